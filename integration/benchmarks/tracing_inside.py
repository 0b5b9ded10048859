"""Seconds that a process spends in tracing code, measured inside it while real steps run.

Steps of one length differ by several percent from each other, tracing costs less than that: the
difference of two steps says little unless there are hundreds of them. So the calls into tracing are
timed where they happen, between a step's own work, with the caches as that left them; the same
calls in a tight loop take a fifth of the time.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import opentelemetry.sdk._shared_internal as sdk_batches
from opentelemetry.sdk.trace import Span, Tracer

from dataplane_core import telemetry
from observability import actors, lifecycle, operations
from observability._setup_spans import LeanSpan, LeanTracer
from observability.lane import Lane
from observability.lifecycle import Lifecycle
from observability.meters import Meters
from observability.metrics import Account
from observability.tracing import Tracing


@dataclass
class Spent:
    """Of one process since `watch` or the last `take`.

    Attributes:
        inline_s: wall time of calls into tracing, in the threads that did the step's work.
        export_s: CPU time of the background: the lane, encoding and sending.
    """

    inline_s: float = 0.0
    export_s: float = 0.0


class _Watch(threading.local):
    inside = False


_watch = _Watch()
_spent = Spent()
_watched = False


def watch() -> None:
    """From now on count, in this process."""
    global _watched
    if _watched:
        return
    _watched = True
    for owner in (Tracing, Lifecycle, Meters, Account):
        for name in ("begin", "end"):
            _time(owner, name)
    for owner, names in (
        (operations, ("_bytes_by_field", "_bytes_by_column")),
        (telemetry, ("extract", "inject")),
        (actors, ("inject",)),
        (telemetry.context, ("attach", "detach")),
        (Tracer, ("start_span",)),
        (LeanTracer, ("start_span",)),
        (Span, ("end", "set_attribute", "set_attributes")),
        (LeanSpan, ("end", "set_attribute", "set_attributes")),
    ):
        for name in names:
            _time(owner, name)
    _time(lifecycle, "emit")
    worker = sys.modules.get("grpo_trainer.policy_worker")
    if worker is not None:
        _time(worker, "trained")
    for owner, name in ((sdk_batches.BatchProcessor, "_export"), (Lane, "drain")):
        _time_background(owner, name)


def take() -> Spent:
    """What was spent in this process, and begin anew."""
    global _spent
    taken, _spent = _spent, Spent()
    return taken


def _time_background(owner: Any, name: str) -> None:
    """Count the CPU time of calls of a function, but for those within another that is counted.

    What the lane does is the work of functions that are counted inline elsewhere.
    """
    _count(owner, name, time.thread_time, "export_s")


def _time(owner: Any, name: str) -> None:
    """Count how long calls of a function take, but for those within another that is counted."""
    _count(owner, name, time.perf_counter, "inline_s")


def _count(owner: Any, name: str, clock: Callable[[], float], to: str) -> None:
    function: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if _watch.inside:
            return function(*args, **kwargs)
        _watch.inside = True
        began = clock()
        try:
            return function(*args, **kwargs)
        finally:
            setattr(_spent, to, getattr(_spent, to) + clock() - began)
            _watch.inside = False

    setattr(owner, name, timed)
