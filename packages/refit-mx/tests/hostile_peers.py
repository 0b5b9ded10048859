"""Hostile or broken peers: they connect and send nothing, too little, or garbage."""

from __future__ import annotations

import contextlib
import resource
import selectors
import socket
import time
from collections.abc import Iterator, Sequence

import pytest

SILENT = 1200


@contextlib.contextmanager
def many_descriptors(needed: int) -> Iterator[None]:
    """Limit this process to ``needed`` descriptors; skip the test if the hard limit is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"needs {needed} file descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def connections(endpoint: str, count: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    """Open connections to an address; each sends ``sent`` and nothing more."""
    host, _, port = endpoint.rpartition(":")
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            sock = stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
            with contextlib.suppress(OSError):  # it may be dropped already
                sock.sendall(sent)
            opened.append(sock)
        yield opened


def closed(sockets: Sequence[socket.socket], *, within_s: float) -> int:
    """Wait until the other end has closed all sockets, or for a time; return how many it closed."""
    deadline = time.monotonic() + within_s
    remaining = set(sockets)
    with selectors.DefaultSelector() as readable:
        for sock in sockets:
            readable.register(sock, selectors.EVENT_READ)
        while remaining and time.monotonic() < deadline:
            for key, _ in readable.select(0.1):
                try:
                    ended = not key.fileobj.recv(1 << 16)
                except OSError:
                    ended = True
                if ended:
                    readable.unregister(key.fileobj)
                    remaining.discard(key.fileobj)
    return len(sockets) - len(remaining)
