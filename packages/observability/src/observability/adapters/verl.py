"""Adapter for verl: one trace per training step, with verl's timers as spans.

`install` records each `marked_timer` inside a step of the trainer as a span. Workers are not
traced: their work is idle time of the trainer. What the trainer logs with `Tracking` becomes
metrics of the step, its configuration, without ``ray_kwargs``, that of the run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from typing import Any  # Any: verl has no types

from wrapt import register_post_import_hook

from dataplane_core.telemetry import STEP, Bucket, span, step_context, step_facts
from observability.adapters.first_step import LateRun
from observability.adapters.verl_metrics import NAMES, with_means
from observability.setup import setup
from observability.step_metrics import record_trainer_metrics

_MOVES = ("switch_to_rollout", "switch_to_trainer", "sync_rollout_weights", "save_checkpoint")
# Span name (see docs/telemetry.md) and bucket of each of verl's timers. A span of any other timer
# has the timer's name and the bucket idle: the trainer is blocked on its workers.
_SPANS: dict[str, tuple[str, Bucket]] = {
    "gen": ("rollout", "idle"),
    "old_log_prob": ("logprobs", "idle"),
    "ref": ("reference", "idle"),
    "adv": ("advantages", "overhead"),
    "update_actor": ("train", "idle"),
    **dict.fromkeys(("update_weights", "timing_s/param_sync"), ("refit", "overhead")),
    **{name: (name, "overhead") for name in (*_MOVES, "dump_rollout_generations")},
}
_is_installed = False


def install() -> None:
    """Replace verl's timer and tracking when the process imports them; call it before.

    If it is set as Ray's ``worker_process_setup_hook``, it runs in each Ray worker. It imports
    nothing of verl, because most workers need neither. A process exports only if it creates a
    `Tracking`, as verl's trainers do. The id of the run is the environment variable RUN_ID; without
    it, verl's experiment name. Later calls do nothing.

    Raises:
        ImportError: verl is not installed.
    """
    global _is_installed
    if sys.modules.get("verl") is None and find_spec("verl") is None:
        raise ImportError(f"{__name__} needs verl (it is not installed)")
    if not _is_installed:
        _is_installed, run = True, _Run()
        register_post_import_hook(partial(_trace_timer, run), "verl.utils.profiler")
        register_post_import_hook(partial(_trace_tracking, run), "verl.utils.tracking")


def _trace_timer(run: _Run, profiler: Any) -> None:
    original = profiler.marked_timer

    @contextmanager
    def traced_timer(name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(original(name, *args, **kwargs))
            if STEP in step_facts():
                stack.enter_context(span(*_SPANS.get(name, (name, "idle"))))
            elif name == "step":
                step = run.next_step()
                stack.enter_context(step_context(run.record.run_id, step, weight_version=step))
                stack.enter_context(span("grpo.step"))
            yield  # a timer outside of steps, as in a validation, has no span

    profiler.marked_timer = traced_timer
    # Trainers use the name of `verl.utils.debug`, which may have copied the original.
    share = lambda debug: setattr(debug, "marked_timer", traced_timer)  # noqa: E731
    register_post_import_hook(share, "verl.utils.debug")


def _trace_tracking(run: _Run, module: Any) -> None:
    tracking = module.Tracking
    original_init, original_log, original_finish = tracking.__init__, tracking.log, tracking.finish

    def traced_init(
        tracking: Any, project_name: str, experiment_name: str, *args: Any, **kwargs: Any
    ) -> None:
        if not run.record.run_id:
            run.start(experiment_name, kwargs.get("config"))  # verl's trainers pass it by keyword
        original_init(tracking, project_name, experiment_name, *args, **kwargs)

    def traced_log(tracking: Any, data: Any, step: int, *args: Any, **kwargs: Any) -> None:
        original_log(tracking, data, step, *args, **kwargs)
        run.record.start_at_log(step, data)
        record_trainer_metrics(step, with_means(data), NAMES, run_id=run.record.run_id)

    def traced_finish(tracking: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original_finish(tracking, *args, **kwargs)
        finally:
            # `Tracking.__del__` passes no exit code: it does not know how the run ended.
            run.finish(is_final=bool(args or kwargs))

    tracking.__init__, tracking.log, tracking.finish = traced_init, traced_log, traced_finish


class _Run:
    """The run of this process."""

    def __init__(self) -> None:
        self.record = LateRun("")  # until the first `Tracking`
        self._steps = 0  # number of the next step, if verl does not count its steps
        self._telemetry: Any = None  # from the first `Tracking` until it finishes

    def start(self, experiment_name: str, config: Any) -> None:
        """Set up telemetry and the record of the run."""
        run_id = os.environ.get("RUN_ID") or str(experiment_name)
        # `setup` raises if the program has set up telemetry, which is then used.
        with suppress(RuntimeError):
            self._telemetry = setup("grpo.driver", run_id=run_id)
        config = dict(config or {})
        config.pop("ray_kwargs", None)  # its environment variables may have tokens
        self.record = LateRun(run_id, config)

    def finish(self, *, is_final: bool) -> None:
        """Record the end of the run if this call is final, and export telemetry now.

        Ray may kill the process next. verl makes the call while it handles the run's error.
        """
        telemetry = self._telemetry
        if is_final:
            self._telemetry = None  # `__del__` will call this again
            self.record.__exit__(*sys.exc_info())
        if telemetry is not None:
            telemetry.flush()

    def next_step(self) -> int:
        """Return the number of the step that begins, from 0.

        Trainers store the number of the current step in `SkipManager.step`. It starts at 1 and
        continues after a resume. If a trainer does not store it, count the steps of this process.
        """
        from verl.utils.skip.skip_manager import SkipManager

        if SkipManager.step > 0:
            self._steps = SkipManager.step - 1
            self.record.start(self._steps)
        self._steps += 1
        return self._steps - 1
