"""Adapter for SkyRL: one trace per training step, with SkyRL's timers as spans.

SkyRL times the stages of a step with `Timer`, in the process that runs its trainer. `trace_steps`
makes each timer inside a step a span. Workers are not traced: the trainer is blocked on them.
What the trainer logs with `Tracking` is recorded as metrics of the step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any  # Any: SkyRL has no types that hold for all releases

from dataplane_core.telemetry import STEP, Bucket, span, step_context, step_facts
from observability.adapters.logged import record_logged
from observability.runs import record_run
from observability.setup import setup

_STEP_TIMER = "step"
# SkyRL's timer names, mapped to the names in docs/telemetry.md. Other timers keep their names.
_NAMES = {
    "generate": "rollout",
    "fwd_logprobs_values_reward": "logprobs",
    "compute_advantages_and_returns": "advantages",
    "train_critic_and_policy": "train",
    "sync_weights": "refit",
}
# The trainer is blocked on its workers in all stages but these.
_BUCKETS: dict[str, Bucket] = {
    "postprocess_generator_output": "overhead",
    "convert_to_training_input": "overhead",
    "compute_advantages_and_returns": "productive",
    "save_checkpoints": "overhead",
    "save_hf_model": "overhead",
    "sync_weights": "overhead",
}
# SkyRL's names of metrics, mapped to those of docs/telemetry.md.
_METRICS = {
    "reward/avg_raw_reward": "rl.reward.mean",
    "policy/final_loss": "rl.loss",
    "policy/policy_kl": "rl.kl",
    "policy/policy_entropy": "rl.entropy",
    "policy/clip_ratio": "rl.clip_fraction",
    "policy/grad_norm": "rl.grad_norm",
    "policy/policy_lr": "rl.learning_rate",
    "generate/avg_num_tokens": "rl.response.length",
    "eval/all/avg_score": "rl.validation.reward",
    "eval/all/pass_at_1": "rl.validation.pass_rate",
}
_ENDPOINT, _RUN_ID = "OTEL_EXPORTER_OTLP_ENDPOINT", "RUN_ID"
_OVERRIDE = "trainer.override_entrypoint="


class _Steps:
    """The steps of this process's trainer, at most one of which is open."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._open = ExitStack()
        self._number: int | None = None
        self.trainer: Any = None  # until a trainer is made

    def begin(self) -> None:
        """Open the step of the trainer, unless it is open already."""
        number = self.trainer.global_step - 1  # SkyRL counts steps from 1
        if number != self._number:
            self.end()
            self._open.enter_context(step_context(self._run_id, number, weight_version=number))
            self._open.enter_context(span("grpo.step"))
            self._number = number

    def pause(self, *error: Any) -> None:
        """End the open step, unless dynamic sampling continues it with further prompts."""
        if error[0] is not None or self.trainer.dynamic_sampling_state is None:
            self.end(*error)

    def end(self, *error: Any) -> None:
        """End the open step, if any, with the type, value and traceback of its error."""
        self._number = None
        self._open.__exit__(*(error or (None, None, None)))


@contextmanager
def trace_steps(run_id: str) -> Iterator[None]:
    """Trace the steps of a SkyRL trainer that is made and run in the block.

    Without `observability.setup` in this process, nothing is recorded.

    Args:
        run_id: id of the run.

    Raises:
        ImportError: SkyRL is not installed.
    """
    try:
        from skyrl.train.trainer import RayPPOTrainer
        from skyrl.train.utils import Timer
        from skyrl.train.utils.tracking import Tracking
    except ModuleNotFoundError as error:
        raise ImportError(
            f"observability.adapters.skyrl needs SkyRL ({error.name} is missing)"
        ) from error
    steps = _Steps(run_id)
    make, enter, leave = RayPPOTrainer.__init__, Timer.__enter__, Timer.__exit__
    log = Tracking.log

    def traced_make(trainer: Any, *args: Any, **kwargs: Any) -> None:
        steps.trainer = trainer
        make(trainer, *args, **kwargs)

    def traced_enter(timer: Any) -> Any:
        name = timer.message
        timer.rl_span = ExitStack()
        if name == _STEP_TIMER and steps.trainer is not None:
            steps.begin()
        elif STEP in step_facts():  # timers outside of a step, as in evaluations, have no span
            called, bucket = _NAMES.get(name, name), _BUCKETS.get(name, "idle")
            timer.rl_span.enter_context(span(called, bucket))
        return enter(timer)

    def traced_leave(timer: Any, *error: Any) -> Any:
        try:
            return leave(timer, *error)
        finally:
            timer.rl_span.__exit__(*error)
            if timer.message == _STEP_TIMER and steps.trainer is not None:
                steps.pause(*error)

    def recorded_log(tracking: Any, data: Any, step: int, *args: Any, **kwargs: Any) -> None:
        log(tracking, data, step, *args, **kwargs)
        record_logged(step, data, _METRICS, validation="eval/", run_id=run_id)

    RayPPOTrainer.__init__, Tracking.log = traced_make, recorded_log
    Timer.__enter__, Timer.__exit__ = traced_enter, traced_leave
    try:
        with ExitStack() as stack:
            stack.enter_context(record_run(run_id=run_id))
            stack.push(steps.end)
            yield
    finally:
        RayPPOTrainer.__init__, Tracking.log = make, log
        Timer.__enter__, Timer.__exit__ = enter, leave


def main() -> None:
    """Run SkyRL's own entry point with traced steps.

    SkyRL calls it if its command line has
    ``trainer.override_entrypoint=observability.adapters.skyrl``. The id of the run is the
    environment variable RUN_ID or, without it, ``trainer.run_name``. The trainer's process gets
    both RUN_ID and OTEL_EXPORTER_OTLP_ENDPOINT from this one.
    """
    import ray
    from skyrl.train.entrypoints import main_base

    run_id, endpoint = os.environ.get(_RUN_ID), os.environ.get(_ENDPOINT)

    @ray.remote(num_cpus=1)
    def traced_entrypoint(config: Any) -> None:
        named = run_id or config.trainer.run_name
        with setup("grpo.driver", run_id=named, endpoint=endpoint), trace_steps(named):
            main_base.BasePPOExp(config).run()

    sys.argv = [argument for argument in sys.argv if not argument.startswith(_OVERRIDE)]
    main_base.skyrl_entrypoint = traced_entrypoint
    main_base.main()
