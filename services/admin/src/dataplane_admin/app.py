"""The application: its routes, and the layers that every request passes.

From the outside in: security headers, root path, HEAD as GET, Host allow-list, Origin allow-list,
CORS of the OTLP routes, bound of the body, who it is, CSRF, routes. A request that a layer refuses
never reaches the next one, so an unknown route does not show to those without a token.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from starlette.routing import Match

from dataplane_admin import api, ingest, pages
from dataplane_admin.access import OPEN_PREFIX, AccessMiddleware
from dataplane_admin.answers import Answers
from dataplane_admin.answers.answers import NAME
from dataplane_admin.answers.claimants import Claimants
from dataplane_admin.body_limit import OTLP_PREFIX, BodyLimitMiddleware
from dataplane_admin.csrf import CsrfMiddleware
from dataplane_admin.failed_logins import FailedLogins
from dataplane_admin.head import HeadMiddleware
from dataplane_admin.host import HostAllowListMiddleware, canonical_host
from dataplane_admin.live import Connector, Given, Live, OnRay
from dataplane_admin.login import Sessions, login_router
from dataplane_admin.origin import OriginMiddleware, OtlpCorsMiddleware, canonical_origin
from dataplane_admin.root_path import RootPathMiddleware
from dataplane_admin.security_headers import SecurityHeadersMiddleware
from dataplane_admin.settings import Settings
from dataplane_admin.store import Store, StoreUnavailable
from dataplane_core import DataPlaneInspector

DISTRIBUTION = NAME
_OWN_PREFIXES = ("/api/", "/actions/", OPEN_PREFIX, OTLP_PREFIX)


def create_app(settings: Settings, *, inspector: DataPlaneInspector | None = None) -> FastAPI:
    """The admin service as an ASGI application, which opens its store at once.

    It looks into the data plane while its lifespan lasts, and closes the store at the end of it.
    ``app.state`` holds ``settings``, ``store``, ``live``, ``answers`` and ``updates``.

    Args:
        settings: what the service is told.
        inspector: a data plane of this process to look into; without it, that of
            ``settings.ray_address``. Its owner closes it.

    Raises:
        ValueError: an allowed host or origin, the root path, or the store's URL, is none.
        StoreError: the store cannot be opened.
        OSError: its file cannot be made.
    """
    hosts = [canonical_host(host) for host in settings.allowed_hosts]
    root_path = settings.root_path
    origins = [canonical_origin(origin) for origin in settings.allowed_origins]
    store = Store.open(settings.store_url, retention=settings.retention)
    live = _live(settings, inspector, store)
    answers = Answers(store, live, settings)
    updates = api.LiveUpdates(answers, settings.most_subscribers)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        if live is not None:
            live.start()
        try:
            yield
        finally:
            updates.end()
            if live is not None:
                live.close()
            store.close()

    # The interactive documentation of FastAPI loads scripts from elsewhere, so it stays off.
    app = FastAPI(
        title=NAME,
        version=version(NAME),
        description="Partition state, lineage and traces of a data plane.",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        # Where this process is traced itself, each export to it would make spans of its own.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.settings = settings
    app.state.store = store
    app.state.live = live
    app.state.answers = answers
    app.state.updates = updates
    sessions = Sessions()
    failed = FailedLogins(settings.failed_login_delay_s)
    app.add_middleware(CsrfMiddleware)
    app.add_middleware(
        AccessMiddleware,
        token=settings.token,
        sessions=sessions,
        failed=failed,
        root_path=root_path,
    )
    app.add_middleware(BodyLimitMiddleware)
    app.add_middleware(OtlpCorsMiddleware, allowed_origins=origins)
    app.add_middleware(OriginMiddleware, allowed_origins=origins)
    app.add_middleware(
        HostAllowListMiddleware, allowed_hosts=hosts, failed=failed, token=settings.token
    )
    app.add_middleware(HeadMiddleware)
    app.add_middleware(RootPathMiddleware, root_path=root_path)
    app.add_middleware(SecurityHeadersMiddleware)
    api.add_error_handlers(app)
    api.add_openapi(app)
    app.include_router(api.router(answers, updates, allow_actions=settings.allow_actions))
    app.include_router(
        ingest.router(store, settings.limits, keep_sample_text=settings.keep_sample_text)
    )
    app.include_router(pages.router(answers, settings))
    if settings.token is not None:
        app.include_router(login_router(settings.token, sessions, failed, root_path))
    if root_path and _is_own(app, root_path):
        store.close()
        raise ValueError(f"root path {root_path!r} is one of the service's own paths")
    return app


def _is_own(app: FastAPI, root_path: str) -> bool:
    """Whether a request without the root path could be taken for one that has it."""
    scope = {"type": "http", "method": "GET", "path": root_path, "root_path": ""}
    return f"{root_path}/".startswith(_OWN_PREFIXES) or any(
        route.matches(scope)[0] is not Match.NONE for route in app.routes
    )


def _live(settings: Settings, inspector: DataPlaneInspector | None, store: Store) -> Live | None:
    connector: Connector
    if inspector is not None:
        connector = Given(inspector)
    elif settings.ray_address is not None:
        connector = OnRay(settings.ray_address, timeout_s=settings.ask_s)
    else:
        return None

    claimants = Claimants(store)

    def has_claimed(partition: str, task: str) -> bool:
        with contextlib.suppress(StoreUnavailable):
            return claimants.has_claimed(partition, task)
        return False

    return Live(
        connector,
        poll_s=settings.poll_s,
        ask_s=settings.ask_s,
        stuck_after_s=settings.stuck_after_s,
        has_claimed=has_claimed,
    )
