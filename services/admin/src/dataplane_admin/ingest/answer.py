"""Answers to export requests, in the encoding of the request."""

from __future__ import annotations

import json
import math
from http import HTTPStatus

from starlette.responses import Response

from dataplane_admin.ingest.refusal import Refusal
from observability.otlp_json import write_json
from observability.wire import (
    INTERNAL,
    INVALID_ARGUMENT,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    OtlpSignal,
    export_response,
    status_response,
)

JSON = "application/json"

_MAX_MESSAGE = 1000


def success_response(
    kind: OtlpSignal, refused: int, reasons: tuple[str, ...], media_type: str
) -> Response:
    """Return 200, with the number of rejected records and the reasons."""
    answer = export_response(kind, refused, "; ".join(reasons)[:_MAX_MESSAGE])
    body = write_json(answer) if media_type == JSON else answer.SerializeToString()
    return Response(body, media_type=media_type)


def refusal_response(refusal: Refusal, media_type: str) -> Response:
    """Return an error with a ``google.rpc.Status``, as the OTLP specification requires."""
    status = refusal.status
    message = str(refusal)[:_MAX_MESSAGE]
    code = {
        HTTPStatus.TOO_MANY_REQUESTS: RESOURCE_EXHAUSTED,
        HTTPStatus.SERVICE_UNAVAILABLE: UNAVAILABLE,
        HTTPStatus.INTERNAL_SERVER_ERROR: INTERNAL,
    }.get(status, INVALID_ARGUMENT)
    if media_type == JSON:
        shown = message.encode(errors="replace").decode()
        body = json.dumps({"code": code, "message": shown}).encode()
    else:
        body = status_response(code, message)
    headers = {}
    if refusal.retry_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(refusal.retry_s)))
    if status is HTTPStatus.UNSUPPORTED_MEDIA_TYPE:
        headers["Accept-Encoding"] = "gzip, identity"
    return Response(body, status_code=status, media_type=media_type, headers=headers)
