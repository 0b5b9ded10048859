"""Atomic writes of files."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Write a temporary file in the same folder, then rename it to ``path``.

    A reader sees either the old file or the new one. The new one has default permissions.

    Raises:
        OSError: the folder does not exist or cannot be written; ``path`` is unchanged.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with draft.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
