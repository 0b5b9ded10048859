"""Listening socket of the service, and whether other machines can reach it."""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass

BACKLOG = 4096
"""Maximum number of connections that wait to be accepted."""
# Time after which a connection is closed if the peer acknowledges no sent data.
_USER_TIMEOUT_MS = 60_000


@dataclass(frozen=True)
class Address:
    """A numeric address, resolved once, so that the checked address is the bound one."""

    family: socket.AddressFamily
    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        address = ipaddress.ip_address(self.host)
        # Only Python 3.13 and later count ::ffff:127.0.0.1 as loopback; here it never counts.
        return address.is_loopback and getattr(address, "ipv4_mapped", None) is None

    @property
    def hosts(self) -> list[str]:
        """Host names of this address; empty for the address of all interfaces."""
        return [] if ipaddress.ip_address(self.host).is_unspecified else [self.host]

    def __str__(self) -> str:
        host = f"[{self.host}]" if self.family == socket.AF_INET6 else self.host
        return f"{host}:{self.port}"


def resolve(host: str, port: int) -> Address:
    """Return the first address of ``host``; an empty host means all interfaces.

    Raises OSError if the host is unknown.
    """
    try:
        addresses = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except UnicodeError:
        raise OSError(errno.EINVAL, "not a host name") from None
    family, _, _, _, address = addresses[0]
    return Address(family, str(address[0]), port)


def listen(address: Address) -> tuple[socket.socket, Address]:
    """Return a listening socket and its address, with the actual port for port 0.

    Raises OSError if the address is in use or not of this machine.
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
