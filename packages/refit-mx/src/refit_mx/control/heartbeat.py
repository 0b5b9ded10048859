"""`Heartbeat`: keeps a worker registered, and marks it STALE when the process stops.

The worker becomes STALE on close, at interpreter exit and on SIGTERM. A signal handler may
interrupt the main thread anywhere, so it must not take a lock that other code takes. It writes a
byte to a socket, the heartbeat's thread makes the call, and the handler waits for a bounded time.
The heartbeat has a separate connection, because the interrupted main thread may hold the lock of
any other connection, and releases it only after the handler has returned.
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
from types import FrameType

from refit_mx.closing import Closeable
from refit_mx.control.client import ControlClient
from refit_mx.control.records import WorkerRole
from refit_mx.errors import RefitConfigError, RefitError

_STALE_TIMEOUT_S = 2.0


class Heartbeat(Closeable):
    """Registration of a worker, renewed every third of its time to live until closed.

    The client is cloned for a separate connection. The caller must choose a ``worker_id`` that no
    earlier process used: the id of a STALE worker cannot be registered again.

    With ``on_sigterm``, SIGTERM marks the worker STALE before the previous handler runs. Python
    sets handlers only in the main thread: if the process creates no heartbeat there, the worker
    expires instead.

    Raises:
        RefitConfigError: ``ttl_s`` is less than 1.
        RefitError: the first registration failed.
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
        self._client = client.clone()
        self._role = role
        self._model_name = model_name
        self._ttl_s = ttl_s
        self._pid = os.getpid()
        self.stale_by_sigterm = False
        """True if SIGTERM made the worker STALE; the process may handle the signal and continue."""
        try:
            self.renew()
        except BaseException:  # disconnect also on an interrupt
            self._client.close()
            raise
        # A renewal that hangs must leave time for another renewal before the worker expires.
        self._client.rpc_timeout_s = min(self._client.rpc_timeout_s, ttl_s / 3)
        self._stop_writer, self._stop_reader = socket.socketpair()
        self._done = _thread.allocate_lock()
        self._done.acquire()
        self._closed = False
        self._thread = threading.Thread(
            target=self._beat, name=f"refit-heartbeat-{worker_id}", daemon=True
        )
        self._thread.start()
        atexit.register(self.close)
        if on_sigterm:
            _sigterm_heartbeats.append(self)
            _chain_sigterm()

    def renew(self, client: ControlClient | None = None) -> None:
        """Register now, before the next beat, for a control plane that forgot the worker.

        Without a ``client``, the heartbeat's is used.

        Raises:
            RefitError: the registration failed.
        """
        (client or self._client).register_worker(
            self.worker_id, self._role, self._model_name, ttl_s=self._ttl_s
        )

    def close(self) -> None:
        """Mark the worker STALE and stop, within a few seconds. May be called again."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self in _sigterm_heartbeats:
            _sigterm_heartbeats.remove(self)
        self._signal_stop()
        self._thread.join(2 * _STALE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._stop_writer.close()
            self._stop_reader.close()
        self._client.close()

    def _signal_stop(self) -> None:
        # The socket is closed if the thread has stopped already.
        with contextlib.suppress(OSError):
            os.write(self._stop_writer.fileno(), b"x")

    def _beat(self) -> None:
        pause_s = self._ttl_s / 3
        # Not `select`: it fails for descriptors from 1,024 on.
        stop = select.poll()
        stop.register(self._stop_reader, select.POLLIN)
        while not stop.poll(pause_s * 1000):
            pause_s = self._ttl_s / 3
            try:
                self.renew()
            except RefitError:
                pause_s = min(self._ttl_s / 10, 1.0)  # retry soon, while the worker lives
        try:
            # If the call fails, the worker expires.
            with contextlib.suppress(RefitError):
                self._client.mark_stale(
                    self.worker_id, self._role, self._model_name, timeout_s=_STALE_TIMEOUT_S
                )
        finally:
            self._done.release()


_sigterm_heartbeats: list[Heartbeat] = []
_Handler = Callable[[int, FrameType | None], object] | int | None
_previous_handler: _Handler = None


def _chain_sigterm() -> None:
    global _previous_handler
    if threading.current_thread() is not threading.main_thread():
        return
    current = signal.getsignal(signal.SIGTERM)
    # A process that ignores the signal continues; a handler set outside Python cannot be chained.
    if current in (_on_sigterm, signal.SIG_IGN, None):
        return
    _previous_handler = current
    signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    heartbeats = [each for each in _sigterm_heartbeats if each._pid == os.getpid()]
    for each in heartbeats:
        each.stale_by_sigterm = True
        each._signal_stop()
    until = time.monotonic() + _STALE_TIMEOUT_S
    for each in heartbeats:
        if each._done.acquire(timeout=max(0.0, until - time.monotonic())):
            each._done.release()
    if callable(_previous_handler):
        _previous_handler(number, frame)
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
