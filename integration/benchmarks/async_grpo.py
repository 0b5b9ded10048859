"""Samples a second of synchronous, one-step-off and asynchronous GRPO.

A part of a full run of the benchmarks, and ``python -m integration.benchmarks.async_grpo``. With
``--vllm`` it measures a real vLLM instead, with ``--learning`` rewards instead of speed.

Generation is simulated: each response takes at least a log-normal time, while the processor is
idle, as it would be with a GPU. Training is real and bound by the processor. Every variant
generates the same number of responses at a time. A synchronous step generates its batch in one
rollout; an asynchronous generator has a concurrent rollout for each prompt of a batch. A second
case has no simulated time: both sides need the same processor, so running ahead gains nothing.

Variants alternate in shuffled rounds. The random numbers of a round depend on its number. The
learning rate is 0 and no group is dropped for equal rewards, so that all steps do the same work.
A run is measured after ``1 + max_staleness`` steps, when generators are as far ahead as they may
be, and stopped before its last step, so that they stay ahead.

Idle times: a synchronous trainer is idle during rollouts, its generators otherwise. Ranks of an
asynchronous trainer are idle in claims, its generators while they wait for a prompt. A rollout
counts as busy until its last response, also where most of its responses are finished.

A traced run with staleness 1 predicts the other variants: see `grpo_trainer.what_if`.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any  # Any: records of steps

import typer
from integration.benchmarks.parts import Parts
from integration.benchmarks.results_file import Entry
from integration.benchmarks.summary import Summary
from rich.console import Console

from grpo_trainer import DEMO_CONFIG, GracefulStop, RunDisplay, TrainerConfig, load_config, train
from grpo_trainer.what_if import Recording, Shares, recording_of
from observability.receiver import Receiver

SEED = 20_263
_ROUNDS = 3
_STEPS = 6
_MANY_STEPS = 100
"""Steps of a run that is stopped earlier."""

_PROMPTS = 32
_NO_LEARNING = (
    "policy.optimizer.learning_rate=0.0",
    "grpo.dynamic_sampling.enabled=false",
    "validation.every_steps=0",
    "checkpointing.every_steps=0",
    "data_plane.transfer_queue_mirror=false",
)
ASYNC_HEADINGS = [
    "generation",
    "variant",
    "samples/s",
    "x sync (IQR)",
    "step, s",
    "trainer idle",
    "generators idle",
    "staleness",
    "dropped groups",
    "runs",
]
WHAT_IF_HEADINGS = [
    "generation",
    "variant",
    "step, s",
    "predicted, s",
    "error",
    "trainer idle, predicted",
    "generators idle, predicted",
]
LEARNING_HEADINGS = [
    "variant",
    "seed",
    "samples trained",
    "reward, first five steps",
    "last five steps",
    "held out, after 20 steps",
    "40",
    "60",
    "seconds",
]
_SEEDS = (17, 18, 19)
_FIVE = 5


@dataclass(frozen=True)
class Variant:
    """Mode of a run; ``max_staleness`` is None for a synchronous one."""

    title: str
    name: str
    max_staleness: int | None

    @property
    def overrides(self) -> list[str]:
        """Overrides of the configuration."""
        if self.max_staleness is None:
            return ["grpo.mode=sync"]
        return [
            "grpo.mode=async",
            f"grpo.asynchronous.max_staleness={self.max_staleness}",
            "grpo.asynchronous.prompts_per_rollout=1",
            f"grpo.asynchronous.concurrent_rollouts={_PROMPTS}",
        ]

    @property
    def warm_up_steps(self) -> int:
        """Steps until generators are as far ahead as they may be."""
        return 1 + (self.max_staleness or 0)


SYNC = Variant("sync", "sync", None)
ONE_STEP_OFF = Variant("async, staleness 1 (one step off)", "staleness1", 1)
VARIANTS = (
    SYNC,
    Variant("async, staleness 0", "staleness0", 0),
    ONE_STEP_OFF,
    Variant("async, staleness 2", "staleness2", 2),
    Variant("async, staleness 4", "staleness4", 4),
)


@dataclass(frozen=True)
class Load:
    """Generation to measure.

    Attributes:
        title: first column of the table.
        name: part of the names of its results.
        variants: variants to compare.
        config: configuration.
        overrides: overrides of the configuration.
        is_traced: whether a traced run is to predict the other variants.
    """

    title: str
    name: str
    variants: Sequence[Variant]
    config: Path = DEMO_CONFIG
    overrides: tuple[str, ...] = ()
    is_traced: bool = False


SLOW = Load(
    "slow, simulated",
    "slow",
    VARIANTS,
    overrides=("policy.generation.simulated_latency={median_s: 0.05, sigma: 1.0}",),
    is_traced=True,
)
FAST = Load("fast, on the same cores", "fast", (SYNC, ONE_STEP_OFF))
VLLM = Load("vLLM on the same cores", "vllm", VARIANTS, DEMO_CONFIG.with_name("demo-vllm.yaml"))


@dataclass
class Pace:
    """Throughput of one run, and the fractions of its time in which either side was idle."""

    samples_per_s: float
    step_s: float
    trainer_idle: float
    generators_idle: float
    staleness: float
    staleness_max: int
    dropped_groups: int


class _Timed(RunDisplay):
    """Display that stops the run after its steps; the measured ones follow the warm-up.

    Attributes:
        records: records of the measured steps.
        seconds: their duration together.
    """

    def __init__(self, warm_up_steps: int, steps: int, stop: GracefulStop) -> None:
        self.records: list[dict[str, Any]] = []
        self.seconds = 0.0
        self._warm_up_steps, self._last = warm_up_steps, warm_up_steps + steps
        self._stop = stop
        self._began = 0.0

    def finished_step(self, record: dict[str, Any]) -> None:
        now = time.perf_counter()
        if record["step"] > self._warm_up_steps:
            self.records.append(record)
            self.seconds = now - self._began
        if record["step"] == self._warm_up_steps:
            self._began = now
        self._stop.requested = record["step"] == self._last


def run_paced(config: TrainerConfig, warm_up_steps: int, steps: int) -> Pace:
    """Run the configuration until ``steps`` are measured."""
    stop = GracefulStop()
    timed = _Timed(warm_up_steps, steps, stop)
    train(config, display=timed, stop=stop)
    records, section = timed.records, config.grpo.asynchronous
    seconds = timed.seconds
    if config.grpo.mode == "sync":
        rollout = sum(record["seconds"]["rollout"] for record in records) / seconds
        idle = rollout, 1 - rollout
    else:
        rollouts = section.generators * section.concurrent_rollouts
        idle = (
            sum(record["trainer_wait_s"] for record in records) / seconds,
            sum(record["generator_wait_s"] for record in records) / (seconds * rollouts),
        )
    return Pace(
        sum(record["samples"] for record in records) / seconds,
        seconds / len(records),
        *idle,
        fmean(record.get("staleness", 0.0) for record in records),
        max(record.get("staleness_max", 0) for record in records),
        sum(record.get("stale_groups", 0) for record in records),
    )


@dataclass
class AsyncResult:
    """Results of a load.

    Attributes:
        load: the load.
        paces: pace of each run, by variant and round.
        recording: a traced run of `ONE_STEP_OFF`.
    """

    load: Load
    paces: dict[str, list[Pace]] = field(default_factory=lambda: defaultdict(list))
    recording: Recording | None = None

    def ratio(self, variant: Variant) -> Summary:
        """Return the samples a second over those of the synchronous run, by round."""
        pairs = zip(self.paces[variant.name], self.paces[SYNC.name], strict=True)
        return Summary.of([each.samples_per_s / sync.samples_per_s for each, sync in pairs])

    def entries(self) -> list[Entry]:
        """Return the results for the file."""
        entries = []
        for variant in self.load.variants:
            name = f"async.{self.load.name}_{variant.name}"
            paces = self.paces[variant.name]
            rate = Summary.of([pace.samples_per_s for pace in paces])
            entries.append(Entry.of(f"{name}.samples_per_s", rate, "samples/s"))
            for what, values in (
                ("policy_idle_pct", [100 * pace.trainer_idle for pace in paces]),
                ("generators_idle_pct", [100 * pace.generators_idle for pace in paces]),
            ):
                entries.append(Entry.of(f"{name}.{what}", Summary.of(values), "%"))
            if variant != SYNC:
                ratio = self.ratio(variant)
                entries.append(Entry.of(f"{name}.ratio_vs_sync", ratio, "x", baseline="sync"))
                staleness = Summary.of([pace.staleness for pace in paces])
                entries.append(Entry.of(f"{name}.staleness", staleness, "versions"))
        return entries

    def rows(self) -> list[list[str]]:
        """Return rows for a table with `ASYNC_HEADINGS`; medians over the rounds."""
        rows = []
        for variant in self.load.variants:
            paces = self.paces[variant.name]
            ratio = self.ratio(variant)
            rows.append(
                [
                    self.load.title,
                    variant.title,
                    f"{median(pace.samples_per_s for pace in paces):.0f}",
                    "1" if variant == SYNC else f"{ratio.value:.2f} ({ratio.spread:.2f})",
                    f"{median(pace.step_s for pace in paces):.2f}",
                    f"{median(pace.trainer_idle for pace in paces):.0%}",
                    f"{median(pace.generators_idle for pace in paces):.0%}",
                    ""
                    if variant == SYNC
                    else f"{fmean(pace.staleness for pace in paces):.2f}, "
                    f"max {max(pace.staleness_max for pace in paces)}",
                    "" if variant == SYNC else str(sum(pace.dropped_groups for pace in paces)),
                    str(len(paces)),
                ]
            )
        return rows

    def what_if_rows(self) -> list[list[str]]:
        """Return rows for a table with `WHAT_IF_HEADINGS`; none without a recording."""
        if self.recording is None:
            return []
        shares = self.recording.replayed()
        rows = [self._what_if_row("the traced run", self.recording.shares.step_s, shares)]
        for variant in self.load.variants:
            if variant.max_staleness is not None:
                measured = median(pace.step_s for pace in self.paces[variant.name])
                setting = replace(self.recording.setting, staleness=variant.max_staleness)
                shares = self.recording.with_setting(setting)
                rows.append(self._what_if_row(variant.title, measured, shares))
        return rows

    def _what_if_row(self, title: str, measured_s: float, predicted: Shares) -> list[str]:
        return [
            self.load.title,
            title,
            f"{measured_s:.2f}",
            f"{predicted.step_s:.2f}",
            f"{predicted.step_s / measured_s - 1:+.0%}",
            f"{predicted.trainer_idle:.0%}",
            f"{predicted.generators_idle:.0%}",
        ]


def measure_async(
    announce: Callable[[str], None],
    loads: Sequence[Load] = (SLOW, FAST),
    *,
    rounds: int = _ROUNDS,
    steps: int = _STEPS,
) -> list[AsyncResult]:
    """Measure all variants of the loads, on the Ray of this process.

    Args:
        announce: called with the title of each part.
        loads: the loads.
        rounds: runs of each variant.
        steps: measured steps of each run.
    """
    order = random.Random(SEED)
    results = []
    for load in loads:
        result = AsyncResult(load)
        for number in range(rounds):
            announce(f"asynchronous GRPO, generation {load.title}: round {number + 1} of {rounds}")
            for variant in order.sample(list(load.variants), len(load.variants)):
                with _configured(load, variant, number) as config:
                    pace = run_paced(config, variant.warm_up_steps, steps)
                result.paces[variant.name].append(pace)
        if load.is_traced:
            announce(f"asynchronous GRPO, generation {load.title}: a traced run")
            with _configured(load, ONE_STEP_OFF, rounds) as config, Receiver() as receiver:
                tracing = {"enabled": True, "endpoint": receiver.endpoint}
                tracing = config.tracing.model_copy(update=tracing)
                traced = config.model_copy(update={"tracing": tracing})
                run_paced(traced, ONE_STEP_OFF.warm_up_steps, 2 * steps)
                result.recording = recording_of(receiver.snapshot())
        results.append(result)
    return results


@contextmanager
def _configured(load: Load, variant: Variant, number: int) -> Iterator[TrainerConfig]:
    """Yield the configuration of a run, whose files are removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="bench-async-") as folder:
        yield load_config(
            load.config,
            [
                f"run.output={folder}",
                f"run.seed={SEED + number}",
                f"grpo.num_steps={_MANY_STEPS}",
                *_NO_LEARNING,
                *load.overrides,
                *variant.overrides,
            ],
        )


def measure_learning(announce: Callable[[str], None], seeds: Sequence[int]) -> Iterator[list[str]]:
    """Yield rows for a table with `LEARNING_HEADINGS`: the demo, synchronous and one step off.

    Rewards are those of all generated samples, also of groups that are dropped.
    """
    for seed in seeds:
        for variant in (SYNC, ONE_STEP_OFF):
            announce(f"learning: {variant.title}, seed {seed}")
            started = time.perf_counter()
            with tempfile.TemporaryDirectory(prefix="bench-async-") as folder:
                overrides = [
                    f"run.output={folder}",
                    f"run.seed={seed}",
                    "checkpointing.every_steps=0",
                    *variant.overrides,
                ]
                history = train(load_config(DEMO_CONFIG, overrides)).history
            name = "reward" if variant == SYNC else "generated_reward"
            # A step in which no rollout ended has none.
            rewards = [step[name] for step in history if name in step]
            name = "validation_reward"
            held_out = [step[name] for step in history if name in step]
            yield [
                variant.title,
                str(seed),
                f"{sum(step['samples'] for step in history):,}",
                f"{fmean(rewards[:_FIVE]):.3f}",
                f"{fmean(rewards[-_FIVE:]):.3f}",
                *(f"{reward:.3f}" for reward in held_out),
                f"{time.perf_counter() - started:.0f}",
            ]


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def async_grpo(
    vllm: Annotated[
        bool, typer.Option("--vllm", help="Measure a real vLLM, which `make vllm` installs.")
    ] = False,
    learning: Annotated[
        bool, typer.Option("--learning", help="Compare the rewards of 60 steps, with three seeds.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each variant.")] = _ROUNDS,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each run.")] = _STEPS,
) -> None:
    """Compare synchronous, one-step-off and asynchronous GRPO."""
    from integration.benchmarks.cluster import ray_cluster
    from integration.benchmarks.report import markdown_table

    console = Console(stderr=True, highlight=False, log_path=False)
    parts = Parts(console)
    markdown = Console(soft_wrap=True, highlight=False, markup=False)
    parts.begin("starting Ray")
    with ray_cluster(full=False):
        if learning:
            rows = []
            for row in measure_learning(parts.begin, _SEEDS):
                console.log(*row)
                rows.append(row)
            markdown.print(markdown_table("Learning", LEARNING_HEADINGS, rows))
            return
        loads = (VLLM,) if vllm else (SLOW, FAST)
        results = measure_async(parts.begin, loads, rounds=rounds, steps=steps)
    rows = [row for result in results for row in result.rows()]
    markdown.print(markdown_table("Asynchronous GRPO", ASYNC_HEADINGS, rows))
    if rows := [row for result in results for row in result.what_if_rows()]:
        markdown.print(markdown_table("What-if", WHAT_IF_HEADINGS, rows))
    parts.begin("done")
    for title, seconds in parts.rows():
        console.print(f"{seconds:>8} s  {title}")


if __name__ == "__main__":
    # Under `uv run`, Ray would also start every worker by `uv run`. Ray reads this on import.
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    app()
