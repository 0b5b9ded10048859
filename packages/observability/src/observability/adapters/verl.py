"""Adapter for verl: one trace per training step, with verl's timers as spans.

verl times the stages of a step with `marked_timer`, in the process that runs its trainer. `install`
records each timer inside a step as a span. Workers are not traced: their work is idle
time of the trainer. What the trainer logs with `Tracking` is recorded as metrics of the step. Its
configuration, without ``ray_kwargs``, is recorded as the run's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from typing import Any  # Any: verl has no types

from dataplane_core.telemetry import STEP, Bucket, span, step_context, step_facts
from observability.runs import record_run
from observability.setup import setup
from observability.step_metrics import record_trainer_metrics

_STEP_TIMER = "step"
# Span names of docs/telemetry.md by verl's timer. Other timers keep their names.
_SPAN_NAMES = {
    "gen": "rollout",
    "old_log_prob": "logprobs",
    "ref": "reference",
    "adv": "advantages",
    "update_weights": "refit",
    "update_actor": "train",
}
# All other stages are idle: the trainer is blocked on its workers.
_BUCKETS: dict[str, Bucket] = {
    "adv": "productive",
    "update_weights": "overhead",
    "save_checkpoint": "overhead",
}
# Metric names of docs/telemetry.md by verl's metric.
_METRIC_NAMES = {
    "critic/score/mean": "rl.reward.mean",
    "actor/loss": "rl.loss",
    "actor/kl_loss": "rl.kl",
    "actor/entropy": "rl.entropy",
    "actor/pg_clipfrac": "rl.clip_fraction",
    "actor/grad_norm": "rl.grad_norm",
    "actor/lr": "rl.learning_rate",
    "response_length/mean": "rl.response.length",
    "response_length/clip_ratio": "rl.response.truncated",
}
_RUN_ID_VARIABLE = "RUN_ID"
_installed = False


def install() -> None:
    """Replace verl's timer and tracking; call it in a process before it imports a trainer.

    If it is set as Ray's ``worker_process_setup_hook``, it runs in each Ray worker. A process
    exports only if it creates a `Tracking`, as verl's trainers do. The id of the run is the
    environment variable RUN_ID; without it, verl's experiment name. Later calls do nothing.

    Raises:
        ImportError: verl is not installed.
    """
    global _installed
    if _installed:
        return
    try:
        import verl.utils.debug as debug
        import verl.utils.profiler as profiler
        from verl.utils.tracking import Tracking
    except ModuleNotFoundError as error:
        raise ImportError(
            f"observability.adapters.verl needs verl ({error.name} is missing)"
        ) from error
    run = _Run()
    debug.marked_timer = profiler.marked_timer = run.with_span(profiler.marked_timer)
    Tracking.__init__ = run.with_setup(Tracking.__init__)
    Tracking.log = run.with_metrics(Tracking.log)
    Tracking.finish = run.with_end(Tracking.finish)
    _installed = True


class _Run:
    """The run of this process, and the wrappers that record it."""

    def __init__(self) -> None:
        self.run_id = ""  # until the first `Tracking`
        self.steps = 0  # number of the next step, if verl does not count its steps
        self.telemetry: Any = None  # from the first `Tracking` until it finishes
        self.record = ExitStack()

    def with_setup(self, initialize: Callable[..., None]) -> Callable[..., None]:
        """Return a wrapper of `Tracking.__init__` that sets up telemetry and starts the run."""

        @wraps(initialize)
        def traced_init(
            tracking: Any, project_name: str, experiment_name: str, *args: Any, **kwargs: Any
        ) -> None:
            if not self.run_id:  # a process has one run
                self.run_id = os.environ.get(_RUN_ID_VARIABLE) or str(experiment_name)
                # `setup` raises if the program has called it: then that telemetry is used.
                with suppress(RuntimeError):
                    self.telemetry = setup("grpo.driver", run_id=self.run_id)
                config = dict(kwargs.get("config") or {})  # verl's trainers pass it by keyword
                config.pop("ray_kwargs", None)  # its environment variables may have tokens
                self.record.enter_context(record_run(config, run_id=self.run_id))
            initialize(tracking, project_name, experiment_name, *args, **kwargs)

        return traced_init

    def with_metrics(self, log: Callable[..., None]) -> Callable[..., None]:
        """Return a wrapper of `Tracking.log` that records the metrics."""

        @wraps(log)
        def traced_log(tracking: Any, data: Any, step: int, *args: Any, **kwargs: Any) -> None:
            log(tracking, data, step, *args, **kwargs)
            record_trainer_metrics(step, data, _METRIC_NAMES, run_id=self.run_id)

        return traced_log

    def with_end(self, finish: Callable[..., None]) -> Callable[..., None]:
        """Return a wrapper of `Tracking.finish` that records the end of the run and exports it.

        The export is immediate, because Ray may kill the process right after `finish`. verl's task
        runner passes an exit code to `finish`. If an error ended the run, it calls `finish` while
        it handles the error. `Tracking.__del__` passes no exit code, so its call does not show how
        the run ended.
        """

        @wraps(finish)
        def traced_finish(tracking: Any, *args: Any, **kwargs: Any) -> None:
            try:
                finish(tracking, *args, **kwargs)
            finally:
                telemetry = self.telemetry
                if args or kwargs:
                    self.telemetry = None  # `__del__` will call `finish` again
                    self.record.__exit__(*sys.exc_info())
                if telemetry is not None:
                    telemetry.flush()

        return traced_finish

    def with_span(self, timer: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of `marked_timer` that records a span."""

        @contextmanager
        @wraps(timer)
        def traced_timer(name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
            with ExitStack() as stack:
                stack.enter_context(timer(name, *args, **kwargs))
                if STEP in step_facts():
                    span_name, bucket = _SPAN_NAMES.get(name, name), _BUCKETS.get(name, "idle")
                    stack.enter_context(span(span_name, bucket))
                elif name == _STEP_TIMER:
                    step = self._next_step()
                    stack.enter_context(step_context(self.run_id, step, weight_version=step))
                    stack.enter_context(span("grpo.step"))
                yield  # a timer outside of steps, as in a validation, has no span

        return traced_timer

    def _next_step(self) -> int:
        """Return the number of the step that begins, from 0.

        verl's trainers store the number of the current step in `SkipManager.step`. It starts at 1
        and continues after a resume. For trainers that do not set it, the steps of this process are
        counted.
        """
        from verl.utils.skip.skip_manager import SkipManager

        number = SkipManager.step - 1 if SkipManager.step > 0 else self.steps
        self.steps = number + 1
        return number
