"""Allowed Host headers, and allowed origins of web pages that send requests.

A page of another site can resolve its own name to a loopback address and so read what is served
there (DNS rebinding). It cannot change the Host header, and does not know the token. Requests with
the token may use any host name: a Prometheus server, for example, finds pods by address. The
cookie of a session does not count, since browsers send it automatically.

A browser sends the origin of the page that causes a request. Another port of the same host is
another origin, though cookies treat it as the same site.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from dataplane_admin.checks import canonical_host, canonical_origin, origin_as_sent
from dataplane_admin.web.login import FailedLogins, has_token, too_many_tokens
from dataplane_admin.web.problem import ProblemResponse
from dataplane_admin.web.transport import OTLP_PREFIX

_HOST = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<name>[^\[\]:@/\s]+))(?::[0-9]{1,5})?")


class HostMiddleware:
    """Middleware that refuses requests whose Host header is not allowed; its port does not matter.

    Args:
        allowed_hosts: canonical names and addresses.
        token: bearer token of requests that may use any host; None if the service has none.
    """

    def __init__(
        self, app: ASGIApp, allowed_hosts: Iterable[str], failed: FailedLogins, token: str | None
    ) -> None:
        self.app = app
        self.allowed = frozenset(allowed_hosts)
        self.failed = failed
        self.token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_allowed(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal: Response = ProblemResponse(
            400, "Host header is not allowed; allow it with --allowed-host"
        )
        is_guess = self.token is not None and "authorization" in headers
        if is_guess and not has_token(headers, self.token) and not await self.failed.hold(scope):
            refusal = too_many_tokens()
        await refusal(scope, receive, send)

    def _is_allowed(self, headers: Headers) -> bool:
        hosts = headers.getlist("host")
        match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if match is None:
            return False
        try:
            host = canonical_host(match["ipv6"] or match["name"])
        except ValueError:
            return False
        return host in self.allowed or has_token(headers, self.token)


class OriginMiddleware:
    """Middleware that refuses requests whose Origin header is not allowed.

    Allowed are the address of the request itself and ``allowed_origins``. A request without the
    header passes: browsers always send it when a page of another origin sends data.
    """

    def __init__(self, app: ASGIApp, allowed_origins: Iterable[str]) -> None:
        self.app = app
        self.allowed = frozenset(allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_allowed(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        refusal = ProblemResponse(
            403, "Origin header is not allowed; allow it with --allowed-origin"
        )
        await refusal(scope, receive, send)

    def _is_allowed(self, headers: Headers) -> bool:
        origins = headers.getlist("origin")
        if not origins:
            return True
        try:
            [origin] = [canonical_origin(given) for given in origins]
            # A proxy may use https to the browser and http to the service.
            own = {
                canonical_origin(f"{scheme}://{headers['host']}") for scheme in ("http", "https")
            }
        except ValueError:
            return False
        return origin in own | self.allowed


class OtlpCorsMiddleware:
    """Middleware with CORS for the OTLP routes only: pages of allowed origins may send telemetry.

    It precedes authentication, since a browser's preflight has no token.
    """

    def __init__(self, app: ASGIApp, allowed_origins: Iterable[str]) -> None:
        self.app = app
        self.cors = CORSMiddleware(
            app,
            allow_origins=[origin_as_sent(origin) for origin in allowed_origins],
            allow_methods=["POST"],
            # Headers of exporters, and of the trace context.
            allow_headers=["authorization", "content-encoding", "traceparent", "tracestate"],
            expose_headers=["retry-after"],
            max_age=3_600,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_otlp = scope["type"] == "http" and scope["path"].startswith(OTLP_PREFIX)
        await (self.cors if is_otlp else self.app)(scope, receive, send)
