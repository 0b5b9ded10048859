"""Style sheets and scripts, served below a path that holds a digest of their content."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from fastapi.responses import Response

from dataplane_admin.pages.links import Link

_FOLDER = files("dataplane_admin.pages").joinpath("static")
_VENDOR = files("dataplane_admin.pages").joinpath("vendor")
_VENDORED = (
    "swagger-ui/swagger-ui-bundle.js",
    "swagger-ui/swagger-ui.css",
    "uplot/uPlot.iife.min.js",
    "uplot/uPlot.min.css",
)
# `observability show` writes the same waterfall.
_WATERFALL = files("observability.views").joinpath("waterfall.css")
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class Assets:
    """The files of ``static/``, Swagger UI, uPlot and the waterfall's style sheet, read once.

    Attributes:
        base: path of the files. It holds a digest of all files, so that scripts import each other
            by plain names and browsers cache without a time limit.
    """

    def __init__(self) -> None:
        vendored = [_VENDOR.joinpath(*name.split("/")) for name in _VENDORED]
        sources = [_WATERFALL, *vendored, *_FOLDER.iterdir()]
        self._files = {path.name: path.read_bytes() for path in sources}
        digest = hashlib.sha256()
        for name, content in sorted(self._files.items()):
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        self._digest = digest.hexdigest()[:16]
        self.base = Link(f"/static/{self._digest}")

    def answer(self, digest: str, name: str) -> Response | None:
        """Return a file, None if missing. An old digest gets the current file, uncached."""
        content = self._files.get(name)
        if content is None:
            return None
        suffix = name[name.rfind(".") :]
        kind = _TYPES.get(suffix, "application/octet-stream")
        cache = "public, max-age=31536000, immutable" if digest == self._digest else "no-cache"
        return Response(content, media_type=kind, headers={"cache-control": cache})
