"""Adapter for trainers of TRL: one trace per optimizer step, with TRL's profiled blocks as spans.

TRL times blocks of its code with a `ProfilingContext`; `trace_steps` records each block as a span.
Data loading, logging, evaluation and checkpoints are outside of optimizer steps, so they have no
spans. What TRL logs is recorded as metrics of the step. The trainer's arguments, without access
tokens, are recorded as the configuration of the run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any  # Any: TRL and transformers have no types that hold for all releases

from dataplane_core.telemetry import STEP, Bucket, span, step_context, step_facts
from observability.adapters.logged import record_logged
from observability.runs import record_run

try:
    from transformers import TrainerCallback
    from trl.extras.profiling import ProfilingContext
except ModuleNotFoundError as error:
    raise ImportError(
        f"observability.adapters.trl needs TRL ({error.name} is missing): "
        "install the extra observability[trl]"
    ) from error

_LOSS = "compute_loss"
# Span name of docs/telemetry.md, and bucket, by TRL's name of a block. Other blocks, such as reward
# functions, keep their names.
_SPANS: dict[str, tuple[str, Bucket]] = {
    "_prepare_inputs": ("rollout", "overhead"),
    "transformers.generate": ("generate", "productive"),
    "transformers.generate_batch": ("generate", "productive"),
    "vLLM.generate": ("generate", "productive"),
    "sync_weights": ("refit", "overhead"),
    "_calculate_rewards": ("environment_step", "productive"),
    "_get_per_token_logps_and_entropies": ("logprobs", "productive"),
    _LOSS: ("forward", "productive"),
}

# Metric names of docs/telemetry.md by TRL's metric.
_METRIC_NAMES = {
    "reward": "rl.reward.mean",
    "reward_std": "rl.reward.std",
    "loss": "rl.loss",
    "kl": "rl.kl",
    "entropy": "rl.entropy",
    "clip_ratio/region_mean": "rl.clip_fraction",
    "grad_norm": "rl.grad_norm",
    "learning_rate": "rl.learning_rate",
    "completions/mean_length": "rl.response.length",
    "completions/clipped_ratio": "rl.response.truncated",
    "sampling/sampling_logp_difference/mean": "rl.logprob_gap.mean",
    "eval_reward": "rl.validation.reward",
}
_REWARD_COMPONENT = re.compile(r"rewards/(.+)/mean")


class StepTracer(TrainerCallback):
    """A callback that opens one trace per optimizer step.

    `trace_steps` adds it to a trainer and runs TRL's profiled blocks inside `block`.

    Args:
        run_id: id of the run.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._step = ExitStack()
        # Span of a backward pass or of the optimizer. TRL profiles neither; callbacks delimit them.
        self._phase = ExitStack()
        self._generates_remotely = False

    def end(self, *error: Any) -> None:
        """End the open step, if there is one.

        Args:
            error: type, value and traceback of the error that ended it; nothing without an error.
        """
        error = error or (None, None, None)
        try:
            self._phase.__exit__(*error)
        finally:
            self._step.__exit__(*error)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open a step; its number is that of the completed optimizer steps."""
        self.end()  # if training stopped between two micro-batches, the last step is still open
        self._generates_remotely = getattr(args, "vllm_mode", None) == "server"
        step = state.global_step
        self._step.enter_context(step_context(self._run_id, step, weight_version=step))
        self._step.enter_context(span("grpo.step"))

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the span of a backward pass, or of the optimizer."""
        self._phase.close()

    on_optimizer_step = on_substep_end

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the backward pass, and open the optimizer's span."""
        self._open_phase("optimizer_step")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the step, even if training stopped within it."""
        self.end()

    on_train_end = on_step_end

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Record the metrics that TRL logs, except its summary of the training."""
        logged = {name: value for name, value in logs.items() if not name.startswith("train_")}
        matches = {name: _REWARD_COMPONENT.fullmatch(name) for name in logged}
        components = {match[1]: logged.pop(name) for name, match in matches.items() if match}
        record_logged(
            state.global_step,
            logged,
            _METRIC_NAMES,
            validation="eval_",
            run_id=self._run_id,
            components=components,
        )

    @contextmanager
    def block(self, name: str) -> Iterator[None]:
        """Run a block that TRL profiles in a span, if the block is part of a step.

        Args:
            name: TRL's name of the block: the trainer's class, a dot, and the name of the method.
        """
        name = name.partition(".")[2] or name
        if STEP not in step_facts():  # an evaluation
            yield
            return
        span_name, bucket = _SPANS.get(name, (name, "productive"))
        bucket = "idle" if name == "vLLM.generate" and self._generates_remotely else bucket
        if name == _LOSS:
            self._phase.close()
        with span(span_name, bucket):
            yield
        if name == _LOSS:
            self._open_phase("backward")

    def _open_phase(self, name: str) -> None:
        self._phase.close()
        self._phase.enter_context(span(name, "productive"))


@contextmanager
def trace_steps(trainer: Any, run_id: str) -> Iterator[None]:
    """Trace the steps of one trainer in the block, which calls ``trainer.train()``.

    Without `observability.setup` in this process, nothing is recorded.

    Args:
        trainer: a trainer of TRL that profiles its methods, such as ``GRPOTrainer``.
        run_id: id of the run.
    """
    tracer = StepTracer(run_id)
    original_enter, original_exit = ProfilingContext.__enter__, ProfilingContext.__exit__

    def traced_enter(context: Any) -> Any:
        context.rl_block = ExitStack()
        context.rl_block.enter_context(tracer.block(context.name))
        return original_enter(context)

    def traced_exit(context: Any, *error: Any) -> Any:
        try:
            return original_exit(context, *error)
        finally:
            context.rl_block.__exit__(*error)

    trainer.add_callback(tracer)
    ProfilingContext.__enter__, ProfilingContext.__exit__ = traced_enter, traced_exit
    try:
        config = trainer.args.to_sanitized_dict()
        with record_run(config, run_id=run_id), ExitStack() as stack:
            stack.push(tracer.end)
            yield
    finally:
        ProfilingContext.__enter__, ProfilingContext.__exit__ = original_enter, original_exit
        trainer.remove_callback(tracer)
