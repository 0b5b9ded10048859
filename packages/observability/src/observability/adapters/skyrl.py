"""Adapter for SkyRL: one trace per training step, with SkyRL's timers as spans.

SkyRL times stages of a step with `Timer` in its trainer's process. `trace_steps` records timers
inside a step as spans. It records what `Tracking` logs as metrics of the step. Workers are not
traced.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any  # Any: SkyRL has no types that hold for all releases

from dataplane_core.telemetry import STEP, Bucket, span, step_context, step_facts
from observability.adapters.first_step import LateRun
from observability.adapters.skyrl_metrics import record_log
from observability.setup import setup

# Span name (see docs/telemetry.md) and bucket of each of SkyRL's timers. A span of any other timer
# has the timer's name and the bucket idle: the trainer is blocked on its workers.
_SPANS: dict[str, tuple[str, Bucket]] = {
    "generate": ("rollout", "idle"),
    "postprocess_generator_output": ("postprocess_generator_output", "overhead"),
    "convert_to_training_input": ("convert_to_training_input", "overhead"),
    "fwd_logprobs_values_reward": ("logprobs", "idle"),
    "compute_advantages_and_returns": ("advantages", "overhead"),
    "train_critic_and_policy": ("train", "idle"),
    "save_checkpoints": ("save_checkpoints", "overhead"),
    "save_hf_model": ("save_hf_model", "overhead"),
    "sync_weights": ("refit", "overhead"),
}


class _Steps:
    """The steps of this process's trainer; `step` holds the contexts of the open step."""

    def __init__(self, run: LateRun) -> None:
        self._run = run
        self.step = ExitStack()
        self._number: int | None = None  # of the open step
        self.trainer: Any = None  # until a trainer is created

    def begin(self) -> None:
        """Open the trainer's current step, unless it is already open."""
        number = self.trainer.global_step - 1  # SkyRL counts steps from 1
        if number != self._number:
            self.step.close()
            self._run.start(number)
            self.step.enter_context(step_context(self._run.run_id, number, weight_version=number))
            self.step.enter_context(span("grpo.step"))
            self._number = number

    def end_unless_sampling(self, *error: Any) -> None:
        """End the open step, unless dynamic sampling continues it with further prompts."""
        if error[0] is not None or self.trainer.dynamic_sampling_state is None:
            self._number = None
            self.step.__exit__(*error)


@contextmanager
def trace_steps(run_id: str) -> Iterator[None]:
    """Trace the steps of a SkyRL trainer that is created and run in the block.

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
        raise ImportError(f"{__name__} needs SkyRL ({error.name} is missing)") from error
    run = LateRun(run_id)
    steps = _Steps(run)
    original_init, original_log = RayPPOTrainer.__init__, Tracking.log
    original_enter, original_exit = Timer.__enter__, Timer.__exit__

    def traced_init(trainer: Any, *args: Any, **kwargs: Any) -> None:
        steps.trainer = trainer
        original_init(trainer, *args, **kwargs)

    def traced_enter(timer: Any) -> Any:
        timer.rl_span = ExitStack()
        if timer.message == "step" and steps.trainer is not None:
            steps.begin()
        elif STEP in step_facts():  # timers outside of steps, as in evaluations, have no span
            timer.rl_span.enter_context(span(*_SPANS.get(timer.message, (timer.message, "idle"))))
        return original_enter(timer)

    def traced_exit(timer: Any, *error: Any) -> Any:
        try:
            return original_exit(timer, *error)
        finally:
            timer.rl_span.__exit__(*error)
            if timer.message == "step" and steps.trainer is not None:
                steps.end_unless_sampling(*error)

    def traced_log(tracking: Any, data: Any, step: int, *args: Any, **kwargs: Any) -> None:
        original_log(tracking, data, step, *args, **kwargs)
        run.start_at_log(step, data)
        record_log(step, data, run_id)

    RayPPOTrainer.__init__, Tracking.log = traced_init, traced_log
    Timer.__enter__, Timer.__exit__ = traced_enter, traced_exit
    try:
        with run, steps.step:
            yield
    finally:
        RayPPOTrainer.__init__, Tracking.log = original_init, original_log
        Timer.__enter__, Timer.__exit__ = original_enter, original_exit


def main() -> None:
    """Run SkyRL's own entry point with traced steps.

    SkyRL calls this function if its command line has
    ``trainer.override_entrypoint=observability.adapters.skyrl``. The id of the run is the
    environment variable RUN_ID; without it, ``trainer.run_name``. The values of RUN_ID and
    OTEL_EXPORTER_OTLP_ENDPOINT in this process are passed to the trainer's process.
    """
    import ray
    from skyrl.train.entrypoints import main_base

    run_id, endpoint = os.environ.get("RUN_ID"), os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")

    @ray.remote(num_cpus=1)
    def traced_entrypoint(config: Any) -> None:
        chosen_id = run_id or config.trainer.run_name
        with setup("grpo.driver", run_id=chosen_id, endpoint=endpoint), trace_steps(chosen_id):
            main_base.BasePPOExp(config).run()

    sys.argv = [each for each in sys.argv if not each.startswith("trainer.override_entrypoint=")]
    main_base.skyrl_entrypoint = traced_entrypoint
    main_base.main()
