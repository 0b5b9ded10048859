"""Storage of metric series; each holds the aggregate of its points."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any  # Any: values of rows

from sqlalchemy import select

from dataplane_admin.store.batch import SeriesPoint
from dataplane_admin.store.series_sums import Sums
from dataplane_admin.store.tables import SeriesModel
from dataplane_admin.store.texts import storable
from dataplane_admin.store.work import WANTED, Work

MAX_SERIES = 10_000
"""Maximum number of series; beyond it, those reported longest ago are deleted."""

_POINT = 8
_MAX_POINTS = 64
"""Maximum number of stored digests of points, to recognize resent ones. At one export per second
they cover a minute, which is how long exporters retry."""
_MAX_POINTS_OF_REQUEST = 4096
"""The same maximum for a series with more than `_MAX_POINTS` points in one request."""

_STORED = select(SeriesModel.digest, SeriesModel.sums, SeriesModel.points).where(
    SeriesModel.digest.in_(WANTED)
)


def apply_series(work: Work, points: Iterable[SeriesPoint]) -> None:
    """Add new points to their series."""
    by_series: dict[bytes, list[SeriesPoint]] = {}
    for point in points:
        by_series.setdefault(point.digest, []).append(point)
    if not by_series:
        return
    stored = {row.digest: row for row in work.rows(_STORED, by_series)}
    rows = [
        row
        for digest, series_points in by_series.items()
        if (row := _row(work, series_points, stored.get(digest))) is not None
    ]
    work.save(SeriesModel, "digest", rows, stored)
    if len(stored) < len(by_series):
        key = SeriesModel.digest
        work.drop(key, work.beyond(key, SeriesModel.updated_ns, MAX_SERIES))


def _row(work: Work, points: Sequence[SeriesPoint], before: Any) -> dict[str, Any] | None:
    """Return the row of a series with its new points; None without new points."""
    sums = Sums() if before is None else Sums.read(before.sums)
    known = b"" if before is None else before.points
    recent = dict.fromkeys(known[at : at + _POINT] for at in range(0, len(known), _POINT))
    last = None
    for point in points:
        if point.point_digest and point.point_digest in recent:
            continue
        if point.point_digest:
            recent[point.point_digest] = None
        sums.add(point)
        last = point
    if last is None:
        return None
    total = sums.total
    number = None if total is None else total.get("value")
    remembered = max(_MAX_POINTS, min(len(points), _MAX_POINTS_OF_REQUEST))
    return {
        "digest": last.digest,
        "process": storable(last.process),
        "process_id": last.process_id,
        "scope": storable(last.scope),
        "run_id": storable(last.run_id),
        "name": storable(last.name),
        "unit": storable(last.unit),
        "attributes": last.attributes,
        "value": number if number is not None and math.isfinite(number) else None,
        "histogram": json.dumps(total) if total is not None and number is None else None,
        "time_ns": sums.time_ns,
        "updated_ns": work.now_ns,
        "sums": sums.write(),
        "points": b"".join([*recent][-remembered:]),
    }
