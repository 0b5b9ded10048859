"""Folder of a run: its configuration, metrics, chart, checkpoints and initial model.

Each file is complete or absent, even if the disk fills up.
"""

from __future__ import annotations

import errno
import fcntl
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any  # Any: metrics of a step

from grpo_trainer.atomic_file import append_completely, write_atomically
from grpo_trainer.config.loading import TrainerConfig
from grpo_trainer.errors import ConfigurationError, OutputError

CONFIG = "config.json"
LOCK = ".lock"
METRICS = "metrics.jsonl"
PICTURE = "reward.png"
JOURNAL = "journal"
CHECKPOINTS = "checkpoints"
INITIAL_MODEL = "initial_model"

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def create_run_folder(config: TrainerConfig) -> Path:
    """Create the run's folder below ``run.output``, named after the time, with its configuration.

    The path is absolute, because other processes have other working folders.

    Raises:
        ConfigurationError: ``run.output`` cannot hold a folder.
        OutputError: the configuration cannot be written.
    """
    base = (config.run.output / config.run.name).absolute()
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{i}" for i in range(2, 100))):
        folder = base / (stamp + suffix)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if base.is_dir():
                continue
            raise ConfigurationError(f"run.output: {base}: exists and is not a folder") from None
        except OSError as error:
            raise ConfigurationError(f"run.output: {folder}: {error.strerror}") from None
        write_config(folder, config)
        return folder
    raise ConfigurationError(f"run.output: {base}: a hundred runs began in this second")


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of the run in ``folder``, so that no other process runs it.

    The lock ends with the process. On a file system without locks it does nothing.

    Raises:
        OutputError: another process has the lock, or its file cannot be created.
    """
    path = folder / LOCK
    with ExitStack() as stack:
        with output_errors(path):
            file = stack.enter_context(path.open("ab"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OutputError(
                    f"{folder}: another process runs this run; wait for its end, or stop it"
                ) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
        yield


def write_config(folder: Path, config: TrainerConfig) -> None:
    """Write ``config`` as the run's configuration."""
    with output_errors(folder / CONFIG):
        write_atomically(folder / CONFIG, config.model_dump_json(indent=1).encode())


def write_history(folder: Path, history: Sequence[Mapping[str, Any]]) -> None:
    """Write ``history`` as the run's metrics."""
    with output_errors(folder / METRICS):
        write_atomically(folder / METRICS, b"".join(_line(record) for record in history))


def append_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Append a step to the run's metrics."""
    path = folder / METRICS
    # Unbuffered: closing must not retry a write that did not fit.
    with output_errors(path), path.open("ab", buffering=0) as file:
        append_completely(file, _line(record))


@contextmanager
def output_errors(path: Path) -> Iterator[None]:
    """Report a failure to write ``path`` as `OutputError`."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error


def _line(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record) + "\n").encode()
