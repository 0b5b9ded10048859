"""The path below which a proxy serves the service, ``/rl`` for example.

Inside, every path is relative to it: middlewares and routes see ``/v1/traces``. What a browser is
sent has it: links, redirects and the paths of cookies. So both kinds of proxies fit, those that
remove the prefix (``proxy_pass http://host:8080/;``) and those that pass it on.
"""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

_ROOT_PATH = re.compile(r"(/(?!\.{1,2}(/|$))[A-Za-z0-9._~-]+)*")


def canonical_root_path(given: str) -> str:
    """Return ``given`` with a leading slash and without a trailing one; the root is empty.

    Raises:
        ValueError: it is not a path of letters, digits and ``-._~``.
    """
    stripped = given.strip("/")
    path = f"/{stripped}" if stripped else ""
    if _ROOT_PATH.fullmatch(path) is None:
        raise ValueError(f"found {given!r}; expected a path such as /rl, of letters, digits, -._~")
    return path


class RootPathMiddleware:
    """Remove the root path from requests that still have it.

    Args:
        root_path: in its canonical form. No route may be below it by itself.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self.app = app
        self.root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.root_path and scope["type"] != "lifespan":
            path = scope["path"]
            if path == self.root_path or path.startswith(f"{self.root_path}/"):
                # raw_path goes, since it would contradict; nothing here reads it.
                scope = {**scope, "path": path[len(self.root_path) :] or "/", "raw_path": None}
        await self.app(scope, receive, send)
