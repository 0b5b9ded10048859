"""Starts and joins a Ray cluster that listens on loopback only.

Each part of Ray listens on all interfaces unless the node's address is a loopback address, and Ray
replaces a given loopback address with the machine's own. Ray has a switch that prevents this. Ray
reads the switch from ``RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER`` on import; this module sets it
later, only while it starts or joins a cluster.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any  # Any: Ray's options

import ray
from ray._private import ray_constants, services
from ray._private.node import Node

from dataplane_core import UnavailableError

ANSWER_S = 5.0
"""Time in which the cluster's control store (GCS) must answer `join_ray`, in seconds."""

_LOOPBACK = "127.0.0.1"
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""Connection preface and an empty SETTINGS frame (RFC 9113, 3.4); a server sends its own back."""


def start_local_ray(**options: Any) -> None:
    """Start a Ray cluster for this process; no other machine can connect to it.

    Actors that listen on their node's address listen on loopback too: the data plane's and
    TransferQueue's do. ``RAY_ADDRESS`` is ignored.

    Args:
        options: options of `ray.init`, except ``address``.

    Raises:
        UnavailableError: Ray did not start, or this version of Ray does not stay on loopback; the
            processes that were started are stopped again.
        TypeError, ValueError: an option is wrong.
    """
    was_running = ray.is_initialized()
    started = time.monotonic()
    try:
        with _keep_loopback():
            ray.init(address="local", _node_ip_address=_LOOPBACK, **options)
    except BaseException as error:  # an interrupt, too, must leave no process of Ray behind
        stopped = "" if was_running else _stop_parts(error)
        if isinstance(error, TypeError | ValueError) or not isinstance(error, Exception):
            raise
        raise UnavailableError(
            f"Ray did not start on {_LOOPBACK}, after {time.monotonic() - started:.0f} s: "
            f"{_reason(error)}{stopped}"
        ) from None
    address = ray.util.get_node_ip_address()
    if not ipaddress.ip_address(address).is_loopback:
        ray.shutdown()
        raise UnavailableError(
            f"Ray {ray.__version__} would listen on {address} instead of {_LOOPBACK}; set "
            f"{ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR}=0 in the environment of this process"
        )


def join_ray(address: str, **options: Any) -> None:
    """Connect this process to a running Ray cluster, even if it listens on loopback only.

    This function checks first that Ray answers: `ray.init` would wait minutes for an answer, and
    might exit the process.

    Args:
        address: address of the cluster, as for `ray.init`; "auto" for the one on this machine.
        options: options of `ray.init`, except ``address``.

    Raises:
        UnavailableError: no Ray answers at the address within `ANSWER_S` seconds, or this process
            cannot join it, for example because its version differs.
        TypeError, ValueError: an option is wrong.
    """
    try:
        with _keep_loopback():
            _check_answers(address)
            ray.init(address=address, **options)
    except (TypeError, ValueError, UnavailableError):
        raise
    except Exception as error:  # noqa: BLE001  # Ray raises plain Exceptions
        raise UnavailableError(f"Ray at {address!r} cannot be joined: {_reason(error)}") from None


def _stop_parts(error: BaseException) -> str:
    """Stop the processes that a failed start left; return text about them for the error message.

    Ray's `Node` lists these processes. Until Ray has started, only a frame in the error's traceback
    refers to it.
    """
    text = ""
    for frame, _ in walk_tb(error.__traceback__):
        node = frame.f_locals.get("self")
        if isinstance(node, Node):
            for name, (part, *_) in node.all_processes.items():
                if part.process.poll() is not None:
                    text += f"; {name} ended with status {part.process.returncode}"
            node.kill_all_processes(check_alive=False)
            text += (
                f"; its logs are in {node.get_logs_dir_path()}; start again when this machine has "
                "free processor time and memory"
            )
            break
    ray.shutdown()
    return text


def _reason(error: Exception) -> str:
    """Return the text of Ray's error in one line, without the traceback that some texts have."""
    return " ".join(str(error).partition("Traceback (most")[0].split()).rstrip(".")


def _check_answers(address: str) -> None:
    """Raise `UnavailableError` if no process accepts a connection, or if it then stays silent."""
    if "://" in address:
        return  # Ray Client, which has its own time-out
    resolved = services.canonicalize_bootstrap_address(address)
    host, _, port = (resolved or "").rpartition(":")
    if not host:
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S) as probe:
            if os.environ.get("RAY_USE_TLS", "0") == "0":
                probe.sendall(_HTTP2)
                probe.recv(1)
    except (OSError, OverflowError) as error:
        raise UnavailableError(f"no Ray answers at {resolved}: {error}") from None


@contextmanager
def _keep_loopback() -> Iterator[None]:
    """Keep Ray from replacing a loopback address with the machine's own."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
