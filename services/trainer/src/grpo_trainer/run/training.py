"""Loop of a run: processes, steps, validation, checkpoints, chart."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any  # Any: metrics of a step

from safetensors import SafetensorError

from grpo_trainer.actors.calls import Observer
from grpo_trainer.actors.telemetry import TelemetrySettings
from grpo_trainer.checkpoint.folder import RunState, save_checkpoint
from grpo_trainer.checkpoint.policy_state import save_tokenizer
from grpo_trainer.config.loading import TrainerConfig
from grpo_trainer.config.sections import RandomModel
from grpo_trainer.errors import GradientError, OutputError
from grpo_trainer.model.load import save_random_model
from grpo_trainer.policy.driver import Policy
from grpo_trainer.report.display import RunDisplay
from grpo_trainer.report.picture import save_reward_picture
from grpo_trainer.report.step_metrics import record_step
from grpo_trainer.report.tracking import public_config, tracking_of
from grpo_trainer.rollout.prompts import PromptStream
from grpo_trainer.run.async_step import AsyncGRPOStep
from grpo_trainer.run.folder import (
    CHECKPOINTS,
    INITIAL_MODEL,
    JOURNAL,
    PICTURE,
    append_record,
    output_errors,
    write_config,
    write_history,
)
from grpo_trainer.run.inputs import RunInputs
from grpo_trainer.run.processes import RunActors
from grpo_trainer.run.signals import GracefulStop
from grpo_trainer.run.step import GRPOStep, StepReport
from observability import record_run


def run_steps(
    config: TrainerConfig,
    inputs: RunInputs,
    folder: Path,
    state: RunState,
    *,
    checkpoint: Path | None = None,
    display: RunDisplay,
    observer: Observer | None = None,
    stop: GracefulStop | None = None,
) -> list[dict[str, Any]]:
    """Run the steps after ``state``; return the metrics of every step, including earlier ones.

    Model and optimizer are loaded from ``checkpoint``; None uses the configured model. If ``stop``
    is requested, the run ends after the current step. That step writes a checkpoint even if none is
    due, unless checkpoints are disabled.
    """
    model = inputs.model or str(initial_model(config, folder))
    prompts = PromptStream(
        inputs.training,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        position=state.prompts_position,
    )
    stop = stop or GracefulStop()
    history = list(state.history)
    run_id = f"{config.run.name}/{folder.name}"
    telemetry = (
        TelemetrySettings(run_id, config.tracing.endpoint, config.tracing.sample_texts > 0)
        if config.tracing.enabled
        else None
    )
    with ExitStack() as stack:
        if telemetry is not None:
            stack.callback(telemetry.start("grpo.driver").shutdown)
        resumed_from = None if checkpoint is None else state.step
        run = stack.enter_context(record_run(public_config(config), resumed_from=resumed_from))
        actors = RunActors(
            config,
            model=model,
            tokenizer=inputs.tokenizer,
            folder=folder,
            observer=observer,
            telemetry=telemetry,
            notice=display.notice,
        )
        stack.callback(actors.close)
        policy = Policy(actors.calls, actors.policy_ranks, config.policy)
        if config.checkpointing.every_steps > 0:
            policy.check_visible(folder)  # before the first checkpoint can be lost
        if checkpoint is not None:
            policy.load(checkpoint)
        parts: dict[str, Any] = {
            "calls": actors.calls,
            "data_plane": actors.data_plane,
            "policy": policy,
            "weight_sync": actors.weight_sync,
            "prompts": prompts,
            "run_id": run_id,
            "tokenizer": inputs.tokenizer,
        }
        stepper = GRPOStep(config, **parts)
        if config.grpo.mode == "async":
            stepper = AsyncGRPOStep(
                config,
                **parts,
                actors=actors,
                pending=state.pending_prompts,
                journal=folder / JOURNAL if config.checkpointing.journal else None,
                notice=display.notice,
            )

        def write_policy(partial: Path) -> dict[str, int]:
            written = policy.save(partial)
            save_tokenizer(partial, inputs.tokenizer)
            return written

        def save(reached: RunState) -> None:
            save_checkpoint(
                folder / CHECKPOINTS,
                reached,
                write_policy,
                keep_last=config.checkpointing.keep_last,
                notice=display.notice,
            )
            stepper.on_checkpoint(reached)

        write_config(folder, config)
        write_history(folder, history)
        tracking = stack.enter_context(tracking_of(config, folder, state.step, display.notice))
        display.started(folder, config, state.step)
        stop.start_steps()
        trained = sum(record.get("samples", 0) for record in history)
        has_kl = config.grpo.kl_coefficient > 0
        for step in range(state.step, config.grpo.num_steps):
            report = StepReport(on_phase=display.phase)
            started = time.perf_counter()
            try:
                stepper.run(step, report)
            except GradientError:
                seconds = time.perf_counter() - started
                record_step(step, report.metrics, seconds=seconds, has_kl=has_kl, trained=trained)
                raise
            step_s = time.perf_counter() - started
            done = step + 1
            if _is_due(done, config.validation.every_steps, config.grpo.num_steps):
                stepper.validate(done, inputs.held_out, report)
            record = {"step": done, **report.metrics, "seconds": report.seconds}
            history.append(record)
            trained += record.get("samples", 0)
            record_step(step, report.metrics, seconds=step_s, has_kl=has_kl, trained=trained)
            append_record(folder, record)
            tracking.log(record)
            display.finished_step(record)
            reached = state.model_copy(
                update={
                    "step": done,
                    "prompts_position": prompts.position,
                    "pending_prompts": stepper.untrained_prompts(),
                    "history": history,
                }
            )
            every = config.checkpointing.every_steps
            saved = _is_due(done, every, config.grpo.num_steps)
            if saved:
                save(reached)
            # After the checkpoint: the request may arrive while it is written.
            if stop.requested:
                if every > 0 and not saved:
                    save(reached)
                if done < config.grpo.num_steps:
                    run.stop()
                break
        stepper.stop()
    with output_errors(folder / PICTURE):
        save_reward_picture(history, folder / PICTURE, title=f"GRPO, run {config.run.name!r}")
    return history


def _is_due(done: int, every: int, total: int) -> bool:
    return every > 0 and (done % every == 0 or done == total)


def initial_model(config: TrainerConfig, folder: Path) -> Path:
    """Return the random model that the run begins with; build it from the seed if missing."""
    path = (folder / INITIAL_MODEL).resolve()
    if path.exists() or not isinstance(config.policy.model, RandomModel):
        return path
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        save_random_model(
            config.policy.model,
            partial,
            seed=config.run.seed,
            max_length=config.policy.max_total_sequence_length,
        )
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"{path}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return path
