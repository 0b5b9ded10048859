"""`JournalFile`: records that survive a crash, appended to a file per process.

An incomplete or damaged record is ignored: each has a length and a checksum, and a crash can cut
only the last one. Its payload is a safetensors file of columns, whose metadata holds facts as JSON;
nothing is pickled. An appended record is in the operating system's cache: it survives the death of
every process, but not a crash of the machine.

::

    magic | XXH3-64 of the payload | size of the payload | payload    | next record
    4     | 8                      | 8                   | safetensors|

A record belongs to the position of a prompt in the stream. A file is removed once none of its
positions is needed.
"""

from __future__ import annotations

import json
import os
import struct
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any  # Any: facts are plain JSON

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load, save

from grpo_trainer.atomic_file import append_completely

_HEAD = struct.Struct("<4sQQ")
"""Head of a record: the magic, the XXH3-64 of its payload, and the payload's size in bytes."""

_MAGIC = b"GRJ3"
_SUFFIX = ".journal"
_POSITION, _FACTS = "position", "facts"


@dataclass(frozen=True)
class Place:
    """Place of a record, whose payload is at ``start`` of ``path``.

    ``position`` is the position of a prompt in the stream; ``facts`` are JSON values.
    Both are as found in the file; only `read` verifies the checksum.
    """

    path: Path
    start: int
    size: int
    checksum: int
    position: int
    facts: Mapping[str, Any]


class JournalFile:
    """A new file for records of one ``kind`` below ``folder``, open for appending.

    Not thread-safe.

    Attributes:
        path: path of the file.
    """

    path: Path

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder, self._kind = folder, kind
        folder.mkdir(parents=True, exist_ok=True)
        self._file = self._open()

    def _open(self) -> FileIO:
        self.path = self._folder / f"{uuid.uuid4().hex}.{self._kind}{_SUFFIX}"
        return self.path.open("xb", buffering=0)

    def append(
        self, position: int, facts: Mapping[str, Any], columns: dict[str, torch.Tensor]
    ) -> int:
        """Append a record; return the bytes written."""
        header = json.dumps({_POSITION: position, _FACTS: facts})
        payload = save(columns, metadata={self._kind: header})
        head = _HEAD.pack(_MAGIC, xxhash.xxh3_64_intdigest(payload), len(payload))
        # An incomplete record would hide the records after it.
        append_completely(self._file, head + payload)
        return len(head) + len(payload)

    def rotate(self) -> str:
        """Append to a new file from now on; return its name."""
        self._file.close()
        self._file = self._open()
        return self.path.name


def places(folder: Path, kind: str) -> Iterator[Place]:
    """Yield the places of the complete records of a kind, oldest file first."""
    for path in _files(folder, f".{kind}"):
        yield from _places(path)


def read(place: Place) -> dict[str, torch.Tensor] | None:
    """Return the columns of a record; None if it is damaged or its file was removed."""
    try:
        with place.path.open("rb") as file:
            file.seek(place.start)
            payload = file.read(place.size)
    except FileNotFoundError:  # pruned: its prompts are trained
        return None
    if xxhash.xxh3_64_intdigest(payload) != place.checksum:
        return None
    try:
        return load(payload)
    except SafetensorError:
        return None


def prune(
    folder: Path, *, open_files: Collection[str], untrained: Collection[int], position: int
) -> None:
    """Remove files that a new checkpoint makes superfluous: all their prompts are trained.

    Args:
        folder: the folder of the files, of any kind.
        open_files: names of the files to which processes append.
        untrained: positions of the prompts that the checkpoint lists as pending.
        position: number of prompts that the checkpoint's run has taken. Files of an earlier part
            of the run, which crashed, may have later prompts.
    """
    wanted = set(untrained)
    for path in _files(folder):
        is_needed = any(
            place.position in wanted or place.position >= position for place in _places(path)
        )
        if path.name not in open_files and not is_needed:
            path.unlink(missing_ok=True)


def _files(folder: Path, kind: str = "") -> list[Path]:
    """Return the files in ``folder``, ordered by their last write."""
    ages: dict[Path, tuple[int, str]] = {}
    for path in folder.glob(f"*{kind}{_SUFFIX}"):
        with suppress(FileNotFoundError):  # pruned meanwhile
            ages[path] = path.stat().st_mtime_ns, path.name
    return sorted(ages, key=ages.__getitem__)


def _kind_of(path: Path) -> str:
    return path.name.removesuffix(_SUFFIX).rpartition(".")[2]


def _places(path: Path) -> Iterator[Place]:
    """Yield the places of the complete records of a file, without their columns."""
    with suppress(FileNotFoundError), path.open("rb") as file:  # pruned meanwhile
        end = os.fstat(file.fileno()).st_size
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            magic, checksum, size = _HEAD.unpack(head)
            start = file.tell()
            if magic != _MAGIC or start + size > end:
                return  # cut by a crash, or not a journal
            length = int.from_bytes(file.read(8), "little")
            header = _header(file.read(length), _kind_of(path)) if length <= size - 8 else None
            if header is not None:
                yield Place(path, start, size, checksum, *header)
            file.seek(start + size)


def _header(header: bytes, kind: str) -> tuple[int, dict[str, Any]] | None:
    """Return position and facts from the header of a safetensors file; None if it is damaged."""
    try:
        entry = json.loads(json.loads(header)["__metadata__"][kind])
        position, facts = entry[_POSITION], entry[_FACTS]
    except (ValueError, LookupError, TypeError):
        return None
    if not isinstance(position, int) or not isinstance(facts, dict):
        return None
    return position, facts
