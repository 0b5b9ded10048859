"""A whole run: folder, data, model, processes, steps, validation, checkpoints, picture."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any  # Any: metrics of a step

from grpo_trainer.actor_calls import Observer
from grpo_trainer.checkpoint import RunState, latest_checkpoint, load_state, save_checkpoint
from grpo_trainer.config import PretrainedModel, TrainerConfig, check_config
from grpo_trainer.errors import CheckpointError, ConfigurationError
from grpo_trainer.model import check_model, load_tokenizer, prompt_encoder, save_random_model
from grpo_trainer.picture import save_reward_picture
from grpo_trainer.policy import Policy
from grpo_trainer.prompts import SHIPPED, Prompt, PromptStream, load_prompts
from grpo_trainer.run_actors import GENERATION, RunActors
from grpo_trainer.step import GRPOStep, StepReport
from grpo_trainer.weight_sync import RayObjectWeightSync

METRICS = "metrics.jsonl"
PICTURE = "reward.png"
CHECKPOINTS = "checkpoints"


class RunDisplay:
    """What a run tells about itself while it runs; this one says nothing."""

    def started(self, folder: Path, config: TrainerConfig, done_steps: int) -> None:
        """The processes are up; ``done_steps`` were completed before."""

    def phase(self, name: str) -> None:
        """A phase of the current step begins."""

    def finished_step(self, record: dict[str, Any]) -> None:
        """A step is complete; ``record`` is its line of metrics."""


@dataclass(frozen=True)
class RunResult:
    """A completed run.

    Attributes:
        folder: where everything was written.
        history: the metrics of every step, those before a resume included.
    """

    folder: Path
    history: list[dict[str, Any]]

    @property
    def rewards(self) -> list[float]:
        """Mean reward of every step."""
        return [float(record["reward"]) for record in self.history]


def train(
    config: TrainerConfig, *, display: RunDisplay | None = None, observer: Observer | None = None
) -> RunResult:
    """Run from the start, in a new folder below ``run.output``.

    Raises:
        TrainerError: the configuration, the data or the model cannot be used, or a worker failed.
        DataPlaneError: the data plane failed.
    """
    folder = _new_folder(config)
    (folder / "config.json").write_text(config.model_dump_json(indent=1))
    state = RunState(step=0, prompts_position=0, history=[], config=config.model_dump(mode="json"))
    return _run(config, folder, state, None, display or RunDisplay(), observer)


def resume(folder: Path, *, display: RunDisplay | None = None) -> RunResult:
    """Go on from the newest checkpoint of the run in ``folder``, with its configuration.

    Raises:
        CheckpointError: there is none, or it is damaged.
        TrainerError, DataPlaneError: as `train`.
    """
    checkpoint = latest_checkpoint(folder / CHECKPOINTS)
    if checkpoint is None:
        raise CheckpointError(f"{folder}: no complete checkpoint below {folder / CHECKPOINTS}")
    state = load_state(checkpoint)
    config = check_config(state.config, source=str(checkpoint))
    return _run(config, folder, state, checkpoint, display or RunDisplay(), None)


def _run(
    config: TrainerConfig,
    folder: Path,
    state: RunState,
    checkpoint: Path | None,
    display: RunDisplay,
    observer: Observer | None,
) -> RunResult:
    model, tokenizer = _prepare_model(config, folder)
    encode = prompt_encoder(tokenizer, config.policy.model)
    limit = config.policy.max_total_sequence_length
    training = load_prompts(config.data.train or SHIPPED / "train.jsonl", encode, max_length=limit)
    held_out: list[Prompt] = []
    if config.validation.every_steps:
        path = config.data.validation or SHIPPED / "validation.jsonl"
        held_out = load_prompts(path, encode, max_length=limit)
    prompts = PromptStream(
        training,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        position=state.prompts_position,
    )
    history = list(state.history)
    _write_metrics(folder, history)
    actors = RunActors(config, model=model, tokenizer=tokenizer, observer=observer)
    try:
        policy = Policy(actors.calls, actors.policy_workers, config.policy)
        if checkpoint is not None:
            policy.load(checkpoint)
        stepper = GRPOStep(
            config,
            calls=actors.calls,
            data_plane=actors.data_plane,
            policy=policy,
            weight_sync=RayObjectWeightSync(
                actors.calls, source=actors.policy_workers[0], targets=[GENERATION]
            ),
            prompts=prompts,
        )
        display.started(folder, config, state.step)
        for step in range(state.step, config.grpo.num_steps):
            report = StepReport(on_phase=display.phase)
            stepper.run(step, report)
            done = step + 1
            if _due(done, config.validation.every_steps, config.grpo.num_steps):
                report.metrics["validation_reward"] = stepper.validate(done, held_out, report)
            record = {"step": done, **report.metrics, "seconds": report.seconds}
            history.append(record)
            with (folder / METRICS).open("a") as file:
                file.write(json.dumps(record) + "\n")
            display.finished_step(record)
            if _due(done, config.checkpointing.every_steps, config.grpo.num_steps):
                save_checkpoint(
                    folder / CHECKPOINTS,
                    RunState(done, prompts.position, history, state.config),
                    policy.save,
                    keep_last=config.checkpointing.keep_last,
                )
    finally:
        actors.close()
    result = RunResult(folder, history)
    save_reward_picture(history, folder / PICTURE, title=f"GRPO, run {config.run.name!r}")
    return result


def _due(done: int, every: int, total: int) -> bool:
    return every > 0 and (done % every == 0 or done == total)


def _new_folder(config: TrainerConfig) -> Path:
    base = config.run.output / config.run.name
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{i}" for i in range(2, 100))):
        folder = base / (stamp + suffix)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigurationError(f"run.output: {folder}: {error.strerror}") from None
        return folder
    raise ConfigurationError(f"run.output: {base}: a hundred runs began in this second")


def _prepare_model(config: TrainerConfig, folder: Path) -> tuple[str, Any]:
    """Name and tokenizer of the model; a random one is built into the run's folder first."""
    model = config.policy.model
    if isinstance(model, PretrainedModel):
        check_model(model.name)
        return model.name, load_tokenizer(model.name)
    path = folder / "initial_model"
    if not path.exists():
        save_random_model(
            model,
            path,
            seed=config.run.seed,
            max_length=config.policy.max_total_sequence_length,
        )
    return str(path.resolve()), load_tokenizer(str(path))


def _write_metrics(folder: Path, history: list[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(record) + "\n" for record in history)
    (folder / METRICS).write_text(lines)
