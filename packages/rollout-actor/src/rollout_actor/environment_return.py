"""Checks of an environment's result, and its split into one outcome per row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import isfinite
from typing import Any  # Any: metadata and answers are the environment's own values

import torch

from dataplane_core import InvalidRequestError
from dataplane_core.arguments import is_utf8
from dataplane_core.errors import listed
from rollout_actor.interfaces import EnvironmentReturn, Observation

REWARD_PREFIX = "reward/"
"""Prefix of the reward components that are metrics, and that the driver gets."""

_OPTIONAL = "answers"


@dataclass(frozen=True)
class StepOutcome:
    """An environment's result for one row."""

    observation: Observation
    metadata: Any
    sets_stop_strings: bool
    stop_strings: list[str] | None
    reward: float
    components: dict[str, float]
    terminated: bool


def read_return(result: Any, task: str, rows: Sequence[int]) -> list[StepOutcome]:
    """Check the result of a step, and return one outcome per row.

    Args:
        result: the value that the environment returned.
        task: names the environment in errors.
        rows: indices of the step's n rows in the rollout's batch.

    Raises:
        InvalidRequestError: (a ValueError) ``result`` is not an `EnvironmentReturn`, a part of it
            is not one value per row, an observation has no text, a reward is not finite,
            ``terminateds`` are not booleans, or a row's stop strings are not a list of str. The
            error names the task and, if possible, the row.
    """
    source = f"environment of task {task!r}"
    parts = _as_return(result, source)
    for name in ("observations", "metadata", "next_stop_strings", _OPTIONAL):
        _check_length(getattr(parts, name), name, source, len(rows))
    for row, observation in zip(rows, parts.observations, strict=True):
        _check_observation(observation, f"{source}: observation of row {row}")
    rewards, components = _read_rewards(parts.rewards, source, rows)
    nothing = [None] * len(rows)
    columns = (
        rows,
        parts.observations,
        nothing if parts.metadata is None else parts.metadata,
        nothing if parts.next_stop_strings is None else parts.next_stop_strings,
        _column(parts.terminateds, torch.bool, f"{source}: terminateds", len(rows)),
    )
    return [
        StepOutcome(
            observation=observation,
            metadata=metadata,
            sets_stop_strings=parts.next_stop_strings is not None,
            stop_strings=read_stop_strings(stops, f"{source}: next_stop_strings of row {row}"),
            reward=rewards[index],
            components={name: values[index] for name, values in components.items()},
            terminated=terminated,
        )
        for index, (row, observation, metadata, stops, terminated) in enumerate(
            zip(*columns, strict=True)
        )
    ]


def read_stop_strings(strings: Any, what: str) -> list[str] | None:
    """Return the stop strings of one row, as a new list.

    A single str is refused, because it would stop at each of its letters. An empty stop string is
    refused, because every text contains it.

    Raises:
        InvalidRequestError: (a ValueError) they are invalid; the message begins with ``what``.
    """
    if strings is None:
        return None
    is_list = isinstance(strings, Iterable) and not isinstance(strings, str | bytes | Mapping)
    copy = list(strings) if is_list else []
    if not is_list or not all(isinstance(string, str) and string for string in copy):
        raise InvalidRequestError(
            f"{what} are {strings!r}; expected a list of strings, none of them empty, or None"
        )
    return copy


def _check_length(column: Any, name: str, source: str, count: int) -> None:
    if column is None and name != "observations":
        return
    # From a str or a mapping of n items, the rows would get letters or keys; a set is unordered.
    is_list = _is_sized(column) and not isinstance(column, str | bytes | Mapping | Set)
    if not is_list or len(column) != count:
        raise InvalidRequestError(
            f"{source}: {name} is {_described(column)}; expected one value for each of {count} rows"
        )


def _check_observation(observation: Any, source: str) -> None:
    if not isinstance(observation, Mapping) or not {"role", "content"} <= observation.keys():
        raise InvalidRequestError(
            f"{source} is {_described(observation)}; expected a dict with 'role' and 'content'"
        )
    for name in ("role", "content"):
        if not isinstance(observation[name], str):
            raise InvalidRequestError(
                f"{source} has {_described(observation[name])} as {name}; expected a str"
            )
        if not is_utf8(observation[name]):
            raise InvalidRequestError(
                f"{source} has a lone surrogate in its {name}, which UTF-8 cannot encode"
            )


def _as_return(result: Any, source: str) -> EnvironmentReturn:
    names = EnvironmentReturn._fields
    parts: dict[str, Any]
    if isinstance(result, Mapping):
        parts = dict(result)
    elif isinstance(result, tuple | list) and not hasattr(result, "_fields"):
        parts = dict(zip(names, result, strict=False))
    else:
        parts = {name: getattr(result, name) for name in names if hasattr(result, name)}
    missing = [name for name in names if name not in parts and name != _OPTIONAL]
    if missing:
        raise InvalidRequestError(
            f"{source}: its step returned {_described(result)} without "
            f"{listed(missing)}; expected an EnvironmentReturn"
        )
    return EnvironmentReturn._make(parts.get(name) for name in names)


def _read_rewards(
    rewards: Any, source: str, rows: Sequence[int]
) -> tuple[list[float], dict[str, list[float]]]:
    named = rewards if isinstance(rewards, Mapping) else {"rewards": rewards}
    if not named:
        raise InvalidRequestError(f"{source}: rewards is an empty mapping; expected a component")
    columns: dict[str, list[float]] = {}
    for name, values in named.items():
        if not isinstance(name, str):
            raise InvalidRequestError(
                f"{source}: reward component {name!r} is {_described(name)}; expected a str"
            )
        column = _column(values, torch.float32, f"{source}: reward {name!r}", len(rows))
        for row, value in zip(rows, column, strict=True):
            if not isfinite(value):
                raise InvalidRequestError(
                    f"{source}: reward {name!r} of row {row} is {value}; expected a finite number"
                )
        columns[name] = column
    totals = [sum(column[index] for column in columns.values()) for index in range(len(rows))]
    return totals, columns if isinstance(rewards, Mapping) else {}


def _column(values: Any, dtype: torch.dtype, what: str, count: int) -> list[Any]:
    """Return one number per row, or one boolean per row if ``dtype`` is ``torch.bool``.

    Numbers are not accepted as booleans, because a probability of 0.3 is not a decision. Neither is
    the shape (n, 1): its rows would be lists, and a non-empty list is true.
    """
    expected = "booleans" if dtype == torch.bool else "numbers"
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRequestError(
            f"{what} is {_described(values)}, not a tensor: {error}; expected {expected}, "
            f"one for each of {count} rows"
        ) from error
    fits = tensor.dtype == torch.bool if dtype == torch.bool else not tensor.is_complex()
    if tensor.shape != (count,) or not fits:
        raise InvalidRequestError(
            f"{what} of shape {tuple(tensor.shape)} ({tensor.dtype}); expected {expected} of shape "
            f"({count},), one for each row"
        )
    column: list[Any] = tensor.to(dtype).tolist()
    return column


def _described(value: Any) -> str:
    size = f" of {len(value)}" if _is_sized(value) else ""
    return f"a {type(value).__name__}{size}"


def _is_sized(value: Any) -> bool:
    """Return whether ``value`` has a length; zero-dimensional arrays and tensors have none."""
    return hasattr(value, "__len__") and getattr(value, "ndim", 1) != 0
