"""Cost of a crash of an asynchronous run, with and without the journal.

``python -m integration.benchmarks.crash`` kills the driver and the Ray cluster of runs with
simulated slow generation at random moments after a checkpoint, and resumes the runs at once. Both
variants are killed at the same moments, and alternate.

A rollout generates one prompt's group. It is lost if a kill interrupts it, or if a later rollout of
the same prompt replaces it. A replaced rollout costs its duration. An interrupted one costs the
time from its start, or from the last record of its responses, to the kill: a resumed run continues
from that record. Each lost rollout counts for the first crash after its start.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any  # Any: events

import typer
from integration.benchmarks.crash_driver import ROLLOUTS_FILE
from integration.benchmarks.parts import Parts
from integration.benchmarks.report import markdown_table
from integration.killable_run import EVERYTHING, KillableRun
from integration.waiting import wait_until
from rich.console import Console

from grpo_trainer import DEMO_CONFIG, load_config

SEED = 20_263
CRASH_HEADINGS = [
    "journal",
    "crashes",
    "generation seconds lost",
    "seconds of finished groups",
    "finished groups lost",
    "unfinished groups lost",
    "steps trained again",
    "s until processes run",
    "until the next step",
    "until the killed step",
]
EACH_HEADINGS = ["journal", "s after the checkpoint", *CRASH_HEADINGS[2:]]
_ROUNDS, _CRASHES = 2, 2
_EVERY_STEPS, _STALENESS, _PROMPTS, _ROLLOUTS = 10, 2, 8, 16
_MAX_DELAY_S = 10.0
_WAIT_S = 600.0
_PROGRAM = ("-m", "integration.benchmarks.crash_driver")
_OVERRIDES = (
    "grpo.mode=async",
    "grpo.num_steps=1000",  # it never ends
    f"grpo.num_prompts_per_step={_PROMPTS}",
    "grpo.num_generations_per_prompt=8",
    "grpo.dynamic_sampling.enabled=false",
    f"grpo.asynchronous.max_staleness={_STALENESS}",
    "grpo.asynchronous.prompts_per_rollout=1",
    f"grpo.asynchronous.concurrent_rollouts={_ROLLOUTS}",
    "grpo.asynchronous.prompts_per_claim=1",
    "policy.global_batch_size=64",
    "policy.micro_batch_size=32",
    "policy.optimizer.learning_rate=0.0",
    "policy.generation.simulated_latency={median_s: 0.5, sigma: 1.0}",
    "validation.every_steps=0",
    f"checkpointing.every_steps={_EVERY_STEPS}",
    "data_plane.transfer_queue_mirror=false",
)


@dataclass(frozen=True)
class Rollout:
    """Generation of one prompt's group.

    Attributes:
        position: the prompt's position in the stream.
        begin: when it began.
        end: when it ended; None if a kill interrupted it.
        recorded: time of the last record of its responses; ``begin`` if there is none.
    """

    position: int
    begin: float
    end: float | None
    recorded: float


@dataclass(frozen=True)
class Loss:
    """Rollouts that a crash cost: their number and seconds."""

    finished: int
    finished_s: float
    unfinished: int
    unfinished_s: float


@dataclass(frozen=True)
class Crash:
    """One crash.

    Attributes:
        after_s: seconds from the checkpoint to the kill.
        loss: generation that had to be done again.
        steps: steps trained after the checkpoint, which had to be done again.
        started_s: seconds from the kill until the resumed run's processes have started.
        step_s: seconds from the kill until the resumed run has trained its first step.
        recovered_s: seconds from the kill until it has trained as many steps as before the kill.
    """

    after_s: float
    loss: Loss
    steps: int
    started_s: float
    step_s: float
    recovered_s: float

    @property
    def values(self) -> list[float]:
        """Values for `CRASH_HEADINGS`, after the first two."""
        loss = self.loss
        return [
            loss.finished_s + loss.unfinished_s,
            loss.finished_s,
            loss.finished,
            loss.unfinished,
            self.steps,
            self.started_s,
            self.step_s,
            self.recovered_s,
        ]


def rollouts_of(events: Iterable[dict[str, Any]]) -> list[Rollout]:
    """Return the rollouts in the events that a run's processes recorded, ordered by start."""
    ends: dict[str, float] = {}
    begins: list[tuple[int, str, float]] = []
    recorded: dict[tuple[int, str], float] = {}
    newest: dict[int, str] = {}  # a prompt's rollouts do not overlap
    for event in sorted(events, key=lambda event: event["time"]):
        if event["event"] == "end":
            ends[event["id"]] = event["time"]
        for position in event["positions"]:
            if event["event"] == "begin":
                newest[position] = event["id"]
                begins.append((position, event["id"], event["time"]))
            elif event["event"] == "recorded":
                recorded[position, newest[position]] = event["time"]
    return [
        Rollout(position, begin, ends.get(rollout), recorded.get((position, rollout), begin))
        for position, rollout, begin in begins
    ]


def losses(rollouts: Iterable[Rollout], kills: Sequence[float]) -> list[Loss]:
    """Return the loss of each kill; ``kills`` are their times in order."""
    of_position: dict[int, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        of_position[rollout.position].append(rollout)
    lost: list[list[Rollout]] = [[] for _ in kills]
    for same in of_position.values():
        for rollout in same:
            number = next((i for i, kill in enumerate(kills) if kill > rollout.begin), None)
            # The last complete rollout of a prompt was trained or dropped, or still will be.
            if number is not None and (rollout.end is None or rollout is not same[-1]):
                lost[number].append(rollout)
    result = []
    for own, kill in zip(lost, kills, strict=True):
        finished = [rollout.end - rollout.begin for rollout in own if rollout.end is not None]
        unfinished = [kill - rollout.recorded for rollout in own if rollout.end is None]
        result.append(Loss(len(finished), sum(finished), len(unfinished), sum(unfinished)))
    return result


def crash_run(folder: Path, *, journal: bool, seed: int, delays: Sequence[float]) -> list[Crash]:
    """Kill a run after each of ``delays``, in seconds after a checkpoint; return the crashes."""
    overrides = [
        f"run.output={folder}",
        f"run.seed={seed}",
        f"checkpointing.journal={str(journal).lower()}",
        *_OVERRIDES,
    ]
    config = load_config(DEMO_CONFIG, overrides).model_dump_json()
    run = KillableRun(folder, config, *_PROGRAM)
    try:
        kills: list[float] = []
        saved: list[float] = []
        reached = 0
        for delay_s in delays:
            checkpoint = reached - reached % _EVERY_STEPS + _EVERY_STEPS
            saved.append(_await(run, lambda: _checkpoint_time(run, checkpoint)))  # noqa: B023
            time.sleep(max(0.0, saved[-1] + delay_s - time.time()))
            run.kill(EVERYTHING)
            run.process.wait()
            kills.append(run.events()[-1]["time"])
            run.start()
            # Up to this step the run trains what was stored, and generates again what was lost.
            reached = _last_step(run.events()) + _STALENESS + 1
            _await(run, lambda: _last_step(run.events()) > reached)  # noqa: B023
        events = run.events()
    finally:
        run.close()
    lines = (folder / ROLLOUTS_FILE).read_text().splitlines()
    rollout_events: list[dict[str, Any]] = []
    for line in lines:
        with suppress(json.JSONDecodeError):  # cut by a kill
            rollout_events.append(json.loads(line))
    costs = losses(rollouts_of(rollout_events), kills)
    return [
        _crash(events, kill - checkpoint, kill, loss)
        for kill, checkpoint, loss in zip(kills, saved, costs, strict=True)
    ]


def _await(run: KillableRun, condition: Callable[[], Any]) -> Any:
    def holds() -> Any:
        if run.process.poll() is not None:
            raise RuntimeError(f"the run ended: {run.log()}")
        return condition()

    return wait_until(holds, _WAIT_S, state=run.log)


def _checkpoint_time(run: KillableRun, step: int) -> float | None:
    """Return when the checkpoint of ``step`` or a later one was written; None before."""
    # The change time is that of the rename.
    times = [path.stat().st_ctime for saved, path in run.checkpoints.items() if saved >= step]
    return max(times, default=None)


def _last_step(events: Sequence[dict[str, Any]]) -> int:
    return max((event["step"] for event in events if event["event"] == "step"), default=0)


def _crash(events: Sequence[dict[str, Any]], after_s: float, kill: float, loss: Loss) -> Crash:
    last = _last_step([event for event in events if event["time"] < kill])
    after = [event for event in events if event["time"] > kill]
    started = next(event for event in after if event["event"] == "started")
    steps = [event for event in after if event["event"] == "step"]
    recovered = next(event["time"] for event in steps if event["step"] >= last)
    return Crash(
        after_s,
        loss,
        last - started["done_steps"],
        started["time"] - kill,
        steps[0]["time"] - kill,
        recovered - kill,
    )


def drawn_delays(draw: random.Random, count: int) -> list[float]:
    """Return delays up to `_MAX_DELAY_S`, one from each of ``count`` equal parts, shuffled."""
    part = _MAX_DELAY_S / count
    delays = [draw.uniform(number * part, (number + 1) * part) for number in range(count)]
    return draw.sample(delays, count)


def measure_crashes(
    announce: Callable[[str], None], *, rounds: int, crashes: int
) -> dict[bool, list[Crash]]:
    """Return the crashes of runs without and with the journal."""
    draw = random.Random(SEED)
    measured: dict[bool, list[Crash]] = {False: [], True: []}
    for number in range(rounds):
        delays = drawn_delays(draw, crashes)
        for journal in draw.sample([False, True], 2):
            announce(f"round {number + 1} of {rounds}, {'with' if journal else 'no'} journal")
            with tempfile.TemporaryDirectory(prefix="bench-crash-") as folder:
                measured[journal] += crash_run(
                    Path(folder), journal=journal, seed=SEED + number, delays=delays
                )
    return measured


def _cell(value: float) -> str:
    return f"{value:.1f}"


def rows(measured: dict[bool, list[Crash]]) -> list[list[str]]:
    """Return rows for a table with `CRASH_HEADINGS`: medians, and the range in brackets."""
    table = []
    for journal, crashes in measured.items():
        columns = zip(*(crash.values for crash in crashes), strict=True)
        cells = [
            f"{_cell(median(column))} ({_cell(min(column))} to {_cell(max(column))})"
            for column in columns
        ]
        table.append(["yes" if journal else "no", str(len(crashes)), *cells])
    return table


def crash_rows(measured: dict[bool, list[Crash]]) -> list[list[str]]:
    """Return rows for a table with `EACH_HEADINGS`: one for each crash."""
    return [
        ["yes" if journal else "no", *map(_cell, [crash.after_s, *crash.values])]
        for journal, crashes in measured.items()
        for crash in crashes
    ]


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def crash(
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each variant.")] = _ROUNDS,
    crashes: Annotated[int, typer.Option(min=1, help="Crashes of each run.")] = _CRASHES,
) -> None:
    """Measure what a crash costs, with and without the journal."""
    parts = Parts(Console(stderr=True, highlight=False, log_path=False))
    markdown = Console(soft_wrap=True, highlight=False, markup=False)
    measured = measure_crashes(parts.begin, rounds=rounds, crashes=crashes)
    markdown.print(markdown_table("Crashes", CRASH_HEADINGS, rows(measured)))
    markdown.print(markdown_table("Each crash", EACH_HEADINGS, crash_rows(measured)))
    parts.begin("done")
    for title, seconds in parts.rows():
        parts.console.print(f"{seconds:>8} s  {title}")


if __name__ == "__main__":
    app()
