"""What an environment's step returned, checked and taken apart by row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any  # Any: metadata and answers are the environment's own values

import torch

from dataplane_core import InvalidRequestError
from dataplane_core.errors import listed
from rollout_actor.interfaces import EnvironmentReturn, Observation

_OPTIONAL = "answers"


@dataclass(frozen=True)
class StepOutcome:
    """What an environment said about one row."""

    observation: Observation
    metadata: Any
    sets_stop_strings: bool
    stop_strings: list[str] | None
    reward: float
    components: dict[str, float]
    terminated: bool


def read_return(answer: Any, task: str, count: int) -> list[StepOutcome]:
    """Take the return of a step of ``count`` rows apart.

    Raises:
        InvalidRequestError: (a ValueError) naming the task, if ``answer`` has none of the forms of
            an `EnvironmentReturn`, a part of it is not one value per row, a reward is not finite,
            or a row's stop strings are not a list of strings.
    """
    parts = _as_return(answer, task)
    rewards, components = _read_rewards(parts.rewards, task, count)
    nothing = [None] * count
    columns = {
        "observations": parts.observations,
        "metadata": nothing if parts.metadata is None else parts.metadata,
        "next_stop_strings": (
            nothing if parts.next_stop_strings is None else parts.next_stop_strings
        ),
        "terminateds": torch.as_tensor(parts.terminateds).tolist(),
    }
    for name, column in columns.items():
        if not hasattr(column, "__len__") or len(column) != count:
            raise InvalidRequestError(
                f"environment of task {task!r}: {name} is {_described(column)}; expected one "
                f"value for each of {count} rows"
            )
    for observation in parts.observations:
        if not isinstance(observation, Mapping) or not {"role", "content"} <= observation.keys():
            raise InvalidRequestError(
                f"environment of task {task!r}: observation {_described(observation)}; expected "
                "a dict with 'role' and 'content'"
            )
    return [
        StepOutcome(
            observation=observation,
            metadata=metadata,
            sets_stop_strings=parts.next_stop_strings is not None,
            stop_strings=read_stop_strings(
                stop_strings,
                f"environment of task {task!r}: next_stop_strings of row {row} of {count}",
            ),
            reward=rewards[row],
            components={name: values[row] for name, values in components.items()},
            terminated=bool(terminated),
        )
        for row, (observation, metadata, stop_strings, terminated) in enumerate(
            zip(*columns.values(), strict=True)
        )
    ]


def read_stop_strings(found: Any, what: str) -> list[str] | None:
    """The stop strings of one row, as a list of their own.

    Raises:
        InvalidRequestError: (a ValueError) starting with ``what``; a string by itself would stop
            at each of its letters.
    """
    if found is None:
        return None
    listing = isinstance(found, Iterable) and not isinstance(found, str | bytes | Mapping)
    strings = list(found) if listing else []
    if not listing or not all(isinstance(string, str) for string in strings):
        raise InvalidRequestError(f"{what} are {found!r}; expected a list of strings, or None")
    return strings


def _as_return(answer: Any, task: str) -> EnvironmentReturn:
    names = EnvironmentReturn._fields
    found: dict[str, Any]
    if isinstance(answer, Mapping):
        found = dict(answer)
    elif isinstance(answer, tuple | list) and not hasattr(answer, "_fields"):
        found = dict(zip(names, answer, strict=False))
    else:
        found = {name: getattr(answer, name) for name in names if hasattr(answer, name)}
    missing = [name for name in names if name not in found and name != _OPTIONAL]
    if missing:
        raise InvalidRequestError(
            f"environment of task {task!r}: its step returned {_described(answer)} without "
            f"{listed(missing)}; expected an EnvironmentReturn"
        )
    return EnvironmentReturn._make(found.get(name) for name in names)


def _read_rewards(
    rewards: Any, task: str, count: int
) -> tuple[list[float], dict[str, list[float]]]:
    named = rewards if isinstance(rewards, Mapping) else {"rewards": rewards}
    columns: dict[str, list[float]] = {}
    for name, values in named.items():
        tensor = torch.as_tensor(values, dtype=torch.float32)
        if tensor.shape != (count,):
            raise InvalidRequestError(
                f"environment of task {task!r}: reward {name!r} of shape {tuple(tensor.shape)}; "
                f"expected ({count},), a value per row"
            )
        columns[name] = tensor.tolist()
        wrong = next((row for row, value in enumerate(columns[name]) if not isfinite(value)), None)
        if wrong is not None:
            raise InvalidRequestError(
                f"environment of task {task!r}: reward {name!r} of row {wrong} of {count} is "
                f"{columns[name][wrong]}; expected a finite number"
            )
    totals = [sum(column[row] for column in columns.values()) for row in range(count)]
    return totals, columns if isinstance(rewards, Mapping) else {}


def _described(value: Any) -> str:
    size = f" of {len(value)}" if hasattr(value, "__len__") else ""
    return f"a {type(value).__name__}{size}"
