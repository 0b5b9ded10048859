"""The address that a process of the run listens on, and the one that it advertises.

Ray places the processes, so each process determines its addresses on its own machine.
"""

from __future__ import annotations

import ipaddress
import os

import psutil
import ray

NODE = "node"
"""Placeholder for the address by which Ray knows this process's machine."""


def node_address() -> str:
    """Return the address by which Ray knows this process's machine."""
    return str(ray.util.get_node_ip_address())


def resolve_hosts(host: str, advertised_host: str | None) -> tuple[str, str]:
    """Return the hosts that this process listens on and advertises.

    Args:
        host: an address, or `NODE`.
        advertised_host: an address, or `NODE`. None advertises ``host``, or the machine's address
            if ``host`` means all interfaces.
    """
    listened = node_address() if host == NODE else host
    advertised = advertised_host
    if advertised is None:
        advertised = NODE if _interface_is("unspecified", listened) else listened
    return listened, node_address() if advertised == NODE else advertised


def bind_to_node_interface() -> None:
    """Make the libraries of this process listen on the interface of `node_address`.

    Gloo would resolve the host's name, perhaps to an address that other machines cannot reach.
    NCCL and UCX, which NIXL uses, choose the fastest of all interfaces. That is right unless Ray
    itself is on loopback: then no other machine may reach this process. Variables that are already
    set keep their values.
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
    """Return whether only processes of the same machine can connect to ``host``."""
    return host == "localhost" or _interface_is("loopback", host)


def _interface_is(kind: str, host: str) -> bool:
    try:
        return bool(getattr(ipaddress.ip_address(host), f"is_{kind}"))
    except ValueError:  # a name, or `NODE`
        return False
