"""Metric series, of each what its points come to."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any  # Any: values of rows

from sqlalchemy import delete, select

from dataplane_admin.store.batch import SeriesPoint
from dataplane_admin.store.models import SeriesModel
from dataplane_admin.store.series_sums import Sums
from dataplane_admin.store.texts import storable
from dataplane_admin.store.work import Work, in_groups

MOST_SERIES = 10_000
"""That are kept; of more the ones that were told longest ago go."""

_POINT = 8
_MAX_POINTS = 64
"""Points by which one that is sent again is recognised: of an exporter that exports each second,
those of a minute, for which exporters send again what was not answered."""
_MAX_POINTS_OF_REQUEST = 4096
"""As `_MAX_POINTS`, of a series of which one request brings more."""


def apply_series(work: Work, points: Iterable[SeriesPoint]) -> int:
    """Add the points that did not come before to their series; how many series changed."""
    by_series: dict[bytes, list[SeriesPoint]] = {}
    for point in points:
        by_series.setdefault(point.digest, []).append(point)
    if not by_series:
        return 0
    there = {
        row.digest: row
        for some in in_groups(by_series)
        for row in work.connection.execute(
            select(SeriesModel.digest, SeriesModel.sums, SeriesModel.points).where(
                SeriesModel.digest.in_(some)
            )
        )
    }
    rows = [
        row
        for digest, those in by_series.items()
        if (row := _row(work, those, there.get(digest))) is not None
    ]
    work.change(SeriesModel, "digest", [row for row in rows if row["digest"] in there])
    work.add(SeriesModel, [row for row in rows if row["digest"] not in there])
    if len(there) < len(by_series):
        kept = select(SeriesModel.digest).order_by(
            SeriesModel.updated_ns.desc(), SeriesModel.digest
        )
        spare = [row[0] for row in work.connection.execute(kept.offset(MOST_SERIES))]
        for some in in_groups(spare):
            work.connection.execute(delete(SeriesModel).where(SeriesModel.digest.in_(some)))
    return len(rows)


def _row(work: Work, points: Sequence[SeriesPoint], before: Any) -> dict[str, Any] | None:
    """The row of a series with its new points; None if there is none."""
    sums = Sums() if before is None else Sums.read(before.sums)
    known = b"" if before is None else before.points
    recent = dict.fromkeys(known[at : at + _POINT] for at in range(0, len(known), _POINT))
    last = None
    for point in points:
        if point.point and point.point in recent:
            continue
        if point.point:
            recent[point.point] = None
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
