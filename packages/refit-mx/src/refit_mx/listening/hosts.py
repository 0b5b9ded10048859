"""The address that a process listens on, and the address that it advertises.

They differ behind network address translation or when a process listens on all interfaces: only the
deployer then knows how others reach it.
"""

from __future__ import annotations

import ipaddress

from refit_mx.errors import RefitConfigError


def resolve_advertised_host(host: str, advertised_host: str | None) -> str:
    """Return the host that clients connect to.

    Raises:
        RefitConfigError: clients cannot connect to the advertised host.
    """
    advertised = host if advertised_host is None else advertised_host
    if is_wildcard_host(advertised):
        raise RefitConfigError(
            f"{advertised!r} means all addresses of a machine, so others cannot connect to it; "
            "set advertised_host"
        )
    return advertised


def is_wildcard_host(host: str) -> bool:
    """Return whether a host means all interfaces."""
    try:
        return not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return False


def host_and_port(host: str, port: int) -> str:
    """Return HOST:PORT, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
