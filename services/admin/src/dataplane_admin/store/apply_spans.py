"""Storage of chunks of spans; each span counts once, and the rows of traces are updated.

Exporters may resend spans in the same requests, or divided into other requests. A stored chunk is
recognized by its digest, a stored span by its id.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any  # Any: values of rows

from sqlalchemy import select

from dataplane_admin.store.apply_runs import apply_runs
from dataplane_admin.store.batch import Batch
from dataplane_admin.store.chunk import Chunk
from dataplane_admin.store.tables import ChunkModel, LinkModel, SpanModel, TraceModel
from dataplane_admin.store.texts import storable
from dataplane_admin.store.work import WANTED, Work, in_groups

SPAN_BYTES = 25
"""Approximate bytes of the row that stores a span's id."""

_CHUNKS = select(ChunkModel.trace_id, ChunkModel.digest).where(ChunkModel.trace_id.in_(WANTED))
_TRACES = select(TraceModel.__table__).where(TraceModel.trace_id.in_(WANTED))

_ROW_BYTES = 200

_Row = dict[str, Any]
_States = dict[bytes, dict[int, int]]


@dataclass(frozen=True)
class _Count:
    """New spans and new failed spans of a chunk."""

    spans: int
    errors: int
    changed: bool

    @property
    def nbytes(self) -> int:
        return self.spans * SPAN_BYTES


def apply_spans(work: Work, batches: Sequence[Batch]) -> list[int]:
    """Store new spans; return the number of new spans of each batch."""
    chunks = [chunk for batch in batches for chunk in batch.chunks]
    if not chunks:
        return [0] * len(batches)
    rows = _rows(work, chunks)
    seen = _stored(work, [chunk for chunk in chunks if chunk.trace_id in rows])
    fresh = [chunk for chunk in chunks if (chunk.trace_id, chunk.digest) not in seen]
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
    # Sorted by key: inserting neighbors into a B-tree costs half as much as scattered rows.
    work.put(SpanModel, [(*key, changed[key]) for key in sorted(changed)])
    _add_chunks(work, [chunk for chunk, _ in new])
    _merge_traces(work, rows, arrivals, new)
    apply_runs(work, ((storable(chunk.run_id), chunk.start_ns, chunk.end_ns) for chunk, _ in new))
    work.state.spans += sum(spans)
    return spans


def _stored(work: Work, chunks: list[Chunk]) -> set[tuple[bytes, bytes]]:
    return set(map(tuple, work.rows(_CHUNKS, {chunk.trace_id for chunk in chunks})))


def _rows(work: Work, chunks: Iterable[Chunk]) -> dict[bytes, _Row]:
    """Return the stored rows of these chunks' traces."""
    wanted = {chunk.trace_id: None for chunk in chunks}
    return {row.trace_id: dict(row._mapping) for row in work.rows(_TRACES, wanted)}


def _states(work: Work, chunks: Iterable[Chunk], arrivals: Mapping[bytes, int]) -> _States:
    """Return, by trace, the states of the chunks' spans that are stored already.

    This bypasses SQLAlchemy, which is four times slower for a list of a hundred spans.
    """
    wanted: dict[bytes, set[int]] = defaultdict(set)
    for chunk in chunks:
        if chunk.trace_id in arrivals:
            wanted[chunk.trace_id].update(chunk.states)
    states: _States = defaultdict(dict)
    for trace_id, spans in wanted.items():
        for group in in_groups(spans):
            marks = ", ".join([work.mark] * len(group))
            states[trace_id].update(
                (row[0], row[1])
                for row in work.connection.exec_driver_sql(
                    f"SELECT span, state FROM {SpanModel.__tablename__} "  # noqa: S608  # its name
                    f"WHERE trace = {work.mark} AND span IN ({marks})",
                    (arrivals[trace_id], *group),
                )
            )
    return states


def _count(
    chunk: Chunk, arrival: int, states: dict[int, int], changed: dict[tuple[int, int], int]
) -> _Count:
    """Count the spans that a chunk adds to the known spans; update ``states`` and ``changed``."""
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
    stored = set(rows)
    touched: dict[bytes, None] = {}
    for chunk, count in chunks:
        before = rows.get(chunk.trace_id, {})
        added = {
            "spans": count.spans,
            "errors": count.errors,
            "nbytes": len(chunk.blob) + _ROW_BYTES + count.nbytes,
        }
        rows[chunk.trace_id] = {
            **(chunk.merged(before) if before else chunk.row()),
            **{name: before.get(name, 0) + number for name, number in added.items()},
            "arrival": arrivals[chunk.trace_id],
            "updated_ns": work.now_ns,
        }
        touched[chunk.trace_id] = None
        work.state.nbytes += added["nbytes"]
    work.change(TraceModel, "trace_id", [rows[key] for key in touched if key in stored])
    new = [rows[key] for key in touched if key not in stored]
    work.add(TraceModel, new)
    work.state.traces += len(new)
