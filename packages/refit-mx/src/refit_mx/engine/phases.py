"""The phases of a weight update, and which step may follow which.

```
IDLE -- init --> INITIALISED -- start --> UPDATING -- receive --> RECEIVED -- finish --> INITIALISED
```

A step in the wrong phase raises and changes nothing. A step that fails ends the update: the old
version is served on, or, where live weights were touched, the worker is fenced until an update
succeeds. So a caller never has to guess what a worker holds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from refit_mx.errors import FencedError, PhaseError


class Phase(Enum):
    """Where a worker stands."""

    IDLE = "idle"
    INITIALISED = "initialised"
    UPDATING = "updating"
    RECEIVED = "received"
    CLOSED = "closed"


class Step(Enum):
    """What a worker can be asked to do."""

    INIT = "init_transfer_engine"
    START = "start_weight_update"
    RECEIVE = "receive_weights"
    FINISH = "finish_weight_update"
    ABORT = "abort_weight_update"
    SHUTDOWN = "shutdown"


_ALLOWED: dict[Step, frozenset[Phase]] = {
    Step.INIT: frozenset({Phase.IDLE}),
    Step.START: frozenset({Phase.INITIALISED}),
    Step.RECEIVE: frozenset({Phase.UPDATING}),
    Step.FINISH: frozenset({Phase.RECEIVED}),
    # Also where there is nothing to abort: some workers of a server may have failed already.
    Step.ABORT: frozenset({Phase.INITIALISED, Phase.UPDATING, Phase.RECEIVED}),
    Step.SHUTDOWN: frozenset(Phase),
}
_AFTER: dict[Step, Phase] = {
    Step.INIT: Phase.INITIALISED,
    Step.START: Phase.UPDATING,
    Step.RECEIVE: Phase.RECEIVED,
    Step.FINISH: Phase.INITIALISED,
    Step.ABORT: Phase.INITIALISED,
    Step.SHUTDOWN: Phase.CLOSED,
}
_AFTER_FAILURE: dict[Step, Phase] = {
    Step.INIT: Phase.IDLE,
    Step.START: Phase.INITIALISED,
    Step.RECEIVE: Phase.INITIALISED,
    Step.FINISH: Phase.INITIALISED,
    Step.ABORT: Phase.INITIALISED,
    Step.SHUTDOWN: Phase.CLOSED,
}


class UpdatePhases:
    """The phase of one worker. Steps of several threads are refused, not interleaved."""

    def __init__(self) -> None:
        self._phase = Phase.IDLE
        self._step: Step | None = None
        self._fenced: str | None = None
        self._touching = False
        self._lock = threading.Lock()

    @property
    def phase(self) -> Phase:
        """Where the worker stands; during a step, where it stood before."""
        return self._phase

    @property
    def fenced(self) -> str | None:
        """Why the worker must not serve; None if it may."""
        return self._fenced

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """Take a step: its work is the body, and the phase changes when that ends.

        Raises:
            PhaseError: the step is not allowed now, or another one is under way. Nothing changed.
        """
        with self._lock:
            if self._step is not None:
                raise PhaseError(
                    f"{step.value}: {self._step.value} is under way; wait until it has returned"
                )
            if self._phase not in _ALLOWED[step]:
                raise PhaseError(
                    f"{step.value}: the worker is {self._phase.value}; "
                    f"expected {' or '.join(sorted(p.value for p in _ALLOWED[step]))}"
                )
            self._step = step
            self._touching = False
        try:
            yield
        except BaseException as error:
            with self._lock:
                self._phase = _AFTER_FAILURE[step]
                if self._touching:
                    self._fenced = f"{step.value} failed half way: {type(error).__name__}: {error}"
                self._step = None
            raise
        with self._lock:
            self._phase = _AFTER[step]
            if self._touching:
                self._fenced = None
            self._step = None

    def check(self) -> None:
        """See that the worker may serve.

        Raises:
            PhaseError: a step is under way, or the worker is closed.
            FencedError: the live weights are a mixture.
        """
        with self._lock:
            if self._step is not None or self._phase is Phase.CLOSED:
                now = f"in {self._step.value}" if self._step is not None else self._phase.value
                raise PhaseError(f"check: the worker is {now}")
            if self._fenced is not None:
                raise FencedError(f"{self._fenced}; the worker must not serve")

    def touch_live_weights(self) -> None:
        """Say that live weights change from here on: if the step fails now, the worker is fenced.

        Raises:
            PhaseError: no step is under way.
        """
        with self._lock:
            if self._step is None:
                raise PhaseError("live weights change only within a step")
            self._touching = True
