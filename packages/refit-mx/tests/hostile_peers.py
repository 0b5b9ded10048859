"""Peers that mean no good, or are broken: they connect and say nothing, too little, or nonsense."""

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
    """This process may open so many and no more; skips the test where it may not."""
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
    """To an address, each of which sends this and no more."""
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
    """How many of them the other end has closed by the end of this time, or all before."""
    until = time.monotonic() + within_s
    left = set(sockets)
    with selectors.DefaultSelector() as readable:
        for sock in sockets:
            readable.register(sock, selectors.EVENT_READ)
        while left and time.monotonic() < until:
            for key, _ in readable.select(0.1):
                try:
                    ended = not key.fileobj.recv(1 << 16)
                except OSError:
                    ended = True
                if ended:
                    readable.unregister(key.fileobj)
                    left.discard(key.fileobj)
    return len(sockets) - len(left)
