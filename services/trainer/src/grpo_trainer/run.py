"""Starts and resumes runs. Whatever can be refused is refused before a file or process exists."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # Any: metrics of a step

from grpo_trainer.checkpoint import RunState, latest_checkpoint, load_state
from grpo_trainer.config import TrainerConfig
from grpo_trainer.errors import CheckpointError, ConfigurationError
from grpo_trainer.resumed_config import resumed_config
from grpo_trainer.run_display import RunDisplay
from grpo_trainer.run_folder import CHECKPOINTS, create_run_folder, held, write_config
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
        data=inputs.data_digests,
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
            computed; see `grpo_trainer.resumed_config`. Checkpoints to come record them.
        display: told about the progress.
        stop: lets the run end after a step.

    Raises:
        CheckpointError: there is none, or it is damaged.
        ConfigurationError: an override names another key, or a value does not fit; or a data set is
            not the one that the run began with.
        OutputError: another process runs it.
        TrainerError, DataPlaneError: as `train`.
    """
    folder = folder.absolute()  # processes that work elsewhere are told it
    _newest(folder)
    with held(folder):
        return _go_on(folder, overrides, display or RunDisplay(), stop)


def _newest(folder: Path) -> Path:
    checkpoint = latest_checkpoint(folder / CHECKPOINTS)
    if checkpoint is None:
        raise CheckpointError(f"{folder}: no complete checkpoint below {folder / CHECKPOINTS}")
    return checkpoint


def _go_on(
    folder: Path, overrides: Sequence[str], display: RunDisplay, stop: GracefulStop | None
) -> RunResult:
    checkpoint = _newest(folder)
    state = load_state(checkpoint)
    resumed = resumed_config(state.config, overrides, source=str(checkpoint))
    config = resumed.config
    if state.step >= config.grpo.num_steps:
        return RunResult(folder, state.history)

    from grpo_trainer.inputs import read_inputs
    from grpo_trainer.refit_settings import check_control

    inputs = read_inputs(config)
    _check_data(config, inputs.data_digests, state.data, checkpoint)
    check_control(config.refit)
    if resumed.added:
        told = ", ".join(f"{key}={json.dumps(value)}" for key, value in resumed.added.items())
        display.notice(f"{checkpoint} is of an older release; keys that it lacks: {told}")
    plain = config.model_dump(mode="json")
    if plain != state.config:
        write_config(folder, config)
    data = {**state.data, **inputs.data_digests}
    state = state.model_copy(update={"config": plain, "data": data})

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


def _check_data(
    config: TrainerConfig, found: Mapping[str, str], expected: Mapping[str, str], checkpoint: Path
) -> None:
    """Refuse a data set that changed: the position in it would mean other prompts."""
    paths = {"data.train": config.data.train, "data.validation": config.data.validation}
    for key in sorted(found.keys() & expected.keys()):
        if found[key] != expected[key]:
            raise ConfigurationError(
                f"{key}: {paths[key] or 'the shipped prompts'}: found prompts or tokens of digest "
                f"{found[key]}; expected those of digest {expected[key]}, with which the run of "
                f"{checkpoint} began"
            )
