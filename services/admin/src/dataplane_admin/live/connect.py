"""How the data plane is reached, and reached again after it went away."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, cast

from dataplane_core import DataPlaneClient, DataPlaneError, DataPlaneInspector, UnavailableError

_PLANE = {
    # An attached client sizes nothing: what the running store is made of is its own affair.
    "enabled": True,
    "impl": "transfer_queue",
    "backend": "simple",
    "storage_capacity": 1,
    "num_storage_units": 1,
    "claim_meta_poll_interval_s": 1.0,
    "global_segment_size": 1,
    "local_buffer_size": 1,
}
_KNOCK_S = 3.0
_MOST_REASON = 500
_SIGACTION_BYTES = 512
"""More than the structure has on any platform."""


class Connector(Protocol):
    """Reaches one data plane."""

    source: str
    """What is reached, for people."""

    def connect(self) -> DataPlaneInspector:
        """Reach it. Raises DataPlaneError with a sentence that says why it cannot be reached."""

    def disconnect(self) -> None:
        """Let go of it, so that `connect` starts anew. Nothing to let go of is fine."""


class Given:
    """A data plane of this process, which its owner closes."""

    def __init__(self, inspector: DataPlaneInspector, source: str = "") -> None:
        self._inspector = inspector
        self.source = source or type(inspector).__name__

    def connect(self) -> DataPlaneInspector:
        return self._inspector

    def disconnect(self) -> None:
        pass


class OnRay:
    """The data plane of a Ray cluster.

    Args:
        address: of the cluster, as `ray.init` takes it; ``auto`` for the one on this machine.
        timeout_s: deadline of one question, in seconds.
    """

    def __init__(self, address: str, *, timeout_s: float) -> None:
        self._address = address
        self._timeout_ms = max(1, int(timeout_s * 1000))
        self._client: DataPlaneClient | None = None
        self._joined = False
        self.source = f"Ray at {address}"

    def connect(self) -> DataPlaneInspector:
        _bring_token()  # Ray looks for it when it is imported
        try:
            import ray

            from dataplane_core import build_data_plane_client
        except ImportError:
            raise UnavailableError(
                "Ray is not installed; looking into a data plane on Ray needs the extra "
                "dataplane-admin[ray]"
            ) from None
        if not ray.is_initialized():
            self._join()
        try:
            self._client = build_data_plane_client(
                {**_PLANE, "ack_timeout_ms": self._timeout_ms}, bootstrap=False
            )
        finally:
            # Looking asks the directory alone. Ray would end this process with its cluster.
            self._part()
        return cast("DataPlaneInspector", self._client)

    def disconnect(self) -> None:
        if self._client is not None:
            with contextlib.suppress(DataPlaneError, OSError):
                self._client.close()
            self._client = None

    def _join(self) -> None:
        from dataplane_tq import join_ray

        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        self._joined = True
        try:
            _check_listens(self._address)
            with _own_signals():
                join_ray(
                    self._address,
                    namespace="dataplane-admin",
                    logging_level="ERROR",
                    log_to_driver=False,
                )
        except (RuntimeError, OSError, ValueError, OverflowError) as error:
            self._part()
            raise UnavailableError(
                f"no Ray cluster at {self._address!r}: {one_line(error)}"
            ) from None

    def _part(self) -> None:
        """Leave the cluster, unless this process had joined it for purposes of its own."""
        import ray

        if self._joined:
            self._joined = False
            with _own_signals():
                ray.shutdown()


def one_line(error: Exception) -> str:
    """What an error says, as one line of bounded length: Ray names the two versions that differ
    below its first line."""
    text = " ".join(str(error).split())
    return text if len(text) <= _MOST_REASON else f"{text[:_MOST_REASON]}…"


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep what this process does on SIGTERM: Ray's libraries set an action of their own when they
    start, which ends it with a stack, and the system's when they end.

    Python sets signals in the main thread alone, and this may be another, so it is asked of libc.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    action = ctypes.create_string_buffer(_SIGACTION_BYTES)
    known = libc.sigaction(signal.SIGTERM, None, action) == 0
    try:
        yield
    finally:
        if known:
            libc.sigaction(signal.SIGTERM, action, None)


def _check_listens(address: str) -> None:
    """Raise OSError if nothing listens there: Ray takes a minute to say so."""
    host, colon, port = address.rpartition(":")
    if colon and "/" not in address and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()


def _bring_token() -> None:
    """Let Ray send the token that it keeps for this user, as it does by itself for ``auto`` alone.

    Clusters ask for it by default since Ray 2.60; others do not mind it.
    """
    places = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    kept = Path.home() / ".ray" / "auth_token"
    if any(os.environ.get(name) for name in places) or kept.is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
