"""Prediction of a run's step time with another number of generators or another staleness.

A discrete-event model replays a traced run. Generators start rollouts while the store has space for
their samples. The trainer refits, trains on groups of samples as they become ready, and frees their
space after the next refit. Durations are drawn from the recorded ones. So the model
ignores that added processes share processors, and that an engine is slower with more requests.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil, inf
from statistics import fmean, median
from typing import TYPE_CHECKING

from dataplane_core.tags import group_of
from grpo_trainer.errors import TrainerError

if TYPE_CHECKING:
    from observability.records import Event, Process, Records, Span

SEED = 20_262
_REPETITIONS = 20
"""Number of simulated runs; a prediction is their mean."""

_LONG_RUN = 50
"""Number of simulated steps over which the predicted step time is averaged."""


@dataclass(frozen=True)
class Setting:
    """Settings of a run that a prediction can change.

    Attributes:
        generators: number of generators.
        concurrent_rollouts: rollouts of a generator at the same time.
        staleness: steps by which generators may run ahead.
    """

    generators: int
    concurrent_rollouts: int
    staleness: int

    @property
    def rollouts(self) -> int:
        """Rollouts of all generators at the same time."""
        return self.generators * self.concurrent_rollouts


@dataclass(frozen=True)
class Durations:
    """Durations and amounts of a run.

    Attributes:
        rollouts_s: duration of each rollout.
        fixed_s: duration of each step without training and waiting; mostly its refit.
        train_s: duration of each step's training without waiting.
        groups_per_step: groups that a step trains on.
        groups_per_rollout: maximum number of groups of a rollout.
        kept: fraction of the groups that are not filtered, because their rewards differ.
        fills_batch: whether each rollout has ``groups_per_rollout`` groups, and the surplus is
            dropped, as in a synchronous run.
    """

    rollouts_s: Sequence[float]
    fixed_s: Sequence[float]
    train_s: Sequence[float]
    groups_per_step: int
    groups_per_rollout: int
    kept: float = 1.0
    fills_batch: bool = False


@dataclass(frozen=True)
class Shares:
    """Mean duration of a step, and the fractions of it in which either side is idle."""

    step_s: float
    trainer_idle: float
    generators_idle: float


@dataclass(frozen=True)
class Recording:
    """Recorded run.

    Attributes:
        setting: setting derived from its telemetry; see `_Run.setting`.
        durations: durations of its steps.
        shares: measured shares of the steps after the first.
        rescoring_s: mean duration of the pass that scores the batch with the policy, which an
            asynchronous step does not have.
        max_groups: number of groups that the run put and did not drop.
    """

    setting: Setting
    durations: Durations
    shares: Shares
    rescoring_s: float = 0.0
    max_groups: float = inf

    def replayed(self) -> Shares:
        """Return the prediction for the recorded steps, to compare with the measured shares."""
        steps = len(self.durations.fixed_s)
        return predict(
            self.durations, self.setting, steps, skipped=min(1, steps - 1), limit=self.max_groups
        )

    def with_setting(self, setting: Setting) -> Shares:
        """Return the prediction for a long run."""
        durations = self.durations
        if setting.staleness > 0 and self.rescoring_s:
            train_s = [max(0.0, each - self.rescoring_s) for each in durations.train_s]
            durations = replace(durations, train_s=train_s)
        skipped = 2 + setting.staleness
        return predict(durations, setting, skipped + _LONG_RUN, skipped=skipped)


def predict(
    durations: Durations, setting: Setting, steps: int, *, skipped: int = 0, limit: float = inf
) -> Shares:
    """Return the means over simulated runs, each without its first ``skipped`` steps.

    ``limit`` bounds the number of groups that are started and not dropped.
    """
    runs = [
        _Simulation(durations, setting, limit, SEED + number).run(steps, skipped)
        for number in range(_REPETITIONS)
    ]
    return Shares(
        fmean(run.step_s for run in runs),
        fmean(run.trainer_idle for run in runs),
        fmean(run.generators_idle for run in runs),
    )


class _Simulation:
    """One simulated run; times are seconds since its start."""

    def __init__(self, durations: Durations, setting: Setting, limit: float, seed: int) -> None:
        self._durations = durations
        self._setting = setting
        self._limit = limit
        self._random = random.Random(seed)  # noqa: S311  # not for secrets
        self._now = 0.0
        self._version = -1
        self._started = self._stored = self._stale = 0
        self._free = setting.rollouts
        self._running: list[tuple[float, int, int, int]] = []  # heap: end, order, version, groups
        self._ready: list[tuple[int, int]] = []  # heap of groups: order, version
        self._intervals: list[tuple[float, float]] = []

    def run(self, steps: int, skipped: int) -> Shares:
        began, waited_s = 0.0, 0.0
        for step in range(steps):
            if step == skipped:
                began, waited_s = self._now, 0.0
            waited_s += self._step()
        elapsed = self._now - began
        idle = 1 - _overlap(self._intervals, began, self._now) / (self._setting.rollouts * elapsed)
        return Shares(elapsed / (steps - skipped), waited_s / elapsed, idle)

    def _step(self) -> float:
        """Simulate one step; return the seconds in which the trainer waited for groups."""
        self._advance(self._now + self._random.choice(self._durations.fixed_s))
        self._version += 1
        if self._version:
            self._stored -= self._durations.groups_per_step
        fresh = [group for group in self._ready if self._is_fresh(group[1])]
        self._drop(self._stale + len(self._ready) - len(fresh))
        self._ready, self._stale = sorted(fresh), 0
        self._start()
        group_s = self._random.choice(self._durations.train_s) / self._durations.groups_per_step
        waited_s = 0.0
        for _ in range(self._durations.groups_per_step):
            while not self._ready:
                if not self._running:
                    return waited_s  # the last groups of a recorded run were dropped
                waited_s += self._running[0][0] - self._now
                self._advance(self._running[0][0])
            heapq.heappop(self._ready)
            self._advance(self._now + group_s)
        return waited_s

    def _is_fresh(self, version: int) -> bool:
        return version >= self._version - self._setting.staleness

    def _advance(self, until: float) -> None:
        """Let rollouts finish and start until the time ``until``."""
        while self._running and self._running[0][0] <= until:
            self._now, order, version, groups = heapq.heappop(self._running)
            kept = sum(self._random.random() < self._durations.kept for _ in range(groups))
            self._drop(groups - kept)
            if self._is_fresh(version):
                for _ in range(kept):
                    heapq.heappush(self._ready, (order, version))
            else:
                self._stale += kept  # they take space until the next step
            self._free += 1
            self._start()
        self._now = until

    def _drop(self, groups: int) -> None:
        self._stored -= groups
        self._limit += groups

    def _start(self) -> None:
        """Start rollouts while a generator is free and the store has space for a group."""
        durations = self._durations
        bound = durations.groups_per_step * (1 + self._setting.staleness)
        while self._free and self._stored < bound and self._started < self._limit:
            groups = durations.groups_per_rollout
            if not durations.fills_batch:
                groups = int(min(groups, bound - self._stored, self._limit - self._started))
            end = self._now + self._random.choice(durations.rollouts_s)
            heapq.heappush(self._running, (end, self._started, self._version, groups))
            self._intervals.append((self._now, end))
            self._started += groups
            self._stored += groups
            self._free -= 1


def recording_of(records: Records) -> Recording:
    """Return the newest traced run in ``records``.

    Raises:
        TrainerError: it has no finished step, no finished rollout or no trained sample.
    """
    run = _Run(records)
    rollouts = run.rollouts
    trained = [len(run.groups("trained", {step.trace_id})) for step in run.steps]
    generated = run.groups("put", {span.trace_id for span in rollouts})
    if not any(trained) or not generated:
        raise TrainerError("the newest run has no finished rollout, or no trained sample")
    groups_per_step = ceil(median(filter(None, trained)))
    if run.is_async:
        waits_and_trains = [run.async_seconds(step) for step in run.steps]
        setting = run.setting(groups_per_step)
    else:
        waits_and_trains = [run.sync_seconds(step) for step in run.steps]
        setting = Setting(1, 1, 0)
    waits, trains = zip(*waits_and_trains, strict=True)
    ends = [*(step.start_ns for step in run.steps[1:]), run.steps[-1].end_ns]
    periods = [(end - step.start_ns) / 1e9 for step, end in zip(run.steps, ends, strict=True)]
    first = min(1, len(periods) - 1)
    began, elapsed = run.steps[first].start_ns / 1e9, sum(periods[first:])
    intervals = [(span.start_ns / 1e9, span.end_ns / 1e9) for span in rollouts]
    busy = _overlap(intervals, began, began + elapsed) / (setting.rollouts * elapsed)
    dropped = run.groups("dropped")
    filtered = run.groups("dropped", reasons=("filtered", "equal_rewards"))
    return Recording(
        setting,
        Durations(
            [span.seconds for span in rollouts],
            [
                period - wait - train
                for period, wait, train in zip(periods, waits, trains, strict=True)
            ],
            trains,
            groups_per_step,
            ceil(len(generated) / len(rollouts)),
            1 - len(filtered) / len(generated),
            fills_batch=not run.is_async,
        ),
        Shares(elapsed / len(periods[first:]), sum(waits[first:]) / elapsed, 1 - busy),
        0.0 if run.is_async else fmean(run.phase_s(step, "logprobs") for step in run.steps),
        len(run.groups("put") - dropped) if run.is_async else inf,
    )


class _Run:
    """Telemetry of the newest run of a recording."""

    def __init__(self, records: Records) -> None:
        spans = [span for span in records.spans if span.is_timed and span.outcome != "error"]
        steps = sorted((s for s in spans if s.name == "grpo.step"), key=lambda s: s.start_ns)
        if not steps:
            raise TrainerError("found no finished step: no span grpo.step")
        self.driver: Process = steps[-1].process
        run_id = steps[-1].attributes.get("rl.run_id")
        self.steps = [step for step in steps if step.process == self.driver]
        self._spans: dict[str, list[Span]] = defaultdict(list)
        for span in spans:
            if span.attributes.get("rl.run_id") == run_id:
                self._spans[span.trace_id].append(span)
        self._events: list[Event] = sorted(
            (each for each in records.events if each.attributes.get("rl.run_id") == run_id),
            key=lambda each: each.time_ns,
        )
        streamed = [s for spans in self._spans.values() for s in spans if s.name == "grpo.rollout"]
        self.is_async = bool(streamed)
        self.rollouts = streamed or [
            span for step in self.steps for span in self._phases(step, "rollout")
        ]

    def _phases(self, step: Span, name: str) -> Iterator[Span]:
        for span in self._spans[step.trace_id]:
            if span.name == name and span.process == self.driver:
                yield span

    def phase_s(self, step: Span, name: str) -> float:
        """Return the seconds of one of the driver's phases."""
        return sum(span.seconds for span in self._phases(step, name))

    def sync_seconds(self, step: Span) -> tuple[float, float]:
        """Return the seconds that the policy waits, and works, in a synchronous step."""
        wait_s = self.phase_s(step, "rollout")
        return wait_s, step.seconds - wait_s - self.phase_s(step, "refit")

    def async_seconds(self, step: Span) -> tuple[float, float]:
        """Return the seconds that the policy waits, and works, in an asynchronous step.

        A rank's time in `optimizer_step`, minus its claims, still includes waits for other ranks.
        The rank with the least of this time waited the least, so its time is closest to the work.
        """
        spans = self._spans[step.trace_id]
        claims: dict[str | None, float] = defaultdict(float)
        for span in spans:
            if span.name.startswith("receive "):
                claims[span.parent_id] += span.seconds
        ranks: dict[Process, list[float]] = defaultdict(list)
        for span in sorted(spans, key=lambda each: each.start_ns):
            if span.name == "optimizer_step":
                ranks[span.process].append(span.seconds - claims[span.span_id])
        train_s = sum(map(min, zip(*ranks.values(), strict=False)))
        return max(0.0, self.phase_s(step, "train") - train_s), train_s

    def groups(
        self, name: str, traces: Container[str] | None = None, reasons: Container[str] | None = None
    ) -> set[str]:
        """Return the groups in the events ``name``; None allows every trace or reason."""
        return {
            group
            for event in self._events
            if event.name == name
            and (traces is None or event.trace_id in traces)
            and (reasons is None or event.attributes.get("dataplane.reason") in reasons)
            for group in _groups_of(event)
        }

    def setting(self, groups_per_step: int) -> Setting:
        """Return the maximum numbers of live generators and of rollouts of one, and the staleness.

        The staleness follows from the maximum number of stored groups.
        """
        rollouts: dict[Process, list[tuple[int, int]]] = defaultdict(list)
        for span in self.rollouts:
            rollouts[span.process].append((span.start_ns, span.end_ns))
        # A generator exists from its first to its last rollout. So a lost generator and its
        # replacement do not overlap, and count once.
        lives = [
            (min(start for start, _ in each), max(end for _, end in each))
            for each in rollouts.values()
        ]
        stored: set[str] = set()
        max_stored = 0
        for event in self._events:
            if event.name == "put" and event.process == self.driver:
                stored |= _groups_of(event)
            elif event.name == "cleared":
                stored -= _groups_of(event)
            max_stored = max(max_stored, len(stored))
        ahead = max(0, ceil(max_stored / groups_per_step) - 1)
        return Setting(
            _max_overlapping(lives), max(map(_max_overlapping, rollouts.values())), ahead
        )


def _groups_of(event: Event) -> set[str]:
    return {group_of(each, {}) for each in event.sample_ids}


def _max_overlapping(intervals: Iterable[tuple[int, int]]) -> int:
    """Return the maximum number of intervals at a time, at least 1."""
    changes = sorted(each for interval in intervals for each in zip(interval, (1, -1), strict=True))
    return max(1, *accumulate(change for _, change in changes))


def _overlap(intervals: Iterable[tuple[float, float]], began: float, ended: float) -> float:
    """Return the seconds of all intervals that are between two times."""
    return sum(max(0.0, min(end, ended) - max(start, began)) for start, end in intervals)
