"""Storage of curves: the metrics of a run by step. A step that is reported again is replaced."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any  # Any: rows

import structlog
from sqlalchemy import bindparam, delete, func, select

from dataplane_admin.store.apply_runs import Resumes, apply_runs
from dataplane_admin.store.batch import SeriesPoint
from dataplane_admin.store.chunk import MAX_INT
from dataplane_admin.store.read_curves import TIME, is_validation
from dataplane_admin.store.tables import (
    BLOCK,
    CurveBlockModel,
    CurveModel,
    CurvePointModel,
    RunModel,
)
from dataplane_admin.store.texts import storable
from dataplane_admin.store.work import WANTED, Work, in_groups

MAX_CURVES = 10_000
"""Maximum number of curves; beyond it, those reported longest ago are deleted."""
MAX_RUN_CURVES = 1_000
"""Maximum number of curves of a run; further ones are not stored."""
POINT_BYTES = 40
"""Approximate bytes of a stored point, with its share of a block."""

logger = structlog.get_logger("dataplane_admin")

_STORED = select(CurveModel.__table__).where(CurveModel.digest.in_(WANTED))
_COUNTS = select(CurveModel.points).where(CurveModel.id.in_(WANTED))
_PER_RUN = (
    select(CurveModel.run_id, func.count().label("curves"))
    .where(CurveModel.run_id.in_(WANTED))
    .group_by(CurveModel.run_id)
)
_RESUMED = select(RunModel.run_id, RunModel.resumed_from, RunModel.started_ns).where(
    RunModel.run_id.in_(WANTED), RunModel.resumed_from.is_not(None)
)


def apply_curves(work: Work, points: Iterable[SeriesPoint]) -> None:
    """Store the points that have a run and a step.

    A point is omitted if the run was resumed after its time, from its step or an earlier one.
    """
    reported = [
        (storable(point.run_id), point.step, point)
        for point in points
        if point.step is not None and point.run_id
    ]
    resumed = {row.run_id: row for row in work.rows(_RESUMED, {run_id for run_id, *_ in reported})}
    by_curve: dict[bytes, dict[int, SeriesPoint]] = {}
    for run_id, step, point in reported:
        if not _is_repeated(step, point, resumed.get(run_id)):
            key = json.dumps([run_id, storable(point.name), point.attributes])
            digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
            by_curve.setdefault(digest, {})[step] = point
    if not by_curve:
        return
    stored = {row.digest: row for row in work.rows(_STORED, by_curve)}
    for digest in _surplus(work, by_curve, stored):
        del by_curve[digest]
    if not by_curve:
        return
    ids = {
        digest: stored[digest].id if digest in stored else work.state.next_id()
        for digest in by_curve
    }
    known = _known_points(
        work,
        [row.id for row in stored.values()],
        {step for of_curve in by_curve.values() for step in of_curve},
    )
    rows = [
        _row(work, digest, ids[digest], of_curve, known.get(ids[digest], set()), stored.get(digest))
        for digest, of_curve in by_curve.items()
    ]
    work.save(CurveModel, "digest", rows, stored)
    placed = [
        (ids[digest], step, point)
        for digest, of_curve in by_curve.items()
        for step, point in of_curve.items()
    ]
    work.put(CurvePointModel, [(curve, step, _value(point)) for curve, step, point in placed])
    _aggregate(work, {(curve, step // BLOCK) for curve, step, _ in placed})
    apply_runs(
        work, ((storable(point.run_id), point.time_ns, point.time_ns) for *_, point in placed)
    )
    if len(stored) < len(by_curve):
        drop_curves(work, work.beyond(CurveModel.id, CurveModel.updated_ns, MAX_CURVES))


def _is_repeated(step: int, point: SeriesPoint, start: Any) -> bool:
    """Return whether a point is earlier than the last resume, which repeats its step."""
    if start is None or not 0 < point.time_ns < start.started_ns:
        return False
    first_step = start.resumed_from
    return step >= (_next_step(first_step) if is_validation(point.name) else first_step)


def _surplus(
    work: Work, by_curve: Mapping[bytes, Mapping[int, SeriesPoint]], stored: Container[bytes]
) -> list[bytes]:
    """Return the new curves beyond the limit of their runs."""
    new: dict[str, list[bytes]] = {}
    for digest, points in by_curve.items():
        if digest not in stored:
            run_id = storable(next(iter(points.values())).run_id)
            new.setdefault(run_id, []).append(digest)
    counts = {row.run_id: row.curves for row in work.rows(_PER_RUN, new)}
    surplus = []
    for run_id, digests in new.items():
        beyond = digests[max(0, MAX_RUN_CURVES - counts.get(run_id, 0)) :]
        surplus += beyond
        if beyond:
            _log_surplus(run_id)
    return surplus


@lru_cache(maxsize=1_000)  # logs a run once
def _log_surplus(run_id: str) -> None:
    logger.warning("curves_not_stored", run_id=run_id, max_curves=MAX_RUN_CURVES)


def rewind_curves(work: Work, resumes: Resumes) -> None:
    """Delete the points of steps that resumes repeat.

    Processes export independently: points of the resumed run may arrive before its start. They are
    retained if their steps have a later time.
    """
    # Validations first: their ranges begin a step later, so this deletes no time that the other
    # curves still need.
    _delete_repeated(
        work,
        resumes.run_id,
        [(_next_step(step), time_ns) for step, time_ns in resumes.starts],
        of_validations=True,
    )
    _delete_repeated(work, resumes.run_id, resumes.starts, of_validations=False)


def _next_step(first_step: int) -> int:
    """Return the first step whose validation a resume repeats.

    A resume does not repeat the validation of its checkpoint, which has the number of its first
    step. A resume from step 0 has no checkpoint.
    """
    return min(first_step + 1, MAX_INT) if first_step else 0


def _delete_repeated(
    work: Work, run_id: str, starts: Collection[tuple[int, int]], *, of_validations: bool
) -> None:
    first_step = min(step for step, _ in starts)
    of_run = CurveModel.run_id == run_id
    query = select(CurveModel.__table__).where(of_run, CurveModel.last_step >= first_step)
    curves = work.connection.execute(query).all()
    times = [row for row in curves if row.name == TIME and row.attributes == "{}"]
    chosen = [
        row for row in curves if row not in times and is_validation(row.name) == of_validations
    ]
    if of_validations and not chosen:
        return
    # Times of repeated steps are deleted first: other curves retain the steps that still have one.
    for row in times:
        earlier = CurvePointModel.step.between(bindparam("first"), bindparam("last")) & (
            CurvePointModel.value.is_(None) | (CurvePointModel.value < bindparam("time_s"))
        )
        _rewind(work, row, first_step, earlier, _repeated(starts))
    retained = select(CurvePointModel.step).where(
        CurvePointModel.curve.in_([row.id for row in times]), CurvePointModel.step >= first_step
    )
    repeated = (CurvePointModel.step >= first_step) & CurvePointModel.step.not_in(retained)
    for row in chosen:
        _rewind(work, row, first_step, repeated)


def _repeated(starts: Iterable[tuple[int, int]]) -> list[dict[str, float]]:
    """Return ranges of repeated steps, and the time before which the steps of each are deleted.

    Of the starts that repeat a step, the last one counts:

        starts   (3, 10 s)  (5, 20 s)  (6, 15 s)
        ranges   3 to 4 before 10 s, 5 and later before 20 s
    """
    ranges: list[dict[str, float]] = []
    for step, time_ns in sorted(starts):
        time_s = time_ns / 1e9
        if ranges and time_s <= ranges[-1]["time_s"]:
            continue
        if ranges:
            ranges[-1]["last"] = step - 1
        ranges.append({"first": step, "last": MAX_INT, "time_s": time_s})
    return ranges


def _rewind(
    work: Work,
    row: Any,
    first_step: int,
    chosen: Any,
    parameters: Sequence[Mapping[str, float]] = ({},),
) -> None:
    of_curve = CurvePointModel.curve == row.id
    dropped = work.connection.execute(
        delete(CurvePointModel).where(of_curve, chosen), parameters
    ).rowcount
    if not dropped:
        return
    if dropped == row.points:
        drop_curves(work, [row.id])
        return
    work.state.nbytes -= dropped * POINT_BYTES
    block = first_step // BLOCK
    points = select(CurvePointModel.step, CurvePointModel.value).where(of_curve)
    rest = work.connection.execute(points.where(CurvePointModel.step >= block * BLOCK)).all()
    work.connection.execute(
        delete(CurveBlockModel).where(
            CurveBlockModel.curve == row.id, CurveBlockModel.block >= block
        )
    )
    _aggregate(work, {(row.id, step // BLOCK) for step, _ in rest})
    by_step = points.order_by(CurvePointModel.step.desc()).limit(1)
    last_step, last_value = work.connection.execute(by_step).one()
    first = work.connection.scalar(select(func.min(CurvePointModel.step)).where(of_curve))
    rewound = {"first_step": first, "last_step": last_step, "last_value": last_value}
    work.change(CurveModel, "id", [{"id": row.id, "points": row.points - dropped, **rewound}])


def drop_curves(work: Work, ids: Sequence[int]) -> None:
    """Delete curves with their points."""
    work.state.nbytes -= POINT_BYTES * sum(row.points for row in work.rows(_COUNTS, ids))
    for column in (CurvePointModel.curve, CurveBlockModel.curve, CurveModel.id):
        work.drop(column, ids)


def _known_points(work: Work, curves: Sequence[int], steps: set[int]) -> dict[int, set[int]]:
    """Return which of the steps each curve has."""
    known: dict[int, set[int]] = {}
    columns = select(CurvePointModel.curve, CurvePointModel.step)
    for some_curves in in_groups(curves):
        for some_steps in in_groups(steps):
            chosen = columns.where(
                CurvePointModel.curve.in_(some_curves), CurvePointModel.step.in_(some_steps)
            )
            for curve, step in work.connection.execute(chosen):
                known.setdefault(curve, set()).add(step)
    return known


def _row(
    work: Work,
    digest: bytes,
    curve: int,
    points: Mapping[int, SeriesPoint],
    known: set[int],
    before: Any,
) -> dict[str, Any]:
    """Return the row of a curve with new points; ``known`` has the steps that are stored."""
    newest = max(points)
    last = points[newest]
    new = len(points.keys() - known)
    work.state.nbytes += new * POINT_BYTES
    is_last = before is None or newest >= before.last_step
    return {
        "id": curve,
        "digest": digest,
        "run_id": storable(last.run_id),
        "name": storable(last.name),
        # A value that is not finite has no unit.
        "unit": storable(last.unit) or ("" if before is None else before.unit),
        "attributes": last.attributes,
        "points": new + (0 if before is None else before.points),
        "first_step": min(points) if before is None else min(*points, before.first_step),
        "last_step": newest if is_last else before.last_step,
        "last_value": _value(last) if is_last else before.last_value,
        "updated_ns": work.now_ns,
    }


def _value(point: SeriesPoint) -> float | None:
    return None if point.figures is None else point.figures["value"]


def _aggregate(work: Work, blocks: set[tuple[int, int]]) -> None:
    """Compute the aggregates of blocks from their points."""
    if not blocks:
        return
    names = ("points", "mean", "low", "high")
    work.connection.exec_driver_sql(
        f"INSERT INTO curve_blocks (curve, block, {', '.join(names)}) "  # noqa: S608  # constants
        f"SELECT curve, step / {BLOCK}, count(value), avg(value), min(value), max(value) "
        f"FROM curve_points WHERE curve = {work.mark} AND step BETWEEN {work.mark} AND {work.mark} "
        f"GROUP BY curve, step / {BLOCK} ON CONFLICT (curve, block) "
        f"DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in names)}",
        [(curve, block * BLOCK, block * BLOCK + BLOCK - 1) for curve, block in blocks],
    )
