"""A folder of files that is whole or not there: how a partition checkpoint lies on disk.

It is written under another name, its manifest last and with a digest of every other file, and
renamed when complete. An old one is renamed before the new one takes its place, and a reader that
finds neither name takes the old one; so at every moment one of the two can be read whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # Any: the manifest's content as JSON has it

from dataplane_core.errors import CheckpointError

MANIFEST = "manifest.json"
_FORMAT = 1


class FolderWriter:
    """Takes the files of a checkpoint; made by `write_whole`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, str] = {}

    def add(self, name: str, content: bytes) -> None:
        """Write one file, to the disk."""
        _write(self._folder / name, content)
        self._files[name] = hashlib.sha256(content).hexdigest()

    def finish(self, about: dict[str, Any]) -> None:
        """Write the manifest, which says what the files are about. The last call."""
        body = {"format": _FORMAT, "files": self._files, "about": about}
        manifest = {**body, "sha256": _digest_of(body)}
        _write(self._folder / MANIFEST, json.dumps(manifest, indent=1).encode())


@contextlib.contextmanager
def write_whole(folder: Path) -> Iterator[FolderWriter]:
    """Write a checkpoint, in place of one that is there once the block has ended without an error.

    Raises:
        CheckpointError: it cannot be written, for example because the disk is full, or another
            process writes it, or the folder holds something else. Nothing of it is left, and an
            older checkpoint is untouched.
    """
    partial, old = _beside(folder, "partial"), _beside(folder, "old")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(partial):
            try:
                _settle_old(folder, old)
                if folder.exists() and not (folder / MANIFEST).is_file():
                    raise CheckpointError(
                        f"checkpoint {folder}: it exists and is no checkpoint; name a folder that "
                        "does not exist"
                    )
                for left in partial.iterdir():  # of a process that was killed
                    left.unlink()
                yield FolderWriter(partial)
                _sync(partial)
                if folder.exists():
                    os.replace(folder, old)
                os.replace(partial, folder)
                _sync(folder.parent)
                shutil.rmtree(old, ignore_errors=True)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                _settle_old(folder, old)
                raise
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder}: cannot be written: {error}") from error


@dataclass(frozen=True)
class WholeFolder:
    """A checkpoint of which every file was verified.

    Attributes:
        folder: where it lies.
        files: names of its files, in the order written, to their digests.
        about: what the manifest says of them.
    """

    folder: Path
    files: dict[str, str]
    about: dict[str, Any]

    def read(self, name: str) -> bytes:
        """One file, verified again, because it may have changed since.

        Raises:
            CheckpointError: naming the file.
        """
        path = self.folder / name
        if name not in self.files:
            raise CheckpointError(f"checkpoint file {path}: the manifest does not list it")
        content = _read(path)
        if hashlib.sha256(content).hexdigest() != self.files[name]:
            raise CheckpointError(f"checkpoint file {path}: its content changed since it was saved")
        return content


def open_whole(folder: Path) -> WholeFolder:
    """Verify a checkpoint: its manifest, every file, and that there is no other.

    Raises:
        CheckpointError: naming the first file that is missing, changed, extra or not understood.
    """
    old = _beside(folder, "old")
    if not folder.exists() and old.exists():  # its writer was killed between two renames
        folder = old
    path = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint {folder}: there is no such folder")
    try:
        manifest = json.loads(_read(path))
        body = {name: manifest[name] for name in ("format", "files", "about")}
        files, about, digest = body["files"], body["about"], manifest["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint file {path}: cannot be read: {error!r}") from None
    if body["format"] != _FORMAT:
        raise CheckpointError(
            f"checkpoint file {path}: format {body['format']!r}; expected {_FORMAT}"
        )
    if _digest_of(body) != digest:
        raise CheckpointError(f"checkpoint file {path}: its content changed since it was saved")
    whole = WholeFolder(folder, files, about)
    for name in files:
        if Path(name).name != name:
            raise CheckpointError(f"checkpoint file {path}: lists {name!r}, which is no file name")
        whole.read(name)
    for found in sorted(folder.iterdir()):
        if found.name not in {MANIFEST, *files}:
            raise CheckpointError(f"checkpoint file {found}: the manifest does not list it")
    return whole


@contextlib.contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Hold ``partial``, made if it is not there; the lock ends with this process."""
    partial.mkdir(exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = partial.exists() and os.path.samestat(os.fstat(descriptor), partial.stat())
        except BlockingIOError:
            mine = False
        if not mine:
            raise CheckpointError(f"checkpoint folder {partial}: another process writes it now")
        yield
    finally:
        os.close(descriptor)


def _settle_old(folder: Path, old: Path) -> None:
    """End what a writer left that was killed or failed between two renames."""
    if old.exists():
        if folder.exists():
            shutil.rmtree(old)
        else:
            os.replace(old, folder)


def _beside(folder: Path, what: str) -> Path:
    return folder.with_name(f".{folder.name}.{what}")


def _read(path: Path) -> bytes:
    if path.is_symlink() or not path.is_file():
        raise CheckpointError(f"checkpoint file {path}: missing")
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"checkpoint file {path}: cannot be read: {error}") from None


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
