"""Cost of tracing: the same GRPO step with tracing off, on and verbose, in shuffled rounds.

All steps are equal: the same prompts, the same random numbers, and a learning rate of 0. All steps
also run in the same processes, since two sets of processes differ by more than the cost of tracing.
Before a step the processes are switched between observed clients with an SDK, and bare clients with
OpenTelemetry's API only. A second untraced step in each round measures the noise.

Telemetry goes to a receiver in a separate process with the lowest priority, since a collector
usually runs elsewhere. The cost grows with the spans and events of a step, not with its duration.
So the budget is absolute: 1 % of a step of `BUDGET_STEP_S`.

Imports internals: a real run never switches tracing, so this module assembles it from its parts.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import psutil
import ray
from integration.benchmarks.garbage import freeze_garbage
from integration.benchmarks.results_file import Entry
from integration.benchmarks.summary import Summary
from integration.benchmarks.tracing_collector import collector
from integration.benchmarks.tracing_inside import Spent
from integration.benchmarks.tracing_operations import time_operations
from integration.benchmarks.tracing_switch import bare, switch, take, watch

from grpo_trainer import TrainerConfig, load_config
from grpo_trainer.actors.telemetry import TelemetrySettings
from grpo_trainer.policy.driver import Policy
from grpo_trainer.refit.weight_sync import RefitWeightSync
from grpo_trainer.rollout.prompts import PromptStream
from grpo_trainer.run.inputs import RunInputs, read_inputs
from grpo_trainer.run.processes import RunActors
from grpo_trainer.run.step import GRPOStep, StepReport
from grpo_trainer.run.training import initial_model

T = TypeVar("T")
Mode = Literal["off", "off_again", "on", "verbose"]

BUDGET_STEP_S = 5.0
"""Duration of the step for which the budget of 1 % is stated; the demo's steps are shorter."""

_QUICK_ROUNDS, _FULL_ROUNDS = 4, 10
_LEAD_IN, _IN_A_ROW = 8, 8
"""Steps of one mode in a round of a full run. The first ones do not count: telemetry is sent every
five seconds, so without them the steps of one mode would pay for another's."""
_QUICK_MODES: tuple[Mode, ...] = ("off", "on")
_FULL_MODES: tuple[Mode, ...] = ("off", "off_again", "on", "verbose")
_WARM_UPS = 1
SEED = 20_261
_RESAMPLES = 4_000
_INSIDE_STEPS, _QUICK_INSIDE_STEPS = 20, 1


INSIDE_HEADINGS = [
    "tracing",
    "process",
    "inline, ms a step",
    "export, CPU ms a step",
    "of a step of 5 s",
    "us a span",
]
TRACING_HEADINGS = [
    "tracing",
    "step, p50 ms",
    "IQR",
    "slower, % (IQR)",
    "95 % interval",
    "CPU, p50 ms",
    "more CPU, % (IQR)",
    "spans",
    "events",
    "rounds",
]


@dataclass(frozen=True)
class TracingCost:
    """Result of the tracing benchmark.

    Attributes:
        inside: mode to the time in tracing code of each step, by process; see `Spent`.
        seconds: mode to the mean duration of each round's steps.
        cpu_seconds: mode to the mean CPU time of each round's steps, over all processes except the
            collector's.
        spans: mode to the number of spans of one step.
        events: mode to the number of events of one step.
        micros: durations of a span, of an event of 512 samples, and the additional durations of a
            put and a get of an instrumented client; empty in a quick run.
    """

    inside: dict[Mode, list[dict[str, Spent]]]
    seconds: dict[Mode, list[float]]
    cpu_seconds: dict[Mode, list[float]]
    spans: dict[Mode, int]
    events: dict[Mode, int]
    micros: dict[str, Summary]

    def overhead(self, mode: Mode) -> list[float]:
        """Return by how many percent each round's steps are slower than its untraced ones."""
        return _percent(self.seconds, mode)

    def cpu_overhead(self, mode: Mode) -> list[float]:
        """Return by how many percent each step needs more CPU time, over all processes."""
        return _percent(self.cpu_seconds, mode)

    def critical(self, mode: Mode) -> Summary:
        """Return the seconds by which tracing in the step's own threads delays the step.

        The processes work one after the other, except for the policy workers. Untraced steps also
        send and read a carrier.
        """
        plain = self._mean("off")
        delays = []
        for step in self.inside[mode]:
            longer = {name: spent.inline_s - plain[name].inline_s for name, spent in step.items()}
            policy = [longer.pop(name) for name in list(longer) if name.startswith("policy worker")]
            delays.append(sum(longer.values()) + max(policy))
        summary = Summary.of(delays)
        return Summary(statistics.mean(delays), summary.p99, summary.spread, summary.count)

    def background_s(self, mode: Mode) -> float:
        """Return the CPU seconds of background work per step, over all processes.

        It is a mean, since background work runs every few seconds.
        """
        plain, mean = self._mean("off"), self._mean(mode)
        return sum(spent.export_s - plain[name].export_s for name, spent in mean.items())

    def _mean(self, mode: Mode) -> dict[str, Spent]:
        steps = self.inside[mode]
        return {
            name: Spent(
                statistics.mean(step[name].inline_s for step in steps),
                statistics.mean(step[name].export_s for step in steps),
            )
            for name in steps[0]
        }

    def inside_rows(self) -> list[list[str]]:
        """Return rows for a table with `INSIDE_HEADINGS`."""
        rows = []
        for mode in self.inside:
            for name, spent in self._mean(mode).items():
                rows.append(
                    [
                        mode,
                        name,
                        f"{spent.inline_s * 1e3:.2f}",
                        f"{spent.export_s * 1e3:.2f}",
                        "",
                        "",
                    ]
                )
            if mode == "off":
                continue
            longer, background = self.critical(mode), self.background_s(mode)
            inline = f"{longer.value * 1e3:.2f} ({longer.spread * 1e3:.2f})"
            share, micros = longer.value / BUDGET_STEP_S, longer.value / self.spans[mode] * 1e6
            rows += [
                [mode, "critical path", inline, "", f"{share:.2%}", f"{micros:.0f}"],
                [mode, "all", "", f"{background * 1e3:.2f}", "", ""],
            ]
        return rows

    def rows(self) -> list[list[str]]:
        """Return rows for a table with `TRACING_HEADINGS`."""
        rows = []
        for mode, seconds in self.seconds.items():
            step, cpu = Summary.of(seconds), Summary.of(self.cpu_seconds[mode])
            longer, more = Summary.of(self.overhead(mode)), Summary.of(self.cpu_overhead(mode))
            low, high = _interval(self.overhead(mode))
            rows.append(
                [
                    mode.replace("_", " "),
                    f"{step.value * 1e3:.0f}",
                    f"{step.spread * 1e3:.0f}",
                    "" if mode == "off" else f"{longer.value:+.2f} ({longer.spread:.2f})",
                    "" if mode == "off" else f"{low:+.2f} to {high:+.2f}",
                    f"{cpu.value * 1e3:.0f}",
                    "" if mode == "off" else f"{more.value:+.2f} ({more.spread:.2f})",
                    str(self.spans.get(mode, "")),
                    str(self.events.get(mode, "")),
                    str(step.count),
                ]
            )
        return rows

    def entries(self) -> list[Entry]:
        """Return entries for the file of results."""
        names = {"on": "", "verbose": "_verbose", "off_again": "_noise"}
        entries = []
        for mode, name in names.items():
            if mode in self.seconds:
                for what, cost in (("", self.overhead(mode)), ("_cpu", self.cpu_overhead(mode))):
                    summary = Summary.of(cost)
                    name_of_cost = f"trace.step{name}{what}_overhead_pct"
                    entries.append(Entry.of(name_of_cost, summary, "%", baseline="off"))
        entries.append(Entry.ms("trace.step_off_ms", Summary.of(self.seconds["off"])))
        for mode in self.inside:
            if mode == "off":
                continue
            suffix = "" if mode == "on" else f"_{mode}"
            longer = self.critical(mode)
            per_span = 1e6 / self.spans[mode]
            for what, factor, unit in (
                ("ms", 1e3, "ms"),
                ("pct", 100 / BUDGET_STEP_S, "%"),
                ("us_per_span", per_span, "us"),
            ):
                entries.append(
                    Entry.of(f"trace.step{suffix}_inside_{what}", longer, unit, factor=factor)
                )
            background_ms = self.background_s(mode) * 1e3
            steps = len(self.inside[mode])
            name = f"trace.step{suffix}_background_ms"
            entries.append(Entry(name, background_ms, "ms", None, 0.0, steps))
        for mode in self.spans:
            suffix = "" if mode == "on" else f"_{mode}"
            for name, counted in (("spans", self.spans), ("events", self.events)):
                entries.append(
                    Entry(f"trace.{name}_per_step{suffix}", counted[mode], "1", None, 0.0, 1)
                )
        for name, summary in self.micros.items():
            entries.append(Entry.of(f"trace.{name}_us", summary, "us", factor=1e6))
        return entries


def measure_tracing(announce: Callable[[str], None], *, full: bool) -> TracingCost:
    """Run the rounds on the running Ray; start and stop all other processes.

    Args:
        announce: called with the title of each part.
        full: whether to run all modes and rounds; if False, the minimum.
    """
    announce("starting the processes of a GRPO run")
    modes = _FULL_MODES if full else _QUICK_MODES
    with tempfile.TemporaryDirectory(prefix="bench-trace-") as folder, collector() as collecting:
        config = _config(Path(folder), collecting.endpoint)
        inputs = read_inputs(config)
        model = str(initial_model(config, Path(folder)))
        telemetry = TelemetrySettings("bench", collecting.endpoint)
        with contextlib.ExitStack() as stack:
            stack.callback(telemetry.start("grpo.driver").shutdown)
            actors = RunActors(config, model=model, tokenizer=inputs.tokenizer, telemetry=telemetry)
            stack.callback(actors.close)
            steps = Steps(config, inputs, actors, collecting.pid)
            announce("tracing of a GRPO step")
            order = random.Random(SEED)
            seconds: dict[Mode, list[float]] = defaultdict(list)
            cpu_seconds: dict[Mode, list[float]] = defaultdict(list)
            rounds = _FULL_ROUNDS if full else _QUICK_ROUNDS
            inside_steps = _INSIDE_STEPS if full else _QUICK_INSIDE_STEPS
            lead_in = _LEAD_IN if full else 0
            in_a_row = lead_in + _IN_A_ROW if full else 1
            for number in range(_WARM_UPS + rounds):
                if number == _WARM_UPS:
                    steps.freeze_garbage()
                for mode in order.sample(modes, len(modes)):
                    first = number * in_a_row
                    ran = [steps.run(mode, first + more) for more in range(in_a_row)][lead_in:]
                    if number >= _WARM_UPS:
                        seconds[mode].append(statistics.mean(duration for duration, _ in ran))
                        cpu_seconds[mode].append(statistics.mean(used for _, used in ran))
            done = (_WARM_UPS + rounds) * in_a_row
            inside = {
                mode: steps.inside(mode, done, inside_steps)
                for mode in modes
                if mode != "off_again"
            }
            micros = time_operations() if full else {}
        counts = collecting.count()
    last = done - 1
    reported: list[Mode] = [mode for mode in ("on", "verbose") if mode in modes]
    return TracingCost(
        inside,
        dict(seconds),
        dict(cpu_seconds),
        {mode: counts["spans"][steps.number(mode, last)] for mode in reported},
        {mode: counts["events"][steps.number(mode, last)] for mode in reported},
        micros,
    )


def _config(folder: Path, endpoint: str) -> TrainerConfig:
    return load_config(
        overrides=[
            f"run.output={folder}",
            "policy.optimizer.learning_rate=0.0",
            "grpo.dynamic_sampling.enabled=false",
            "validation.every_steps=0",
            "tracing.enabled=true",
            f"tracing.endpoint={endpoint}",
        ]
    )


class Steps:
    """Runner of the step, traced or not."""

    def __init__(
        self, config: TrainerConfig, inputs: RunInputs, actors: RunActors, collector: int
    ) -> None:
        verbose = config.tracing.model_copy(update={"verbose": True})
        self._configs: dict[Mode, TrainerConfig] = defaultdict(lambda: config)
        self._configs["verbose"] = config.model_copy(update={"tracing": verbose})
        self._inputs = inputs
        self._actors = actors
        driver = psutil.Process()
        self._processes = [
            process
            for process in (driver, *driver.children(recursive=True))
            if process.pid != collector
        ]

    @staticmethod
    def number(mode: Mode, round_number: int) -> int:
        """Return the step's number in its telemetry."""
        return 2 * round_number + (mode == "verbose")

    def freeze_garbage(self) -> None:
        """Freeze garbage collection in all processes: see `freeze_garbage`."""
        freeze_garbage()
        self._everywhere(freeze_garbage)

    def run(self, mode: Mode, round_number: int) -> tuple[float, float]:
        """Run one step; return its duration, and its CPU time over all processes, in seconds."""
        actors, config = self._actors, self._configs[mode]
        traced = not mode.startswith("off")
        self._everywhere(partial(switch, traced=traced))
        switch(self, traced=traced)
        stepper = SameStep(
            config,
            calls=actors.calls,
            data_plane=actors.data_plane if traced else bare(actors.data_plane),
            policy=Policy(actors.calls, actors.policy_ranks, config.policy),
            weight_sync=Refit(actors.weight_sync),
            prompts=PromptStream(self._inputs.training, seed=1, shuffle=True),
            run_id="bench",
            tokenizer=self._inputs.tokenizer,
        )
        before = self._cpu_seconds()
        started = time.perf_counter()
        stepper.run(self.number(mode, round_number), StepReport())
        duration = time.perf_counter() - started
        return duration, self._cpu_seconds() - before

    def inside(self, mode: Mode, round_number: int, count: int) -> list[dict[str, Spent]]:
        """Run ``count`` steps; return the time in tracing code of each, by process."""
        self._everywhere(watch)
        watch()
        names = [*self._actors.calls.actors, "driver"]
        steps = []
        for extra in range(count):
            self._take()
            self.run(mode, round_number + extra)
            steps.append(dict(zip(names, self._take(), strict=True)))
        return steps

    def _take(self) -> list[Spent]:
        return [*self._everywhere(take), take()]

    def _everywhere(self, function: Callable[[Any], T]) -> list[T]:
        handles = self._actors.calls.actors.values()
        answers: list[T] = ray.get([handle.__ray_call__.remote(function) for handle in handles])
        return answers

    def _cpu_seconds(self) -> float:
        times = [process.cpu_times() for process in self._processes if process.is_running()]
        return sum(time.user + time.system for time in times)


class Refit:
    """Weight sync that refits in every step, also if the version is installed already."""

    def __init__(self, inner: RefitWeightSync) -> None:
        self._inner = inner

    def sync(self, version: int) -> None:
        """Refit: see `grpo_trainer.refit.weight_sync.RefitWeightSync.sync`."""
        self._inner.refit(version)


class SameStep(GRPOStep):
    """GRPO step that draws the same random numbers for every step number."""

    def _random_stream(self, step: int) -> str:
        return "bench"


def _percent(by_mode: dict[Mode, list[float]], mode: Mode) -> list[float]:
    """Return the percentage over the mean of each round's untraced steps.

    Untraced steps are compared with each other.
    """
    others: list[Mode] = ["off"] if mode == "off_again" else ["off", "off_again"]
    plain = np.mean([by_mode[other] for other in others if other in by_mode], axis=0)
    percent: list[float] = (100 * (np.array(by_mode[mode]) / plain - 1)).tolist()
    return percent


def _interval(samples: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, by bootstrap."""
    drawn = np.random.default_rng(SEED).choice(samples, (_RESAMPLES, len(samples)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)
