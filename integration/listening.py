"""Listening sockets of a process and its descendants."""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple

import psutil


class Listener(NamedTuple):
    """A listening TCP socket, or an unconnected UDP socket."""

    process: str
    protocol: str
    address: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """True if only processes of this machine can reach the socket."""
        address = ipaddress.ip_address(self.address.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback


def listeners(pid: int) -> list[Listener]:
    """Return the sockets that process ``pid`` and its descendants listen on."""
    sockets = []
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            name = process.name()
            for connection in process.net_connections("inet"):
                datagrams = connection.type == socket.SOCK_DGRAM
                if connection.status == psutil.CONN_LISTEN or (datagrams and not connection.raddr):
                    protocol = "udp" if datagrams else "tcp"
                    sockets.append(Listener(name, protocol, *connection.laddr))
        except psutil.NoSuchProcess:
            continue
    return sockets
