"""Middleware that every request passes before its route; see `add_layers`."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import Response

from dataplane_admin.checks import canonical_origin
from dataplane_admin.settings import Settings
from dataplane_admin.web.callers import (
    OPEN_PREFIX,
    AccessMiddleware,
    Forbidden,
    caller_of,
    require_csrf,
    wants_page,
)
from dataplane_admin.web.login import FailedLogins, Sessions, login_router
from dataplane_admin.web.origins import HostMiddleware, OriginMiddleware, OtlpCorsMiddleware
from dataplane_admin.web.problem import ProblemResponse
from dataplane_admin.web.transport import (
    NO_STORE,
    OTLP_PREFIX,
    SECURITY_HEADERS,
    BodyLimitMiddleware,
    HeadMiddleware,
    RootPathMiddleware,
    SecurityHeadersMiddleware,
)

__all__ = [
    "NO_STORE",
    "OPEN_PREFIX",
    "OTLP_PREFIX",
    "SECURITY_HEADERS",
    "ProblemResponse",
    "add_layers",
    "caller_of",
    "require_csrf",
    "wants_page",
]


def add_layers(app: FastAPI, settings: Settings) -> None:
    """Add the middleware to an application, and login routes if there is a token.

    From the outside in: security headers, root path, HEAD as GET, Host allow-list, Origin
    allow-list, CORS of the OTLP routes, body limit, authentication. A refused request reaches no
    further layer, so unauthenticated clients cannot detect which routes exist. `require_csrf` is a
    dependency of the application.
    """
    token, root_path = settings.token, settings.root_path
    origins = [canonical_origin(origin) for origin in settings.allowed_origins]
    sessions = Sessions()
    failed = FailedLogins(settings.failed_login_delay_s)
    app.add_middleware(
        AccessMiddleware, token=token, sessions=sessions, failed=failed, root_path=root_path
    )
    app.add_middleware(BodyLimitMiddleware)
    app.add_middleware(OtlpCorsMiddleware, allowed_origins=origins)
    app.add_middleware(OriginMiddleware, allowed_origins=origins)
    hosts = settings.allowed_hosts
    app.add_middleware(HostMiddleware, allowed_hosts=hosts, failed=failed, token=token)
    app.add_middleware(HeadMiddleware)
    app.add_middleware(RootPathMiddleware, root_path=root_path)
    app.add_middleware(SecurityHeadersMiddleware)
    app.add_exception_handler(Forbidden, _on_forbidden)
    if token is not None:
        app.include_router(login_router(token, sessions, failed, root_path))


async def _on_forbidden(_request: Request, error: Exception) -> Response:
    assert isinstance(error, Forbidden)
    return ProblemResponse(403, error.detail)
