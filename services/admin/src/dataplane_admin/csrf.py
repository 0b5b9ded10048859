"""Which requests that change something were meant by who seems to send them.

A page of another site can make a browser send a form, cookies included. It can read none of our
pages, so it does not know the value that a form of ours carries.
"""

from __future__ import annotations

from starlette.requests import HTTPConnection

CSRF_FIELD = "csrf"
CSRF_HEADER = "x-csrf-token"


def csrf_of(connection: HTTPConnection) -> str:
    """The value that forms of the page which answers this request carry, or scripts send back.

    It belongs to the session that the request comes with, or to the process where nobody logs in.
    """
    return str(connection.scope["state"]["csrf"])
