"""Calls from the driver to the run's actors, each with a deadline.

The death of one actor ends a call to several actors, unless the caller collects the errors. All
data between the driver and an actor passes through here, so a test can measure its size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any  # Any: arguments and results of remote methods

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from dataplane_core.deadlines import call_within
from grpo_trainer.actors.blocked import AwaitedColumns, report_while_blocked
from grpo_trainer.errors import TrainerError, WorkerError, first_line

_PROBE_S = 2.0
_KILL_S = 5.0
_FETCH_S = 5.0
_POLL_S = 0.2

Observer = Callable[[str, str, Any], None]
"""Callback that gets the actor's name, "sent" or "received", and the value."""


class ActorCalls:
    """The run's actors by name.

    Args:
        timeout_s: deadline of a call, in seconds.
        observer: called with each value that is sent or received; for measurements.
        quiet_s: seconds of blocking that are normal for these actors; shorter waits are not
            reported.

    Attributes:
        actors: the Ray handle of each actor; callers add to it.
    """

    def __init__(
        self, *, timeout_s: float, observer: Observer | None = None, quiet_s: float = 0.0
    ) -> None:
        self._timeout_s = timeout_s
        self._observer = observer
        self._quiet_s = quiet_s
        self.actors: dict[str, Any] = {}

    def remove(self, name: str) -> None:
        """Kill an actor and forget it."""
        with suppress(TimeoutError):  # Ray hangs: the actor ends with the driver
            call_within(_KILL_S, partial(ray.kill, self.actors.pop(name)))

    def is_dead(self, name: str) -> bool:
        """Return whether an actor is known to be dead; False if it does not answer soon."""
        return self._answers(name) is False

    def is_alive(self, name: str) -> bool:
        """Return whether an actor has started and answers soon."""
        return self._answers(name) is True

    def _answers(self, name: str) -> bool | None:
        """Return True for an actor that answers, False for a dead one, None for a silent one."""
        try:
            probe = call_within(_PROBE_S, self.actors[name].__ray_ready__.remote)
            if not _ready([probe], 1, _PROBE_S):
                return None
            call_within(_PROBE_S, partial(ray.get, probe))
        except TimeoutError:
            return None
        except RayActorError:
            return False
        return True

    def call(self, name: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of one actor and return its result; the errors are those of `each`."""
        return self.each(method, {name: (args, kwargs)})[name]

    def each(
        self,
        method: str,
        calls: Mapping[str, tuple[tuple[Any, ...], Mapping[str, Any]]],
        *,
        awaited: AwaitedColumns | None = None,
        while_waiting: Callable[[], None] | None = None,
        timeout_s: float | None = None,
        errors: dict[str, WorkerError] | None = None,
    ) -> dict[str, Any]:
        """Call a method of several actors at once; report calls that block.

        Args:
            method: the method's name.
            calls: actor name to positional and keyword arguments.
            awaited: the columns that the call writes; a report of the blocked call names them.
            while_waiting: called several times a second until all have answered; its errors end the
                wait.
            timeout_s: deadline of the call, in seconds; None is the constructor's ``timeout_s``.
            errors: collects the errors of actors that died or failed, which are then not raised.

        Returns:
            Actor name to result.

        Raises:
            WorkerError: naming the actor that died, failed or did not answer. The other calls are
                abandoned: they may be blocked on the dead actor. With ``errors``, it is raised only
                if an actor did not answer.
        """

        def send() -> dict[Any, str]:
            return {
                getattr(self.actors[name], method).remote(*args, **kwargs): name
                for name, (args, kwargs) in calls.items()
            }

        for name, (args, kwargs) in calls.items():
            self._observe(name, "sent", (args, dict(kwargs)))
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        with ExitStack() as stack:
            waiting = {
                name: stack.enter_context(
                    report_while_blocked(f"{name}: {method}", awaited, quiet_s=self._quiet_s)
                )
                for name in calls
            }
            try:
                pending = call_within(limit_s, send)
                return self._gather(
                    method, pending, waiting, deadline, limit_s, while_waiting, errors
                )
            except TimeoutError:
                # No actor is at fault: a hung raylet blocks every process that stores or
                # fetches a value.
                raise WorkerError(
                    f"{method}: Ray did not answer in {limit_s:g} s; check this machine's raylet"
                ) from None

    def _gather(
        self,
        method: str,
        pending: dict[Any, str],
        waiting: Mapping[str, Callable[[], None]],
        deadline: float,
        timeout_s: float,
        while_waiting: Callable[[], None] | None,
        errors: dict[str, WorkerError] | None,
    ) -> dict[str, Any]:
        order = list(pending.values())
        results: dict[str, Any] = {}
        while pending:
            remaining = max(0.0, deadline - time.monotonic())
            pause = remaining if while_waiting is None else min(_POLL_S, remaining)
            done = _ready(list(pending), 1, pause)
            if not done and while_waiting is not None and pause < remaining:
                while_waiting()
                continue
            if not done:
                late = ", ".join(sorted(pending.values()))
                self._check_alive(method)
                raise WorkerError(f"{method}: no answer from {late} in {timeout_s:g} s")
            for reference in done:
                name = pending.pop(reference)
                waiting[name]()
                try:
                    results[name] = self._result(name, method, reference, deadline)
                except WorkerError as error:
                    if errors is None:
                        raise
                    errors[name] = error
                else:
                    self._observe(name, "received", results[name])
        return {name: results[name] for name in order if name in results}

    def close(self, name: str, timeout_s: float) -> None:
        """Let a live actor stop what it started; wait for at most ``timeout_s``."""
        handle = self.actors.get(name)
        if handle is not None:
            with suppress(TimeoutError):  # Ray hangs: the actor ends with the driver
                _ready([call_within(_KILL_S, handle.close.remote)], 1, timeout_s)

    def shutdown_telemetry(self, timeout_s: float) -> None:
        """Let every live actor export its telemetry; wait for at most ``timeout_s``."""
        if not self.actors:  # Ray may not have started; a call would start it
            return

        def send() -> list[Any]:
            return [handle.shutdown_telemetry.remote() for handle in self.actors.values()]

        with suppress(TimeoutError):  # Ray hangs: the actors end with the driver
            ending = call_within(_KILL_S, send)
            _ready(ending, len(ending), timeout_s)

    def stop(self) -> None:
        """Kill every actor."""
        for name in list(self.actors):
            self.remove(name)

    def _observe(self, name: str, direction: str, what: Any) -> None:
        if self._observer is not None:
            self._observer(name, direction, what)

    def _result(self, name: str, method: str, reference: Any, deadline: float) -> Any:
        try:
            # Fetching a ready result takes no time, unless Ray itself hangs.
            remaining = max(_FETCH_S, deadline - time.monotonic())
            return call_within(remaining, partial(ray.get, reference))
        except RayActorError as error:
            raise WorkerError(f"{name} {_death(error, method)}") from error
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
        """Raise `WorkerError` naming a dead actor, if there is one.

        If an actor dies, actors that call it fail too, and their answers can come first.
        """

        def send() -> dict[Any, str]:
            return {handle.__ray_ready__.remote(): name for name, handle in self.actors.items()}

        try:
            probes = call_within(_PROBE_S, send)
        except TimeoutError:  # Ray hangs
            return
        answered = _ready(list(probes), len(probes), _PROBE_S)
        for probe in answered:
            try:
                call_within(_PROBE_S, partial(ray.get, probe))
            except TimeoutError:
                return
            except RayActorError as error:
                raise WorkerError(f"{probes[probe]} {_death(error, method)}") from error


def _ready(references: list[Any], count: int, timeout_s: float) -> list[Any]:
    """Return the references that are ready once ``count`` are, or after ``timeout_s``.

    It returns even if Ray hangs.
    """
    try:
        ready, _ = call_within(
            timeout_s + _PROBE_S,
            lambda: ray.wait(references, num_returns=count, timeout=timeout_s),
        )
    except TimeoutError:
        return []
    return ready


def _death(error: RayActorError, method: str) -> str:
    """Return how an actor ended: "could not start" with the reason, or "died during ``method``"."""
    if error.actor_init_failed:
        # Ray puts the entire stack before the reason.
        return f"could not start: {str(error).strip().splitlines()[-1].strip()}"
    return f"died during {method}: {first_line(error)}"
