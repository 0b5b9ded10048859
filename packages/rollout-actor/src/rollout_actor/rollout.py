"""The multi-turn rollout: generate, let the environments judge, append what they say, repeat.

Both forms end with the same batch for a back end that answers the same. They differ in what waits
for what: the synchronous one takes all active rows through a turn together, the asynchronous one
lets each row go ahead on its own.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any  # Any: columns of a batch are tensors or the caller's own values

import torch
from opentelemetry.trace import SpanKind

from column_io import BatchedDataDict
from dataplane_core import INPUT_LENGTHS, InvalidRequestError
from dataplane_core.errors import listed
from dataplane_core.telemetry import span
from rollout_actor.conversation import Conversation, start_conversations
from rollout_actor.environment_step import (
    check_tasks,
    step_environments,
    step_environments_async,
)
from rollout_actor.generation import generation_input, responses
from rollout_actor.interfaces import (
    AsyncGenerationInterface,
    EnvironmentInterface,
    GenerationInterface,
    TokenizerInterface,
)
from rollout_actor.metrics import rollout_metrics
from rollout_actor.settings import DEFAULT_STEP_TIMEOUT_S


def run_multi_turn_rollout(
    policy_generation: GenerationInterface,
    input_batch: Mapping[str, Any],
    tokenizer: TokenizerInterface,
    task_to_env: Mapping[str, EnvironmentInterface],
    *,
    max_seq_len: int,
    max_rollout_turns: int,
    greedy: bool = False,
    step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S,
    media_group_size: int = 1,
) -> tuple[BatchedDataDict[Any], dict[str, Any]]:
    """Play every row until its environment ends it, its sequence is full, or its turns are used up.

    Each turn generates for the rows that are still active, in one call, and steps them in their
    environments, one call per task, all started before any is awaited.

    Args:
        policy_generation: the back end.
        input_batch: n rows. ``message_log`` (turns with ``role``, ``content`` and ``token_ids``),
            ``task_name``, ``extra_env_info``, optionally ``stop_strings``; other columns are
            carried along. It is not changed.
        tokenizer: decodes responses and encodes observations.
        task_to_env: task to environment.
        max_seq_len: tokens of a conversation. An observation with which it would reach this is
            cut, the row marked truncated and ended.
        max_rollout_turns: responses per row at most.
        greedy: take the likeliest token instead of sampling.
        step_timeout_s: how long the steps of one turn may take, in seconds.
        media_group_size: so many rows in a row repeat one prompt, and share its media in memory.

    Returns:
        The batch and its metrics (`rollout_actor.metrics.rollout_metrics`). The batch has the
        input's columns, with ``message_log`` and ``extra_env_info`` as they ended, and
        ``total_reward`` float32 (n,), ``truncated`` bool (n,) and, float32 (n,), each reward
        component that an environment named, 0 where it did not.

    Raises:
        InvalidRequestError: (a ValueError) if a task has no environment, columns do not fit each
            other, a reward component has the name of a column, or an answer does not fit its rows.
        MissingDataError: (a KeyError and a ValueError) if a column or a key is missing.
        DeadlineExceededError, UnavailableError: as `step_environments`, naming the task.
    """
    rows = _start(input_batch, task_to_env, max_rollout_turns, media_group_size)
    for turn in range(max_rollout_turns):
        active = [row for row in rows if row.active]
        if not active:
            break
        with span("turn", attributes={"rl.turn": turn, "rl.rows": len(active)}):
            data = generation_input(active, pad_token_id=tokenizer.pad_token_id)
            with span("generate", "idle", kind=SpanKind.CLIENT):
                output = policy_generation.generate(data, greedy=greedy)
            _add_responses(active, output, data[INPUT_LENGTHS], tokenizer)
            with span("environment_step", "idle", kind=SpanKind.CLIENT):
                outcomes = step_environments(active, task_to_env, timeout_s=step_timeout_s)
            for row, outcome in zip(active, outcomes, strict=True):
                row.settle(outcome, tokenizer, max_seq_len=max_seq_len)
    return _final_batch(input_batch, rows), rollout_metrics(rows)


def run_async_multi_turn_rollout(
    policy_generation: AsyncGenerationInterface,
    input_batch: Mapping[str, Any],
    tokenizer: TokenizerInterface,
    task_to_env: Mapping[str, EnvironmentInterface],
    *,
    max_seq_len: int,
    max_rollout_turns: int,
    greedy: bool = False,
    step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S,
    media_group_size: int = 1,
) -> tuple[BatchedDataDict[Any], dict[str, Any]]:
    """`run_multi_turn_rollout` over ``generate_async``, each row at its own pace.

    Not a coroutine: it runs an event loop of its own, in a thread of its own if the caller is
    inside one (a notebook), and returns when every row has ended. ``generate_async`` and ``step``
    are called with one row at a time, and ``step_timeout_s`` holds for each row's step. An
    environment that computes inside ``step.remote`` itself keeps the other rows waiting; one that
    returns a reference or a future does not. When a row fails, the others are cancelled and its
    error is raised.
    """
    rows = _start(input_batch, task_to_env, max_rollout_turns, media_group_size)

    async def play(row: Conversation) -> None:
        for _ in range(max_rollout_turns):
            data = generation_input([row], pad_token_id=tokenizer.pad_token_id)
            answers = [
                answer async for _, answer in policy_generation.generate_async(data, greedy=greedy)
            ]
            if len(answers) != 1:
                raise InvalidRequestError(
                    f"generation: generate_async yielded {len(answers)} answers; expected 1, for "
                    "the one row it was given"
                )
            _add_responses([row], answers[0], data[INPUT_LENGTHS], tokenizer)
            outcomes = await step_environments_async([row], task_to_env, timeout_s=step_timeout_s)
            row.settle(outcomes[0], tokenizer, max_seq_len=max_seq_len)
            if not row.active:
                break

    async def play_all() -> None:
        await asyncio.gather(*map(play, rows))

    # One span for all rows: each goes at its own pace, and a span per row would be one per sample.
    with span("play", "idle", attributes={"rl.rows": len(rows)}):
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            asyncio.run(play_all())
        else:
            here = contextvars.copy_context()
            with ThreadPoolExecutor(1, "rollout") as thread:
                thread.submit(here.run, lambda: asyncio.run(play_all())).result()
    return _final_batch(input_batch, rows), rollout_metrics(rows)


def _start(
    input_batch: Mapping[str, Any],
    task_to_env: Mapping[str, EnvironmentInterface],
    max_rollout_turns: int,
    media_group_size: int,
) -> list[Conversation]:
    if max_rollout_turns < 1:
        raise InvalidRequestError(
            f"rollout: max_rollout_turns {max_rollout_turns}; expected at least 1"
        )
    rows = start_conversations(input_batch, media_group_size=media_group_size)
    check_tasks([row.task for row in rows], task_to_env)
    return rows


def _add_responses(
    rows: Sequence[Conversation],
    output: Mapping[str, Any],
    prompt_lengths: torch.Tensor,
    tokenizer: TokenizerInterface,
) -> None:
    found = responses(output, prompt_lengths)
    texts = tokenizer.batch_decode(
        [response.token_ids for response in found], skip_special_tokens=True
    )
    for row, response, text in zip(rows, found, texts, strict=True):
        row.add_response(response, text)


def _final_batch(
    input_batch: Mapping[str, Any], rows: Sequence[Conversation]
) -> BatchedDataDict[Any]:
    batch: BatchedDataDict[Any] = BatchedDataDict(
        {
            **input_batch,
            "message_log": [row.turns for row in rows],
            "extra_env_info": [row.env_info for row in rows],
            "total_reward": torch.tensor([row.total_reward for row in rows], dtype=torch.float32),
            "truncated": torch.tensor([row.truncated for row in rows], dtype=torch.bool),
        }
    )
    components = sorted({name for row in rows for name in row.rewards})
    taken = [name for name in components if name in batch]
    if taken:
        raise InvalidRequestError(
            f"rollout: reward components {listed(taken)} have the names of columns; expected "
            "names of their own, such as 'reward/<name>'"
        )
    for name in components:
        sums = [row.rewards.get(name, 0.0) for row in rows]
        batch[name] = torch.tensor(sums, dtype=torch.float32)
    return batch
