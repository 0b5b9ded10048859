"""The OpenAPI document: what FastAPI derives from the routes, and the problems they may answer."""

from __future__ import annotations

from typing import Any  # Any: a JSON document

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response

from dataplane_admin.answers.models import Problem

OPENAPI_PATH = "/api/v1/openapi.json"

_PROBLEM = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The ``responses`` of a route that may answer these statuses as problems."""
    return {status: {"description": _MEANINGS[status], "content": _PROBLEM} for status in statuses}


def add_openapi(app: FastAPI) -> None:
    """Serve the document of ``app``, once made."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
                servers=[{"url": app.state.settings.root_path or "/"}],
            )
            components = made.setdefault("components", {})
            schemas = components.setdefault("schemas", {})
            schemas["Problem"] = Problem.model_json_schema()
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
            made["security"] = [{"bearer": []}, {}]
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's way to extend it

    @app.get(OPENAPI_PATH, include_in_schema=False)
    def openapi(_request: Request) -> Response:
        return JSONResponse(document())


_MEANINGS = {
    400: "Not an HTTP request as it should be, or a foreign Host header",
    401: "Neither the token nor a session",
    403: "A foreign Origin, or no CSRF value",
    404: "Not there",
    405: "Another method is expected",
    409: "The data plane's state does not allow it",
    413: "Body too large",
    422: "A parameter or the body is not as expected",
    503: "The store, the data plane or a free place is missing; try again",
    504: "The data plane did not answer in time",
}
