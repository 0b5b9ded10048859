"""Storage of log records of traces, each once and up to a limit per trace.

Logs may arrive before the first span of their trace, so they do not need the row of the trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any  # Any: a row of counts

from sqlalchemy import delete, func, select

from dataplane_admin.store.batch import Batch
from dataplane_admin.store.tables import LogModel
from dataplane_admin.store.work import WANTED, Work

MAX_LOGS = 1_000
"""Maximum number of stored log records of a trace."""

MAX_LOGS_BYTES = 1 << 20
"""Bytes of stored log records of a trace at which further records are dropped."""

LOG_BYTES = 120
"""Approximate bytes of a log record without its content."""

_COUNTS = (func.count(), func.coalesce(func.sum(func.length(LogModel.record)), 0))
_BY_TRACE = (
    select(LogModel.trace_id, *_COUNTS)
    .where(LogModel.trace_id.in_(WANTED))
    .group_by(LogModel.trace_id)
)
_STORED = select(LogModel.trace_id, LogModel.digest).where(LogModel.trace_id.in_(WANTED))


def apply_logs(work: Work, batches: Sequence[Batch]) -> None:
    """Store new log records, of each trace up to the limit."""
    logs = {(log.trace_id, log.digest): log for batch in batches for log in batch.logs}
    if not logs:
        return
    traces = {trace_id for trace_id, _ in logs}
    stored = set(map(tuple, work.rows(_STORED, traces)))
    held = {
        trace_id: (int(count), int(nbytes))
        for trace_id, count, nbytes in work.rows(_BY_TRACE, traces)
    }
    rows: list[dict[str, Any]] = []
    for key, log in logs.items():
        count, nbytes = held.get(log.trace_id, (0, 0))
        if key in stored or is_full(count, nbytes):
            continue
        held[log.trace_id] = count + 1, nbytes + len(log.record)
        rows.append(
            {
                "id": work.state.next_id(),
                "trace_id": log.trace_id,
                "digest": log.digest,
                "received_ns": work.now_ns,
                "record": log.record,
            }
        )
    work.add(LogModel, rows)
    work.state.nbytes += sum(len(row["record"]) + LOG_BYTES for row in rows)


def is_full(count: int, nbytes: int) -> bool:
    """Return whether a trace with so many records, or bytes of records, has reached the limit."""
    return count >= MAX_LOGS or nbytes >= MAX_LOGS_BYTES


def drop_logs(work: Work, chosen: Any) -> int:
    """Delete the log records that a condition chooses; return how many."""
    count, nbytes = work.connection.execute(select(*_COUNTS).where(chosen)).one()
    if count:
        work.connection.execute(delete(LogModel).where(chosen))
        work.state.nbytes -= int(nbytes) + LOG_BYTES * count
    return int(count)
