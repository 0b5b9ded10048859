"""Checkpoints of a run: safetensors for tensors, JSON for the rest, nothing pickled.

A checkpoint is a folder. It is written under a temporary name and renamed when complete. The state
file is written last and has a digest of every other file. An old checkpoint is renamed before it is
removed. So a folder named ``step-...`` is always complete.

Another process, perhaps on another machine, writes model and optimizer and returns the names and
sizes of their files. If the driver does not see these files, the save fails and removes no old
checkpoint.
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
    """State that a run needs to continue, besides model and optimizer.

    Attributes:
        step: completed steps.
        prompts_position: prompts taken from the stream.
        history: the metrics of every completed step.
        config: the run's configuration as plain data.
        pending_prompts: positions of prompts taken and not trained, in an asynchronous run.
        data: `RunInputs.digests`; empty, or not comparable, if an older release wrote them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    step: NonNegativeInt
    prompts_position: NonNegativeInt
    history: list[dict[str, Any]]
    config: dict[str, Any]
    data: dict[str, str] = {}
    pending_prompts: list[NonNegativeInt] = []


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
        folder: folder of the run's checkpoints; created if missing.
        state: the run's state.
        write_policy: writes model and optimizer into an existing folder; returns the
            `written_files`.
        keep_last: number of checkpoints to retain.
        notice: called for each old checkpoint that cannot be removed; the next save retries.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: the checkpoint cannot be written, for example because the disk is full, or
            the driver does not see the policy's files. Nothing of it remains. Or it is complete,
            but its name cannot be flushed to disk, so that it may be lost if the machine dies. In
            both cases older checkpoints are untouched.
    """
    final = folder / f"step-{state.step:06d}"
    partial = _partial(final)
    try:
        for orphaned in folder.glob(_PARTIAL):  # left by a killed process
            shutil.rmtree(orphaned, ignore_errors=True)
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
            raise CheckpointError(f"checkpoint {final}: exists already; move it away")
        os.replace(partial, final)
    except OSError as error:
        raise CheckpointError(f"checkpoint {final}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    try:
        _sync(folder)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {final}: complete, but its name cannot be flushed to disk: {error}"
        ) from error
    _remove_old(folder, keep_last, notice)
    return final


def _remove_old(folder: Path, keep_last: int, notice: Callable[[str], None]) -> None:
    """Remove old checkpoints; report those that cannot be removed, and continue.

    NFS, for example, keeps a file that another process has open.
    """
    for old in [*_checkpoints(folder)[:-keep_last], *folder.glob(_PARTIAL)]:
        try:
            hidden = _partial(old) if _match(old) else old
            os.replace(old, hidden)
            shutil.rmtree(hidden)
        except OSError as error:
            notice(f"{old}: cannot be removed: {error}; the next checkpoint retries")


def written_files(folder: Path) -> dict[str, int]:
    """Flush the files in ``folder`` to disk; return their sizes in bytes by relative name."""
    _sync_tree(folder)
    return {name: path.stat().st_size for name, path in _files(folder).items()}


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint, None if there is none."""
    checkpoints = _checkpoints(folder)
    return checkpoints[-1] if checkpoints else None


def previous_intact_checkpoint(checkpoint: Path) -> tuple[Path, list[Path]] | None:
    """Return the newest intact checkpoint before ``checkpoint``, and the checkpoints after it.

    The latter include ``checkpoint``. None if no earlier checkpoint is intact.
    """
    checkpoints = _checkpoints(checkpoint.parent)
    for place in reversed(range(checkpoints.index(checkpoint))):
        try:
            load_state(checkpoints[place])
        except CheckpointError:
            continue
        return checkpoints[place], checkpoints[place + 1 :]
    return None


def load_state(checkpoint: Path) -> RunState:
    """Read a checkpoint's state, after verifying every file of it.

    Raises:
        CheckpointError: naming the file that is missing, changed or malformed.
    """
    path = checkpoint / _STATE
    try:
        raw = json.loads(path.read_bytes())
        saved = _StateFile.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        location = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"checkpoint file {path}: {location}: {first['msg']}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint file {path}: cannot be read: {error}") from None
    body = {name: value for name, value in raw.items() if name != "digest"}
    if _json_digest(body) != saved.digest:
        raise CheckpointError(f"checkpoint file {path}: its content changed since it was saved")
    _check_parts(checkpoint, saved.files)
    for name, digest in saved.files.items():
        file = checkpoint / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint file {file}: missing")
        try:
            is_same = _digest(file) == digest
        except OSError as error:
            raise CheckpointError(f"checkpoint file {file}: cannot be read: {error}") from None
        if not is_same:
            raise CheckpointError(f"checkpoint file {file}: its content changed since it was saved")
    return saved.state


def _files(folder: Path) -> dict[str, Path]:
    """Return files by their name relative to ``folder``, with slashes."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in files}


def _check_written(partial: Path, written: Mapping[str, int]) -> None:
    """Refuse a folder that lacks a file that the policy reports as written."""
    for name, size in written.items():
        path = partial / name
        visible_size = path.stat().st_size if path.is_file() else None
        if visible_size != size:
            raise CheckpointError(
                f"checkpoint file {path}: rank 0 wrote {size} bytes, the driver sees "
                f"{'no file' if visible_size is None else f'{visible_size} bytes'}; run.output "
                "must be a folder that both see"
            )


def _check_parts(checkpoint: Path, names: Collection[str]) -> None:
    """Refuse a list of files without model or optimizer."""
    weights = any(fnmatchcase(name, f"{MODEL}/*.safetensors") for name in names)
    for what, is_listed in (
        (f"{MODEL}/config.json", f"{MODEL}/config.json" in names),
        (f"{MODEL}/*.safetensors", weights),
        (OPTIMIZER, OPTIMIZER in names),
    ):
        if not is_listed:
            raise CheckpointError(
                f"checkpoint {checkpoint}: {what}: not among its {len(names)} files"
            )


def _checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    steps = {int(match[1]): path for path in folder.glob("step-*") if (match := _match(path))}
    return [steps[step] for step in sorted(steps)]


def _match(path: Path) -> re.Match[str] | None:
    return _NAME.fullmatch(path.name) if path.is_dir() else None


def _partial(final: Path) -> Path:
    """Return a new temporary name; an orphan that cannot be removed could occupy a fixed name."""
    return final.with_name(f".{final.name}.{secrets.token_hex(4)}.partial")


def _json_digest(body: dict[str, Any]) -> str:
    content = json.dumps(body, sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _sync_tree(folder: Path) -> None:
    """Flush all files in ``folder``, and the folder itself, to disk."""
    for path in (*folder.rglob("*"), folder):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
