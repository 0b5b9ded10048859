"""Storage of the load of engines and nodes: one point per series and second."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any  # Any: values of rows

from sqlalchemy import bindparam, delete, func, select

from dataplane_admin.store.batch import LoadPoint
from dataplane_admin.store.tables import LoadPointModel, LoadSeriesModel
from dataplane_admin.store.texts import storable
from dataplane_admin.store.work import WANTED, Work

MAX_LOAD_SERIES = 2_000
"""Maximum number of series; beyond it, those reported longest ago are deleted."""
POINT_BYTES = 40
"""Approximate bytes of a stored point."""
_SECONDS_A_CALL = 7_200
"""Seconds of points that one call of `drop_load` deletes."""

_STORED = select(LoadSeriesModel.__table__).where(LoadSeriesModel.digest.in_(WANTED))
_KNOWN = select(LoadPointModel.series, LoadPointModel.second).where(
    LoadPointModel.series.in_(WANTED),
    LoadPointModel.second.between(bindparam("first"), bindparam("last")),
)


def apply_load(work: Work, points: Iterable[LoadPoint]) -> None:
    """Store points; a resent point replaces the stored one."""
    by_series: dict[bytes, dict[int, LoadPoint]] = {}
    for point in points:
        by_series.setdefault(point.digest, {})[point.second] = point
    if not by_series:
        return
    stored = {row.digest: row for row in work.rows(_STORED, by_series)}
    rows: list[dict[str, Any]] = []
    for digest, seconds in by_series.items():
        before, point = stored.get(digest), next(iter(seconds.values()))
        rows.append(
            {
                "id": work.state.next_id() if before is None else before.id,
                "digest": digest,
                "kind": point.kind,
                "subject": storable(point.subject),
                "metric": point.metric,
                "is_counter": point.is_counter,
                "device": storable(point.device),
                "run_id": storable(point.run_id),
                "first_s": min(seconds) if before is None else min(*seconds, before.first_s),
                "last_s": max(seconds) if before is None else max(*seconds, before.last_s),
                "updated_ns": work.now_ns,
            }
        )
    work.save(LoadSeriesModel, "digest", rows, stored)
    ids: dict[bytes, int] = {row["digest"]: row["id"] for row in rows}
    placed: list[tuple[float | None, ...]] = [
        (ids[digest], second, point.value, point.total)
        for digest, seconds in by_series.items()
        for second, point in seconds.items()
    ]
    sent = [second for seconds in by_series.values() for second in seconds]
    stored_ids = (row.id for row in stored.values())
    known = set(map(tuple, work.rows(_KNOWN, stored_ids, first=min(sent), last=max(sent))))
    new = sum((series, second) not in known for series, second, *_ in placed)
    work.state.nbytes += POINT_BYTES * new
    work.put(LoadPointModel, placed)
    if len(stored) < len(by_series):
        key, updated_ns = LoadSeriesModel.id, LoadSeriesModel.updated_ns
        _drop_series(work, work.beyond(key, updated_ns, MAX_LOAD_SERIES))


def drop_load(work: Work, before_s: int) -> bool:
    """Delete some points before a time, in seconds since 1970; return whether there were any."""
    oldest = (
        select(LoadSeriesModel.id, LoadSeriesModel.first_s, LoadSeriesModel.last_s)
        .where(LoadSeriesModel.first_s < before_s)
        .order_by(LoadSeriesModel.first_s)
        .limit(1)
    )
    row = work.connection.execute(oldest).first()
    if row is None:
        return False
    limit_s = min(before_s, row.first_s + _SECONDS_A_CALL)
    if row.last_s < limit_s:
        _drop_series(work, [row.id])
        return True
    # Points may be rare: the next call starts at the first remaining point.
    after = select(func.min(LoadPointModel.second)).where(
        LoadPointModel.series == row.id, LoadPointModel.second >= limit_s
    )
    first_s = work.connection.scalar(after)
    gone = work.connection.execute(
        delete(LoadPointModel).where(
            LoadPointModel.series == row.id, LoadPointModel.second < first_s
        )
    )
    work.state.nbytes -= POINT_BYTES * gone.rowcount
    work.change(LoadSeriesModel, "id", [{"id": row.id, "first_s": first_s}])
    return True


def _drop_series(work: Work, ids: Sequence[int]) -> None:
    work.state.nbytes -= POINT_BYTES * work.drop(LoadPointModel.series, ids)
    work.drop(LoadSeriesModel.id, ids)
