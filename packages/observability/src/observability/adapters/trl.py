"""Adapter for trainers of TRL: one trace per optimizer step, with TRL's profiled blocks as spans.

TRL times blocks with a `ProfilingContext`. Each block inside a step is recorded as a span. Data
loading, logging, evaluation and checkpoints are outside of steps, so they have no spans. What TRL
logs is recorded as metrics of the step. The trainer's arguments, without access tokens, are
recorded as the configuration of the run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any  # Any: TRL and transformers have no types that hold for all releases

from dataplane_core.telemetry import STEP, Bucket, span, step_context, step_facts
from observability.runs import record_run
from observability.step_metrics import record_trainer_metrics

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


class _StepTracer(TrainerCallback):
    """A callback that records a trainer's steps; `step` holds the contexts of the open step."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self.step = ExitStack()
        # Span of a backward pass or of the optimizer. TRL profiles neither; callbacks delimit them.
        self._phase = ExitStack()
        self._generates_remotely = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step.close()  # still open if training stopped between two micro-batches
        self._generates_remotely = getattr(args, "vllm_mode", None) == "server"
        number = state.global_step  # of completed optimizer steps
        self.step.enter_context(step_context(self._run_id, number, weight_version=number))
        self.step.enter_context(span("grpo.step"))
        self._phase = self.step.enter_context(ExitStack())

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._phase.close()

    on_optimizer_step = on_substep_end

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._phase.close()
        self._phase.enter_context(span("optimizer_step", "productive"))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step.close()

    on_train_end = on_step_end  # ends a step within which training stopped

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        metrics, components = {}, {}
        for name, value in logs.items():
            if match := _REWARD_COMPONENT.fullmatch(name):
                components[match[1]] = value
            elif not name.startswith("train_"):  # TRL's summary of the training
                metrics[name] = value
        record_trainer_metrics(
            state.global_step, metrics, _METRIC_NAMES, run_id=self._run_id, components=components
        )

    @contextmanager
    def block(self, name: str) -> Iterator[None]:
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
def trace_steps(trainer: Any, run_id: str) -> Iterator[None]:
    """Trace the steps of one trainer in the block, which calls ``trainer.train()``.

    Without `observability.setup` in this process, nothing is recorded.

    Args:
        trainer: a trainer of TRL that profiles its methods, such as ``GRPOTrainer``.
        run_id: id of the run.
    """
    tracer = _StepTracer(run_id)
    original_enter, original_exit = ProfilingContext.__enter__, ProfilingContext.__exit__

    def traced_enter(context: Any) -> Any:
        context.rl_block = tracer.block(context.name)
        context.rl_block.__enter__()
        return original_enter(context)

    def traced_exit(context: Any, *error: Any) -> Any:
        try:
            return original_exit(context, *error)
        finally:
            context.rl_block.__exit__(*error)

    trainer.add_callback(tracer)
    ProfilingContext.__enter__, ProfilingContext.__exit__ = traced_enter, traced_exit
    try:
        with record_run(trainer.args.to_sanitized_dict(), run_id=run_id), tracer.step:
            yield
    finally:
        ProfilingContext.__enter__, ProfilingContext.__exit__ = original_enter, original_exit
        trainer.remove_callback(tracer)
