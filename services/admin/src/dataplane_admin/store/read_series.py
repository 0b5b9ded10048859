"""Queries for metric series and the audit log."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any  # Any: rows

from sqlalchemy import select

from dataplane_admin.models import AuditEntry, Series
from dataplane_admin.store.reader import Reader
from dataplane_admin.store.rows import AuditCursor
from dataplane_admin.store.tables import AuditModel, RunModel, SeriesModel
from dataplane_admin.store.texts import storable

_MAX_SERIES = 10_000
_DROPPED = "dataplane.telemetry.dropped"
_SIGNALS = ("spans", "events", "steps")
"""Values of ``dataplane.signal``; ``steps`` are exports of step metrics."""


def read_series(reader: Reader, name: str | None = None) -> list[Series]:
    """Return the newest value of every metric series, or of the series of one name."""
    rows = _series(reader, name)
    alike: dict[str, set[bytes]] = {}
    for row in rows:
        alike.setdefault(row.process, set()).add(row.process_id)
    return [
        Series.of(
            row,
            process=row.process
            if len(alike[row.process]) == 1
            else f"{row.process} [{row.process_id.hex()[:8]}]",
            attributes=json.loads(row.attributes),
            histogram=None if row.histogram is None else json.loads(row.histogram),
            time_ns=row.time_ns or None,
            received_ns=row.updated_ns,
        )
        for row in rows
    ]


def read_dropped_spans(reader: Reader) -> dict[str, int]:
    """Return how many spans each process reports as dropped, by its identity."""
    dropped: Counter[str] = Counter()
    for row in _series(reader, _DROPPED):
        if json.loads(row.attributes).get("dataplane.signal") == "spans":
            dropped[row.process_id.hex()] += int(row.value or 0)
    return dropped


def read_dropped_items(reader: Reader) -> dict[str, dict[str, int]]:
    """Return how many items the processes of each run report as dropped, by run and signal.

    Processes that reported nothing since the run's last start do not count.
    """
    dropped: dict[str, dict[str, int]] = {}
    starts = select(RunModel.run_id, RunModel.started_ns)
    started = {row.run_id: row.started_ns for row in reader.rows(starts)}
    for row in _series(reader, _DROPPED):
        signal = json.loads(row.attributes).get("dataplane.signal")
        ended = row.time_ns < started.get(row.run_id, 0)
        if row.run_id and row.value and signal in _SIGNALS and not ended:
            of_run = dropped.setdefault(row.run_id, {})
            of_run[signal] = of_run.get(signal, 0) + int(row.value)
    return dropped


def _series(reader: Reader, name: str | None) -> Sequence[Any]:
    query = select(SeriesModel.__table__)
    query = query.order_by(SeriesModel.name, SeriesModel.process, SeriesModel.digest)
    if name is not None:
        query = query.where(SeriesModel.name == storable(name))
    return reader.rows(query.limit(_MAX_SERIES))


def read_audit(
    reader: Reader, after: AuditCursor | None = None, limit: int = 50
) -> tuple[list[AuditEntry], AuditCursor | None]:
    """Return a page of the audit log, newest first, and the cursor of the next page."""
    query = select(AuditModel.__table__).order_by(AuditModel.id.desc())
    if after is not None:
        query = query.where(AuditModel.id < after[0])
    rows, last = reader.page(query, limit, lambda row: (row.id,))
    return [AuditEntry.of(row, parameters=json.loads(row.parameters)) for row in rows], last
