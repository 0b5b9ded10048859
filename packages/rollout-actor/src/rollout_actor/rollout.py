"""The multi-turn rollout: generate, step the environments, append their observations, repeat.

The synchronous form runs each turn for all active rows together; in the asynchronous form each row
proceeds at its own pace. Both return the same batch for a backend with the same responses.
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
from dataplane_core import InvalidRequestError
from dataplane_core.arguments import checked_period
from dataplane_core.errors import listed
from dataplane_core.telemetry import span
from dataplane_core.tensors.columns import object_array
from rollout_actor.conversation import Conversation, check_tokenizer, start_conversations
from rollout_actor.environment_step import (
    check_tasks,
    step_environments,
    step_environments_async,
)
from rollout_actor.generation import (
    WEIGHT_VERSIONS,
    GenerationRequest,
    generation_request,
    responses,
)
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
    max_new_tokens: int | None = None,
    greedy: bool = False,
    step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S,
    media_group_size: int = 1,
) -> tuple[BatchedDataDict[Any], dict[str, Any]]:
    """Continue every row until its environment ends it, its sequence is full, or no turns remain.

    Each turn generates for all active rows in one call, then steps them in their environments, with
    one concurrent call per task.

    Args:
        policy_generation: the backend.
        input_batch: n rows with ``message_log`` (turns with ``role``, ``content`` and
            ``token_ids``), ``task_name``, ``extra_env_info``, and optionally ``stop_strings``.
            Other columns are copied to the result, except ``weight_versions``. The rollout does not
            change this batch.
        tokenizer: decodes responses and encodes observations.
        task_to_env: task to environment.
        max_seq_len: maximum tokens of a conversation. An observation that would reach it is cut,
            and ends the row.
        max_rollout_turns: maximum responses per row.
        max_new_tokens: maximum tokens of a response; with None, ``max_seq_len`` limits it. The
            backend needs the same limit; a longer response is refused.
        greedy: take the most likely token instead of sampling.
        step_timeout_s: how long the steps of one turn may take, in seconds.
        media_group_size: number of consecutive rows that repeat one prompt, and share its media in
            memory.

    Returns:
        The batch and its metrics (`rollout_actor.metrics.rollout_metrics`). The batch has the
        input's columns, with the final ``message_log`` and ``extra_env_info``, and:

        - ``total_reward``, float32 (n,);
        - ``truncated``, bool (n,): whether a response reached its token budget;
        - each reward component by its name, float32 (n,), 0 for rows without it;
        - ``weight_versions``, if the backend reports them, objects (n,): lists of
            `rollout_actor.WeightVersionSpan` over the row's tokens, None for rows without versions.

    Raises:
        InvalidRequestError: (a ValueError) a task has no environment, columns do not fit each
            other, or the tokenizer adds tokens to an observation. A reward component has the name
            of a column, or a sum of rewards exceeds float32. The output of the backend or of an
            environment violates its interface (see `rollout_actor.generation.responses`).
        MissingDataError: (a KeyError and a ValueError) a column or a key is missing.
        DeadlineExceededError, UnavailableError: as `step_environments`; names the task.
    """
    checked_period("rollout", "step_timeout_s", step_timeout_s)
    rows = _start(input_batch, tokenizer, task_to_env, max_rollout_turns, media_group_size)
    for turn in range(max_rollout_turns):
        active = [row for row in rows if row.active]
        if not active:
            break
        with span("turn", attributes={"rl.turn": turn, "rl.rows": len(active)}):
            request = generation_request(
                active,
                backend=type(policy_generation).__name__,
                pad_token_id=tokenizer.pad_token_id,
                max_seq_len=max_seq_len,
                max_new_tokens=max_new_tokens,
            )
            with span("generate", "idle", kind=SpanKind.CLIENT):
                output = policy_generation.generate(request.data, greedy=greedy)
            _add_responses(active, output, request, tokenizer)
            with span("environment_step", "idle", kind=SpanKind.CLIENT):
                outcomes = step_environments(active, task_to_env, timeout_s=step_timeout_s)
            for row, outcome in zip(active, outcomes, strict=True):
                row.add_outcome(outcome, tokenizer, max_seq_len=max_seq_len)
    return _final_batch(input_batch, rows), rollout_metrics(rows)


def run_async_multi_turn_rollout(
    policy_generation: AsyncGenerationInterface,
    input_batch: Mapping[str, Any],
    tokenizer: TokenizerInterface,
    task_to_env: Mapping[str, EnvironmentInterface],
    *,
    max_seq_len: int,
    max_rollout_turns: int,
    max_new_tokens: int | None = None,
    greedy: bool = False,
    step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S,
    media_group_size: int = 1,
) -> tuple[BatchedDataDict[Any], dict[str, Any]]:
    """Do the same as `run_multi_turn_rollout` with ``generate_async``, each row at its own pace.

    It is not a coroutine: it starts an event loop, in a separate thread if the caller's thread runs
    one (a notebook), and returns when every row is finished. ``generate_async`` and ``step`` get
    one row per call, and ``step_timeout_s`` applies to each row's step. An environment that
    computes in ``step.remote`` itself blocks the other rows; one that returns a reference or a
    future does not. When a row fails, the others are cancelled and its error is raised.
    """
    checked_period("rollout", "step_timeout_s", step_timeout_s)
    rows = _start(input_batch, tokenizer, task_to_env, max_rollout_turns, media_group_size)

    async def run_row(row: Conversation) -> None:
        for _ in range(max_rollout_turns):
            request = generation_request(
                [row],
                backend=type(policy_generation).__name__,
                pad_token_id=tokenizer.pad_token_id,
                max_seq_len=max_seq_len,
                max_new_tokens=max_new_tokens,
            )
            stream = policy_generation.generate_async(request.data, greedy=greedy)
            answers = [answer async for answer in stream]
            indices = [index for index, _ in answers]
            if indices != [0]:
                raise InvalidRequestError(
                    f"generation backend {request.backend}: row {row.row}: generate_async yielded "
                    f"outputs for the rows {indices}; expected [0], the only row of the request"
                )
            _add_responses([row], answers[0][1], request, tokenizer)
            outcomes = await step_environments_async([row], task_to_env, timeout_s=step_timeout_s)
            row.add_outcome(outcomes[0], tokenizer, max_seq_len=max_seq_len)
            if not row.active:
                break

    async def run_rows() -> None:
        await asyncio.gather(*map(run_row, rows))

    # One span for all rows: rows do not share turns, and a span per row would be one per sample.
    with span("turns", "idle", attributes={"rl.rows": len(rows)}):
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            asyncio.run(run_rows())
        else:
            here = contextvars.copy_context()
            with ThreadPoolExecutor(1, "rollout") as thread:
                thread.submit(here.run, lambda: asyncio.run(run_rows())).result()
    return _final_batch(input_batch, rows), rollout_metrics(rows)


def _start(
    input_batch: Mapping[str, Any],
    tokenizer: TokenizerInterface,
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
    check_tokenizer(tokenizer)
    return rows


def _add_responses(
    rows: Sequence[Conversation],
    output: Any,
    request: GenerationRequest,
    tokenizer: TokenizerInterface,
) -> None:
    answers = responses(output, request)
    texts = tokenizer.batch_decode(
        [response.token_ids for response in answers], skip_special_tokens=True
    )
    for row, response, text in zip(rows, answers, texts, strict=True):
        row.add_response(response, text)


def _final_batch(
    input_batch: Mapping[str, Any], rows: Sequence[Conversation]
) -> BatchedDataDict[Any]:
    batch: BatchedDataDict[Any] = BatchedDataDict(
        {
            # The input may have weight versions of an earlier rollout.
            **{name: column for name, column in input_batch.items() if name != WEIGHT_VERSIONS},
            "message_log": [row.turns for row in rows],
            "extra_env_info": [row.env_info for row in rows],
            "total_reward": _float32([row.total_reward for row in rows], "total_reward"),
            "truncated": torch.tensor([row.truncated for row in rows], dtype=torch.bool),
        }
    )
    if any(row.weight_versions is not None for row in rows):
        batch[WEIGHT_VERSIONS] = object_array([row.weight_versions for row in rows])
    components = sorted({name for row in rows for name in row.rewards})
    taken = [name for name in components if name in batch]
    if taken:
        raise InvalidRequestError(
            f"rollout: reward components {listed(taken)} have the names of columns; expected "
            "other names, such as 'reward/<name>'"
        )
    for name in components:
        batch[name] = _float32([row.rewards.get(name, 0.0) for row in rows], name)
    return batch


def _float32(sums: Sequence[float], name: str) -> torch.Tensor:
    """Return sums of finite rewards as a column; a sum that exceeds float32 is refused."""
    column = torch.tensor(sums, dtype=torch.float32)
    if not column.isfinite().all():
        row = int(column.isfinite().logical_not().int().argmax())
        raise InvalidRequestError(
            f"rollout: {name} of row {row} adds up to {sums[row]:g}, which exceeds float32"
        )
    return column
