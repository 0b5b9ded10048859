"""Which names this service answers to.

A page of another site can make a browser resolve the site's own name to a loopback address and so
read what is served there (DNS rebinding). It cannot make the browser send another Host header, and
it does not know the token: who brings that may call the service by any name, as a Prometheus does
that finds pods by their addresses. A session's cookie does not count, since browsers send it
unasked.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from dataplane_admin.failed_logins import FailedLogins
from dataplane_admin.peer import address_of
from dataplane_admin.problem import ProblemResponse
from dataplane_admin.token import brings_token

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_HEADER = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<name>[^\[\]:@/\s]+))(?::[0-9]{1,5})?")


def canonical_host(host: str) -> str:
    """``host`` in the one form in which hosts are compared.

    Raises:
        ValueError: if ``host`` is neither a host name nor an IP address without a port.
    """
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        name = host.lower().removesuffix(".")
        if _NAME.fullmatch(name) is None:
            raise ValueError(
                f"host {host!r}; expected a host name or an IP address, without a port or wildcard"
            ) from None
        return name


class HostAllowListMiddleware:
    """Refuse requests whose Host header is not one of ``allowed_hosts``; any port is fine.

    Args:
        allowed_hosts: names and addresses.
        failed: holds back the answers to wrong tokens.
        token: bearer token of requests that may name any host; None for no such requests.

    Raises:
        ValueError: if an allowed host is not a host name or an IP address.
    """

    def __init__(
        self,
        app: ASGIApp,
        allowed_hosts: Iterable[str],
        failed: FailedLogins,
        token: str | None = None,
    ) -> None:
        self.app = app
        self.failed = failed
        self.token = token
        self.allowed = frozenset(canonical_host(host) for host in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_allowed(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        if self.token is not None and "authorization" in Headers(scope=scope):
            await self.failed.hold(address_of(scope))
        refusal = ProblemResponse(
            400, "Host header is not one of the allowed hosts; add it with --allowed-host"
        )
        await refusal(scope, receive, send)

    def _is_allowed(self, headers: Headers) -> bool:
        hosts = headers.getlist("host")
        match = _HEADER.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if match is None:
            return False
        try:
            host = canonical_host(match["ipv6"] or match["name"])
        except ValueError:
            return False
        return host in self.allowed or brings_token(headers, self.token)
