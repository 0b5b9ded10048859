"""Queries for the load of engines and nodes, down-sampled in the database."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sqlalchemy import BindParameter, bindparam, func, select

from dataplane_admin.store.reader import Reader
from dataplane_admin.store.rows import LoadRows
from dataplane_admin.store.tables import LoadPointModel, LoadSeriesModel
from dataplane_admin.store.texts import storable
from dataplane_admin.store.work import WANTED, in_groups

_MAX_SERIES = 2_000

_FIRST: BindParameter[int] = bindparam("first")
_LAST: BindParameter[int] = bindparam("last")
_WIDTH: BindParameter[int] = bindparam("width")
_BUCKET = (LoadPointModel.second // _WIDTH).label("bucket")
_POINTS = (
    select(
        LoadPointModel.series,
        _BUCKET,
        func.max(LoadPointModel.second),
        func.avg(LoadPointModel.value),
        func.max(LoadPointModel.value),
        func.avg(LoadPointModel.total),
        func.max(LoadPointModel.total),
    )
    .where(LoadPointModel.series.in_(WANTED), LoadPointModel.second.between(_FIRST, _LAST))
    .group_by(LoadPointModel.series, _BUCKET)
    .order_by(LoadPointModel.series, _BUCKET)
)


def read_load(
    reader: Reader, first_s: int, last_s: int, *, run_id: str | None, max_points: int
) -> Sequence[LoadRows]:
    """Return the points of a period, at most about ``max_points`` of each series.

    Args:
        first_s: start of the period, seconds since 1970.
        run_id: run whose engines and nodes are read, with those that report no run; None for all.
        max_points: maximum number of buckets. A bucket of several points has their mean, or the
            largest if the metric is a counter.
    """
    query = select(LoadSeriesModel.__table__).where(
        LoadSeriesModel.last_s >= first_s, LoadSeriesModel.first_s <= last_s
    )
    if run_id is not None:
        query = query.where(LoadSeriesModel.run_id.in_(("", storable(run_id))))
    query = query.order_by(LoadSeriesModel.kind, LoadSeriesModel.subject, LoadSeriesModel.id)
    width = max(1, math.ceil((last_s - first_s + 1) / max_points))
    limits = {"first": first_s, "last": last_s, "width": width}
    with reader.connect() as connection:
        series = {
            row.id: LoadRows(
                row.kind, row.subject, row.metric, row.is_counter, row.device, row.run_id, points=[]
            )
            for row in connection.execute(query.limit(_MAX_SERIES))
        }
        for group in in_groups(series):
            rows = connection.execute(_POINTS, {"wanted": group, **limits})
            for number, _, second, value, maximum, total, maximum_total in rows:
                held = series[number]
                point = (
                    (second, maximum, maximum_total) if held.is_counter else (second, value, total)
                )
                held.points.append(point)
    return [held for held in series.values() if held.points]
