"""Metric series, of each its newest value."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import delete, select

from dataplane_admin.store.batch import SeriesPoint
from dataplane_admin.store.models import SeriesModel
from dataplane_admin.store.texts import storable
from dataplane_admin.store.work import Work, in_groups

MOST_SERIES = 10_000
"""That are kept; of more the ones that were told longest ago go."""


def apply_series(work: Work, points: Iterable[SeriesPoint]) -> int:
    """Keep the newest value of each series; how many were written."""
    newest: dict[bytes, SeriesPoint] = {}
    for point in points:
        if point.digest not in newest or newest[point.digest].time_ns <= point.time_ns:
            newest[point.digest] = point
    if not newest:
        return 0
    there = {
        row.digest: row.time_ns
        for some in in_groups(newest)
        for row in work.connection.execute(
            select(SeriesModel.digest, SeriesModel.time_ns).where(SeriesModel.digest.in_(some))
        )
    }
    rows = [
        {
            "digest": point.digest,
            "process": storable(point.process),
            "name": storable(point.name),
            "unit": storable(point.unit),
            "attributes": point.attributes,
            "value": point.value,
            "histogram": point.histogram,
            "time_ns": point.time_ns,
            "updated_ns": work.now_ns,
        }
        for point in newest.values()
        if point.time_ns >= there.get(point.digest, 0)
    ]
    work.change(SeriesModel, "digest", [row for row in rows if row["digest"] in there])
    work.add(SeriesModel, [row for row in rows if row["digest"] not in there])
    if len(there) < len(newest):
        kept = select(SeriesModel.digest).order_by(
            SeriesModel.updated_ns.desc(), SeriesModel.digest
        )
        spare = [row[0] for row in work.connection.execute(kept.offset(MOST_SERIES))]
        for some in in_groups(spare):
            work.connection.execute(delete(SeriesModel).where(SeriesModel.digest.in_(some)))
    return len(rows)
