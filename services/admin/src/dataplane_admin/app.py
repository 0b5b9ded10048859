"""The application: its routes, and the layers that every request passes.

From the outside in: security headers, Host allow-list, bearer token, routes. A request that a layer
refuses never reaches the next one, so an unknown route does not show to those without a token.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from dataplane_admin.host import LOOPBACK_HOSTS, HostAllowListMiddleware, canonical_host
from dataplane_admin.problem import ProblemResponse
from dataplane_admin.security_headers import SECURITY_HEADERS, SecurityHeadersMiddleware
from dataplane_admin.token import LIVENESS_PATH, BearerTokenMiddleware

DISTRIBUTION = "dataplane-admin"


def create_app(
    *, token: str | None = None, allowed_hosts: Iterable[str] = LOOPBACK_HOSTS
) -> FastAPI:
    """The admin service as an ASGI application.

    Args:
        token: bearer token for every route but ``/healthz``; None lets everybody in.
        allowed_hosts: host names and addresses that the Host header may name, without ports.

    Raises:
        ValueError: if an allowed host is not a host name or an IP address.
    """
    # The interactive documentation of FastAPI loads scripts from elsewhere, so it stays off.
    app = FastAPI(title=DISTRIBUTION, openapi_url=None, redirect_slashes=False)
    if token is not None:
        app.add_middleware(BearerTokenMiddleware, token=token)
    hosts = [canonical_host(host) for host in allowed_hosts]
    app.add_middleware(HostAllowListMiddleware, allowed_hosts=hosts)
    app.add_middleware(SecurityHeadersMiddleware)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_failure)
    app.add_api_route(LIVENESS_PATH, _healthz, methods=["GET"])
    app.add_api_route("/api/v1/version", _version, methods=["GET"])
    return app


async def _healthz() -> dict[str, str]:
    return {"status": "ok"}


async def _version() -> dict[str, str]:
    return {"name": DISTRIBUTION, "version": version(DISTRIBUTION)}


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        detail = f"{request.method} {request.url.path}: there is nothing at this path"
    else:
        detail = f"{request.method} {request.url.path}: {error.detail}"
    return ProblemResponse(error.status_code, detail, headers=error.headers)


async def _on_failure(_request: Request, _error: Exception) -> Response:
    # Answers from outside the middleware, so it brings the headers along.
    return ProblemResponse(500, "the service failed; its log says why", headers=SECURITY_HEADERS)
