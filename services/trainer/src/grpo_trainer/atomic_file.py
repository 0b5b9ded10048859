"""Writes of files that succeed completely or leave the old content."""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``content`` to a temporary file next to ``path`` and rename it into place.

    Raises:
        OSError: the write failed; ``path`` is unchanged and the temporary file is removed.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # else a machine that dies may leave an empty file
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def append_completely(file: FileIO, content: bytes) -> None:
    """Append ``content`` to an unbuffered file.

    Raises:
        OSError: the write failed; the file has its previous content.
    """
    before = file.seek(0, os.SEEK_END)
    remaining = memoryview(content)
    try:
        while remaining:  # a raw file may write a part
            remaining = remaining[file.write(remaining) :]
    except OSError:
        file.truncate(before)
        raise
