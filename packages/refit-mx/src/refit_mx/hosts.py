"""The address that a process listens on, and the one that it tells others: not always the same.

Behind a network translation, or where all interfaces are listened on, only whoever deployed the
process knows how others reach it.
"""

from __future__ import annotations

import ipaddress

from refit_mx.errors import RefitConfigError


def told_host(host: str, advertised_host: str | None) -> str:
    """What others are told.

    Args:
        host: that is listened on.
        advertised_host: to be told instead.

    Raises:
        RefitConfigError: nobody can connect to the address that would be told.
    """
    told = host if advertised_host is None else advertised_host
    if is_every_interface(told):
        raise RefitConfigError(
            f"{told!r} stands for all addresses of a machine, so no other one can connect to it; "
            "give an advertised_host"
        )
    return told


def is_every_interface(host: str) -> bool:
    """Whether listening there is listening on all interfaces."""
    try:
        return not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return False


def host_and_port(host: str, port: int) -> str:
    """HOST:PORT; an IPv6 address is put into brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
