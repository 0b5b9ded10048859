"""Connections to the data plane."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dataplane_core import (
    ConfigError,
    DataPlaneClient,
    DataPlaneError,
    StoreInspector,
    UnavailableError,
)

if TYPE_CHECKING:
    from dataplane_tq import QueueInspector

_PLANE = {"enabled": True, "impl": "transfer_queue"}
_CONNECT_S = 3.0
_MAX_REASON = 500
_USE_SAME_VERSIONS = "run the admin service with the Ray version and the Python 3.x of the cluster"
_SIGACTION_BYTES = 512
"""Upper bound of the size of libc's ``struct sigaction`` on any platform."""


class Connector(Protocol):
    """Connector to one data plane."""

    source: str
    """Human-readable name of the data plane."""

    def connect(self) -> StoreInspector:
        """Connect. Raises DataPlaneError with one sentence on why that failed."""

    def disconnect(self) -> None:
        """Disconnect, so that `connect` starts anew. Safe without a connection."""


class LocalConnector:
    """Connector to a data plane of this process. The caller closes the inspector."""

    def __init__(self, inspector: StoreInspector, source: str = "") -> None:
        self._inspector = inspector
        self.source = source or type(inspector).__name__

    def connect(self) -> StoreInspector:
        return self._inspector

    def disconnect(self) -> None:
        pass


class RayConnector:
    """Connector to the data plane of a Ray cluster, or to a TransferQueue of another program.

    ``address`` is the address of the cluster for `ray.init`; ``auto`` is the cluster on this
    machine.
    """

    def __init__(self, address: str, *, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._client: DataPlaneClient | QueueInspector | None = None
        self._joined = False
        self.source = f"Ray at {address}"

    def connect(self) -> StoreInspector:
        _prepare_environment()  # Ray reads it on import
        try:
            import ray

            from dataplane_core import build_data_plane_client
            from dataplane_tq import QueueInspector
        except ImportError:
            raise UnavailableError(
                "Ray is not installed; to inspect a data plane on Ray, install dataplane-admin[ray]"
            ) from None
        # When a cluster ends, Ray ends every process that has joined it. So a separate process
        # looks for the queue, and this one joins only while it attaches to a data plane.
        try:
            _check_listener(self._address)
            queue = self._client = QueueInspector(self._address, timeout_s=self._timeout_s)
            return queue
        except ConfigError:
            pass  # a data plane, not another program's queue
        except (UnavailableError, OSError) as error:
            raise self._unavailable(error) from None
        if not ray.is_initialized():
            self._join()
        try:
            timeout_ms = max(1, int(self._timeout_s * 1000))
            client = build_data_plane_client(
                {**_PLANE, "ack_timeout_ms": timeout_ms}, bootstrap=False
            )
            self._client = client
            return client.inspector
        finally:
            self._leave()  # queries go to the data plane's directory

    def disconnect(self) -> None:
        if self._client is not None:
            with contextlib.suppress(DataPlaneError, OSError):
                self._client.close()
            self._client = None

    def _join(self) -> None:
        from dataplane_tq import join_ray

        self._joined = True
        try:
            with _sigterm_restored():
                join_ray(
                    self._address,
                    namespace="dataplane-admin",
                    logging_level="ERROR",
                    log_to_driver=False,
                )
        except (RuntimeError, OSError, ValueError, OverflowError) as error:
            self._leave()
            raise self._unavailable(error) from None

    def _unavailable(self, error: Exception) -> UnavailableError:
        sentence = f"no Ray cluster at {self._address!r}: "
        reason = one_line(error).removeprefix(sentence)
        if "Version mismatch" in reason:
            return UnavailableError(f"{_USE_SAME_VERSIONS} at {self._address!r}: {reason}")
        if isinstance(error, UnavailableError) and not str(error).startswith(sentence):
            return UnavailableError(reason)
        return UnavailableError(f"{sentence}{reason}")

    def _leave(self) -> None:
        """Leave the cluster if `_join` joined it."""
        import ray

        if self._joined:
            self._joined = False
            with _sigterm_restored():
                ray.shutdown()


def one_line(error: Exception) -> str:
    """Return an error's message as one line of bounded length.

    Ray's messages have details below their first line, such as two versions that differ.
    """
    text = " ".join(str(error).split())
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}…"


@contextlib.contextmanager
def _sigterm_restored() -> Iterator[None]:
    """Restore this process's SIGTERM action afterwards.

    When Ray's libraries start, they replace it with an action that exits with a stack trace; when
    they stop, they replace it again. Python can set signals only in the main thread, and this may
    be another thread: hence libc.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    action = ctypes.create_string_buffer(_SIGACTION_BYTES)
    is_saved = libc.sigaction(signal.SIGTERM, None, action) == 0
    try:
        yield
    finally:
        if is_saved:
            libc.sigaction(signal.SIGTERM, action, None)


def _check_listener(address: str) -> None:
    """Raise OSError if nothing listens at the address: Ray needs a minute to report that."""
    host, colon, port = address.rpartition(":")
    if colon and "/" not in address and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()


def _prepare_environment() -> None:
    """Set Ray's options for this process and those that it starts.

    Ray sends this user's stored token, as it does by default for ``auto`` only. Clusters require a
    token by default since Ray 2.60; older clusters ignore it.
    """
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    # By default Ray refuses another patch release of Python, too.
    os.environ.setdefault("RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL", "minor")
    names = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    stored = Path.home() / ".ray" / "auth_token"
    if any(os.environ.get(name) for name in names) or stored.is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
