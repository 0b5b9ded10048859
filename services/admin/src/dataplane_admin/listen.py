"""The socket that the service listens on, and whether others than this machine can reach it."""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass

BACKLOG = 4096
"""Connections that may wait to be accepted, when many come at once."""
# A peer that is gone without a word holds a connection with unread data no longer.
_USER_TIMEOUT_MS = 60_000


@dataclass(frozen=True)
class Address:
    """A numeric address, resolved once, so that what was checked is what is bound."""

    family: socket.AddressFamily
    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback

    @property
    def hosts(self) -> list[str]:
        """What a client calls this address; nothing if it stands for every interface."""
        return [] if ipaddress.ip_address(self.host).is_unspecified else [self.host]

    def __str__(self) -> str:
        host = f"[{self.host}]" if self.family == socket.AF_INET6 else self.host
        return f"{host}:{self.port}"


def resolve(host: str, port: int) -> Address:
    """The first address that ``host`` stands for; the empty host stands for every interface.

    Raises:
        OSError: if the host is not known.
    """
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except UnicodeError:
        raise OSError(errno.EINVAL, "not a host name") from None
    family, _, _, _, address = found[0]
    return Address(family, str(address[0]), port)


def listen(address: Address) -> tuple[socket.socket, Address]:
    """A listening socket and its address, with the port that was given if 0 was asked for.

    Raises:
        OSError: if the address is in use or not one of this machine.
    """
    listener = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
        if address.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((address.host, address.port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener, Address(address.family, address.host, listener.getsockname()[1])
