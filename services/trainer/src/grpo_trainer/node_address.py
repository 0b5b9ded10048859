"""Which address a process of the run listens on, and which it tells the others.

Ray places the processes, so what is right for one machine can only be found on that machine.
"""

from __future__ import annotations

import ipaddress
import os

import psutil
import ray

NODE = "node"
"""In place of an address: the one by which Ray knows this process's machine."""


def node_address() -> str:
    """By which Ray knows this process's machine."""
    return str(ray.util.get_node_ip_address())


def own_hosts(host: str, advertised_host: str | None) -> tuple[str, str]:
    """What this process listens on, and what it tells others.

    Args:
        host: an address, or `NODE`.
        advertised_host: likewise; None for the one that is listened on, or for the machine's where
            that is all interfaces.
    """
    listened = node_address() if host == NODE else host
    told = advertised_host
    if told is None:
        told = NODE if _is("unspecified", listened) else listened
    return listened, node_address() if told == NODE else told


def keep_to_own_interface() -> None:
    """Have the libraries of this process listen on the interface of `node_address`.

    Gloo would ask what the host's name resolves to, which may be an address of no other machine.
    NCCL and UCX, which is below NIXL, choose by speed among all interfaces, which is right unless
    Ray itself is on loopback: then no other machine is to reach this process. What the environment
    says already stands.
    """
    address = node_address()
    name = _interface_of(address)
    if name is None:
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if is_loopback(address):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
        os.environ.setdefault("UCX_NET_DEVICES", name)


def _interface_of(address: str) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    return None


def is_loopback(host: str) -> bool:
    """Whether only processes of the same machine can connect to it."""
    return host == "localhost" or _is("loopback", host)


def _is(kind: str, host: str) -> bool:
    try:
        return bool(getattr(ipaddress.ip_address(host), f"is_{kind}"))
    except ValueError:  # a name, or `NODE`
        return False
