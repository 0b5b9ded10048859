"""Errors that end a run. The user sees each message without a stack."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """Return the first line of the error's message, or its class's name if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class TrainerError(Exception):
    """Root of the trainer's errors; its message is complete without a stack."""


class ConfigurationError(TrainerError, ValueError):
    """Unusable configuration, data set or model; the message names it."""


class OutputError(TrainerError, RuntimeError):
    """Failed write to the run's folder; the message names the file."""


class WorkerError(TrainerError, RuntimeError):
    """Death, failure or time-out of a process of the run; the message names it."""


class CheckpointError(TrainerError, RuntimeError):
    """Failed write or read of a checkpoint; the message names the file."""


class GradientError(TrainerError, RuntimeError):
    """Non-finite gradient; the message names the step."""


class DynamicSamplingError(TrainerError, RuntimeError):
    """Too few groups with unequal rewards after the allowed number of batches."""


class StalenessError(TrainerError, RuntimeError):
    """Too many samples of an asynchronous step were too stale to be trained."""


class AdvantageError(TrainerError, ValueError):
    """Rewards without finite advantages; the message names the sample."""
