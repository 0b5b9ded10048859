"""Sinks of a run's metrics: MLflow, Weights & Biases, TensorBoard.

Each imports its library in `start`, and reads its address, project and credentials from the
library's own environment variables. Names of experiments and projects default to ``run.name``.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol  # Any: configurations as plain data

from grpo_trainer.atomic_file import write_atomically
from grpo_trainer.config.resumed import flatten_keys
from grpo_trainer.errors import ConfigurationError

Status = Literal["finished", "stopped", "failed"]
"""Outcome of a run; a stopped run can be resumed."""


class MetricSink(Protocol):
    """A receiver of a run's metrics. Every method may raise; after that, none is called."""

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin or continue the record of the run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""

    def close(self, status: Status) -> None:
        """End the record of the run."""


@dataclass(frozen=True)
class TrackedRun:
    """A run as its sinks see it.

    Attributes:
        name: the run's name in the configuration.
        folder: folder of the run.
        done_steps: steps completed before a resume.
    """

    name: str
    folder: Path
    done_steps: int

    def sink_folder(self) -> Path:
        """Create the folder of the sinks' files, and return it."""
        folder = self.folder / "tracking"
        folder.mkdir(exist_ok=True)
        return folder

    def stored_id(self, sink: str, make: Callable[[], str]) -> str:
        """Return the id of the run in a sink; it is made once and is the same after a resume."""
        path = self.sink_folder() / f"{sink}_run_id"
        if not path.exists():
            write_atomically(path, make().encode())
        return path.read_text()


class MlflowSink:
    """A run of MLflow, in the experiment MLFLOW_EXPERIMENT_NAME at MLFLOW_TRACKING_URI."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = run

    def start(self, config: Mapping[str, Any]) -> None:
        """Create the run with the configuration as parameters, or continue it."""
        from mlflow import MlflowClient

        self._client = MlflowClient()  # the functions of `mlflow` would block the exit
        self._id = self._run.stored_id("mlflow", lambda: self._create(config))
        self._client.update_run(self._id, status="RUNNING")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step; MLflow shows both values of a repeated step."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        points = [Metric(name, value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=points)

    def close(self, status: Status) -> None:
        """End the run; a stopped one is KILLED until it is resumed."""
        self._client.set_terminated(self._id, {"stopped": "KILLED"}.get(status, status.upper()))

    def _create(self, config: Mapping[str, Any]) -> str:
        from mlflow.entities import Param

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", self._run.name)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = (
            self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        )
        run = self._client.create_run(experiment_id, run_name=self._run.folder.name)
        parameters = [Param(key, _text(value)) for key, value in flatten_keys(config)]
        for at in range(0, len(parameters), _MAX_PARAMETERS):
            chunk = parameters[at : at + _MAX_PARAMETERS]
            self._client.log_batch(run.info.run_id, params=chunk)
        return str(run.info.run_id)


# MLflow's limits: parameters per request, and characters per value.
_MAX_PARAMETERS, _MAX_VALUE = 100, 6000


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value))[:_MAX_VALUE]


_WANDB_INIT_S = 60  # the process cannot exit earlier if the server does not answer


class WandbSink:
    """A run of Weights & Biases, in the project WANDB_PROJECT; offline with WANDB_MODE=offline."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = run

    def start(self, config: Mapping[str, Any]) -> None:
        """Create the run with the configuration, or continue it."""
        import wandb

        quiet = {"silent": True, "console": "off"}  # the display is the trainer's
        wandb.setup(wandb.Settings(**quiet))
        self._wandb = wandb.init(
            project=os.environ.get("WANDB_PROJECT", self._run.name),
            name=self._run.folder.name,
            id=self._run.stored_id("wandb", lambda: secrets.token_hex(8)),
            resume="allow",
            dir=str(self._run.sink_folder()),
            config=dict(config),
            allow_val_change=True,
            settings=wandb.Settings(**quiet, init_timeout=_WANDB_INIT_S),
        )
        # W&B drops values of a step that is not its newest. A resume repeats steps.
        self._wandb.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        self._wandb.log({"step": step, **metrics})

    def close(self, status: Status) -> None:
        """Send what is pending, and end the run."""
        self._wandb.finish(exit_code=int(status == "failed"))


class TensorBoardSink:
    """Event files below ``tracking/tensorboard`` in the run's folder."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = run

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin an event file; TensorBoard hides the repeated steps of earlier files."""
        from torch.utils.tensorboard import SummaryWriter

        folder, done = self._run.sink_folder() / "tensorboard", self._run.done_steps
        self._writer = SummaryWriter(str(folder), purge_step=done + 1 if done else None)
        self._writer.add_text("configuration", f"```\n{json.dumps(config, indent=1)}\n```", done)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, status: Status) -> None:
        """Close the event file."""
        self._writer.close()


SINKS: Mapping[str, Callable[[TrackedRun], MetricSink]] = {
    "mlflow": MlflowSink,
    "wandb": WandbSink,
    "tensorboard": TensorBoardSink,
}
"""The sinks by their name, which is also the name of their module and of the trainer's extra."""


def check_installed(sinks: Iterable[str]) -> None:
    """Refuse sinks whose library is missing.

    Raises:
        ConfigurationError: naming each of them.
    """
    missing = []
    for name in sinks:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a folder of this name is no package
            missing.append(f"{name!r} is not installed; install the extra grpo-trainer[{name}]")
    if missing:
        raise ConfigurationError(f"tracking.sinks: {'; '.join(missing)}")
