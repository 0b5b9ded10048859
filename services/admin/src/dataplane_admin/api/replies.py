"""Answers on the wire: JSON, and 304 to those who have the newest one already."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from fastapi import Request
from fastapi.responses import Response
from pydantic import ConfigDict, TypeAdapter

from dataplane_admin.answers.models import Changed

AGES_S = 5
"""For how long an answer that tells ages counts as the same."""

# What is no number has no form in JSON.
_ANY: TypeAdapter[object] = TypeAdapter(object, config=ConfigDict(ser_json_inf_nan="null"))
# Revisions of the live part begin anew with each process.
_BOOT = secrets.token_hex(4)


def json_reply(answer: object, *, status: int = 200) -> Response:
    """An answer that nobody may keep."""
    return Response(_ANY.dump_json(answer), status, media_type="application/json")


def kept_reply(
    request: Request, revisions: Changed, answer: Callable[[], object], *, ages: bool = False
) -> Response:
    """An answer with an ETag, or 304 if the caller has it; only then ``answer`` is not called.

    Args:
        request: may have If-None-Match.
        revisions: what the answer depends on.
        answer: makes it.
        ages: whether it tells how long ago something was.
    """
    slot = f".{int(time.monotonic()) // AGES_S}" if ages else ""
    tag = f'W/"{_BOOT}.{revisions.store}.{revisions.live}{slot}"'
    headers = {"etag": tag, "cache-control": "private, no-cache"}
    if _has(request.headers.get("if-none-match", ""), tag):
        return Response(status_code=304, headers=headers)
    reply = json_reply(answer())
    reply.headers.update(headers)
    return reply


def _has(condition: str, tag: str) -> bool:
    """Weak comparison, as RFC 9110 asks for it here."""
    bare = tag.removeprefix("W/")
    return any(one.strip().removeprefix("W/") == bare for one in condition[:8_192].split(","))
