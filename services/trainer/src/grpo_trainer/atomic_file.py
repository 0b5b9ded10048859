"""A file that is either the old one or the whole new one, never a part."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write ``content`` beside ``path`` and rename it into place.

    Raises:
        OSError: it cannot be written; ``path`` is as it was, and nothing is left beside it.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
