"""What is around every page: the frame, errors as pages, and who asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any  # Any: what a template is given

from fastapi import Request
from fastapi.responses import HTMLResponse, Response
from jinja2 import Template

from dataplane_admin.access import caller_of
from dataplane_admin.answers import AnswerError
from dataplane_admin.pages.assets import Assets
from dataplane_admin.pages.links import Link, to
from dataplane_admin.pages.render import environment
from dataplane_admin.settings import Settings
from observability.views.printable import printable

_THEMES = frozenset({"light", "dark"})
_SECTIONS = {"/partition": "/", "/sample": "/samples", "/trace": "/traces", "/compare": "/traces"}
_TITLES = {
    404: "Not here",
    409: "Not now",
    422: "Cannot be read",
    503: "Not available now",
    504: "No answer in time",
}
_ADVICE = {
    404: "It may have been cleared, or removed by retention, or its telemetry went elsewhere.",
    503: "The page can be loaded again in a moment; what arrived as telemetry is still there.",
    504: "The data plane may be busy or gone; the page can be loaded again in a moment.",
}
_HEADERS = {"vary": "Cookie"}


class Shell:
    """Renders pages in their frame.

    Args:
        settings: what the service was told.
    """

    def __init__(self, settings: Settings) -> None:
        self.assets = Assets()
        self._settings = settings
        self._environment = environment(settings.root_path)
        self._templates: dict[str, Template] = {}

    def page(self, request: Request, name: str, *, status: int = 200, **shown: Any) -> HTMLResponse:
        """A page out of the template ``name``."""
        caller = caller_of(request)
        theme = request.cookies.get("dataplane_theme", "")
        path = request.url.path
        text = self._template(name).render(
            assets=self.assets.base,
            theme=theme if theme in _THEMES else "",
            here=path,
            below=_SECTIONS.get(path, ""),
            bare=path == "/login",
            signed_in=caller.by == "session",
            csrf=caller.csrf,
            endpoint=self._endpoint(request),
            needs_token=self._settings.token is not None,
            actions=self._settings.allow_actions,
            **shown,
        )
        # What a browser could not be sent stands there as an escape.
        return HTMLResponse(text.encode("utf-8", "backslashreplace"), status, headers=_HEADERS)

    def problem(self, request: Request, status: int, detail: str) -> HTMLResponse:
        """An error as a page that says where to go on."""
        ways = [("Overview", to("/"))]
        section = _SECTIONS.get(request.url.path)
        if section == "/samples":
            ways.append(("Find a sample", to("/samples", q=request.query_params.get("id"))))
        if section == "/traces":
            ways.append(("All traces", to("/traces")))
        if status >= 500:
            again = "/"
            if request.method == "GET":
                query = request.url.query
                again = f"{request.url.path}?{query}" if query else request.url.path
            ways.insert(0, ("Try again", Link(again)))
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
            ways=ways,
        )

    def tell(self, request: Request, make: Callable[[], Response]) -> Response:
        """What ``make`` gives, or the page of the error that it raised."""
        try:
            return make()
        except AnswerError as error:
            return self.problem(request, error.status, str(error))

    def _endpoint(self, request: Request) -> str:
        """Return where telemetry is sent, as the reader's browser knows the service."""
        # A proxy may speak https to the browser and http to the service.
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
    """The address of the next page of a list; None on the last."""
    return to(path, **query, cursor=cursor) if cursor else None
