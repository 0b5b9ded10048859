"""Where a request comes from."""

from __future__ import annotations

from starlette.types import Scope


def address_of(scope: Scope) -> str:
    """Return the address of who sends a request, without a port: of the proxy, behind one."""
    client = scope.get("client")
    return str(client[0]) if client else "an unknown address"
