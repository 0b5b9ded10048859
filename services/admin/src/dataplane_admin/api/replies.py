"""HTTP replies: JSON, or 304 if the client has the newest answer."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from fastapi import Request
from fastapi.responses import Response
from pydantic import ConfigDict, TypeAdapter

AGES_S = 5
"""Seconds for which an answer with ages counts as unchanged."""

# JSON has no form for NaN.
_ANY: TypeAdapter[object] = TypeAdapter(object, config=ConfigDict(ser_json_inf_nan="null"))
# Live revisions restart with each process.
_BOOT = secrets.token_hex(4)


def json_reply(answer: object, *, status: int = 200) -> Response:
    """Return an answer that must not be cached."""
    return Response(_ANY.dump_json(answer), status, media_type="application/json")


def conditional_reply(
    request: Request, answer: Callable[[], object], *, ages: bool = False
) -> Response:
    """Return an answer with an ETag, or 304 without calling ``answer`` if the client has it.

    ``ages`` is True if the answer contains ages, which change with time.
    """
    # Revisions grow when the answer may have changed.
    revisions = request.app.state.service.revisions
    slot = f".{int(time.monotonic()) // AGES_S}" if ages else ""
    tag = f'W/"{_BOOT}.{revisions.store}.{revisions.live}{slot}"'
    headers = {"etag": tag, "cache-control": "private, no-cache"}
    if _matches(request.headers.get("if-none-match", ""), tag):
        return Response(status_code=304, headers=headers)
    reply = json_reply(answer())
    reply.headers.update(headers)
    return reply


def _matches(condition: str, tag: str) -> bool:
    """Compare weakly, as RFC 9110 requires for If-None-Match."""
    bare = tag.removeprefix("W/")
    return any(
        candidate.strip().removeprefix("W/") == bare for candidate in condition[:8_192].split(",")
    )
