"""`Heartbeat`: keeps a worker registered, and says STALE when the process stops.

It says so on close, at the interpreter's exit and on SIGTERM. A signal handler may run in the
middle of anything that the main thread does, so it takes no lock that others take: it writes a byte
to a socket, the heartbeat's own thread makes the call, and the handler waits for it a bounded time.
For the same reason the heartbeat has a connection of its own: the main thread may hold the lock of
any other, and goes on only after the handler.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

from refit_mx.control.client import ControlClient
from refit_mx.control.records import WorkerRole
from refit_mx.errors import ControlError, ControlUnavailableError, RefitConfigError, RefitError

_STALE_TIMEOUT_S = 2.0


class Heartbeat:
    """Registers a worker, and renews it every third of its time to live until closed.

    Args:
        client: of the control plane; the heartbeat connects again, as it did.
        worker_id: new with every process.
        role: what the worker does.
        model_name: of the weights.
        ttl_s: after which the worker is taken for dead if nothing is heard.
        on_sigterm: say STALE on SIGTERM, before what was to happen on it. The handler for that is
            set only in the main thread, as Python demands; where none of the process's heartbeats
            was made there, the worker lapses by itself.

    Raises:
        RefitConfigError: ``ttl_s`` is less than 1.
        RefitError: whatever the first registration raises.
    """

    def __init__(
        self,
        client: ControlClient,
        worker_id: str,
        role: WorkerRole,
        model_name: str,
        *,
        ttl_s: float = 10.0,
        on_sigterm: bool = True,
    ) -> None:
        if ttl_s < 1:
            raise RefitConfigError(f"ttl_s {ttl_s:g}; expected at least 1, the protocol's unit")
        self.worker_id = worker_id
        self._client = client.another()
        self._role = role
        self._model_name = model_name
        self._ttl_s = ttl_s
        self._pid = os.getpid()
        self._error: RefitError | None = None
        self._refused = False
        self._signalled = False
        asked = time.monotonic()
        try:
            self._client.register_worker(worker_id, role, model_name, ttl_s=ttl_s)
        except BaseException:
            self._client.close()
            raise
        self._until = asked + ttl_s
        self._wake, self._woken = socket.socketpair()
        self._done = _thread.allocate_lock()
        self._done.acquire()
        self._closed = False
        self._thread = threading.Thread(
            target=self._beat, name=f"refit-heartbeat-{worker_id}", daemon=True
        )
        self._thread.start()
        atexit.register(self.close)
        if on_sigterm:
            _told_of_sigterm.append(self)
            _chain_sigterm()

    @property
    def is_live(self) -> bool:
        """Whether the control plane is sure to take the worker for alive."""
        return not self._closed and not self._refused and time.monotonic() < self._until

    @property
    def said_stale_on_sigterm(self) -> bool:
        """Whether a SIGTERM ended it, in a process that handles the signal and goes on."""
        return self._signalled

    @property
    def error(self) -> RefitError | None:
        """Why the last renewal failed; None if it did not."""
        return self._error

    def renew(self, client: ControlClient | None = None) -> None:
        """Register now, not only with the next beat: a control plane that forgot the worker knows
        it again.

        Args:
            client: that asks; None for the heartbeat's own.

        Raises:
            RefitError: whatever the registration raises.
        """
        asked = time.monotonic()
        try:
            (client or self._client).register_worker(
                self.worker_id, self._role, self._model_name, ttl_s=self._ttl_s
            )
        except RefitError as error:
            self._error = error
            self._refused = isinstance(error, ControlError) and not isinstance(
                error, ControlUnavailableError
            )
            raise
        self._error, self._refused = None, False
        self._until = asked + self._ttl_s

    def close(self) -> None:
        """Say STALE, and stop. Takes at most a few seconds; may be called again."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self in _told_of_sigterm:
            _told_of_sigterm.remove(self)
        self._ask_to_stop()
        self._thread.join(2 * _STALE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._wake.close()
            self._woken.close()
        self._client.close()

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ask_to_stop(self) -> None:
        # An error says that it has stopped already.
        with contextlib.suppress(OSError):
            os.write(self._wake.fileno(), b"x")

    def _beat(self) -> None:
        pause_s = self._ttl_s / 3
        # Not `select`, which takes no descriptor from 1,024 on.
        woken = select.poll()
        woken.register(self._woken, select.POLLIN)
        while not woken.poll(pause_s * 1000):
            pause_s = self._ttl_s / 3
            try:
                self.renew()
            except RefitError:
                pause_s = min(pause_s, 1.0)
        try:
            self._client.mark_stale(
                self.worker_id, self._role, self._model_name, timeout_s=_STALE_TIMEOUT_S
            )
        except RefitError as error:
            self._error = error
        finally:
            self._done.release()


_told_of_sigterm: list[Heartbeat] = []
_Handler = Callable[[int, FrameType | None], object] | int | None
_earlier: _Handler = None


def _chain_sigterm() -> None:
    global _earlier
    if threading.current_thread() is not threading.main_thread():
        return
    current = signal.getsignal(signal.SIGTERM)
    # A process that ignores the signal goes on; a handler that is not Python's cannot be chained.
    if current in (_on_sigterm, signal.SIG_IGN, None):
        return
    _earlier = current
    signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    mine = [each for each in _told_of_sigterm if each._pid == os.getpid()]
    for each in mine:
        each._signalled = True
        each._ask_to_stop()
    until = time.monotonic() + _STALE_TIMEOUT_S
    for each in mine:
        if each._done.acquire(timeout=max(0.0, until - time.monotonic())):
            each._done.release()
    if callable(_earlier):
        _earlier(number, frame)
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
