"""Overview: whether the run is making progress, and if not, why."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

from dataplane_admin import models
from dataplane_admin.pages import marks, words
from dataplane_admin.pages.headline import headline, newest_pace, runs_to_judge
from dataplane_admin.pages.learning import Tile, learning_tiles
from dataplane_admin.pages.partition import is_streaming
from dataplane_admin.service import AdminService, ServiceError
from dataplane_admin.service.pace import Pace
from dataplane_admin.service.traces import Selection
from dataplane_admin.store.read_curves import NewestPoint

_STEPS = 10
_RUNS = 50
_MAX_CACHED = 256


@dataclass(frozen=True)
class PartitionOnOverview:
    """One partition as the overview shows it.

    ``streams`` is the result of `is_streaming`; ``total`` the samples that a full bar stands for.
    """

    facts: models.Partition
    streams: bool
    total: int
    trend: marks.Trend | None
    trend_of: str
    trend_words: str


@dataclass(frozen=True)
class StepOnOverview:
    """One of the last steps."""

    facts: models.TraceFacts
    seconds: dict[str, float] | None
    """Process time by bucket, if any."""
    buckets: marks.Stack
    productive: float | None
    """Percent of the process time."""


@dataclass(frozen=True)
class UnitOnOverview:
    """Row of the table of storage units."""

    facts: models.Unit
    bar: marks.Stack
    capacity: str


@dataclass(frozen=True)
class Overview:
    """Content of the overview.

    Attributes:
        state: ``moving``, ``stuck``, ``quiet`` or ``empty``.
        waits: blocked tasks of live processes.
        run: the only run that is shown; None for all.
        last: the step that the headline names, else the newest one; None with ``point``.
        point: the step of a run without traces that the headline names.
        alerts: raised alerts, the most severe first.
        has_rules: whether alerts can be raised.
        learning: metrics of the run of ``last`` or ``point``.
    """

    state: str
    headline: str
    status: models.Status
    waits: Sequence[models.Wait]
    silent: Sequence[models.Wait]
    partitions: Sequence[PartitionOnOverview]
    steps: Sequence[StepOnOverview]
    last: StepOnOverview | None
    point: NewestPoint | None
    units: Sequence[UnitOnOverview]
    storage_error: str | None
    put_per_s: float | None
    run: str | None
    runs: Sequence[models.Run]
    durations: marks.Trend | None
    learning: Sequence[Tile]
    alerts: Sequence[models.Alert]
    has_rules: bool


class Buckets:
    """Cache of the bucket times of unchanged traces.

    Assembling a trace costs more than the rest of the page.
    """

    def __init__(self, service: AdminService) -> None:
        self._service = service
        self._cache: OrderedDict[models.TraceFacts, dict[str, float]] = OrderedDict()
        self._lock = Lock()

    def of(self, facts: models.TraceFacts) -> dict[str, float] | None:
        """Return bucket to process-seconds; None if the trace is no longer stored."""
        with self._lock:
            known = self._cache.get(facts)
        if known is not None:
            return known
        try:
            seconds = self._service.trace(
                facts.trace_id, Selection(max_rows=0, max_events=0)
            ).buckets
        except ServiceError:
            return None
        with self._lock:
            self._cache[facts] = seconds
            while len(self._cache) > _MAX_CACHED:
                self._cache.popitem(last=False)
        return seconds


def overview(
    service: AdminService, buckets: Buckets, run: str | None = None, *, stuck_after_s: float
) -> Overview:
    """Return the overview; with ``run``, blocked tasks and steps of this run only.

    Nothing counts as stuck before ``stuck_after_s`` seconds.
    """
    data_plane = service.partitions()
    # Report the data plane's status as of the snapshot that is shown.
    status = service.status().model_copy(update={"live": data_plane.live})
    waits_of_run = service.why(run=run)
    waits = [item for item in waits_of_run if item.silent_s is None]
    silent = [item for item in waits_of_run if item.silent_s is not None]
    judged = runs_to_judge(service, run, waits, _newest(service, run))
    paces = service.paces(judged, status.now_ns, stuck_after_s)
    newest = newest_pace(paces)
    point = _untraced(service.store.newest_point(run), newest)
    traced_run = newest.newest.run_id if newest and newest.newest else None
    shown_run = traced_run if point is None else point.run_id
    state, first_line = headline(
        status,
        waits,
        silent,
        data_plane.partitions,
        paces,
        point,
        None if shown_run is None else service.find_run(shown_run),
    )
    # Read the steps after the headline, so that the table has the step that the headline names.
    facts = _newest(service, run)
    longest = max((item.seconds for item in facts), default=0.0)
    rates = [item.put_per_s for item in data_plane.partitions if item.put_per_s is not None]
    steps = [_step(item, buckets.of(item), longest) for item in facts]
    last = _last(steps, newest) if point is None else None
    learning_run = last.facts.run_id if last else point.run_id if point else None
    raised = service.store.raised_alerts()
    return Overview(
        state=state,
        headline=first_line,
        status=status,
        waits=waits,
        silent=silent,
        partitions=[_partition(item) for item in data_plane.partitions],
        steps=steps,
        last=last,
        point=point,
        units=[_unit(unit) for unit in data_plane.storage],
        storage_error=data_plane.storage_error,
        put_per_s=sum(rates) if rates else None,
        run=run,
        runs=service.runs().runs[:_RUNS],
        durations=marks.trend([item.seconds for item in reversed(facts) if item.has_root]),
        learning=[] if learning_run is None else learning_tiles(service, learning_run),
        alerts=[alert for alert in raised if run is None or alert.run_id in ("", run)],
        has_rules=bool(service.watch.rules.rules),
    )


def _newest(service: AdminService, run: str | None) -> list[models.TraceFacts]:
    """Return the newest steps; the newest traces if there are no steps."""
    return service.store.steps(run, _STEPS) or service.traces(run=run, limit=_STEPS).traces


def _untraced(point: NewestPoint | None, traced: Pace | None) -> NewestPoint | None:
    """Return the point; None if the newest traced run is the same, still moving, or newer."""
    if point is None or traced is None or traced.newest is None:
        return point
    if traced.is_moving or point.run_id == traced.newest.run_id:
        return None
    return point if point.updated_ns > traced.newest.received_ns else None


def _last(steps: Sequence[StepOnOverview], pace: Pace | None) -> StepOnOverview | None:
    """Return the headline's step, else the newest finished step, else the newest."""
    if pace is not None and pace.newest is not None:
        for step in steps:
            if step.facts.trace_id == pace.newest.trace_id:
                return step
    return next((step for step in steps if step.facts.has_root), steps[0] if steps else None)


def _partition(facts: models.Partition) -> PartitionOnOverview:
    streams = is_streaming(facts)
    behind = max(facts.tasks, key=lambda task: task.unclaimed, default=None)
    backlog: Sequence[float] = behind.backlog if behind else facts.put_trend
    return PartitionOnOverview(
        facts=facts,
        streams=streams,
        total=facts.present if streams else max(facts.declared, facts.present),
        trend=marks.trend(backlog),
        trend_of=f"unclaimed by {behind.name}" if behind else "samples put",
        trend_words=_trend_words(behind),
    )


def task_text(task: models.PartitionTask) -> str:
    """Return the progress of a task as text."""
    parts = [f"{words.count(task.acknowledged)} acknowledged"]
    if task.leased:
        parts.append(f"{words.count(task.leased)} leased")
    if task.assigned:
        parts.append(f"{words.count(task.assigned)} assigned to ranks")
    if task.unclaimed:
        ready = "" if task.ready is None else f" ({words.count(task.ready)} ready)"
        parts.append(f"{words.count(task.unclaimed)} unclaimed{ready}")
    return " · ".join(parts)


def _trend_words(task: models.PartitionTask | None) -> str:
    if task is None or task.backlog_per_s is None:
        return ""
    rate = task.backlog_per_s
    if abs(rate) < 0.05:
        return "steady"
    return f"{'growing' if rate > 0 else 'shrinking'} by {abs(rate):.1f} samples/s"


def _step(
    facts: models.TraceFacts, seconds: dict[str, float] | None, longest: float
) -> StepOnOverview:
    if not seconds:
        bar = marks.stack([("groups", facts.seconds)], longest, "no buckets")
        return StepOnOverview(facts, None, bar, None)
    total = sum(seconds.values())
    # The width of the bar is the step's duration relative to the longest one shown.
    width_s = total * longest / facts.seconds if facts.seconds > 0 else total
    return StepOnOverview(
        facts,
        seconds,
        marks.of_buckets(seconds, width_s),
        100 * seconds.get("productive", 0.0) / total if total else None,
    )


def _unit(facts: models.Unit) -> UnitOnOverview:
    if facts.capacity is not None:
        capacity = words.size(facts.capacity)
        bar = marks.stack(
            [("accent", facts.used)], facts.capacity, f"{words.size(facts.used)} of {capacity} used"
        )
    elif facts.samples is not None and facts.max_samples is not None:
        capacity = f"{words.count(facts.max_samples)} samples"
        bar = marks.stack(
            [("accent", facts.samples)],
            facts.max_samples,
            f"{words.count(facts.samples)} of {capacity}",
        )
    else:
        capacity = "no limit"
        bar = marks.stack([], 0, capacity)
    return UnitOnOverview(facts, bar, capacity)
