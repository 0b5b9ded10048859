"""Calls from the driver to the run's actors: each has a deadline, and a death ends all of them.

Everything that passes between the driver and an actor passes here, which is also what lets a test
measure how little that is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any  # Any: arguments and results of remote methods

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from grpo_trainer.errors import TrainerError, WorkerError
from grpo_trainer.ray_failures import death, first_line
from grpo_trainer.waiting import Awaited, told

_PROBE_S = 2.0

Observer = Callable[[str, str, Any], None]
"""Called with the actor's name, "sent" or "received", and what was."""


class ActorCalls:
    """The run's actors by name.

    Args:
        timeout_s: deadline of a call, in seconds.
        observer: sees what is sent and received; for measurements.
    """

    def __init__(self, *, timeout_s: float, observer: Observer | None = None) -> None:
        self._timeout_s = timeout_s
        self._observer = observer
        self._actors: dict[str, Any] = {}

    def add(self, name: str, handle: Any) -> None:
        """Name an actor."""
        self._actors[name] = handle

    def handle(self, name: str) -> Any:
        """The Ray handle of an actor."""
        return self._actors[name]

    @property
    def names(self) -> list[str]:
        """The names of all actors, in the order of `handles`."""
        return list(self._actors)

    @property
    def handles(self) -> list[Any]:
        """The Ray handles of all actors."""
        return list(self._actors.values())

    def one(self, name: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of one actor and return its result; errors as `each`."""
        return self.each(method, {name: (args, kwargs)})[name]

    def each(
        self,
        method: str,
        calls: Mapping[str, tuple[tuple[Any, ...], Mapping[str, Any]]],
        *,
        awaited: Awaited | None = None,
    ) -> dict[str, Any]:
        """Call a method of several actors at once. What takes long is told, see `waits`.

        Args:
            method: the method's name.
            calls: actor name to positional and keyword arguments.
            awaited: what the call is to bring about, for whoever asks what it waits for.

        Returns:
            Actor name to result.

        Raises:
            WorkerError: naming the actor that died, failed or did not answer. The other calls are
                not waited for: they may be waiting for the one that died.
        """
        pending: dict[Any, str] = {}
        for name, (args, kwargs) in calls.items():
            self._observe(name, "sent", (args, dict(kwargs)))
            pending[getattr(self._actors[name], method).remote(*args, **kwargs)] = name
        with ExitStack() as stack:
            waiting = {
                name: stack.enter_context(told(f"{name}: {method}", awaited)) for name in calls
            }
            return self._gather(method, calls, pending, waiting)

    def _gather(
        self,
        method: str,
        calls: Iterable[str],
        pending: dict[Any, str],
        waiting: Mapping[str, Callable[[], None]],
    ) -> dict[str, Any]:
        results: dict[str, Any] = {}
        deadline = time.monotonic() + self._timeout_s
        while pending:
            remaining = max(0.0, deadline - time.monotonic())
            done, _ = ray.wait(list(pending), num_returns=1, timeout=remaining)
            if not done:
                late = ", ".join(sorted(pending.values()))
                self._check_alive(method)
                raise WorkerError(f"{method}: no answer from {late} in {self._timeout_s:g} s")
            for reference in done:
                name = pending.pop(reference)
                waiting[name]()
                results[name] = self._result(name, method, reference)
                self._observe(name, "received", results[name])
        return {name: results[name] for name in calls}

    def end_reports(self, timeout_s: float) -> None:
        """Let every actor that lives send its telemetry, not longer than ``timeout_s``."""
        ending = [handle.end_reports.remote() for handle in self._actors.values()]
        ray.wait(ending, num_returns=len(ending), timeout=timeout_s)

    def stop(self) -> None:
        """Kill every actor."""
        for handle in self._actors.values():
            ray.kill(handle)
        self._actors.clear()

    def _observe(self, name: str, direction: str, what: Any) -> None:
        if self._observer is not None:
            self._observer(name, direction, what)

    def _result(self, name: str, method: str, reference: Any) -> Any:
        try:
            return ray.get(reference)
        except RayActorError as error:
            raise WorkerError(f"{name} {death(error, method)}") from error
        except RayTaskError as error:
            self._check_alive(method)
            cause = error.cause
            if isinstance(cause, TrainerError):
                raise WorkerError(f"{name}: {cause}") from error
            raise WorkerError(
                f"{name}: {method} failed: {type(cause).__name__}: {first_line(cause)}"
            ) from error
        except RayError as error:
            raise WorkerError(f"{name}: {method}: {first_line(error)}") from error

    def _check_alive(self, method: str) -> None:
        """Raise `WorkerError` naming an actor that is dead, if one is.

        When one dies, others fail because they talk to it, and their answers can come first.
        """
        probes = {handle.__ray_ready__.remote(): name for name, handle in self._actors.items()}
        answered, _ = ray.wait(list(probes), num_returns=len(probes), timeout=_PROBE_S)
        for probe in answered:
            try:
                ray.get(probe)
            except RayActorError as error:
                raise WorkerError(f"{probes[probe]} {death(error, method)}") from error
