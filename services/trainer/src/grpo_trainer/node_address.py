"""Which address a process of the run listens on, and which it tells the others.

Ray places the processes, so what is right for one machine can only be found on that machine.
"""

from __future__ import annotations

import ipaddress

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


def is_loopback(host: str) -> bool:
    """Whether only processes of the same machine can connect to it."""
    return host == "localhost" or _is("loopback", host)


def _is(kind: str, host: str) -> bool:
    try:
        return bool(getattr(ipaddress.ip_address(host), f"is_{kind}"))
    except ValueError:  # a name, or `NODE`
        return False
