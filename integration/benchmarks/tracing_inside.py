"""Seconds that a process spends in tracing code, measured inside it while real steps run.

Equal steps differ by several percent, and tracing costs less than that. So the difference of two
steps says little, unless there are hundreds of them. Instead the calls into tracing are timed
between a step's own work, with the caches that it leaves. In a tight loop the same calls take a
fifth of the time. Imports internals: it times the functions that trace.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from opentelemetry.sdk.trace import Span, Tracer

from dataplane_core import telemetry
from observability import actors
from observability.middleware import lifecycle, observed_client
from observability.middleware.lifecycle import Lifecycle
from observability.middleware.meters import Meters
from observability.middleware.metrics import Totals
from observability.middleware.tracing import Tracing
from observability.setup.export import (
    CountedLogExporter,
    CountedMetricExporter,
    CountedSpanExporter,
)


@dataclass
class Spent:
    """Time that a process has spent since `watch` or the last `take`.

    Attributes:
        inline_s: wall time of calls into tracing, in the threads of the step's work.
        export_s: CPU time of encoding and sending, in the background.
    """

    inline_s: float = 0.0
    export_s: float = 0.0


class _Watch(threading.local):
    inside = False


_watch = _Watch()
_spent = Spent()
_watched = False


def watch() -> None:
    """Start to time calls into tracing in this process."""
    global _watched
    if _watched:
        return
    _watched = True
    for owner in (Tracing, Lifecycle, Meters, Totals):
        for name in ("begin", "end"):
            _time(owner, name)
    for owner, names in (
        (observed_client, ("_bytes_by_field", "_bytes_by_column")),
        (telemetry, ("extract", "inject")),
        (actors, ("inject",)),
        (telemetry.context, ("attach", "detach")),
        (Tracer, ("start_span",)),
        (Span, ("end", "set_attribute", "set_attributes")),
    ):
        for name in names:
            _time(owner, name)
    _time(lifecycle, "emit")
    worker = sys.modules.get("grpo_trainer.policy.worker")
    if worker is not None:
        _time(worker, "record_trained")
    for exporter in (CountedSpanExporter, CountedLogExporter, CountedMetricExporter):
        _count(exporter, "export", time.thread_time, "export_s")


def take() -> Spent:
    """Return the time spent in this process, and reset it."""
    global _spent
    taken, _spent = _spent, Spent()
    return taken


def _time(owner: Any, name: str) -> None:
    """Time the calls of a function, except for calls inside another timed call."""
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
