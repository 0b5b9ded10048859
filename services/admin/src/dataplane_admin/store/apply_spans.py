"""Chunks of spans: stored once, and their traces' rows brought up to date."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any  # Any: values of rows

from sqlalchemy import select, tuple_

from dataplane_admin.store.apply_runs import apply_runs
from dataplane_admin.store.batch import Batch, Chunk
from dataplane_admin.store.models import ChunkModel, LinkModel, TraceModel
from dataplane_admin.store.texts import storable
from dataplane_admin.store.work import Work, in_groups

MOST_PROCESSES = 1024
"""Of a trace that are told apart."""

_DIGEST = 8
_ROW_BYTES = 200


def apply_spans(work: Work, batches: Sequence[Batch]) -> list[int]:
    """Store the chunks that are not there yet; of each batch how many spans that were."""
    chunks = [chunk for batch in batches for chunk in batch.chunks]
    if not chunks:
        return [0] * len(batches)
    seen = _stored(work, chunks)
    new: list[Chunk] = []
    spans = []
    for batch in batches:
        count = 0
        for chunk in batch.chunks:
            if (chunk.trace_id, chunk.digest) not in seen:
                seen.add((chunk.trace_id, chunk.digest))
                new.append(chunk)
                count += chunk.spans
        spans.append(count)
    _add_chunks(work, new)
    _merge_traces(work, new)
    apply_runs(work, ((storable(one.run_id), one.start_ns, one.end_ns) for one in new))
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


def _merge_traces(work: Work, chunks: list[Chunk]) -> None:
    table = TraceModel.__table__
    rows: dict[bytes, dict[str, Any]] = {}
    for some in in_groups({chunk.trace_id: None for chunk in chunks}):
        found = work.connection.execute(select(table).where(TraceModel.trace_id.in_(some)))
        rows.update((row["trace_id"], dict(row)) for row in found.mappings())
    there = set(rows)
    for chunk in chunks:
        before = rows.get(chunk.trace_id)
        row = _row(chunk) if before is None else _merged(before, chunk)
        rows[chunk.trace_id] = row | {"updated_ns": work.now_ns}
        work.state.nbytes += len(chunk.blob) + _ROW_BYTES
    work.change(TraceModel, "trace_id", [row for key, row in rows.items() if key in there])
    new = [row for key, row in rows.items() if key not in there]
    work.add(TraceModel, new)
    work.state.traces += len(new)


def _row(chunk: Chunk) -> dict[str, Any]:
    return {
        "trace_id": chunk.trace_id,
        "run_id": storable(chunk.run_id),
        "step": chunk.step,
        "name": storable(chunk.name),
        "start_ns": chunk.start_ns,
        "end_ns": chunk.end_ns,
        "has_root": chunk.has_root,
        "spans": chunk.spans,
        "errors": chunk.errors,
        "processes": min(len(chunk.processes), MOST_PROCESSES),
        "process_digests": b"".join(sorted(chunk.processes)[:MOST_PROCESSES]),
        "rejected": chunk.rejected,
        "nbytes": len(chunk.blob) + _ROW_BYTES,
    }


def _merged(row: dict[str, Any], chunk: Chunk) -> dict[str, Any]:
    new = _row(chunk)
    known = row["process_digests"]
    processes = {known[at : at + _DIGEST] for at in range(0, len(known), _DIGEST)}
    processes = set(sorted(processes | chunk.processes)[:MOST_PROCESSES])
    told = {
        "trace_id": chunk.trace_id,
        "run_id": row["run_id"] or new["run_id"],
        "step": new["step"] if row["step"] is None else row["step"],
        "errors": row["errors"] + chunk.errors,
        "spans": row["spans"] + chunk.spans,
        "rejected": row["rejected"] + chunk.rejected,
        "nbytes": row["nbytes"] + new["nbytes"],
        "has_root": row["has_root"] or chunk.has_root,
        "processes": len(processes),
        "process_digests": b"".join(sorted(processes)),
        **{name: row[name] for name in ("name", "start_ns", "end_ns")},
    }
    if not row["spans"]:  # so far only rejected ones, which tell no times
        told |= {name: new[name] for name in ("name", "start_ns", "end_ns")}
    elif chunk.spans:
        earlier = chunk.start_ns < row["start_ns"]
        if (chunk.has_root and not row["has_root"]) or (
            earlier and chunk.has_root == row["has_root"]
        ):
            told["name"] = new["name"]
        told["start_ns"] = min(row["start_ns"], chunk.start_ns)
        told["end_ns"] = max(row["end_ns"], chunk.end_ns)
    return told
