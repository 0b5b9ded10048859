"""Checkpoints of a whole run: safetensors for tensors, JSON for the rest, nothing pickled.

A checkpoint is a folder. It is written under another name, its state file last and with a digest of
every other file, and renamed when complete; an old one is renamed before it is removed. So a folder
named ``step-...`` is always whole. Model and optimiser are written by another process, perhaps on
another machine: it says what it wrote, and nothing is renamed or removed before that is found here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal  # Any: metrics

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from grpo_trainer.errors import CheckpointError

MODEL = "model"
OPTIMIZER = "optimizer.safetensors"

_STATE = "state.json"
_NAME = re.compile(r"step-(\d{6,})")
_PARTIAL = ".step-*.partial"


class RunState(BaseModel):
    """What a run needs to go on besides model and optimiser.

    Attributes:
        step: completed steps.
        prompts_position: prompts taken from the stream.
        history: the metrics of every completed step.
        config: the run's configuration as plain data.
        data: `RunInputs.digests`; an older release kept none, or of other things.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    step: NonNegativeInt
    prompts_position: NonNegativeInt
    history: list[dict[str, Any]]
    config: dict[str, Any]
    data: dict[str, str] = {}


class _StateFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal[1]
    files: dict[str, str]
    state: RunState
    digest: str


def save_checkpoint(
    folder: Path,
    state: RunState,
    write_policy: Callable[[Path], Mapping[str, int]],
    *,
    keep_last: int,
    notice: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write a checkpoint and remove old ones.

    Args:
        folder: folder of the run's checkpoints; created if it is not there.
        state: the run's state.
        write_policy: writes model and optimiser into the folder it is given, which is there;
            returns the `written_files`.
        keep_last: how many checkpoints stay.
        notice: told of each old one that cannot be removed; the next checkpoint tries again.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: it cannot be written, for example because the disk is full, or what was
            written is not here. Nothing of it is left, and older checkpoints are untouched.
    """
    final = folder / f"step-{state.step:06d}"
    partial = _partial(final)
    try:
        for left in folder.glob(_PARTIAL):  # of a process that was killed; their room is needed
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
        written = write_policy(partial)
        _check_written(partial, written)
        names = sorted({*written, *_files(partial)})
        _check_parts(partial, names)
        digests = {name: _digest(partial / name) for name in names}
        body = {"format": 1, "files": digests, "state": state.model_dump()}
        content = {**body, "digest": _json_digest(body)}
        (partial / _STATE).write_text(json.dumps(content, indent=1))
        _sync_tree(partial)
        if final.exists():
            raise CheckpointError(f"checkpoint {final}: exists already")
        os.replace(partial, final)
        _sync(folder)
    except OSError as error:
        raise CheckpointError(f"checkpoint {final}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _remove_old(folder, keep_last, notice)
    return final


def _remove_old(folder: Path, keep_last: int, notice: Callable[[str], None]) -> None:
    """As far as that can be done: the new checkpoint is whole, whatever becomes of the others.

    A file that a process somewhere has open cannot be removed on NFS, for example.
    """
    for old in [*_checkpoints(folder)[:-keep_last], *folder.glob(_PARTIAL)]:
        try:
            hidden = _partial(old) if _match(old) else old
            os.replace(old, hidden)
            shutil.rmtree(hidden)
        except OSError as error:
            notice(f"{old}: cannot be removed: {error}; the next checkpoint tries again")


def written_files(folder: Path) -> dict[str, int]:
    """The files below ``folder`` that are on disk: name relative to it, with slashes, to bytes."""
    _sync_tree(folder)
    return {name: path.stat().st_size for name, path in _files(folder).items()}


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint, None if there is none."""
    found = _checkpoints(folder)
    return found[-1] if found else None


def intact_before(checkpoint: Path) -> Path | None:
    """The newest intact checkpoint that is older than ``checkpoint``, None if there is none."""
    found = _checkpoints(checkpoint.parent)
    for older in reversed(found[: found.index(checkpoint)]):
        try:
            load_state(older)
        except CheckpointError:
            continue
        return older
    return None


def load_state(checkpoint: Path) -> RunState:
    """Read a checkpoint's state, after verifying every file of it.

    Raises:
        CheckpointError: naming the file that is missing, changed or not understood.
    """
    path = checkpoint / _STATE
    try:
        raw = json.loads(path.read_bytes())
        found = _StateFile.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"checkpoint file {path}: {where}: {first['msg']}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint file {path}: cannot be read: {error}") from None
    body = {name: value for name, value in raw.items() if name != "digest"}
    if _json_digest(body) != found.digest:
        raise CheckpointError(f"checkpoint file {path}: its content changed since it was saved")
    _check_parts(checkpoint, found.files)
    for name, digest in found.files.items():
        file = checkpoint / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint file {file}: missing")
        if _digest(file) != digest:
            raise CheckpointError(f"checkpoint file {file}: its content changed since it was saved")
    return found.state


def _files(folder: Path) -> dict[str, Path]:
    """By their names relative to ``folder``, with slashes."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in found}


def _check_written(partial: Path, written: Mapping[str, int]) -> None:
    """Refuse a folder that lacks a file which the policy says that it wrote there."""
    for name, size in written.items():
        path = partial / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            raise CheckpointError(
                f"checkpoint file {path}: rank 0 wrote {size} bytes, the driver finds "
                f"{'no file' if found is None else f'{found} bytes'}; run.output has to be a "
                "folder that both see"
            )


def _check_parts(checkpoint: Path, names: Collection[str]) -> None:
    """Refuse a list of files without model or optimiser."""
    weights = any(fnmatchcase(name, f"{MODEL}/*.safetensors") for name in names)
    for what, there in (
        (f"{MODEL}/config.json", f"{MODEL}/config.json" in names),
        (f"{MODEL}/*.safetensors", weights),
        (OPTIMIZER, OPTIMIZER in names),
    ):
        if not there:
            raise CheckpointError(
                f"checkpoint {checkpoint}: {what}: not among its {len(names)} files"
            )


def _checkpoints(folder: Path) -> list[Path]:
    """Complete ones, oldest first."""
    steps = {int(match[1]): path for path in folder.glob("step-*") if (match := _match(path))}
    return [steps[step] for step in sorted(steps)]


def _match(path: Path) -> re.Match[str] | None:
    return _NAME.fullmatch(path.name) if path.is_dir() else None


def _partial(final: Path) -> Path:
    """A new name: what was left under another one may not be removable."""
    return final.with_name(f".{final.name}.{secrets.token_hex(4)}.partial")


def _json_digest(body: dict[str, Any]) -> str:
    content = json.dumps(body, sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _sync_tree(folder: Path) -> None:
    """Return once everything below ``folder``, and its own list of names, is on disk."""
    for path in (*folder.rglob("*"), folder):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
