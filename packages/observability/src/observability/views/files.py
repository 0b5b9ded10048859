"""Atomic writes of files."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Write a temporary file in the same folder, then rename it to ``path``.

    A reader sees either the old or the new content. The new file has default permissions.

    Raises:
        OSError: the file cannot be written, for example because the folder does not exist. Then
            ``path`` is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
