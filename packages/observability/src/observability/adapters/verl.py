"""Adapter for verl: one trace per training step, with verl's timers as spans.

verl times the stages of a step with `marked_timer`, in the process that runs its trainer. `install`
makes each timer inside a step a span. Workers are not traced: the trainer is blocked on them.
What the trainer logs with `Tracking` is recorded as metrics of the step. The configuration that it
gives to `Tracking` is recorded as the run's, without ``ray_kwargs``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from typing import Any  # Any: verl has no types

from dataplane_core.telemetry import STEP, Bucket, span, step_context, step_facts
from observability.adapters.logged import record_logged
from observability.runs import record_run
from observability.setup import setup

_STEP_TIMER = "step"
# verl's timer names, mapped to the names in docs/telemetry.md. Other timers keep their names.
_NAMES = {
    "gen": "rollout",
    "old_log_prob": "logprobs",
    "ref": "reference",
    "adv": "advantages",
    "update_weights": "refit",
    "update_actor": "train",
}
# The trainer is blocked on its workers in all stages but these.
_BUCKETS: dict[str, Bucket] = {
    "adv": "productive",
    "update_weights": "overhead",
    "save_checkpoint": "overhead",
}
# verl's names of metrics, mapped to those of docs/telemetry.md.
_METRICS = {
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
_RUN_ID = "RUN_ID"
_installed = False


def install() -> None:
    """Replace verl's timer and tracking in this process, before it imports a trainer.

    Set it as Ray's ``worker_process_setup_hook``, so that it runs in each Ray worker. A process
    exports only if it makes a `Tracking`, as verl's trainers do. The id of the run is the
    environment variable RUN_ID or, without it, verl's experiment name. Later calls do nothing.

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
    """The run of this process: its id and the number of its steps."""

    def __init__(self) -> None:
        self.run_id = ""  # until the first `Tracking`
        self.steps = 0
        self.telemetry: Any = None  # from the first `Tracking` until it finishes
        self.record = ExitStack()

    def with_setup(self, initialize: Callable[..., None]) -> Callable[..., None]:
        """Return verl's `Tracking.__init__` with set-up of telemetry."""

        @wraps(initialize)
        def announcing(
            tracking: Any, project_name: str, experiment_name: str, *args: Any, **kwargs: Any
        ) -> None:
            if not self.run_id:  # a process has one run
                self.run_id = os.environ.get(_RUN_ID) or str(experiment_name)
                # If the program set up telemetry itself, the spans are exported by that.
                with suppress(RuntimeError):
                    self.telemetry = setup("grpo.driver", run_id=self.run_id)
                config = dict(kwargs.get("config") or {})  # as verl's trainers pass it
                config.pop("ray_kwargs", None)  # has environment variables, perhaps tokens
                self.record.enter_context(record_run(config, run_id=self.run_id))
            initialize(tracking, project_name, experiment_name, *args, **kwargs)

        return announcing

    def with_metrics(self, log: Callable[..., None]) -> Callable[..., None]:
        """Return verl's `Tracking.log` with a record of the metrics."""

        @wraps(log)
        def recording(tracking: Any, data: Any, step: int, *args: Any, **kwargs: Any) -> None:
            log(tracking, data, step, *args, **kwargs)
            record_logged(step, data, _METRICS, validation="val-", run_id=self.run_id)

        return recording

    def with_end(self, finish: Callable[..., None]) -> Callable[..., None]:
        """Return verl's `Tracking.finish` with a record of the run's end, and an export.

        Ray may kill the process right after `finish`. verl's task runner passes an exit code, and
        calls `finish` while the error that ended the run is handled. `__del__` passes no exit
        code, and its call does not show how the run ended.
        """

        @wraps(finish)
        def flushing(tracking: Any, *args: Any, **kwargs: Any) -> None:
            try:
                finish(tracking, *args, **kwargs)
            finally:
                telemetry = self.telemetry
                if args or kwargs:
                    self.telemetry = None  # `__del__` finishes again
                    self.record.__exit__(*sys.exc_info())
                if telemetry is not None:
                    telemetry.flush()

        return flushing

    def with_span(self, timer: Callable[..., Any]) -> Callable[..., Any]:
        """Return verl's `marked_timer` with a span."""

        @contextmanager
        @wraps(timer)
        def traced_timer(name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
            with ExitStack() as stack:
                stack.enter_context(timer(name, *args, **kwargs))
                if STEP in step_facts():
                    called, bucket = _NAMES.get(name, name), _BUCKETS.get(name, "idle")
                    stack.enter_context(span(called, bucket))
                elif name == _STEP_TIMER:
                    step = self._next_step()
                    stack.enter_context(step_context(self.run_id, step, weight_version=step))
                    stack.enter_context(span("grpo.step"))
                yield  # a timer outside of a step, such as a validation's, has no span

        return traced_timer

    def _next_step(self) -> int:
        """Return the number of completed steps.

        verl's trainers store the number of the current step in `SkipManager.step`: it starts at 1
        and continues after a resume. For trainers that do not set it, steps are counted from 0.
        """
        from verl.utils.skip.skip_manager import SkipManager

        self.steps = SkipManager.step - 1 if SkipManager.step > 0 else self.steps
        number = self.steps
        self.steps += 1
        return number
