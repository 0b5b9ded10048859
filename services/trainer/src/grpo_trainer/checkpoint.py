"""Checkpoints of a whole run: safetensors for tensors, JSON for the rest, nothing pickled.

A checkpoint is a folder. It is written under another name, its state file last and with a digest of
every other file, and renamed when complete: a folder named ``step-...`` is always whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any  # Any: transformers' models, metrics

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from grpo_trainer.errors import CheckpointError

_FORMAT = 1
_STATE = "state.json"
_MODEL = "model"
_OPTIMIZER = "optimizer.safetensors"


@dataclass(frozen=True)
class RunState:
    """What a run needs to go on besides model and optimiser.

    Attributes:
        step: completed steps.
        prompts_position: prompts taken from the stream.
        history: the metrics of every completed step.
        config: the run's configuration as plain data.
    """

    step: int
    prompts_position: int
    history: list[dict[str, Any]]
    config: dict[str, Any]


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
    partial = folder / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        write_policy(partial)
        digests = {
            path.relative_to(partial).as_posix(): _digest(path)
            for path in sorted(partial.rglob("*"))
            if path.is_file()
        }
        content = {"format": _FORMAT, "files": digests, **asdict(state)}
        (partial / _STATE).write_text(json.dumps(content, indent=1))
        for path in partial.rglob("*"):
            _sync(path)
        if final.exists():
            shutil.rmtree(final)
        os.replace(partial, final)
        _sync(folder)
    except OSError as error:
        raise CheckpointError(f"checkpoint {final}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for old in _checkpoints(folder)[:-keep_last]:
        shutil.rmtree(old)
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
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint file {path}: cannot be read: {error}") from None
    if content.get("format") != _FORMAT:
        raise CheckpointError(
            f"checkpoint file {path}: format {content.get('format')!r}; expected {_FORMAT}"
        )
    for name, digest in content["files"].items():
        file = checkpoint / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint file {file}: missing")
        if _digest(file) != digest:
            raise CheckpointError(f"checkpoint file {file}: its content changed since it was saved")
    return RunState(
        step=content["step"],
        prompts_position=content["prompts_position"],
        history=content["history"],
        config=content["config"],
    )


def save_policy(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Write the model, as transformers loads it, and the optimiser's state."""
    model.save_pretrained(folder / _MODEL)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors = {
        f"{names[id(parameter)]}/{key}": value.detach().cpu().contiguous()
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }
    save_file(tensors, folder / _OPTIMIZER)


def load_weights(folder: Path, model: Any) -> None:
    """Take the weights that `save_policy` wrote into ``model``."""
    saved = AutoModelForCausalLM.from_pretrained(folder / _MODEL, dtype=model.dtype)
    model.load_state_dict(saved.state_dict())


def load_optimizer(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Take the optimiser state that `save_policy` wrote.

    Raises:
        CheckpointError: it names a parameter that the model does not have.
    """
    path = folder / _OPTIMIZER
    parameters = dict(model.named_parameters())
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint file {path}: cannot be read: {error}") from None
    for name, tensor in tensors.items():
        parameter_name, _, key = name.rpartition("/")
        if parameter_name not in parameters:
            raise CheckpointError(f"checkpoint file {path}: no parameter {parameter_name!r}")
        parameter = parameters[parameter_name]
        device = "cpu" if key == "step" else parameter.device
        optimizer.state[parameter][key] = tensor.to(device)


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
