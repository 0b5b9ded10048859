"""Model, optimizer and tokenizer of a policy worker in the files of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from socket import gethostname
from typing import Any  # Any: transformers' models

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from grpo_trainer.checkpoint.folder import MODEL, OPTIMIZER, written_files
from grpo_trainer.errors import CheckpointError

_SHARED = "run.output must be a folder that the driver and all ranks see"


def check_visible(folder: Path) -> None:
    """Refuse a folder that this machine does not see.

    Raises:
        CheckpointError: there is no such folder.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder on {gethostname()}; {_SHARED}")


def save_policy(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Write the model, as transformers loads it, and the optimizer's state into ``folder``.

    Returns:
        The `written_files`, which the driver compares with what it sees.

    Raises:
        CheckpointError: this machine lacks the folder, or a part cannot be written.
    """
    check_visible(folder)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors = {
        f"{names[id(parameter)]}/{key}": value.detach().cpu().contiguous()
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }
    part = folder / MODEL
    try:
        model.save_pretrained(part)
        part = folder / OPTIMIZER
        save_file(tensors, part)
        return written_files(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint file {part}: cannot be written: {error}") from error


def save_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Write the tokenizer into the model's folder, so that both are loaded from there.

    Raises:
        CheckpointError: it cannot be written.
    """
    part = folder / MODEL
    try:
        tokenizer.save_pretrained(part)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise CheckpointError(
            f"checkpoint file {part}: the tokenizer cannot be written: {error}"
        ) from error


def load_weights(folder: Path, model: Any) -> None:
    """Load the weights that `save_policy` wrote into ``model``.

    Raises:
        CheckpointError: there is no such folder on this machine.
    """
    check_visible(folder)
    saved = AutoModelForCausalLM.from_pretrained(folder / MODEL, dtype=model.dtype)
    model.load_state_dict(saved.state_dict())


def load_optimizer(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Load the optimizer state that `save_policy` wrote.

    Raises:
        CheckpointError: the file cannot be read, or names a parameter that the model lacks.
    """
    path = folder / OPTIMIZER
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
        # Copy: the tensor maps the file, and some file systems cannot remove a mapped file.
        optimizer.state[parameter][key] = tensor.to(device, copy=True)
