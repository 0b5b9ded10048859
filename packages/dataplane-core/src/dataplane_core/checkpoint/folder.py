"""Atomic folders: a partition's checkpoint on disk is complete or absent.

The files are written to a folder with a temporary name. The manifest, with their digests, is last.
Then the old checkpoint is renamed, and the new one gets its name. A reader that does not find the
name uses the renamed old one, so a complete checkpoint is readable at every moment::

    .name.partial   being written
    name            the checkpoint
    .name.old       the previous one, from the first rename until it is removed
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
from typing import Any  # Any: the manifest, decoded from JSON

from dataplane_core.errors import CheckpointError, DataPlaneError

MANIFEST = "manifest.json"
_FORMAT = 2


class FolderWriter:
    """Writer of a checkpoint's files; made by `write_folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, str] = {}

    def add(self, name: str, content: bytes) -> None:
        """Write one file and flush it to disk."""
        _write(self._folder / name, content)
        self._files[name] = hashlib.sha256(content).hexdigest()

    def finish(self, metadata: dict[str, Any]) -> None:
        """Write the manifest with ``metadata``; this must be the last call."""
        body = {"format": _FORMAT, "files": self._files, "metadata": metadata}
        manifest = {**body, "sha256": _digest_of(body)}
        _write(self._folder / MANIFEST, json.dumps(manifest, indent=1).encode())


@contextlib.contextmanager
def write_folder(folder: Path) -> Iterator[FolderWriter]:
    """Write a checkpoint, which replaces an older one when the block ends without an error.

    Raises:
        CheckpointError: the disk is full, another process writes the checkpoint, the folder is not
            a checkpoint, or the like. Nothing new remains, and an older checkpoint is untouched.
    """
    partial, old = _sibling(folder, "partial"), _sibling(folder, "old")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(partial):
            try:
                _recover_old(folder, old)
                if folder.exists() and not (folder / MANIFEST).is_file():
                    raise CheckpointError(
                        f"checkpoint {folder}: it exists and is not a checkpoint; name a folder "
                        "that does not exist"
                    )
                for orphan in partial.iterdir():  # of a process that was killed
                    orphan.unlink()
                yield FolderWriter(partial)
                _sync(partial)
                if folder.exists():
                    os.replace(folder, old)
                os.replace(partial, folder)
                try:
                    _sync(folder.parent)
                except BaseException:  # the handler below restores the old checkpoint
                    os.replace(folder, partial)
                    raise
                shutil.rmtree(old, ignore_errors=True)
            except BaseException:  # also on an interrupt, the old checkpoint must stay complete
                shutil.rmtree(partial, ignore_errors=True)
                _recover_old(folder, old)
                raise
    except DataPlaneError:  # raised unchanged, although DeadlineExceededError is an OSError too
        raise
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder}: cannot be written: {error}") from error


@dataclass(frozen=True)
class VerifiedFolder:
    """A checkpoint whose files were all verified.

    Attributes:
        folder: path of the checkpoint.
        files: file name to digest, in the order written.
        metadata: what the writer passed to `FolderWriter.finish`.
    """

    folder: Path
    files: dict[str, str]
    metadata: dict[str, Any]

    def read(self, name: str) -> bytes:
        """Return the content of one file, verified again because it may have changed since.

        Raises:
            CheckpointError: the file is unknown, missing or changed; the error names it.
        """
        path = self.folder / name
        if name not in self.files:
            raise CheckpointError(f"checkpoint file {path}: the manifest does not list it")
        content = _read(path)
        if hashlib.sha256(content).hexdigest() != self.files[name]:
            raise CheckpointError(f"checkpoint file {path}: its content changed since it was saved")
        return content


def open_folder(folder: Path) -> VerifiedFolder:
    """Verify a checkpoint: its manifest, every file, and that there is no other file.

    Raises:
        CheckpointError: a file is missing, changed, unexpected or malformed; the error names the
            first one.
    """
    old = _sibling(folder, "old")
    if not folder.exists() and old.exists():  # its writer was killed between two renames
        folder = old
    path = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint {folder}: there is no such folder")
    try:
        manifest = json.loads(_read(path))
        body = {name: manifest[name] for name in ("format", "files", "metadata")}
        files, metadata, digest = body["files"], body["metadata"], manifest["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint file {path}: cannot be read: {error!r}") from None
    if body["format"] != _FORMAT:
        raise CheckpointError(
            f"checkpoint file {path}: format {body['format']!r}; expected {_FORMAT}"
        )
    if _digest_of(body) != digest:
        raise CheckpointError(f"checkpoint file {path}: its content changed since it was saved")
    verified = VerifiedFolder(folder, files, metadata)
    for name in files:
        if Path(name).name != name:
            raise CheckpointError(f"checkpoint file {path}: lists {name!r}, which is no file name")
        verified.read(name)
    for present in sorted(folder.iterdir()):
        if present.name not in {MANIFEST, *files}:
            raise CheckpointError(f"checkpoint file {present}: the manifest does not list it")
    return verified


@contextlib.contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Create ``partial`` if it is missing, and lock it until the block or this process ends."""
    partial.mkdir(exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have renamed the folder before it was locked here.
            is_locked = partial.exists() and os.path.samestat(os.fstat(descriptor), partial.stat())
        except BlockingIOError:
            is_locked = False
        if not is_locked:
            raise CheckpointError(f"checkpoint folder {partial}: another process is writing it")
        yield
    finally:
        os.close(descriptor)


def _recover_old(folder: Path, old: Path) -> None:
    """Restore the old checkpoint if a writer stopped between the renames; else remove it."""
    if old.exists():
        if folder.exists():
            shutil.rmtree(old)
        else:
            os.replace(old, folder)


def _sibling(folder: Path, suffix: str) -> Path:
    return folder.with_name(f".{folder.name}.{suffix}")


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
