"""Frame of every page, and error pages."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import wraps
from http import HTTPStatus
from typing import Any  # Any: what a template is given

from fastapi import Request
from fastapi.responses import HTMLResponse, Response
from jinja2 import Template

from dataplane_admin import models
from dataplane_admin.pages import words
from dataplane_admin.pages.assets import Assets
from dataplane_admin.pages.links import Link, to
from dataplane_admin.pages.render import environment
from dataplane_admin.service import AdminService, ServiceError
from dataplane_admin.settings import Settings
from dataplane_admin.store import StoreError
from dataplane_admin.web import caller_of
from observability.views.printable import printable

_THEMES = frozenset({"light", "dark"})
_SECTIONS = {
    "/partition": "/",
    "/sample": "/samples",
    "/group": "/samples",
    "/run": "/runs",
    "/runs/compare": "/runs",
    "/trace": "/traces",
    "/compare": "/traces",
}
_TITLES = {
    404: "Not found",
    409: "Conflict",
    422: "Invalid request",
    503: "Unavailable",
    504: "Timed out",
}
_ADVICE = {
    404: "Check the URL.",
    503: "Retry in a moment; stored telemetry is not affected.",
    504: "The data plane is busy or unreachable; retry in a moment.",
}
_HEADERS = {"vary": "Cookie"}


class Shell:
    """Renderer of pages in their frame."""

    def __init__(self, settings: Settings, service: AdminService) -> None:
        self.assets = Assets()
        self._settings = settings
        self._service = service
        self._environment = environment(settings.root_path)
        self._templates: dict[str, Template] = {}

    def page(self, request: Request, name: str, *, status: int = 200, **shown: Any) -> HTMLResponse:
        """Return a page, rendered from the template ``name``."""
        caller = caller_of(request)
        theme = request.cookies.get("dataplane_theme", "")
        path = request.url.path
        # The login page and static files need no token; their pages show nothing of the store.
        bare = path == "/login" or (caller.by == "anybody" and self._settings.token is not None)
        text = self._template(name).render(
            assets=self.assets.base,
            theme=theme if theme in _THEMES else "",
            zone=str(words.shown_zone.get()),
            here=path,
            below=_SECTIONS.get(path, ""),
            bare=bare,
            raised=[] if bare else self._raised(),
            signed_in=caller.by == "session",
            csrf=caller.csrf,
            endpoint=self._endpoint(request),
            needs_token=self._settings.token is not None,
            actions=self._settings.allow_actions,
            now_ns=time.time_ns(),
            **shown,
        )
        # Characters that UTF-8 cannot encode are written as escapes.
        return HTMLResponse(text.encode("utf-8", "backslashreplace"), status, headers=_HEADERS)

    def problem(self, request: Request, status: int, detail: str) -> HTMLResponse:
        """Return an error page with links to continue."""
        links = [("Overview", to("/"))]
        section = _SECTIONS.get(request.url.path)
        if section == "/samples":
            links.append(("Find a sample", to("/samples", q=request.query_params.get("id"))))
        if section == "/runs":
            links.append(("All runs", to("/runs")))
        if section == "/traces":
            links.append(("All traces", to("/traces")))
        if status >= 500:
            retry_url = "/"
            if request.method == "GET":
                query = request.url.query
                retry_url = f"{request.url.path}?{query}" if query else request.url.path
            links.insert(0, ("Retry", Link(retry_url)))
        title = _TITLES.get(status) or HTTPStatus(status).phrase
        sentence = printable(detail)
        return self.page(
            request,
            "problem.html.j2",
            status=status,
            number=status,
            title=title,
            detail=sentence[:1].upper() + sentence[1:],
            advice=_ADVICE.get(status, ""),
            links=links,
        )

    def answer(self, request: Request, make: Callable[[], Response]) -> Response:
        """Return what ``make`` returns, or the page of the error that it raises."""
        try:
            return make()
        except ServiceError as error:
            return self.problem(request, error.status, str(error))

    def with_error_page(self, route: Callable[..., Response]) -> Callable[..., Response]:
        """Return a route that answers a `ServiceError` with its page."""

        @wraps(route)
        def answered(request: Request, **given: str) -> Response:
            return self.answer(request, lambda: route(request, **given))

        return answered

    def _raised(self) -> list[models.Alert]:
        """Return the raised alerts; none if the store is unavailable."""
        try:
            return self._service.store.raised_alerts()
        except StoreError:
            return []

    def _endpoint(self, request: Request) -> str:
        """Return the URL for telemetry, as the browser reaches the service."""
        # A proxy may use https to the browser and http to the service.
        origin = f"{request.url.scheme}://{request.url.netloc}"
        for allowed in self._settings.allowed_origins:
            if allowed.partition("://")[2].lower() == request.url.netloc:
                origin = allowed
        return f"{origin}{self._settings.root_path}"

    def _template(self, name: str) -> Template:
        if name not in self._templates:
            self._templates[name] = self._environment.get_template(name)
        return self._templates[name]


def next_page(path: str, query: Mapping[str, object], cursor: str | None) -> Link | None:
    """Return the URL of a list's next page, None on the last page."""
    return to(path, **query, cursor=cursor) if cursor else None
