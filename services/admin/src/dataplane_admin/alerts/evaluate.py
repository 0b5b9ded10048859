"""Evaluation of the rules: which alerts to raise and to clear at one moment.

A value that has been beyond the bound for `Rule.for_s` raises an alert. The alert is cleared once
the value has been within the bound by `_MARGIN` for that duration, so that a value near the bound
does not raise it repeatedly. A value that is not finite does neither. Alerts of a run that ended
are cleared at once, except ``run_failed``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

import numpy as np

from dataplane_admin import models
from dataplane_admin.alerts.rules import Rule
from observability.views import printable
from observability.views.quantities import duration

_STALENESS, _GAP = "rl.staleness.mean", "rl.logprob_gap.mean"
_NOT_FINITE = ("rl.loss", "rl.grad_norm", "rl.reward.mean")
"""Metrics of the kind ``not_finite``."""
TELEMETRY = "telemetry"
"""Subject of an alert about this service's database. No storage unit has this subject."""

_MARGIN = 0.1
"""Fraction of the bound."""
_WINDOW = 10
"""Number of steps over which rewards are averaged."""
_NOISE = 3.0
"""A reward has collapsed only if it fell by more than this multiple of the standard deviation of
the best steps."""
_METRIC_KINDS = frozenset({"reward_collapsed", "staleness", "logprob_gap", "not_finite", "metric"})
"""Kinds that compare step metrics, which some runs do not report."""
_AGE_KINDS = frozenset({"no_step", "telemetry_lost"})
"""Kinds whose value is an age."""

Key: TypeAlias = tuple[str, str, str]
"""Rule, run and subject: what identifies a raised alert."""


@dataclass(frozen=True)
class RunFacts:
    """An unfinished run.

    Attributes:
        seen_s: seconds since its last record.
        step_s: seconds since its last finished step, or its start.
        late_after_s: seconds without a step, or with a blocked task, after which it is late.
        reports_end: whether its end would be reported.
        last: values of metrics at its newest step, NaN if not finite. Keys are names, with any
            attributes in braces: ``rl.reward.component{format}``.
        rewards: mean reward of its steps, in order.
        dropped: items of telemetry that its processes dropped, by signal.
    """

    run_id: str
    seen_s: float
    step_s: float
    late_after_s: float
    reports_end: bool
    last: Mapping[str, float]
    rewards: Sequence[float]
    dropped: Mapping[str, int]


@dataclass(frozen=True)
class Facts:
    """Facts that the rules compare, at one moment.

    Attributes:
        uptime_s: seconds since the service started; before its start, it received no telemetry.
        waits: blocked tasks. Those of silent processes raise nothing and clear nothing.
        failed: error of each run that failed within the last day, by run.
        used_shares: used share of each store, by subject.
        absences: why a run with a raised alert is not among the runs, by run.
        knows_plane: False while the data plane has been unreachable for less than ten minutes;
            meanwhile alerts about its tasks are not cleared.
        knows_units: the same of its storage units.
    """

    now_ns: int
    uptime_s: float
    runs: Sequence[RunFacts]
    waits: Sequence[models.Wait]
    failed: Mapping[str, str]
    used_shares: Mapping[str, float]
    absences: Mapping[str, str]
    knows_plane: bool
    knows_units: bool


@dataclass(frozen=True)
class Measure:
    """A value that a rule compares with its bound: a maximum, or a minimum if ``is_minimum``."""

    rule: Rule
    run_id: str
    subject: str
    value: float
    bound: float
    sentence: str
    is_minimum: bool = False

    @property
    def is_beyond(self) -> bool:
        """True if the value raises an alert."""
        return self.value < self.bound if self.is_minimum else self.value > self.bound

    @property
    def is_within(self) -> bool:
        """True if the value clears an alert."""
        margin = _MARGIN * abs(self.bound)
        if self.is_minimum:
            return self.value >= self.bound + margin
        return self.value <= self.bound - margin

    @property
    def key(self) -> Key:
        """Key of its alert."""
        return self.rule.name, self.run_id, self.subject


@dataclass(frozen=True)
class Decision:
    """Changes of the alerts.

    Attributes:
        cleared: alerts that end, each with the reason.
        kept: raised alerts whose value is still beyond the bound, with the newest value.
        idle_rules: names of the rules that compared no value although they apply to a run.
        since: start of each condition that has not lasted long enough yet, nanoseconds since 1970.
    """

    raised: Sequence[Measure]
    cleared: Sequence[tuple[models.Alert, str]]
    kept: Sequence[tuple[models.Alert, Measure]]
    since: Mapping[Key, int]
    idle_rules: Sequence[str]


def decide(
    rules: Iterable[Rule],
    facts: Facts,
    alerts: Iterable[models.Alert],
    since: Mapping[Key, int],
) -> Decision:
    """Return the changes of the raised alerts.

    ``since`` is `Decision.since` of the previous evaluation; empty after a start.
    """
    by_rule = [(rule, list(measure_all(rule, facts))) for rule in rules]
    measures = {measure.key: measure for _, of_rule in by_rule for measure in of_rule}
    by_key = {(alert.name, alert.run_id, alert.subject): alert for alert in alerts}
    lasting: dict[Key, int] = {}

    def lasts(measure: Measure) -> bool:
        lasting[measure.key] = min(since.get(measure.key, facts.now_ns), facts.now_ns)
        return facts.now_ns - lasting[measure.key] >= measure.rule.for_s * 1e9

    raised, kept = [], []
    cleared: list[tuple[models.Alert, str]] = []
    for key, measure in measures.items():
        alert = by_key.get(key)
        if alert is None:
            # An age includes the time in which this service did not run.
            known = measure.rule.kind not in _AGE_KINDS or facts.uptime_s > measure.bound
            if known and measure.is_beyond and lasts(measure):
                raised.append(measure)
        elif measure.is_within and lasts(measure):
            cleared.append((alert, f"within the bound: {measure.sentence}"))
        elif measure.is_beyond:
            kept.append((alert, measure))
    silent = {wait.run_id for wait in facts.waits if wait.silent_s is not None}
    silent &= {run.run_id for run in facts.runs}
    for key, alert in by_key.items():
        if key in measures or (alert.kind == "blocked" and alert.run_id in silent):
            continue
        if _is_known(alert, facts):
            cleared.append((alert, _reason(alert, facts)))
    decided = {measure.key for measure in raised}
    decided.update((alert.name, alert.run_id, alert.subject) for alert, _ in cleared)
    pending = {key: ns for key, ns in lasting.items() if key not in decided}
    idle = [rule.name for rule, of_rule in by_rule if not of_rule and _applies(rule, facts)]
    return Decision(raised, cleared, kept, pending, idle)


def _is_known(alert: models.Alert, facts: Facts) -> bool:
    """Return whether the facts would include what the alert is about, if it still existed."""
    if alert.kind == "store_full" and alert.subject != TELEMETRY:
        return facts.knows_units
    return facts.knows_plane or alert.kind != "blocked" or bool(alert.run_id)


def _applies(rule: Rule, facts: Facts) -> bool:
    """Return whether a rule of a step metric applies to a run that should report the metric."""
    runs = [run for run in facts.runs if fnmatchcase(run.run_id, rule.runs)]
    # A run that reports rewards has too few steps so far.
    needs_steps = rule.kind == "reward_collapsed" and any(run.rewards for run in runs)
    return bool(runs) and rule.kind in _METRIC_KINDS and not needs_steps


def metrics_of(rules: Iterable[Rule]) -> set[str]:
    """Return the names of the metrics whose last values the rules compare."""
    of_kind = {"staleness": (_STALENESS,), "logprob_gap": (_GAP,), "not_finite": _NOT_FINITE}
    names = {name for rule in rules for name in of_kind.get(rule.kind, ())}
    return names | {rule.metric.partition("{")[0] for rule in rules if rule.metric}


def measure_all(rule: Rule, facts: Facts) -> Iterator[Measure]:
    """Yield a measure for each run or store that a rule applies to."""
    if rule.kind == "store_full":
        for name, share in facts.used_shares.items():
            what = "the telemetry store" if name == TELEMETRY else printable(name)
            yield Measure(rule, "", name, share, rule.bound, f"{what} is {100 * share:.0f} % full")
    elif rule.kind == "blocked":
        yield from _blocked(rule, facts)
    elif rule.kind == "run_failed":
        for run_id, error in facts.failed.items():
            if fnmatchcase(run_id, rule.runs):
                sentence = f"the run failed: {printable(error)}" if error else "the run failed"
                yield Measure(rule, run_id, "", 1.0, rule.bound, sentence)
    else:
        for run in facts.runs:
            if fnmatchcase(run.run_id, rule.runs):
                yield from _of_run(rule, run)


def _blocked(rule: Rule, facts: Facts) -> Iterator[Measure]:
    limits = {run.run_id: run.late_after_s for run in facts.runs}
    longest: dict[str, models.Wait] = {}
    # Name a fault as the cause, even if a task was blocked before the fault was first reported.
    causes = {wait.run_id: wait.sentence for wait in facts.waits if wait.kind == "fault"}
    for wait in facts.waits:
        if wait.silent_s is not None:
            continue
        before = longest.get(wait.run_id)
        if before is None or wait.seconds > before.seconds:
            longest[wait.run_id] = wait
    for run_id, wait in longest.items():
        # Tasks of the data plane belong to no run: use the limit of the slowest run.
        late_after_s = limits.get(run_id, max(limits.values(), default=0.0))
        bound = max(rule.bound, late_after_s)
        if fnmatchcase(run_id, rule.runs):
            sentence = causes.get(run_id, wait.sentence)
            yield Measure(rule, run_id, "", wait.seconds, bound, sentence)


def _of_run(rule: Rule, run: RunFacts) -> Iterator[Measure]:
    def of(value: float, sentence: str, bound: float = rule.bound) -> Measure:
        return Measure(rule, run.run_id, "", value, bound, sentence)

    match rule.kind:
        case "no_step":
            sentence = f"no step finished for {duration(run.step_s)}"
            yield of(run.step_s, sentence, max(rule.bound, run.late_after_s))
        case "telemetry_lost":
            # Without a reported start, a run that ended and one that is silent look the same.
            if run.reports_end:
                yield of(run.seen_s, f"no telemetry for {duration(run.seen_s)}")
        case "telemetry_dropped":
            counts = [f"{count} {name}" for name, count in sorted(run.dropped.items())]
            what = ", ".join(counts) or "nothing"
            yield of(float(sum(run.dropped.values())), f"its processes dropped {what}")
        case "reward_collapsed":
            collapse = _collapse(run.rewards)
            if collapse is not None:
                lost, recent, best = collapse
                yield of(lost, f"the mean reward fell from {best:.4g} to {recent:.4g}")
        case "staleness":
            if _STALENESS in run.last:
                value = run.last[_STALENESS]
                yield of(value, f"the mean staleness is {value:.4g} versions at the newest step")
        case "logprob_gap":
            if _GAP in run.last:
                value = run.last[_GAP]
                yield of(value, f"generator and trainer differ by {value:.4g} nats")
        case "not_finite":
            wanted = [rule.metric] if rule.metric else _NOT_FINITE
            known = [key for name in wanted for key in _keys_of(name, run)]
            wrong = [name for name in known if not math.isfinite(run.last[name])]
            if known:
                what = "not finite" if wrong else "finite"
                names = wrong or known
                verb = "is" if len(names) == 1 else "are"
                sentence = f"{printable(', '.join(names))} {verb} {what} at the newest step"
                yield of(len(wrong), sentence)
        case "metric":
            bound = rule.above if rule.below is None else rule.below
            assert bound is not None  # a rule of this kind has either
            for key in _keys_of(rule.metric, run):
                value = run.last[key]
                sentence = f"{printable(key)} is {value:.4g} at the newest step"
                subject, is_minimum = key.removeprefix(rule.metric), rule.below is not None
                yield Measure(rule, run.run_id, subject, value, bound, sentence, is_minimum)


def _keys_of(metric: str, run: RunFacts) -> list[str]:
    return [key for key in run.last if key == metric or key.startswith(f"{metric}{{")]


def _collapse(rewards: Sequence[float]) -> tuple[float, float, float] | None:
    """Return the lost share of the reward, the recent and the best reward.

    Both rewards are means of `_WINDOW` steps. The share relates the drop to the best reward, or to
    the range from the worst to the best if that is larger: rewards may be negative, and the best
    one near 0. The share is 0 if the drop is within the noise of the best steps. None without
    enough steps.
    """
    if len(rewards) < 2 * _WINDOW:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(rewards), _WINDOW)
    means = windows.mean(axis=1)
    at = int(means[:-_WINDOW].argmax())
    best, recent = float(means[at]), float(means[-1])
    lost = best - recent
    if lost <= _NOISE * float(windows[at].std()):
        return 0.0, recent, best
    return lost / max(abs(best), best - float(means.min())), recent, best


def _reason(alert: models.Alert, facts: Facts) -> str:
    if alert.run_id and all(run.run_id != alert.run_id for run in facts.runs):
        # The alert may be newer than the facts.
        return facts.absences.get(alert.run_id, "the run ended or is silent")
    if alert.kind == "run_failed":
        return "the run was resumed"
    return "no task is blocked" if alert.kind == "blocked" else "no longer measured"
