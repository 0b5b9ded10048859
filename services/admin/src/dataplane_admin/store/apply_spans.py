"""Chunks of spans: each span stored and counted once, and their traces' rows brought up to date.

Exporters send again what was not answered, as a whole or in other portions. A chunk that was there
already is known by its digest, a span by its id.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any  # Any: values of rows

from sqlalchemy import select, tuple_

from dataplane_admin.store.apply_runs import apply_runs
from dataplane_admin.store.batch import Batch, Chunk
from dataplane_admin.store.models import ChunkModel, LinkModel, SpanModel, TraceModel
from dataplane_admin.store.texts import storable
from dataplane_admin.store.work import Work, in_groups

MOST_PROCESSES = 1024
"""Of a trace that are told apart."""

SPAN_BYTES = 25
"""About what it takes to know a span by its id."""

_DIGEST = 8
_ROW_BYTES = 200

_Row = dict[str, Any]
_States = dict[bytes, dict[int, int]]


@dataclass(frozen=True)
class _Count:
    """What a chunk adds: spans that are new, and failed ones."""

    spans: int
    errors: int
    changed: bool

    @property
    def nbytes(self) -> int:
        return self.spans * SPAN_BYTES


def apply_spans(work: Work, batches: Sequence[Batch]) -> list[int]:
    """Store the spans that are not there yet; of each batch how many that were."""
    chunks = [chunk for batch in batches for chunk in batch.chunks]
    if not chunks:
        return [0] * len(batches)
    seen = _stored(work, chunks)
    fresh = [one for one in chunks if (one.trace_id, one.digest) not in seen]
    rows = _rows(work, fresh)
    arrivals = {trace_id: int(row["arrival"]) for trace_id, row in rows.items()}
    states = _states(work, fresh, arrivals)
    changed: dict[tuple[int, int], int] = {}
    new: list[tuple[Chunk, _Count]] = []
    spans = []
    for batch in batches:
        total = 0
        for chunk in batch.chunks:
            if (chunk.trace_id, chunk.digest) in seen:
                continue
            seen.add((chunk.trace_id, chunk.digest))
            if chunk.trace_id not in arrivals:
                arrivals[chunk.trace_id] = work.state.next_id()
            arrival = arrivals[chunk.trace_id]
            count = _count(chunk, arrival, states[chunk.trace_id], changed)
            if count.changed:
                new.append((chunk, count))
                total += count.spans
        spans.append(total)
    work.put(SpanModel, [(*key, state) for key, state in changed.items()])
    _add_chunks(work, [chunk for chunk, _ in new])
    _merge_traces(work, rows, arrivals, new)
    apply_runs(work, ((storable(one.run_id), one.start_ns, one.end_ns) for one, _ in new))
    work.state.spans += sum(spans)
    return spans


def _stored(work: Work, chunks: list[Chunk]) -> set[tuple[bytes, bytes]]:
    key = tuple_(ChunkModel.trace_id, ChunkModel.digest)
    return {
        (row[0], row[1])
        for some in in_groups({(chunk.trace_id, chunk.digest) for chunk in chunks})
        for row in work.connection.execute(
            select(ChunkModel.trace_id, ChunkModel.digest).where(key.in_(some))
        )
    }


def _rows(work: Work, chunks: Iterable[Chunk]) -> dict[bytes, _Row]:
    """The traces of these chunks that are there already."""
    table = TraceModel.__table__
    return {
        row["trace_id"]: dict(row)
        for some in in_groups({chunk.trace_id: None for chunk in chunks})
        for row in work.connection.execute(
            select(table).where(TraceModel.trace_id.in_(some))
        ).mappings()
    }


def _states(work: Work, chunks: Iterable[Chunk], arrivals: Mapping[bytes, int]) -> _States:
    """Of each trace, those of the chunks' spans that are there already."""
    wanted: dict[bytes, set[int]] = defaultdict(set)
    for chunk in chunks:
        if chunk.trace_id in arrivals:
            wanted[chunk.trace_id].update(chunk.states)
    found: _States = defaultdict(dict)
    for trace_id, spans in wanted.items():
        of_trace = SpanModel.trace == arrivals[trace_id]
        known = select(SpanModel.span, SpanModel.state).where(of_trace)
        for some in in_groups(spans):
            rows = work.connection.execute(known.where(SpanModel.span.in_(some)))
            found[trace_id].update((row[0], row[1]) for row in rows)
    return found


def _count(
    chunk: Chunk, arrival: int, states: dict[int, int], changed: dict[tuple[int, int], int]
) -> _Count:
    """What a chunk adds to the spans whose states are known; both mappings are brought up to
    date."""
    spans = errors = 0
    better = False
    for span, state in chunk.states.items():
        known = states.get(span)
        if known is None:
            spans += 1
            errors += state & 1
        elif state >> 1 > known >> 1:
            errors += (state & 1) - (known & 1)
            better = True
        else:
            continue
        states[span] = changed[arrival, span] = state
    return _Count(spans, errors, bool(spans or better or chunk.rejected))


def _add_chunks(work: Work, chunks: list[Chunk]) -> None:
    work.add(
        ChunkModel,
        [
            {
                "id": work.state.next_id(),
                "trace_id": chunk.trace_id,
                "digest": chunk.digest,
                "spans": chunk.spans,
                "received_ns": work.now_ns,
                "blob": chunk.blob,
            }
            for chunk in chunks
        ],
    )
    links = {(chunk.trace_id, linked) for chunk in chunks for linked in chunk.links}
    work.insert_new(
        LinkModel,
        [{"trace_id": trace_id, "linked_id": linked} for trace_id, linked in sorted(links)],
    )


def _merge_traces(
    work: Work,
    rows: dict[bytes, _Row],
    arrivals: Mapping[bytes, int],
    chunks: Iterable[tuple[Chunk, _Count]],
) -> None:
    there = set(rows)
    touched: dict[bytes, None] = {}
    for chunk, count in chunks:
        before = rows.get(chunk.trace_id)
        if before is None:
            row = _row(chunk, count) | {"arrival": arrivals[chunk.trace_id]}
        else:
            row = _merged(before, chunk, count)
        rows[chunk.trace_id] = row | {"updated_ns": work.now_ns}
        touched[chunk.trace_id] = None
        work.state.nbytes += len(chunk.blob) + _ROW_BYTES + count.nbytes
    work.change(TraceModel, "trace_id", [rows[key] for key in touched if key in there])
    new = [rows[key] for key in touched if key not in there]
    work.add(TraceModel, new)
    work.state.traces += len(new)


def _row(chunk: Chunk, count: _Count) -> _Row:
    return {
        "trace_id": chunk.trace_id,
        "run_id": storable(chunk.run_id),
        "step": chunk.step,
        "name": storable(chunk.name),
        "start_ns": chunk.start_ns,
        "end_ns": chunk.end_ns,
        "has_root": chunk.has_root,
        "spans": count.spans,
        "errors": count.errors,
        "processes": min(len(chunk.processes), MOST_PROCESSES),
        "process_digests": b"".join(sorted(chunk.processes)[:MOST_PROCESSES]),
        "rejected": chunk.rejected,
        "nbytes": len(chunk.blob) + _ROW_BYTES + count.nbytes,
    }


def _merged(row: _Row, chunk: Chunk, count: _Count) -> _Row:
    new = _row(chunk, count)
    known = row["process_digests"]
    processes = {known[at : at + _DIGEST] for at in range(0, len(known), _DIGEST)}
    processes = set(sorted(processes | chunk.processes)[:MOST_PROCESSES])
    merged = {
        "trace_id": chunk.trace_id,
        "run_id": row["run_id"] or new["run_id"],
        "step": new["step"] if row["step"] is None else row["step"],
        "has_root": row["has_root"] or chunk.has_root,
        "processes": len(processes),
        "process_digests": b"".join(sorted(processes)),
        "name": row["name"],
        "start_ns": min(filter(None, (row["start_ns"], chunk.start_ns)), default=0),
        "end_ns": max(row["end_ns"], chunk.end_ns),
        "arrival": row["arrival"],
        **{name: row[name] + new[name] for name in ("spans", "errors", "rejected", "nbytes")},
    }
    earlier = 0 < chunk.start_ns < row["start_ns"] or not row["start_ns"]
    is_first = not row["spans"] or (earlier and chunk.has_root == row["has_root"])
    if chunk.spans and (is_first or (chunk.has_root and not row["has_root"])):
        merged["name"] = new["name"]
    return merged
