"""Starts and joins a Ray whose every part listens on loopback alone.

Each part of Ray listens on all interfaces unless the node's address is a loopback one, and Ray
replaces a loopback address that it is given by the machine's own. What keeps it from that is a
switch that Ray reads from ``RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER`` when it is imported; here it is set
after the import, and only while Ray starts.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any  # Any: Ray's options

import ray
from ray._private import ray_constants, services

from dataplane_core import UnavailableError

ANSWER_S = 5.0
"""How long the control store of a running Ray may take to answer `join_ray`, in seconds."""

_LOOPBACK = "127.0.0.1"
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""Connection preface and an empty SETTINGS frame (RFC 9113, 3.4); a server answers with its own."""


def start_local_ray(**options: Any) -> None:
    """Start a Ray for this process on this machine; no other machine can connect to it.

    What its actors listen on is loopback as well, as far as they go by the address of their node:
    the data plane's parts and TransferQueue's do. ``RAY_ADDRESS`` does not matter.

    Args:
        options: of `ray.init`, other than ``address``.

    Raises:
        UnavailableError: this version of Ray does not stay on loopback; it is shut down again.
        Exception: whatever `ray.init` raises.
    """
    with _loopback_stays():
        ray.init(address="local", _node_ip_address=_LOOPBACK, **options)
    address = ray.util.get_node_ip_address()
    if not ipaddress.ip_address(address).is_loopback:
        ray.shutdown()
        raise UnavailableError(
            f"Ray {ray.__version__} would listen on {address} instead of {_LOOPBACK}; set "
            f"{ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR}=0 in the environment of this process"
        )


def join_ray(address: str, **options: Any) -> None:
    """Connect this process to a running Ray, also to one that listens on loopback alone.

    Ray would wait for minutes for one that does not answer, and might end the process.

    Args:
        address: of the cluster, as `ray.init` takes it; "auto" for the one on this machine.
        options: of `ray.init`, other than ``address``.

    Raises:
        UnavailableError: nobody listens there, or does not answer in `ANSWER_S` seconds.
        Exception: whatever `ray.init` raises.
    """
    with _loopback_stays():
        _check_answers(address)
        ray.init(address=address, **options)


def _check_answers(address: str) -> None:
    """Raise `UnavailableError` unless a control store speaks HTTP/2 there, as gRPC does."""
    if "://" in address:
        return  # a Ray client's server, which has a time-out of its own
    where = services.canonicalize_bootstrap_address(address)
    host, _, port = (where or "").rpartition(":")
    if not host:
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S) as probe:
            if os.environ.get("RAY_USE_TLS", "0") == "0":
                probe.sendall(_HTTP2)
                probe.recv(1)
    except (OSError, OverflowError) as error:
        raise UnavailableError(f"no Ray answers at {where}: {error}") from None


@contextmanager
def _loopback_stays() -> Iterator[None]:
    """Let Ray use a loopback address as it is given, instead of the machine's own address."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
