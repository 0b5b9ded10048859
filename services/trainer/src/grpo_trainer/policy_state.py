"""Model and optimiser of a policy worker, and the tokenizer, in the files of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from socket import gethostname
from typing import Any  # Any: transformers' models

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from grpo_trainer.checkpoint import MODEL, OPTIMIZER, written_files
from grpo_trainer.errors import CheckpointError

_SHARED = "run.output has to be a folder that the driver and all ranks see"


def check_seen(folder: Path) -> None:
    """Refuse a folder that this machine does not see.

    Raises:
        CheckpointError: there is no such folder.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder on {gethostname()}; {_SHARED}")


def save_policy(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Write the model, as transformers loads it, and the optimiser's state.

    Args:
        folder: made by the driver, which looks there for what is written.
        model: of the policy.
        optimizer: of the model.

    Returns:
        The `written_files`.

    Raises:
        CheckpointError: there is no such folder on this machine, or naming the part that cannot be
            written.
    """
    check_seen(folder)
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
    """Write the tokenizer beside the model, so that the two are loaded from one folder.

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
    """Take the weights that `save_policy` wrote into ``model``.

    Raises:
        CheckpointError: there is no such folder on this machine.
    """
    check_seen(folder)
    saved = AutoModelForCausalLM.from_pretrained(folder / MODEL, dtype=model.dtype)
    model.load_state_dict(saved.state_dict())


def load_optimizer(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Take the optimiser state that `save_policy` wrote.

    Raises:
        CheckpointError: it names a parameter that the model does not have.
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
        # A copy: the tensor is a mapping of the file, which would keep that from being removed.
        optimizer.state[parameter][key] = tensor.to(device, copy=True)
