"""Starts and resumes runs. Whatever can be refused is refused before a file or process exists."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # Any: metrics of a step

from grpo_trainer.checkpoint import RunState, intact_before, latest_checkpoint, load_state
from grpo_trainer.config import TrainerConfig
from grpo_trainer.errors import CheckpointError, ConfigurationError
from grpo_trainer.resumed_config import ResumedConfig, resumed_config
from grpo_trainer.run_display import RunDisplay
from grpo_trainer.run_folder import CHECKPOINTS, create_run_folder, held
from grpo_trainer.signals import GracefulStop

# torch, transformers and Ray take long to import and are imported where they are needed: a wrong
# configuration is reported at once, and the run's small processes stay small.


@dataclass(frozen=True)
class RunResult:
    """A run that has ended well.

    Attributes:
        folder: where everything was written.
        history: the metrics of every step, those before a resume included.
        stopped_early: it was asked to stop before all of its steps were done.
    """

    folder: Path
    history: list[dict[str, Any]]
    stopped_early: bool = False

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
    """Run from the start, in a new folder below ``run.output``.

    Args:
        config: of the run.
        display: told about the progress.
        observer: see `grpo_trainer.actor_calls.Observer`.
        stop: lets the run end after a step.

    Raises:
        TrainerError: the configuration, the data or the model cannot be used, or a worker failed.
        DataPlaneError: the data plane failed.
    """
    from grpo_trainer.inputs import read_inputs
    from grpo_trainer.refit_settings import check_control

    inputs = read_inputs(config)
    check_control(config.refit)
    folder = create_run_folder(config)

    from grpo_trainer.training import run_steps

    state = RunState(
        step=0,
        prompts_position=0,
        history=[],
        config=config.model_dump(mode="json"),
        data=inputs.digests,
    )
    with held(folder):
        history = run_steps(
            config,
            inputs,
            folder,
            state,
            display=display or RunDisplay(),
            observer=observer,
            stop=stop,
        )
    return RunResult(folder, history, len(history) < config.grpo.num_steps)


def resume(
    folder: Path,
    overrides: Sequence[str] = (),
    *,
    display: RunDisplay | None = None,
    stop: GracefulStop | None = None,
) -> RunResult:
    """Go on from the newest checkpoint of the run in ``folder``, with its configuration.

    A run that had completed all its steps is returned as it is. Keys that a checkpoint of an older
    release does not have take the shipped values.

    Args:
        folder: of the run.
        overrides: ``dotted.key=value`` each, value in YAML, of keys that do not change what is
            computed; see `grpo_trainer.resumed_config`. They last from the next checkpoint on.
        display: told about the progress.
        stop: lets the run end after a step.

    Raises:
        CheckpointError: there is none, or it is damaged.
        ConfigurationError: an override names another key, or a value does not fit; or a data set or
            the tokenizer is not the one that the run began with.
        OutputError: another process runs it.
        TrainerError, DataPlaneError: as `train`.
    """
    folder = folder.absolute()  # processes that work elsewhere are told it
    found = _find(folder, overrides)
    if found.complete:
        return RunResult(folder, found.state.history)  # no lock: the storage may be read-only
    with held(folder):
        if _newest(folder) != found.checkpoint:  # another process has gone on meanwhile
            found = _find(folder, overrides)
            if found.complete:
                return RunResult(folder, found.state.history)
        return _go_on(folder, found, display or RunDisplay(), stop)


@dataclass(frozen=True)
class _Found:
    """Where a run has come to, and how it goes on."""

    checkpoint: Path
    state: RunState
    resumed: ResumedConfig

    @property
    def complete(self) -> bool:
        return self.state.step >= self.resumed.config.grpo.num_steps


def _find(folder: Path, overrides: Sequence[str]) -> _Found:
    checkpoint = _newest(folder)
    try:
        state = load_state(checkpoint)
    except CheckpointError as error:
        older = intact_before(checkpoint)
        if older is None:
            raise
        raise CheckpointError(
            f"{error}; {older} is intact: move {checkpoint} away to resume from there"
        ) from error
    resumed = resumed_config(state.config, overrides, source=str(checkpoint))
    return _Found(checkpoint, state, resumed)


def _newest(folder: Path) -> Path:
    checkpoint = latest_checkpoint(folder / CHECKPOINTS)
    if checkpoint is None:
        raise CheckpointError(f"{folder}: no complete checkpoint below {folder / CHECKPOINTS}")
    return checkpoint


def _go_on(
    folder: Path, found: _Found, display: RunDisplay, stop: GracefulStop | None
) -> RunResult:
    checkpoint, state, config = found.checkpoint, found.state, found.resumed.config

    from grpo_trainer.inputs import read_inputs
    from grpo_trainer.refit_settings import check_control

    inputs = read_inputs(config)
    _check_inputs(config, inputs.digests, state.data, checkpoint)
    check_control(config.refit)
    _tell_older(found, display)
    data = {**state.data, **inputs.digests}
    state = state.model_copy(update={"config": config.model_dump(mode="json"), "data": data})

    from grpo_trainer.training import run_steps

    history = run_steps(
        config,
        inputs,
        folder,
        state,
        checkpoint=checkpoint,
        display=display,
        stop=stop,
    )
    return RunResult(folder, history, len(history) < config.grpo.num_steps)


def _tell_older(found: _Found, display: RunDisplay) -> None:
    """Tell what a checkpoint of an older release does not say as this one does."""
    for keys, told in (
        (found.resumed.added, "keys that it lacks"),
        (found.resumed.ignored, "keys that it ignored, which are null now"),
    ):
        if keys:
            values = ", ".join(f"{key}={json.dumps(value)}" for key, value in keys.items())
            display.notice(f"{found.checkpoint} is of an older release; {told}: {values}")


def _check_inputs(
    config: TrainerConfig, found: Mapping[str, str], expected: Mapping[str, str], checkpoint: Path
) -> None:
    """Refuse a data set that changed, in which the position would mean other prompts, and a
    tokenizer that did, whose tokens would."""
    from grpo_trainer.inputs import DIGEST_FORM

    model = config.policy.model
    things = {
        "data.train": (config.data.train or "the shipped ones", "prompts"),
        "data.validation": (config.data.validation or "the shipped ones", "prompts"),
        "policy.model": (getattr(model, "name", model.kind), "a tokenizer and chat template"),
    }
    for key in sorted(found.keys() & expected.keys()):
        if found[key] != expected[key] and expected[key].startswith(DIGEST_FORM):
            where, what = things[key]
            raise ConfigurationError(
                f"{key}: {where}: found {what} of digest {found[key]}; expected {expected[key]}, "
                f"with which the run of {checkpoint} began"
            )
