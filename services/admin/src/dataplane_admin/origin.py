"""Which web pages may make a browser send requests here: those that were served from here.

A browser names the origin of the page behind a request. Another port of the same host is another
origin, though to cookies it is the same site.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from dataplane_admin.body_limit import OTLP_PREFIX
from dataplane_admin.problem import ProblemResponse

_ORIGIN = re.compile(
    r"(?P<scheme>https?)://(?P<host>[a-z0-9.-]+|\[[0-9a-f:.]+\])(?::(?P<port>[0-9]{1,5}))?"
)
_PORTS = {"http": "80", "https": "443"}


def canonical_origin(origin: str) -> str:
    """``origin`` in the one form in which origins are compared.

    Raises:
        ValueError: if it is not one of http or https, a host and perhaps a port.
    """
    match = _ORIGIN.fullmatch(origin.lower())
    if match is None:
        raise ValueError(
            f"origin {origin!r}; expected a scheme, a host and perhaps a port, such as "
            "https://admin.example"
        )
    return f"{match['scheme']}://{match['host']}:{match['port'] or _PORTS[match['scheme']]}"


class OriginMiddleware:
    """Refuse requests of which the Origin header names a page that is not one of ours.

    Ours are pages at the very address that the request asks, and those of ``allowed_origins``. A
    request without the header passes: no browser leaves it away where a page of another origin
    sends something.

    Raises:
        ValueError: if an allowed origin is none.
    """

    def __init__(self, app: ASGIApp, allowed_origins: Iterable[str]) -> None:
        self.app = app
        self.allowed = frozenset(canonical_origin(origin) for origin in allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_allowed(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        refusal = ProblemResponse(
            403, "Origin header is not the address of this service; add it with --allowed-origin"
        )
        await refusal(scope, receive, send)

    def _is_allowed(self, headers: Headers) -> bool:
        origins = headers.getlist("origin")
        if not origins:
            return True
        try:
            [origin] = [canonical_origin(one) for one in origins]
            # A proxy may speak https to the browser and http to us.
            ours = {canonical_origin(f"{scheme}://{headers['host']}") for scheme in _PORTS}
        except ValueError:
            return False
        return origin in ours | self.allowed


class OtlpCorsMiddleware:
    """Let pages of the allowed origins send telemetry: CORS for the OTLP routes, and no others.

    It stands before the check of the token, which a browser's preflight does not bring.
    """

    def __init__(self, app: ASGIApp, allowed_origins: Iterable[str]) -> None:
        self.app = app
        self.cors = CORSMiddleware(
            app,
            allow_origins=[_as_sent(origin) for origin in allowed_origins],
            allow_methods=["POST"],
            # Those that exporters set, and those of a trace's context.
            allow_headers=["authorization", "content-encoding", "traceparent", "tracestate"],
            expose_headers=["retry-after"],
            max_age=3_600,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_otlp = scope["type"] == "http" and scope["path"].startswith(OTLP_PREFIX)
        await (self.cors if is_otlp else self.app)(scope, receive, send)


def _as_sent(canonical: str) -> str:
    """Return an origin as browsers send it: without the port that its scheme implies."""
    scheme, _, rest = canonical.partition("://")
    return f"{scheme}://{rest.removesuffix(f':{_PORTS[scheme]}')}"
