"""`Tracking`: the metric sinks of a run, which cannot stop or delay it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Full, Queue
from threading import Lock, Thread
from types import TracebackType
from typing import Any  # Any: metrics of a step, configurations as plain data

from grpo_trainer.config.loading import TrainerConfig
from grpo_trainer.report.metric_sinks import SINKS, MetricSink, Status, TrackedRun

_MAX_PENDING = 1000
_CLOSE_S = 10.0
_PRIVATE = (
    ("policy", "generation", "arguments"),
    ("policy", "generation", "command"),
    ("policy", "generation", "environment"),
    ("tracing", "endpoint"),
)
"""Keys whose values may contain credentials, such as ``--api-key`` or a password in a URL."""


class Tracking:
    """The sinks of a run while it runs, as a context manager.

    Each sink has its own thread. A sink that fails, or that is a thousand steps behind, is reported
    once and gets no more metrics. The end of the run waits up to 10 s for the sinks.

    Args:
        sinks: the sinks by name.
        config: the run's configuration.
        last_step: the number of the run's last step.
        notice: function that shows a line to the user, from any thread.
    """

    def __init__(
        self,
        sinks: Mapping[str, MetricSink],
        config: Mapping[str, Any],
        *,
        last_step: int,
        notice: Callable[[str], None],
    ) -> None:
        self._sinks = [_SinkThread(name, sink, notice) for name, sink in sinks.items()]
        self._last_step = last_step
        self._step = 0
        for each in self._sinks:
            each.call(lambda sink: sink.start(config))

    def log(self, record: Mapping[str, Any]) -> None:
        """Send the metrics of a step; ``record`` has the number of the step as ``step``."""
        self._step = step = record["step"]
        metrics = dict(_numbers(record))
        for each in self._sinks:
            each.call(lambda sink: sink.log(step, metrics))

    def __enter__(self) -> Tracking:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        status: Status = "finished" if self._step >= self._last_step else "stopped"
        if kind is not None:
            status = "failed"
        for each in self._sinks:
            each.call(lambda sink: sink.close(status), last=True)
        deadline = time.monotonic() + _CLOSE_S
        for each in self._sinks:
            each.join(max(0.0, deadline - time.monotonic()))


class _SinkThread:
    """A thread that makes the calls of one sink, in order."""

    def __init__(self, name: str, sink: MetricSink, notice: Callable[[str], None]) -> None:
        self._name, self._sink, self._notice = name, sink, notice
        self._calls: Queue[tuple[Callable[[MetricSink], None], bool]] = Queue(_MAX_PENDING)
        self._lock = Lock()
        self._failed = False
        # Not joined at the exit of the process: a library may wait for a network forever.
        self._thread = Thread(target=self._make_calls, name=f"metrics-{name}", daemon=True)
        self._thread.start()

    def call(self, call: Callable[[MetricSink], None], *, last: bool = False) -> None:
        """Queue a call for the thread; after a failure, do nothing."""
        if not self._failed:
            try:
                self._calls.put_nowait((call, last))
            except Full:
                self._fail(f"it is {_MAX_PENDING} steps behind")

    def join(self, timeout_s: float) -> None:
        """Wait for the last call."""
        self._thread.join(0.0 if self._failed else timeout_s)
        if self._thread.is_alive():
            self._fail(f"it did not end within {_CLOSE_S:g} s")

    def _make_calls(self) -> None:
        last = False
        while not (last or self._failed):
            call, last = self._calls.get()
            try:
                call(self._sink)
            except Exception as error:  # noqa: BLE001  # a library may raise anything
                self._fail(" ".join(f"{type(error).__name__}: {error}".split()))

    def _fail(self, reason: str) -> None:
        with self._lock:
            first, self._failed = not self._failed, True
        if first:
            self._notice(f"tracking.sinks: {self._name} failed: {reason}; it gets no more metrics")


def tracking_of(
    config: TrainerConfig, folder: Path, done_steps: int, notice: Callable[[str], None]
) -> Tracking:
    """Return the tracking of a run; `_PRIVATE` keys of its configuration are not sent to the sinks.

    ``done_steps`` were completed before a resume; ``notice`` is called from any thread.
    """
    run = TrackedRun(config.run.name, folder, done_steps)
    return Tracking(
        {name: SINKS[name](run) for name in config.tracking.sinks},
        public_config(config),
        last_step=config.grpo.num_steps,
        notice=notice,
    )


def public_config(config: TrainerConfig) -> dict[str, Any]:
    """Return a run's configuration without the `_PRIVATE` keys."""
    shown = config.model_dump(mode="json")
    for *sections, key in _PRIVATE:
        section = shown
        for name in sections:
            section = section[name]
        section.pop(key, None)
    return shown


def _numbers(record: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the numbers of a step's record; numbers in a mapping get its name as a prefix."""
    numbers: list[tuple[str, float]] = []
    for name, value in record.items():
        if isinstance(value, Mapping):
            numbers += [(f"{name}/{key}", float(number)) for key, number in value.items()]
        elif name != "step":
            numbers.append((name, float(value)))
    return numbers
