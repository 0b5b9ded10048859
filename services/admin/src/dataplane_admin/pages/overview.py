"""The first page: does it move, and if not, why."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

from dataplane_admin.answers import AnswerError, Answers, models
from dataplane_admin.pages import marks, words
from dataplane_admin.pages.links import to
from dataplane_admin.pages.mood import Pace, headline, newest_pace, paces, runs_to_judge

_STEPS = 10
_RUNS = 50
_KEPT = 256


@dataclass(frozen=True)
class TaskOnOverview:
    """One task of a partition: how far it is."""

    name: str
    progress: marks.Stack
    told: str


@dataclass(frozen=True)
class PartitionOnOverview:
    """One partition as the overview shows it."""

    facts: models.Partition
    url: str
    tasks: Sequence[TaskOnOverview]
    trend: marks.Trend | None
    trend_of: str
    trend_words: str


@dataclass(frozen=True)
class StepOnOverview:
    """One of the last steps."""

    facts: models.TraceFacts
    url: str
    buckets: marks.Stack | None
    productive: str


@dataclass(frozen=True)
class Overview:
    """Everything on the first page.

    Attributes:
        mood: ``moving``, ``stuck``, ``quiet`` or ``empty``.
        waits: of what goes on.
        silent: waits of processes that are not heard of any more.
        run: which alone is shown; None for all.
        runs: which can be chosen.
        last: the newest step that has ended.
    """

    mood: str
    headline: str
    status: models.Status
    waits: Sequence[models.Wait]
    silent: Sequence[models.Wait]
    partitions: Sequence[PartitionOnOverview]
    steps: Sequence[StepOnOverview]
    last: StepOnOverview | None
    units: Sequence[tuple[models.Unit, marks.Stack]]
    put_per_s: float | None
    run: str | None
    runs: Sequence[models.Run]
    took: marks.Trend | None


class Buckets:
    """Bucket times of traces, kept as long as a trace does not change: putting one together costs
    more than all the rest of the page."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._kept: OrderedDict[models.TraceFacts, dict[str, float]] = OrderedDict()
        self._lock = Lock()

    def of(self, facts: models.TraceFacts) -> dict[str, float] | None:
        """Bucket to process-seconds; None if the trace cannot be had any more."""
        with self._lock:
            known = self._kept.get(facts)
        if known is not None:
            return known
        try:
            found = self._answers.trace(facts.trace_id).buckets
        except AnswerError:
            return None
        with self._lock:
            self._kept[facts] = found
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return found


def overview(
    answers: Answers, buckets: Buckets, run: str | None = None, *, stuck_after_s: float
) -> Overview:
    """The first page; of one ``run`` only its waits and steps. Nothing counts as stuck before
    ``stuck_after_s`` seconds."""
    held = answers.partitions()
    # What is said of the data plane is of the snapshot that is shown.
    status = answers.status().model_copy(update={"live": held.live})
    told = answers.why(run=run)
    waits = [one for one in told if one.silent_s is None]
    silent = [one for one in told if one.silent_s is not None]
    judged = runs_to_judge(answers, run, waits, answers.traces(run=run, limit=_STEPS).traces)
    pace = paces(answers, judged, status.now_ns, stuck_after_s)
    mood, told_first = headline(status, waits, silent, held.partitions, pace)
    # After the headline's: a step that ended meanwhile stands below it, and not above only.
    facts = answers.traces(run=run, limit=_STEPS).traces
    longest = max((one.seconds for one in facts), default=0.0)
    rates = [one.put_per_s for one in held.partitions if one.put_per_s is not None]
    steps = [_step(one, buckets.of(one), longest) for one in facts]
    return Overview(
        mood=mood,
        headline=told_first,
        status=status,
        waits=waits,
        silent=silent,
        partitions=[_partition(one) for one in held.partitions],
        steps=steps,
        last=_last(steps, newest_pace(pace)),
        units=[(unit, _used(unit)) for unit in held.storage],
        put_per_s=sum(rates) if rates else None,
        run=run,
        runs=answers.runs().runs[:_RUNS],
        took=marks.trend([one.seconds for one in reversed(facts) if one.has_root]),
    )


def _last(steps: Sequence[StepOnOverview], pace: Pace | None) -> StepOnOverview | None:
    """The step of the headline, or the newest one that has ended, or the newest."""
    if pace is not None and pace.newest is not None:
        for one in steps:
            if one.facts.trace_id == pace.newest.trace_id:
                return one
    return next((one for one in steps if one.facts.has_root), steps[0] if steps else None)


def _partition(facts: models.Partition) -> PartitionOnOverview:
    whole = max(facts.declared, facts.present, 1)
    behind = max(facts.tasks, key=lambda task: task.unclaimed, default=None)
    backlog: Sequence[float] = behind.backlog if behind else facts.put_trend
    return PartitionOnOverview(
        facts=facts,
        url=to("/partition", id=facts.id),
        tasks=[
            TaskOnOverview(one.name, marks.of_task(one, whole), _told(one)) for one in facts.tasks
        ],
        trend=marks.trend(backlog),
        trend_of=f"unclaimed by {behind.name}" if behind else "put",
        trend_words=_trend_words(behind),
    )


def _told(task: models.PartitionTask) -> str:
    parts = [f"{words.count(task.settled)} settled"]
    if task.leased:
        parts.append(f"{words.count(task.leased)} leased")
    if task.assigned:
        parts.append(f"{words.count(task.assigned)} assigned to ranks")
    if task.unclaimed:
        ready = "" if task.ready is None else f", {words.count(task.ready)} ready"
        parts.append(f"{words.count(task.unclaimed)} unclaimed{ready}")
    return " · ".join(parts)


def _trend_words(task: models.PartitionTask | None) -> str:
    if task is None or task.backlog_per_s is None:
        return ""
    rate = task.backlog_per_s
    if abs(rate) < 0.05:
        return "steady"
    return f"{'grows' if rate > 0 else 'shrinks'} by {abs(rate):.1f} a second"


def _step(
    facts: models.TraceFacts, seconds: dict[str, float] | None, longest: float
) -> StepOnOverview:
    if not seconds:
        return StepOnOverview(facts, to("/trace", id=facts.trace_id), None, "-")
    total = sum(seconds.values())
    # As wide as the step was long beside the longest one shown.
    whole = total * longest / facts.seconds if facts.seconds > 0 else total
    return StepOnOverview(
        facts,
        to("/trace", id=facts.trace_id),
        marks.of_buckets(seconds, whole),
        words.percent(seconds.get("productive", 0.0), total),
    )


def _used(unit: models.Unit) -> marks.Stack:
    told = f"{words.size(unit.used)} of {words.size(unit.capacity)} used"
    return marks.stack([("accent", unit.used)], unit.capacity, told)
