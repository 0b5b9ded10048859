"""The sockets on which the processes of a run can be reached."""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple

import psutil


class Listener(NamedTuple):
    """A socket that listens (TCP), or takes datagrams of anybody (UDP)."""

    process: str
    protocol: str
    address: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """True where only processes of this machine reach the socket."""
        address = ipaddress.ip_address(self.address.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback


def listeners(pid: int) -> list[Listener]:
    """Return the sockets that process ``pid`` and its descendants listen on."""
    found = []
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            name = process.name()
            for connection in process.net_connections("inet"):
                datagrams = connection.type == socket.SOCK_DGRAM
                if connection.status == psutil.CONN_LISTEN or (datagrams and not connection.raddr):
                    protocol = "udp" if datagrams else "tcp"
                    found.append(Listener(name, protocol, *connection.laddr))
        except psutil.NoSuchProcess:
            continue
    return found
