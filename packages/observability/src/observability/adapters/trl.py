"""Adapter for trainers of TRL: one trace per optimizer step, with TRL's profiled blocks as spans.

TRL times blocks with a `ProfilingContext`. Each block inside a step is recorded as a span. Data
loading, logging, evaluation and checkpoints are outside of steps, so they have no spans. What TRL
logs is recorded as metrics of the step. The trainer's arguments, without access tokens, are
recorded as the configuration of the run.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar  # Any: TRL has no types that hold for all releases

from dataplane_core.telemetry import STEP, Bucket, span, step_context, step_facts
from observability.adapters.trl_metrics import record_logs
from observability.runs import record_run

try:
    from transformers import TrainerCallback
    from trl.extras.profiling import ProfilingContext
except ModuleNotFoundError as error:
    raise ImportError(
        f"{__name__} needs TRL ({error.name} is missing): install the extra observability[trl]"
    ) from error

_LOSS, _VLLM = "compute_loss", "vLLM.generate"
# Span name (see docs/telemetry.md) and bucket of each block that TRL profiles. Spans of other
# blocks, such as reward functions, have the block's name.
_SPANS: dict[str, tuple[str, Bucket]] = {
    "_prepare_inputs": ("rollout", "overhead"),
    "transformers.generate": ("generate", "productive"),
    "transformers.generate_batch": ("generate", "productive"),
    _VLLM: ("generate", "productive"),
    "sync_weights": ("refit", "overhead"),
    "_calculate_rewards": ("environment_step", "productive"),
    "_get_per_token_logps_and_entropies": ("logprobs", "productive"),
    _LOSS: ("forward", "productive"),
}


class TraceCallback(TrainerCallback):
    """A callback of one trainer that profiles its methods, such as ``GRPOTrainer``.

    Pass it as one of ``callbacks``. Without `observability.setup` in this process, nothing is
    recorded. Each rank records its steps; the first rank records metrics, start and end of the run.
    If an error ends the training, that is recorded when the process exits, or trains again.

    Args:
        run_id: id of the run.
    """

    _open: ClassVar[TraceCallback | None] = None

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._training = ExitStack()  # contexts of a training; the last one is `_step`
        self._step = ExitStack()
        # Span of a backward pass or of the optimizer. TRL profiles neither; callbacks delimit them.
        self._phase = ExitStack()
        self._generates_remotely = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if TraceCallback._open is not None:  # an error ended its training
            TraceCallback._open._end_after_error()
        TraceCallback._open = self
        if state.is_world_process_zero:
            resumed_from = state.global_step or None
            config = args.to_sanitized_dict()
            record = record_run(config, resumed_from=resumed_from, run_id=self._run_id)
            self._training.enter_context(record)
        self._training.enter_context(self._traced_blocks())
        self._training.push(self._step)
        atexit.register(self._end_after_error)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        atexit.unregister(self._end_after_error)
        TraceCallback._open = None
        self._training.close()

    def _end_after_error(self) -> None:
        """End a training that is still open."""
        error = getattr(sys, "last_value", None) or SystemExit()  # the error that Python printed
        self._training.__exit__(type(error), error, error.__traceback__)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step.close()  # still open if training stopped between two micro-batches
        self._generates_remotely = getattr(args, "vllm_mode", None) == "server"
        number = state.global_step  # of completed optimizer steps
        self._step.enter_context(step_context(self._run_id, number, weight_version=number))
        self._step.enter_context(span("grpo.step"))
        self._phase = self._step.enter_context(ExitStack())

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._phase.close()

    on_optimizer_step = on_substep_end

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._phase.close()
        self._phase.enter_context(span("optimizer_step", "productive"))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step.close()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            size = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
            record_logs(state.global_step, logs, self._run_id, samples_per_step=size)

    @contextmanager
    def _block(self, name: str) -> Iterator[None]:
        """Record a profiled block as a span; ``name`` is ``class.method``."""
        if STEP not in step_facts():  # an evaluation
            yield
            return
        name = name.partition(".")[2] or name
        span_name, bucket = _SPANS.get(name, (name, "productive"))
        bucket = "idle" if name == _VLLM and self._generates_remotely else bucket
        if name == _LOSS:
            self._phase.close()
        with span(span_name, bucket):
            yield
        if name == _LOSS:
            self._phase.enter_context(span("backward", "productive"))

    @contextmanager
    def _traced_blocks(self) -> Iterator[None]:
        original_enter, original_exit = ProfilingContext.__enter__, ProfilingContext.__exit__

        def traced_enter(context: Any) -> Any:
            context.rl_block = self._block(context.name)
            context.rl_block.__enter__()
            return original_enter(context)

        def traced_exit(context: Any, *error: Any) -> Any:
            try:
                return original_exit(context, *error)
            finally:
                context.rl_block.__exit__(*error)

        ProfilingContext.__enter__, ProfilingContext.__exit__ = traced_enter, traced_exit
        try:
            yield
        finally:
            ProfilingContext.__enter__, ProfilingContext.__exit__ = original_enter, original_exit
