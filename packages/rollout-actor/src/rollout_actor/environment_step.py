"""Concurrent steps of environments, with a deadline.

An environment is the user's code, usually in another process. Every failure there raises an error
that names the task.
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
from rollout_actor.interfaces import EnvironmentInterface, VisibleTurn

if TYPE_CHECKING:
    from rollout_actor.conversation import Conversation


@dataclass(frozen=True)
class _Step:
    task: str
    indices: list[int]
    future: Future[Any]


def check_tasks(task_names: Sequence[str], task_to_env: Mapping[str, EnvironmentInterface]) -> None:
    """Refuse rows whose task has no environment.

    Raises:
        InvalidRequestError: (a ValueError) names these tasks, and those with an environment.
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
    """Step each row in the environment of its task, with one concurrent call per task.

    Args:
        rows: conversations that end with the response to judge.
        task_to_env: task to environment.
        timeout_s: how long the steps may take once all are started, in seconds.

    Returns:
        One outcome per row, in order.

    Raises:
        DeadlineExceededError: (a TimeoutError) a task's step did not finish in time.
        UnavailableError: (a RuntimeError) a task's actor is dead or unreachable.
        InvalidRequestError: (a ValueError) a task's result is not an `EnvironmentReturn` of its
            rows.
        Exception: the error that the environment raised, with a note that names the task.
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
    """Do the same as `step_environments` without blocking the event loop."""
    steps = _start(rows, task_to_env)
    done, _ = await asyncio.wait(
        [asyncio.wrap_future(step.future) for step in steps],
        timeout=timeout_s,
        return_when=asyncio.FIRST_EXCEPTION,
    )
    for future in done:
        if not future.cancelled():
            future.exception()  # marks it as retrieved; _outcomes raises it
    return _outcomes(steps, rows, timeout_s)


def _start(
    rows: Sequence[Conversation], task_to_env: Mapping[str, EnvironmentInterface]
) -> list[_Step]:
    members_of: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        members_of.setdefault(row.task, []).append(index)
    steps = []
    for task, members in members_of.items():
        logs: list[list[VisibleTurn]] = [
            [{"role": turn["role"], "content": turn["content"]} for turn in rows[index].turns]
            for index in members
        ]
        with _name_task_in_errors(task):
            started = task_to_env[task].step.remote(
                logs, [rows[index].env_info for index in members]
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
    by_index: dict[int, StepOutcome] = {}
    # Finished steps first: the failure that ended the wait explains more than unfinished steps.
    for step in sorted(steps, key=lambda step: not step.future.done()):
        if not step.future.done():
            raise DeadlineExceededError(
                f"environment of task {step.task!r}: step of {len(step.indices)} rows not finished "
                f"after {timeout_s:g} s; check what it is blocked on, or raise env.step_timeout_s"
            )
        with _name_task_in_errors(step.task):
            result = step.future.result()
            outcomes = read_return(result, step.task, [rows[index].row for index in step.indices])
        by_index.update(zip(step.indices, outcomes, strict=True))
    return [by_index[index] for index in sorted(by_index)]


@contextmanager
def _name_task_in_errors(task: str) -> Iterator[None]:
    """Add the task's name to every error of its environment."""
    try:
        yield
    except Exception as error:  # the user's code can raise anything
        # A RayTaskError wraps an error of the environment's code; other RayErrors are Ray's.
        if isinstance(error, RayError) and not isinstance(error, RayTaskError):
            raise UnavailableError(
                f"environment of task {task!r}: its actor is dead or unreachable: {error}"
            ) from error
        error.add_note(f"raised by the environment of task {task!r}")
        raise
