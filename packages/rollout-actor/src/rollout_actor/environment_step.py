"""Steps of environments: started together, awaited with a deadline, taken apart by row.

An environment is somebody else's code in somebody else's process, so everything that can go wrong
there ends here as an error that names the task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any  # Any: metadata and answers are the environment's own values

import ray
from ray.exceptions import RayError, RayTaskError

from dataplane_core import DeadlineExceededError, InvalidRequestError, UnavailableError
from dataplane_core.errors import listed
from rollout_actor.environment_return import StepOutcome, read_return
from rollout_actor.interfaces import (
    EnvironmentInterface,
    VisibleTurn,
)

if TYPE_CHECKING:
    from rollout_actor.conversation import Conversation


@dataclass(frozen=True)
class _Step:
    task: str
    places: list[int]
    future: Future[Any]


def check_tasks(task_names: Sequence[str], task_to_env: Mapping[str, EnvironmentInterface]) -> None:
    """Refuse rows whose task has no environment.

    Raises:
        InvalidRequestError: (a ValueError) naming the tasks and those that have one.
    """
    unknown = dict.fromkeys(str(name) for name in task_names if name not in task_to_env)
    if unknown:
        raise InvalidRequestError(
            f"rollout: no environment for task {listed(unknown)}; task_to_env has "
            f"{listed(task_to_env) or 'none'}"
        )


def step_environments(
    rows: Sequence[Conversation],
    task_to_env: Mapping[str, EnvironmentInterface],
    *,
    timeout_s: float,
) -> list[StepOutcome]:
    """Step each row in the environment of its task, one call per task, all started at once.

    Args:
        rows: conversations that end with the response to judge.
        task_to_env: task to environment.
        timeout_s: how long the steps may take from when all are started, in seconds.

    Returns:
        One outcome per row, in order.

    Raises:
        DeadlineExceededError: (a TimeoutError) naming the task whose step did not finish.
        UnavailableError: (a RuntimeError) naming the task whose actor is dead or out of reach.
        InvalidRequestError: (a ValueError) naming the task whose answer is not an
            `EnvironmentReturn` of its rows.
        Exception: what the environment raised, with a note naming the task.
    """
    steps = _start(rows, task_to_env)
    wait([step.future for step in steps], timeout_s, return_when=FIRST_EXCEPTION)
    return _outcomes(steps, rows, timeout_s)


async def step_environments_async(
    rows: Sequence[Conversation],
    task_to_env: Mapping[str, EnvironmentInterface],
    *,
    timeout_s: float,
) -> list[StepOutcome]:
    """`step_environments` without blocking the event loop."""
    steps = _start(rows, task_to_env)
    done, _ = await asyncio.wait(
        [asyncio.wrap_future(step.future) for step in steps],
        timeout=timeout_s,
        return_when=asyncio.FIRST_EXCEPTION,
    )
    for future in done:
        if not future.cancelled():
            future.exception()  # marks it as seen; _outcomes raises it
    return _outcomes(steps, rows, timeout_s)


def _start(
    rows: Sequence[Conversation], task_to_env: Mapping[str, EnvironmentInterface]
) -> list[_Step]:
    check_tasks([row.task for row in rows], task_to_env)
    places: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(row.task, []).append(place)
    steps = []
    for task, members in places.items():
        logs: list[list[VisibleTurn]] = [
            [{"role": turn["role"], "content": turn["content"]} for turn in rows[place].turns]
            for place in members
        ]
        with _named(task):
            started = task_to_env[task].step.remote(
                logs, [rows[place].env_info for place in members]
            )
            steps.append(_Step(task, members, _as_future(started)))
    return steps


def _as_future(started: Any) -> Future[Any]:
    if isinstance(started, Future):
        return started
    if isinstance(started, ray.ObjectRef):
        return started.future()
    done: Future[Any] = Future()
    done.set_result(started)
    return done


def _outcomes(
    steps: Sequence[_Step], rows: Sequence[Conversation], timeout_s: float
) -> list[StepOutcome]:
    by_place: dict[int, StepOutcome] = {}
    # Finished ones first: a failure says more than the wait that it cut short.
    for step in sorted(steps, key=lambda step: not step.future.done()):
        if not step.future.done():
            raise DeadlineExceededError(
                f"environment of task {step.task!r}: step of {len(step.places)} rows not finished "
                f"after {timeout_s:g} s; see what it waits for, or raise env.step_timeout_s"
            )
        with _named(step.task):
            answer = step.future.result()
            outcomes = read_return(answer, step.task, [rows[place].row for place in step.places])
        by_place.update(zip(step.places, outcomes, strict=True))
    return [by_place[place] for place in sorted(by_place)]


@contextmanager
def _named(task: str) -> Iterator[None]:
    """Let every error say which task's environment it comes from."""
    try:
        yield
    except Exception as error:
        # A RayTaskError is what the environment's own code raised; the others are Ray's.
        if isinstance(error, RayError) and not isinstance(error, RayTaskError):
            raise UnavailableError(
                f"environment of task {task!r}: its actor is dead or out of reach: {error}"
            ) from error
        error.add_note(f"raised by the environment of task {task!r}")
        raise
