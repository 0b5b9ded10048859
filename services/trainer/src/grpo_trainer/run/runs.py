"""Start and resumption of runs. Errors in the input are raised before a file or process exists."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any  # Any: metrics of a step

from grpo_trainer.checkpoint.folder import (
    RunState,
    latest_checkpoint,
    load_state,
    previous_intact_checkpoint,
)
from grpo_trainer.config.loading import TrainerConfig
from grpo_trainer.config.resumed import ResumedConfig, resumed_config
from grpo_trainer.errors import CheckpointError, ConfigurationError
from grpo_trainer.report.display import RunDisplay
from grpo_trainer.report.metric_sinks import check_installed
from grpo_trainer.run.folder import CHECKPOINTS, create_run_folder, run_lock
from grpo_trainer.run.signals import GracefulStop

if TYPE_CHECKING:
    from grpo_trainer.run.inputs import RunInputs

# torch, transformers and Ray are slow to import, and are imported where they are needed: a wrong
# configuration is reported at once, and the run's small processes stay small.


@dataclass(frozen=True)
class RunResult:
    """Result of a successful run.

    Attributes:
        folder: folder of all its files.
        history: metrics of every step, including those before a resume.
        was_stopped: whether a request stopped it before its last step.
    """

    folder: Path
    history: list[dict[str, Any]]
    was_stopped: bool = False

    @property
    def rewards(self) -> list[float]:
        """Mean reward of every step."""
        return [float(record["reward"]) for record in self.history]


def train(
    config: TrainerConfig,
    *,
    display: RunDisplay | None = None,
    observer: Callable[[str, str, Any], None] | None = None,
    stop: GracefulStop | None = None,
) -> RunResult:
    """Start a run in a new folder below ``run.output``.

    Args:
        config: the run's configuration.
        display: display of the progress.
        observer: see `grpo_trainer.actors.calls.Observer`.
        stop: request that stops the run after a step.

    Raises:
        TrainerError: the configuration, the data or the model cannot be used, or a worker failed.
        DataPlaneError: the data plane failed.
    """
    check_installed(config.tracking.sinks)

    from grpo_trainer.run.inputs import read_inputs

    inputs = read_inputs(config)
    folder = create_run_folder(config)
    state = RunState(
        step=0,
        prompts_position=0,
        history=[],
        config=config.model_dump(mode="json"),
        data=inputs.digests,
    )
    display = display or RunDisplay()
    with run_lock(folder):
        return _run(config, inputs, folder, state, display=display, observer=observer, stop=stop)


def resume(
    folder: Path,
    overrides: Sequence[str] = (),
    *,
    display: RunDisplay | None = None,
    observer: Callable[[str, str, Any], None] | None = None,
    stop: GracefulStop | None = None,
) -> RunResult:
    """Continue from the newest checkpoint of the run in ``folder``, with its configuration.

    A run that had completed all its steps is returned unchanged. Keys that a checkpoint of an older
    release lacks get the shipped values.

    Args:
        folder: the run's folder.
        overrides: ``dotted.key=value`` each, value in YAML, of keys that do not change the
            results; see `grpo_trainer.config.resumed`. The next checkpoint stores them.
        display: display of the progress.
        observer: see `grpo_trainer.actors.calls.Observer`.
        stop: request that stops the run after a step.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        ConfigurationError: an override names a key that may not change, or a value does not fit; or
            a data set or the tokenizer differs from the one that the run began with.
        OutputError: another process runs it.
        TrainerError, DataPlaneError: as `train`.
    """
    folder = folder.absolute()  # other processes have other working folders
    point = _resume_point(folder, overrides)
    if point.complete:
        return RunResult(folder, point.state.history)  # no lock: the storage may be read-only
    with run_lock(folder):
        if _newest(folder) != point.checkpoint:  # another process has continued the run
            point = _resume_point(folder, overrides)
            if point.complete:
                return RunResult(folder, point.state.history)
        display = display or RunDisplay()
        return _continue_run(folder, point, display=display, observer=observer, stop=stop)


@dataclass(frozen=True)
class _ResumePoint:
    """Checkpoint to resume from, with the state and the configuration of the resumed run."""

    checkpoint: Path
    state: RunState
    resumed: ResumedConfig

    @property
    def complete(self) -> bool:
        return self.state.step >= self.resumed.config.grpo.num_steps


def _resume_point(folder: Path, overrides: Sequence[str]) -> _ResumePoint:
    checkpoint = _newest(folder)
    try:
        state = load_state(checkpoint)
    except CheckpointError as error:
        before = previous_intact_checkpoint(checkpoint)
        if before is None:
            raise
        intact, newer = before
        raise CheckpointError(
            f"{error}; {intact} is intact: move {', '.join(map(str, newer))} away to resume from "
            "there"
        ) from error
    resumed = resumed_config(state.config, overrides, source=str(checkpoint))
    return _ResumePoint(checkpoint, state, resumed)


def _newest(folder: Path) -> Path:
    checkpoint = latest_checkpoint(folder / CHECKPOINTS)
    if checkpoint is None:
        raise CheckpointError(f"{folder}: no complete checkpoint below {folder / CHECKPOINTS}")
    return checkpoint


def _continue_run(
    folder: Path, point: _ResumePoint, *, display: RunDisplay, **options: Any
) -> RunResult:
    checkpoint, state, config = point.checkpoint, point.state, point.resumed.config

    check_installed(config.tracking.sinks)

    from grpo_trainer.run.inputs import read_inputs

    inputs = read_inputs(config)
    _check_inputs(config, inputs.digests, state.data, checkpoint)
    _report_older_release(point, display)
    data = {**state.data, **inputs.digests}
    state = state.model_copy(update={"config": config.model_dump(mode="json"), "data": data})
    options |= {"checkpoint": checkpoint, "display": display}
    return _run(config, inputs, folder, state, **options)


def _run(
    config: TrainerConfig, inputs: RunInputs, folder: Path, state: RunState, **options: Any
) -> RunResult:
    from grpo_trainer.run.training import run_steps

    history = run_steps(config, inputs, folder, state, **options)
    return RunResult(folder, history, len(history) < config.grpo.num_steps)


def _report_older_release(point: _ResumePoint, display: RunDisplay) -> None:
    """Report the keys that a checkpoint of an older release lacks or ignored."""
    for keys, kind in (
        (point.resumed.added, "keys that it lacks get shipped values"),
        (point.resumed.ignored, "keys that it ignored are null now; their saved values"),
    ):
        if keys:
            values = ", ".join(f"{key}={json.dumps(value)}" for key, value in keys.items())
            display.notice(f"{point.checkpoint} is of an older release; {kind}: {values}")


def _check_inputs(
    config: TrainerConfig, digests: Mapping[str, str], expected: Mapping[str, str], checkpoint: Path
) -> None:
    """Refuse a changed data set or tokenizer.

    Otherwise the position in the stream would mean other prompts, and the tokens other text.
    """
    from grpo_trainer.run.inputs import DIGEST_FORM

    model = config.policy.model
    descriptions = {
        "data.train": (config.data.train or "the shipped ones", "prompts"),
        "data.validation": (config.data.validation or "the shipped ones", "prompts"),
        "policy.model": (getattr(model, "name", model.kind), "a tokenizer and chat template"),
    }
    for key in sorted(digests.keys() & expected.keys()):
        if digests[key] != expected[key] and expected[key].startswith(DIGEST_FORM):
            location, what = descriptions[key]
            raise ConfigurationError(
                f"{key}: {location}: found {what} of digest {digests[key]}; expected "
                f"{expected[key]}, with which the run of {checkpoint} began"
            )
