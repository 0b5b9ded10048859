"""Application: store, data plane, routes and middleware."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import Depends, FastAPI
from starlette.routing import Match

from dataplane_admin import api, ingest, pages
from dataplane_admin.live import Connector, Live, LocalConnector, RayConnector
from dataplane_admin.service import AdminService
from dataplane_admin.service.claims import Claimants
from dataplane_admin.service.service import NAME
from dataplane_admin.settings import Settings
from dataplane_admin.store import Store, StoreUnavailable
from dataplane_admin.web import OPEN_PREFIX, OTLP_PREFIX, add_layers, require_csrf
from dataplane_core import StoreInspector

_OWN_PREFIXES = ("/api/", "/actions/", OPEN_PREFIX, OTLP_PREFIX)


def create_app(settings: Settings, *, inspector: StoreInspector | None = None) -> FastAPI:
    """Return the admin service as an ASGI application with an open store.

    It polls the data plane during its lifespan, and then closes the store. ``app.state`` holds
    ``settings``, ``store``, ``live``, ``service`` and ``updates``.

    Args:
        settings: settings of the service.
        inspector: inspector of a data plane of this process; the caller closes it. None for the
            data plane of ``settings.ray_address``.

    Raises:
        ValueError: the store's URL is invalid, or the root path is a path of the service.
        StoreError: the store cannot be opened.
        OSError: the store's file cannot be created.
    """
    store = Store.open(settings.store_url, retention=settings.retention)
    live = _live(settings, inspector, store)
    service = AdminService(store, live, settings)
    updates = api.LiveUpdates(service, settings.max_subscribers)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        if live is not None:
            live.start()
        service.watch.start()
        try:
            yield
        finally:
            updates.end()
            service.watch.close()
            if live is not None:
                live.close()
            store.close()

    # FastAPI's interactive documentation loads scripts from other hosts; that of `pages` does not.
    app = FastAPI(
        title=NAME,
        version=version(NAME),
        description="Partition state, lineage and traces of a data plane.",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        dependencies=[Depends(require_csrf)],
        generate_unique_id_function=lambda route: route.name,
        # If this process were traced, each export to it would create further spans.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.settings = settings
    app.state.store = store
    app.state.live = live
    app.state.service = service
    app.state.updates = updates
    add_layers(app, settings)
    shell = pages.Shell(settings, service)
    api.add_error_handlers(app, shell.problem)
    api.add_openapi(app)
    for router in api.routers(service, updates, allow_actions=settings.allow_actions):
        app.include_router(router)
    app.include_router(
        ingest.router(
            store,
            settings.limits,
            redaction=ingest.Redaction(settings.redact) if settings.keep_sample_text else None,
        )
    )
    app.include_router(pages.router(shell, service, settings))
    if settings.root_path and _is_own(app, settings.root_path):
        store.close()
        raise ValueError(f"root path {settings.root_path!r} is a path of the service")
    return app


def _is_own(app: FastAPI, root_path: str) -> bool:
    """Return whether the root path collides with a path of the service."""
    scope = {"type": "http", "method": "GET", "path": root_path, "root_path": ""}
    return f"{root_path}/".startswith(_OWN_PREFIXES) or any(
        route.matches(scope)[0] is not Match.NONE for route in app.routes
    )


def _live(settings: Settings, inspector: StoreInspector | None, store: Store) -> Live | None:
    connector: Connector
    if inspector is not None:
        connector = LocalConnector(inspector)
    elif settings.ray_address is not None:
        connector = RayConnector(settings.ray_address, timeout_s=settings.query_timeout_s)
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
        query_timeout_s=settings.query_timeout_s,
        stuck_after_s=settings.stuck_after_s,
        has_claimed=has_claimed,
    )
