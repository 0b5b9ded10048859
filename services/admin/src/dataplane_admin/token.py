"""The bearer token that guards the service."""

from __future__ import annotations

import hmac
import re
from pathlib import Path

from starlette.datastructures import Headers

MIN_TOKEN_LENGTH = 16

_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # token68 of RFC 9110, what a Bearer header can carry


def read_token(path: Path) -> str:
    """The token in the file at ``path``; white space around it does not belong to it.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it holds no token that is long enough and fits into a header. The message
            does not contain what was found.
    """
    text = path.read_bytes().decode("utf-8", errors="replace").strip()
    if len(text) < MIN_TOKEN_LENGTH or _TOKEN.fullmatch(text) is None:
        raise ValueError(
            f"token file {str(path)!r}: expected one token of at least {MIN_TOKEN_LENGTH} "
            "characters out of letters, digits and -._~+/, such as `openssl rand -hex 32` writes"
        )
    return text


def brings_token(headers: Headers, token: str | None) -> bool:
    """Whether a request's only Authorization header has the token; never where there is none."""
    given = headers.getlist("authorization")
    if len(given) != 1 or token is None:
        return False
    scheme, _, told = given[0].partition(" ")
    # Compared as bytes, because compare_digest refuses strings that are not ASCII.
    return scheme.lower() == "bearer" and hmac.compare_digest(
        told.strip().encode("latin-1"), token.encode("ascii")
    )
