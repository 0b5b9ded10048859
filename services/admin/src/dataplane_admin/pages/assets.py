"""Style sheets and scripts of ours, below a path that changes when one of them does."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from fastapi.responses import Response

from dataplane_admin.pages.links import Link

_FOLDER = files("dataplane_admin.pages").joinpath("static")
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class Assets:
    """All files of ``static/``, read once.

    Attributes:
        base: the path they are below. It holds a digest of them all, so that scripts can import
            each other by their plain names and a browser may keep them for good.
    """

    def __init__(self) -> None:
        self._files = {one.name: one.read_bytes() for one in _FOLDER.iterdir() if one.is_file()}
        digest = hashlib.sha256()
        for name, content in sorted(self._files.items()):
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        self._digest = digest.hexdigest()[:16]
        self.base = Link(f"/static/{self._digest}")

    def answer(self, digest: str, name: str) -> Response | None:
        """A file; None if there is no such one. An old digest gets today's, without being kept."""
        content = self._files.get(name)
        if content is None:
            return None
        suffix = name[name.rfind(".") :]
        kind = _TYPES.get(suffix, "application/octet-stream")
        kept = "public, max-age=31536000, immutable" if digest == self._digest else "no-cache"
        return Response(content, media_type=kind, headers={"cache-control": kept})
