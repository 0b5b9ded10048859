"""Queries for curves, down-sampled in the database."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple  # Any: rows

from sqlalchemy import BindParameter, bindparam, func, select

from dataplane_admin.models import Curve, CurveFacts
from dataplane_admin.store.reader import Reader
from dataplane_admin.store.tables import BLOCK, CurveBlockModel, CurveModel, CurvePointModel
from dataplane_admin.store.texts import storable

TIME, SAMPLES = "rl.time", "rl.samples"
"""Metrics over which others are drawn: seconds since 1970, and samples trained on so far."""

_MAX_FACTS = 1_000

_CURVE: BindParameter[int] = bindparam("curve")
_FIRST: BindParameter[int] = bindparam("first")
_LAST: BindParameter[int] = bindparam("last")
_WIDTH: BindParameter[int] = bindparam("width")

_POINTS = (
    select(CurvePointModel.step, CurvePointModel.value)
    .where(CurvePointModel.curve == _CURVE, CurvePointModel.step.between(_FIRST, _LAST))
    .order_by(CurvePointModel.step)
)
_POINT_BUCKET = (CurvePointModel.step // _WIDTH).label("bucket")
_FROM_POINTS = (
    select(
        _POINT_BUCKET,
        func.avg(CurvePointModel.value),
        func.min(CurvePointModel.value),
        func.max(CurvePointModel.value),
    )
    .where(CurvePointModel.curve == _CURVE, CurvePointModel.step.between(_FIRST, _LAST))
    .group_by(_POINT_BUCKET)
    .order_by(_POINT_BUCKET)
)
# Here the limits are blocks, and the width is a number of them.
_BLOCK_BUCKET = (CurveBlockModel.block // _WIDTH).label("bucket")
_FROM_BLOCKS = (
    select(
        _BLOCK_BUCKET,
        func.sum(CurveBlockModel.mean * CurveBlockModel.points)
        / func.nullif(func.sum(CurveBlockModel.points), 0),
        func.min(CurveBlockModel.low),
        func.max(CurveBlockModel.high),
    )
    .where(CurveBlockModel.curve == _CURVE, CurveBlockModel.block.between(_FIRST, _LAST))
    .group_by(_BLOCK_BUCKET)
    .order_by(_BLOCK_BUCKET)
)


_VALIDATION_PREFIXES = ("rl.validation.", "eval_", "eval/", "val-")
"""Prefixes of the metrics of validations, documented and as TRL, SkyRL and verl name them."""


class NewestPoint(NamedTuple):
    """Newest step of the curves of a run, stored at ``updated_ns`` by this service's clock."""

    run_id: str
    step: int
    updated_ns: int


def is_validation(name: str) -> bool:
    """Return whether a metric is of a validation, whose step is the next one to train."""
    return name.startswith(_VALIDATION_PREFIXES)


def read_newest_point(reader: Reader, run_id: str | None = None) -> NewestPoint | None:
    """Return the newest point of a run, by default of all runs; None without curves."""
    # A validation after the last step has a time, but is no step.
    query = select(CurveModel.run_id, CurveModel.last_step, CurveModel.updated_ns).where(
        CurveModel.name != TIME,
        *(~CurveModel.name.startswith(each, autoescape=True) for each in _VALIDATION_PREFIXES),
    )
    if run_id is not None:
        query = query.where(CurveModel.run_id == storable(run_id))
    newest = CurveModel.updated_ns.desc(), CurveModel.last_step.desc()
    rows = reader.rows(query.order_by(*newest).limit(1))
    return NewestPoint(*rows[0]) if rows else None


def read_curve_facts(reader: Reader, run_id: str) -> list[CurveFacts]:
    """Return the curves of a run without their points, by name, those without attributes first."""
    rows = reader.rows(_curves(run_id, None).limit(_MAX_FACTS))
    return [CurveFacts.of(row, attributes=json.loads(row.attributes)) for row in rows]


def read_curves(
    reader: Reader,
    run_id: str,
    *,
    names: Sequence[str] | None = None,
    first_step: int | None = None,
    last_step: int | None = None,
    max_points: int,
    limit: int,
) -> list[Curve]:
    """Return curves of a run, each down-sampled to about ``max_points`` points.

    A longer curve is divided into buckets of equally many steps. The order is that of
    `read_curve_facts`.

    Args:
        first_step: first step; None for the smallest first step of the curves.
        last_step: last step; None for the largest last step of the curves.
        max_points: maximum number of buckets.
    """
    with reader.connect() as connection:
        rows = connection.execute(_curves(run_id, names).limit(limit)).all()
        first = min((row.first_step for row in rows), default=0)
        last = max((row.last_step for row in rows), default=0)
        first = first if first_step is None else max(first, first_step)
        last = last if last_step is None else min(last, last_step)
        return [_curve(connection, row, first, last, max_points) for row in rows]


def _curves(run_id: str, names: Sequence[str] | None) -> Any:
    query = select(CurveModel.__table__).where(CurveModel.run_id == storable(run_id))
    if names is not None:
        query = query.where(CurveModel.name.in_([storable(name) for name in names]))
    # A curve without attributes is the metric of all samples: no limit may cut it off.
    return query.order_by(CurveModel.name, CurveModel.attributes != "{}", CurveModel.attributes)


def _curve(connection: Any, row: Any, first: int, last: int, max_points: int) -> Curve:
    width = 1 if row.points <= max_points else math.ceil((last - first + 1) / max_points)
    limits = {"curve": row.id, "first": first, "last": last}
    if width <= 1:
        points = connection.execute(_POINTS, limits).all()
        buckets = [(step, value, None, None) for step, value in points]
    elif width < BLOCK:
        buckets = connection.execute(_FROM_POINTS, {**limits, "width": width}).all()
    else:
        blocks = math.ceil(width / BLOCK)
        width = blocks * BLOCK
        limits |= {"first": first // BLOCK, "last": last // BLOCK, "width": blocks}
        buckets = connection.execute(_FROM_BLOCKS, limits).all()
    return Curve.of(
        row,
        attributes=json.loads(row.attributes),
        width=max(1, width),
        steps=[max(first, bucket * max(1, width)) for bucket, *_ in buckets],
        values=[value for _, value, *_ in buckets],
        low=[low for *_, low, _ in buckets] if width > 1 else [],
        high=[high for *_, high in buckets] if width > 1 else [],
    )
