"""Checkpoints of a whole run: safetensors for tensors, JSON for the rest, nothing pickled.

A checkpoint is a folder. It is written under another name, its state file last and with a digest of
every other file, and renamed when complete; an old one is renamed before it is removed. So a folder
named ``step-...`` is always whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal  # Any: metrics

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from grpo_trainer.errors import CheckpointError

_STATE = "state.json"
_NAME = re.compile(r"step-(\d{6,})")


class RunState(BaseModel):
    """What a run needs to go on besides model and optimiser.

    Attributes:
        step: completed steps.
        prompts_position: prompts taken from the stream.
        history: the metrics of every completed step.
        config: the run's configuration as plain data.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    step: NonNegativeInt
    prompts_position: NonNegativeInt
    history: list[dict[str, Any]]
    config: dict[str, Any]


class _StateFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal[1]
    files: dict[str, str]
    state: RunState
    digest: str


def save_checkpoint(
    folder: Path, state: RunState, write_policy: Callable[[Path], None], *, keep_last: int
) -> Path:
    """Write a checkpoint and remove old ones.

    Args:
        folder: folder of the run's checkpoints; created if it is not there.
        state: the run's state.
        write_policy: writes model and optimiser into the folder it is given.
        keep_last: how many checkpoints stay.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: it cannot be written, for example because the disk is full. Nothing of it
            is left, and older checkpoints are untouched.
    """
    final = folder / f"step-{state.step:06d}"
    partial = _partial(final)
    try:
        for left in folder.glob(".step-*.partial"):  # of a process that was killed
            shutil.rmtree(left)
        partial.mkdir(parents=True)
        write_policy(partial)
        digests = {
            path.relative_to(partial).as_posix(): _digest(path)
            for path in sorted(partial.rglob("*"))
            if path.is_file()
        }
        body = {"format": 1, "files": digests, "state": state.model_dump()}
        content = {**body, "digest": _json_digest(body)}
        (partial / _STATE).write_text(json.dumps(content, indent=1))
        for path in partial.rglob("*"):
            _sync(path)
        if final.exists():
            raise CheckpointError(f"checkpoint {final}: exists already")
        os.replace(partial, final)
        _sync(folder)
        for old in _checkpoints(folder)[:-keep_last]:
            os.replace(old, _partial(old))
            shutil.rmtree(_partial(old))
    except OSError as error:
        raise CheckpointError(f"checkpoint {final}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint, None if there is none."""
    found = _checkpoints(folder)
    return found[-1] if found else None


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
    for name, digest in found.files.items():
        file = checkpoint / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint file {file}: missing")
        if _digest(file) != digest:
            raise CheckpointError(f"checkpoint file {file}: its content changed since it was saved")
    return found.state


def _checkpoints(folder: Path) -> list[Path]:
    """Complete ones, oldest first."""
    steps = {int(match[1]): path for path in folder.glob("step-*") if (match := _match(path))}
    return [steps[step] for step in sorted(steps)]


def _match(path: Path) -> re.Match[str] | None:
    return _NAME.fullmatch(path.name) if path.is_dir() else None


def _partial(final: Path) -> Path:
    return final.with_name(f".{final.name}.partial")


def _json_digest(body: dict[str, Any]) -> str:
    content = json.dumps(body, sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
