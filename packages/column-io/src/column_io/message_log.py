"""Conversions between message logs (conversations) and columns.

A message log is a list of turns, each a dict with ``role``, ``content`` and ``token_ids``. The row
of ``input_ids`` holds the token ids of all turns end to end. Only the lengths, roles and contents
of the turns are stored in addition. Rebuilding a log copies no tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Final  # Any: contents are text or the caller's own structures

import numpy as np
import torch

from dataplane_core import INPUT_IDS, InvalidRequestError, MissingDataError
from dataplane_core.arguments import argument_type_error
from dataplane_core.errors import listed

MESSAGE_LOG_BULK_FIELDS: Final[tuple[str, ...]] = ("turn_lengths", "turn_roles", "turn_contents")
"""Columns that, together with ``input_ids``, hold the message logs of a batch."""

_GENERATION_LOGPROBS = "generation_logprobs"
_ASSISTANT = "assistant"

MessageLog = list[dict[str, Any]]


def decompose_message_log(message_logs: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the turns of ``message_logs`` as columns.

    Args:
        message_logs: list of turns per row. A turn has ``role``, and may have ``content`` (default
            "") and ``token_ids`` (a 1-D tensor or a sequence; default no tokens).

    Returns:
        Column by name.

        - ``turn_lengths``, int64 (n, maximum turns), in tokens, padded with 0;
        - ``turn_roles`` and ``turn_contents``, object arrays (n,) of lists;
        - ``response_token_lengths``, int64 (n,), the tokens of the first assistant turn that has
            any, or 0.

    Raises:
        MissingDataError: (a KeyError and a ValueError) a turn has no role.
    """
    count = len(message_logs)
    turn_lengths = torch.zeros((count, max(map(len, message_logs), default=0)), dtype=torch.int64)
    response_token_lengths = torch.zeros(count, dtype=torch.int64)
    turn_roles = np.empty(count, dtype=object)
    turn_contents = np.empty(count, dtype=object)
    for row, turns in enumerate(message_logs):
        for index, turn in enumerate(turns):
            if "role" not in turn:
                raise MissingDataError(
                    f"decompose_message_log: turn {index} of row {row} has {listed(turn)}; "
                    "expected 'role' among them",
                    fields=["role"],
                )
        lengths = [len(turn.get("token_ids", ())) for turn in turns]
        turn_lengths[row, : len(lengths)] = torch.tensor(lengths, dtype=torch.int64)
        turn_roles[row] = [turn["role"] for turn in turns]
        turn_contents[row] = [turn.get("content", "") for turn in turns]
        response_token_lengths[row] = next(
            (
                length
                for turn, length in zip(turns, lengths, strict=True)
                if turn["role"] == _ASSISTANT and length > 0
            ),
            0,
        )
    return {
        "turn_lengths": turn_lengths,
        "turn_roles": turn_roles,
        "turn_contents": turn_contents,
        "response_token_lengths": response_token_lengths,
    }


def reconstruct_message_log(
    columns: Mapping[str, Any] | torch.Tensor | None = None,
    turn_lengths: torch.Tensor | None = None,
    turn_roles: Sequence[Sequence[str]] | None = None,
    turn_contents: Sequence[Sequence[Any]] | None = None,
    generation_logprobs: torch.Tensor | None = None,
    *,
    input_ids: torch.Tensor | None = None,
) -> list[MessageLog]:
    """Return the message logs of ``columns``; the inverse of `decompose_message_log`.

    The columns may also be separate arguments, in the order ``input_ids``,
    `MESSAGE_LOG_BULK_FIELDS`, ``generation_logprobs``. Pass them by name: the published contract
    does not fix their order, so another implementation may differ.

    Args:
        columns: ``input_ids`` (n, width) or jagged, ``turn_lengths``, ``turn_roles``,
            ``turn_contents``, and optionally ``generation_logprobs``, shaped like ``input_ids``.
            Or ``input_ids`` alone, with the others as arguments.
        turn_lengths: int (n, maximum turns), in tokens.
        turn_roles: n lists of roles.
        turn_contents: n lists of contents.
        generation_logprobs: shaped like ``input_ids``; None if there are none.
        input_ids: (n, width) or jagged, instead of ``columns``.

    Returns:
        A list of turns per row. Each turn has ``role`` and ``content``; if it has tokens, also
        ``token_ids``, a view of ``input_ids``; an assistant's turn with tokens also
        ``generation_logprobs``, likewise a view.

    Raises:
        MissingDataError: (a KeyError and a ValueError) a column is missing.
        InvalidRequestError: (a ValueError) a row's roles, contents, lengths, ids and
            log-probabilities do not fit together, columns differ in their number of rows, or a
            mapping and separate columns are both given.
    """
    given = {
        INPUT_IDS: columns if input_ids is None else input_ids,
        "turn_lengths": turn_lengths,
        "turn_roles": turn_roles,
        "turn_contents": turn_contents,
        _GENERATION_LOGPROBS: generation_logprobs,
    }
    if isinstance(columns, Mapping):
        mixed = [name for name in given if name != INPUT_IDS and given[name] is not None]
        mixed += [] if input_ids is None else [INPUT_IDS]
        if mixed:
            raise InvalidRequestError(
                f"reconstruct_message_log: both a mapping of columns and {listed(mixed)}; "
                "expected one or the other"
            )
        return _reconstruct(columns)
    if columns is not None and input_ids is not None:
        raise InvalidRequestError("reconstruct_message_log: input_ids is given twice")
    return _reconstruct({name: column for name, column in given.items() if column is not None})


def _reconstruct(columns: Mapping[str, Any]) -> list[MessageLog]:
    needed = (INPUT_IDS, *MESSAGE_LOG_BULK_FIELDS)
    missing = [name for name in needed if name not in columns]
    if missing:
        raise MissingDataError(
            f"reconstruct_message_log: no columns {listed(missing)}; expected {listed(needed)}",
            fields=missing,
        )
    for name in (INPUT_IDS, "turn_lengths", _GENERATION_LOGPROBS):
        column = columns.get(name)
        if column is not None and not isinstance(column, torch.Tensor):
            raise argument_type_error(
                "reconstruct_message_log", name, column, "a tensor with a row per sample"
            )
    lengths = columns["turn_lengths"]
    if lengths.dtype.is_floating_point:
        raise argument_type_error("reconstruct_message_log", "turn_lengths", lengths, "integers")
    token_rows = columns[INPUT_IDS].unbind()
    logprobs = columns.get(_GENERATION_LOGPROBS)
    logprob_rows = [None] * len(token_rows) if logprobs is None else logprobs.unbind()
    counts = {name: len(columns[name]) for name in MESSAGE_LOG_BULK_FIELDS} | {
        _GENERATION_LOGPROBS: len(logprob_rows)
    }
    for name, count in counts.items():
        if count != len(token_rows):
            raise InvalidRequestError(
                f"reconstruct_message_log: column {name!r} has {count} rows; expected "
                f"{len(token_rows)}, as {INPUT_IDS}"
            )
    return [
        _rebuild(row, *parts)
        for row, parts in enumerate(
            zip(
                token_rows,
                logprob_rows,
                [row.tolist() for row in lengths.unbind()],
                columns["turn_roles"],
                columns["turn_contents"],
                strict=True,
            )
        )
    ]


def _rebuild(
    row: int,
    tokens: torch.Tensor,
    logprobs: torch.Tensor | None,
    lengths: list[int],
    roles: list[str],
    contents: list[Any],
) -> MessageLog:
    ids, count = len(tokens), sum(lengths)
    logprob_count = ids if logprobs is None else len(logprobs)
    # Lengths beyond the last turn are padding.
    fits = len(contents) == len(roles) <= len(lengths) and not any(lengths[len(roles) :])
    if not fits or min(lengths, default=0) < 0 or count > min(ids, logprob_count):
        raise InvalidRequestError(
            f"reconstruct_message_log: row {row} has {len(roles)} roles, {len(contents)} contents, "
            f"turn_lengths {lengths[:10]}, {ids} token ids and {logprob_count} "
            f"{_GENERATION_LOGPROBS}; expected one content and one length per role, and one id and "
            "log-probability per token"
        )
    log: MessageLog = []
    start = 0
    turns = zip(roles, contents, lengths[: len(roles)], strict=True)
    for role, content, length in turns:
        turn: dict[str, Any] = {"role": role, "content": content}
        if length > 0:
            turn["token_ids"] = tokens[start : start + length]
            if logprobs is not None and role == _ASSISTANT:
                turn[_GENERATION_LOGPROBS] = logprobs[start : start + length]
        log.append(turn)
        start += length
    return log


def attach_message_log_view(batch: MutableMapping[str, Any]) -> None:
    """Set ``batch["message_log"]`` from its columns, in place.

    It does nothing if ``input_ids`` or one of `MESSAGE_LOG_BULK_FIELDS` is absent.

    Args:
        batch: a `BatchedDataDict` or dict of columns.
    """
    if all(name in batch for name in (INPUT_IDS, *MESSAGE_LOG_BULK_FIELDS)):
        batch["message_log"] = reconstruct_message_log(batch)
