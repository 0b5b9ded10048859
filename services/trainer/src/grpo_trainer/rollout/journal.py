"""`Journal`: the finished groups of an asynchronous run, on disk until they are in a checkpoint.

After a crash the run continues from its last checkpoint, and the store of the crashed run is gone.
The prompts since that checkpoint are drawn again in the same order. A generator that claims one of
them finds its finished group in the journal, and puts it instead of generating it again. So a crash
costs the responses that were in progress, and the training since the checkpoint.

Each generator appends to its own file. A record is complete, or ignored: it has a length and a
checksum, and a crash can only cut the last one. Its payload is a safetensors file of the group's
columns, whose metadata names position, weight version and rewards; nothing is pickled. Records are
handed to the operating system when they are appended: they survive the death of every process, not
that of the machine.
"""

from __future__ import annotations

import json
import os
import struct
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load, save

_HEAD = struct.Struct("<4sQQ")
"""Head of a record: the magic, the XXH3-64 of its payload, and the payload's size in bytes."""

_MAGIC = b"GRJ2"
_SUFFIX = ".journal"


@dataclass(frozen=True)
class FinishedGroup:
    """Samples of one prompt.

    Attributes:
        position: position of the prompt in the stream.
        weight_version: number of the weights that drew the group's oldest token.
        rewards: reward of each sample; a group of equal rewards that was filtered has no columns.
        columns: the columns that generators put, (samples, ...), padded; see `write_columns`.
    """

    position: int
    weight_version: int
    rewards: list[float]
    columns: dict[str, torch.Tensor]


class Journal:
    """Journal below ``folder``; this object appends to a separate file, and reads all.

    Not thread-safe.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        # The newest record of a position counts: a run that crashed twice may have two.
        self._places = {
            place.position: place for path in _files(folder) for place in _records(path)
        }
        self._file = self._open()

    def _open(self) -> BinaryIO:
        self.path = self._folder / f"{uuid.uuid4().hex}{_SUFFIX}"
        return self.path.open("xb", buffering=0)

    def append(self, group: FinishedGroup) -> int:
        """Append a finished group; return the bytes written."""
        facts = {
            "position": group.position,
            "weight_version": group.weight_version,
            "rewards": group.rewards,
        }
        payload = save(group.columns, metadata={"group": json.dumps(facts)})
        head = _HEAD.pack(_MAGIC, xxhash.xxh3_64_intdigest(payload), len(payload))
        remaining = memoryview(head + payload)
        while remaining:  # a raw file may write a part
            remaining = remaining[self._file.write(remaining) :]
        return len(head) + len(payload)

    def find(self, position: int) -> FinishedGroup | None:
        """Return the group that an earlier part of the run finished; None without an intact one."""
        place = self._places.get(position)
        return None if place is None else _read(place)

    def rotate(self) -> str:
        """Append to a new file from now on; return its name."""
        self._file.close()
        self._file = self._open()
        return self.path.name

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def prune(folder: Path, *, open_files: Collection[str], untrained: Collection[int]) -> None:
    """Remove files that a new checkpoint makes superfluous: all their groups are trained.

    Args:
        folder: the journal's folder.
        open_files: names of the files to which generators append.
        untrained: positions of the prompts that the checkpoint lists as pending.
    """
    wanted = set(untrained)
    for path in _files(folder):
        is_needed = any(place.position in wanted for place in _records(path))
        if path.name not in open_files and not is_needed:
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Place:
    """Place of a record: its payload is at ``start`` of ``path``."""

    path: Path
    start: int
    size: int
    checksum: int
    position: int


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{_SUFFIX}"), key=lambda path: (path.stat().st_mtime_ns, path.name))


def _records(path: Path) -> Iterator[_Place]:
    """Yield the places of the complete records of a file, without their columns."""
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            magic, checksum, size = _HEAD.unpack(head)
            start = file.tell()
            if magic != _MAGIC or start + size > end:
                return  # cut by a crash, or not a journal
            facts = _facts(file, size)
            if facts is not None:
                yield _Place(path, start, size, checksum, int(facts["position"]))
            file.seek(start + size)


def _facts(file: BinaryIO, size: int) -> Mapping[str, float] | None:
    """Return the metadata of a payload, from the header of the safetensors file."""
    length = int.from_bytes(file.read(8), "little")
    if length > size - 8:
        return None
    try:
        facts: Mapping[str, float] = json.loads(
            json.loads(file.read(length))["__metadata__"]["group"]
        )
    except (ValueError, LookupError, TypeError):
        return None
    return facts if isinstance(facts, dict) and isinstance(facts.get("position"), int) else None


def _read(place: _Place) -> FinishedGroup | None:
    try:
        with place.path.open("rb") as file:
            file.seek(place.start)
            payload = file.read(place.size)
    except FileNotFoundError:  # pruned: the group is trained
        return None
    if xxhash.xxh3_64_intdigest(payload) != place.checksum:
        return None
    length = int.from_bytes(payload[:8], "little")
    try:
        facts = json.loads(json.loads(payload[8 : 8 + length])["__metadata__"]["group"])
        columns = load(payload)
    except (SafetensorError, ValueError, LookupError):
        return None
    return FinishedGroup(facts["position"], facts["weight_version"], facts["rewards"], columns)
