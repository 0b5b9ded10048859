"""OpenAPI document: FastAPI's, plus the problems that routes may return."""

from __future__ import annotations

from typing import Any  # Any: a JSON document

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response

from dataplane_admin.models import Problem
from dataplane_admin.web.callers import OPEN_PATHS

OPENAPI_PATH = "/api/v1/openapi.json"

_PROBLEM = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the ``responses`` of a route that may return problems with these statuses."""
    return {status: {"description": _MEANINGS[status], "content": _PROBLEM} for status in statuses}


def add_openapi(app: FastAPI) -> None:
    """Serve the document of ``app``, built once."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
                servers=[{"url": app.state.settings.root_path or "/"}],
            )
            for path in schema["paths"].values():
                for operation in path.values():
                    _summarize(operation)
            components = schema.setdefault("components", {})
            schemas = components.setdefault("schemas", {})
            schemas["Problem"] = Problem.model_json_schema()
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{"bearer": []}, {}]
            for probe in OPEN_PATHS & schema["paths"].keys():
                for operation in schema["paths"][probe].values():
                    operation["security"] = []
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's way to extend it

    @app.get(OPENAPI_PATH, include_in_schema=False)
    def openapi(_request: Request) -> Response:
        return JSONResponse(document())


def _summarize(operation: dict[str, Any]) -> None:
    """Use a docstring's first line as the summary; FastAPI's default is the function's name."""
    if docstring := operation.pop("description", ""):
        summary, _, rest = docstring.partition("\n\n")
        operation["summary"] = summary.removesuffix(".")
        if rest:
            operation["description"] = rest


_MEANINGS = {
    400: "Invalid HTTP request or Host header",
    401: "Token or session missing",
    403: "Origin not allowed, or CSRF value missing",
    404: "Not found",
    405: "Method not allowed",
    409: "The data plane's state does not allow it",
    413: "Body too large",
    422: "Invalid parameter or body",
    503: "Store or data plane unavailable, or too many requests; retry",
    504: "The data plane did not answer in time",
}
