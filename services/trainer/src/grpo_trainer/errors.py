"""Errors that end a run. Each is shown to the user as it is, without a stack."""

from __future__ import annotations


class TrainerError(Exception):
    """Root of what the trainer reports; its message is complete on its own."""


class ConfigurationError(TrainerError, ValueError):
    """The configuration, the data set or the model cannot be used; names the thing."""


class OutputError(TrainerError, RuntimeError):
    """The run's folder cannot be written; names the file."""


class WorkerError(TrainerError, RuntimeError):
    """A process of the run died, failed or did not answer in time; names it."""


class CheckpointError(TrainerError, RuntimeError):
    """A checkpoint cannot be written or read; names the file."""


class GradientError(TrainerError, RuntimeError):
    """The gradient of a step is not finite; names the step."""


class DynamicSamplingError(TrainerError, RuntimeError):
    """Too few groups with different rewards after the allowed number of batches."""
