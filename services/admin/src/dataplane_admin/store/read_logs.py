"""Query for the log records of a trace."""

from __future__ import annotations

from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from sqlalchemy import select

from dataplane_admin.store.apply_logs import is_full
from dataplane_admin.store.compressed import expand_all
from dataplane_admin.store.reader import Reader, trace_bytes
from dataplane_admin.store.tables import LogModel


def read_logs(reader: Reader, trace_id: str) -> tuple[LogsData, bool]:
    """Return the log records of a trace, and whether the limit of stored ones is reached."""
    logs = LogsData()
    wanted = trace_bytes(trace_id)
    if wanted is None:
        return logs, False
    query = select(LogModel.record).where(LogModel.trace_id == wanted).order_by(LogModel.id)
    with reader.connect() as connection:
        records = list(connection.scalars(query))
    logs.ParseFromString(expand_all(records))
    return logs, is_full(len(records), sum(map(len, records)))
