"""Requests to a generation backend, and checks of its output.

The output is compared with the request, because a missing or extra prompt token would shift every
mask after it, which nothing later detects.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any  # Any: a backend's output maps names to columns

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from column_io import BatchedDataDict
from dataplane_core import INPUT_IDS, INPUT_LENGTHS, ROUTED_EXPERTS_FIELD, MissingDataError
from dataplane_core.errors import InvalidRequestError, listed
from rollout_actor.conversation import Conversation, Response
from rollout_actor.interfaces import WeightVersionSpan

MAX_LOGPROB = 1e-3
"""Largest log-probability accepted as a rounding error; such values are not changed.

An engine that subtracts a rounded normalizer exceeds 0 by about 1e-5 in float32."""

_OUTPUT_IDS, _LENGTHS, _GENERATED = "output_ids", "unpadded_sequence_lengths", "generation_lengths"
_LOGPROBS, _TRUNCATED = "logprobs", "truncated"
WEIGHT_VERSIONS = "weight_versions"
_NEEDED_OUTPUTS = (_OUTPUT_IDS, _GENERATED, _LENGTHS, _LOGPROBS)
# Column to its kind, its number of dimensions, and its shape in error messages.
_FORMS = {
    _OUTPUT_IDS: ("integers", 2, "(n, any width)"),
    _LOGPROBS: ("floats", 2, "(n, any width)"),
    ROUTED_EXPERTS_FIELD: ("integers", 4, "(n, any width, layers, experts per token)"),
    _GENERATED: ("integers", 1, "(n,)"),
    _LENGTHS: ("integers", 1, "(n,)"),
    _TRUNCATED: ("booleans", 1, "(n,)"),
}


@dataclass(frozen=True)
class GenerationRequest:
    """A request with the prompts of n rows.

    Attributes:
        backend: names the backend in errors.
        rows: indices of the rows in the rollout's batch.
        input_ids: int64 (n, width), right-padded.
        lengths: int64 (n,), tokens of each prompt.
        budgets: int64 (n,), maximum tokens of each response.
        data: argument of `GenerationInterface.generate`. Its token tensors are copies, because a
            backend may write to them.
    """

    backend: str
    rows: list[int]
    input_ids: torch.Tensor
    lengths: torch.Tensor
    budgets: torch.Tensor
    data: BatchedDataDict[Any]


def generation_request(
    rows: Sequence[Conversation],
    *,
    backend: str,
    pad_token_id: int,
    max_seq_len: int,
    max_new_tokens: int | None,
) -> GenerationRequest:
    """Build the request for the next response of ``rows``.

    Args:
        rows: conversations to continue.
        backend: names the backend in errors.
        pad_token_id: pads ``input_ids`` on the right.
        max_seq_len: maximum tokens of a conversation.
        max_new_tokens: maximum tokens of a response; with None, ``max_seq_len`` limits it.
    """
    token_rows = [row.token_ids for row in rows]
    lengths = torch.tensor([len(tokens) for tokens in token_rows], dtype=torch.int64)
    input_ids = pad_sequence(token_rows, batch_first=True, padding_value=pad_token_id)
    media = dict.fromkeys(name for row in rows for name in row.media)
    data: BatchedDataDict[Any] = BatchedDataDict(
        {
            **{name: [row.media.get(name) for row in rows] for name in media},
            INPUT_IDS: input_ids.clone(),
            INPUT_LENGTHS: lengths.clone(),
            "stop_strings": [row.stop_strings for row in rows],
        }
    )
    return GenerationRequest(
        backend=backend,
        rows=[row.row for row in rows],
        input_ids=input_ids,
        lengths=lengths,
        budgets=(max_seq_len - lengths).clamp(min=0, max=max_new_tokens),
        data=data,
    )


def responses(output: Any, request: GenerationRequest) -> list[Response]:
    """Check a backend's output, and return one response per row.

    Args:
        output: `GenerationOutput` of n rows.
        request: the request that it answers.

    Raises:
        MissingDataError: (a KeyError and a ValueError) a column is missing.
        InvalidRequestError: (a ValueError) a column has another type or shape, a row does not begin
            with its prompt, or the lengths contradict each other or the budget. A log-probability
            is not finite, is above `MAX_LOGPROB`, or is not 0 on the prompt. The spans of weight
            versions do not cover a response. The error names the backend, the row, what was found
            and what was expected.
    """
    columns = _read_columns(output, request)
    _check_lengths(columns, request)
    _check_tokens(columns, request)
    routing, truncated = columns.get(ROUTED_EXPERTS_FIELD), columns.get(_TRUNCATED)
    spans = zip(request.lengths.tolist(), columns[_LENGTHS].tolist(), strict=True)
    versions = _read_weight_versions(output, columns[_GENERATED].tolist(), request)
    return [
        Response(
            # Copies, because views would keep the padded batch of this turn alive.
            token_ids=columns[_OUTPUT_IDS][row, start:stop].to(torch.int64, copy=True),
            logprobs=columns[_LOGPROBS][row, start:stop].to(torch.float32, copy=True),
            truncated=truncated is not None and bool(truncated[row]),
            routed_experts=None if routing is None else routing[row, :stop].clone(),
            weight_versions=versions[row],
        )
        for row, (start, stop) in enumerate(spans)
    ]


def _read_columns(output: Any, request: GenerationRequest) -> dict[str, torch.Tensor]:
    """Return the columns as CPU tensors of the right type and shape."""
    source = f"generation backend {request.backend}"
    if not isinstance(output, Mapping):
        raise InvalidRequestError(f"{source}: a {type(output).__name__}; expected a mapping")
    missing = [name for name in _NEEDED_OUTPUTS if name not in output]
    if missing:
        raise MissingDataError(
            f"{source}: no {listed(missing)} in its output; found {listed(output)}", fields=missing
        )
    columns = {}
    for name, (kind, dimensions, shape) in _FORMS.items():
        if output.get(name) is None and name not in _NEEDED_OUTPUTS:
            continue
        try:
            column = torch.as_tensor(output[name]).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidRequestError(
                f"{source}: {name} is a {type(output[name]).__name__}, not a tensor: {error}"
            ) from error
        dense = column.layout == torch.strided and not column.is_nested
        fits = dense and column.dim() == dimensions and len(column) == len(request.rows)
        if not fits or _kind_of(column) != kind:
            size = f"of shape {tuple(column.shape)}" if dense else "not a dense tensor"
            raise InvalidRequestError(
                f"{source}: {name} has {_kind_of(column)} ({column.dtype}) and is {size}; expected "
                f"{kind} of shape {shape} for the n = {len(request.rows)} rows of the request"
            )
        columns[name] = column
    return columns


def _read_weight_versions(
    output: Mapping[str, Any], generated: Sequence[int], request: GenerationRequest
) -> list[list[WeightVersionSpan] | None]:
    """Return per row the spans over its response, checked to be contiguous."""
    rows = output.get(WEIGHT_VERSIONS)
    if rows is None:
        return [None] * len(generated)
    source = f"generation backend {request.backend}"
    count = len(rows) if isinstance(rows, Sequence) else None
    if count != len(generated):
        raise InvalidRequestError(
            f"{source}: {WEIGHT_VERSIONS} is a {type(rows).__name__} of {count} rows; expected a "
            f"list of {len(generated)}"
        )
    read: list[list[WeightVersionSpan] | None] = []
    for row, spans, length in zip(request.rows, rows, generated, strict=True):
        if spans is None:
            read.append(None)
            continue
        try:
            borders = [
                (operator.index(span["start"]), operator.index(span["end"])) for span in spans
            ]
            is_valid = all(isinstance(span["version"], str) for span in spans)
        except (LookupError, TypeError, ValueError):
            is_valid = False
        if not is_valid:
            raise InvalidRequestError(
                f"{source}: row {row}: {WEIGHT_VERSIONS} is {spans!r:.300}; expected a list of "
                "spans with version (a str), start and end"
            )
        starts, ends = [start for start, _ in borders], [end for _, end in borders]
        if [*starts, length] != [0, *ends] or any(start >= end for start, end in borders):
            raise InvalidRequestError(
                f"{source}: row {row}: {WEIGHT_VERSIONS} has the spans {borders}; expected spans "
                f"that cover the response of {length} tokens without gaps"
            )
        read.append(
            [
                {"version": span["version"], "start": start, "end": end}
                for span, (start, end) in zip(spans, borders, strict=True)
            ]
        )
    return read


def _kind_of(column: torch.Tensor) -> str:
    if column.dtype == torch.bool:
        return "booleans"
    if column.is_complex():
        return "complex numbers"
    return "floats" if column.is_floating_point() else "integers"


def _check_lengths(columns: Mapping[str, torch.Tensor], request: GenerationRequest) -> None:
    starts, budgets = request.lengths, request.budgets
    stops, generated = columns[_LENGTHS].long(), columns[_GENERATED].long()
    _refuse(
        (generated != stops - starts) | (generated < 0),
        request,
        lambda row: (
            f"{_GENERATED} {generated[row]}, {_LENGTHS} {stops[row]} and a prompt of "
            f"{starts[row]} tokens; expected {_LENGTHS} = {_GENERATED} + prompt"
        ),
    )
    _refuse(
        generated > budgets,
        request,
        lambda row: (
            f"a response of {generated[row]} tokens; expected at most {budgets[row]}, see "
            "policy.generation.max_new_tokens and policy.max_total_sequence_length"
        ),
    )
    for name in (_OUTPUT_IDS, _LOGPROBS, ROUTED_EXPERTS_FIELD):
        if name in columns:
            _check_width(name, columns[name].shape[1], stops, request)


def _check_width(name: str, width: int, stops: torch.Tensor, request: GenerationRequest) -> None:
    _refuse(
        stops > width,
        request,
        lambda row: f"{name} is {width} wide; expected at least {stops[row]}, its {_LENGTHS}",
    )


def _check_tokens(columns: Mapping[str, torch.Tensor], request: GenerationRequest) -> None:
    # Row by row, so that each row is read once, from the CPU cache: masks over the padded columns
    # take thirty times as long. The lengths were checked, so every slice is inside its column.
    ids, sent = columns[_OUTPUT_IDS].numpy(), request.input_ids.numpy()
    given = columns[_LOGPROBS]
    logprobs = given.float().numpy()  # the dtype in which they are stored
    spans = zip(request.lengths.tolist(), columns[_LENGTHS].tolist(), strict=True)
    for row, (start, stop) in enumerate(spans):
        tokens, prompt, logs = ids[row, :stop], sent[row, :start], logprobs[row, :stop]
        if not stop:
            continue
        wrong = tokens[:start] != prompt
        if wrong.any():
            index = int(wrong.argmax())
            raise _row_error(
                request,
                row,
                f"{_OUTPUT_IDS} has token {tokens[index]} at index {index} of the prompt; expected "
                f"{prompt[index]}, as in the request",
            )
        if tokens.min() < 0:
            index = int((tokens < 0).argmax())
            raise _row_error(
                request,
                row,
                f"{_OUTPUT_IDS} has token {tokens[index]} at index {index}; expected at least 0",
            )
        if logs[:start].any():  # true for NaN too
            index = int((logs[:start] != 0).argmax())
            raise _row_error(
                request,
                row,
                f"log-probability {given[row, index]} at index {index} of the prompt; expected 0 "
                f"on its {start} tokens",
            )
        # With a NaN in the row, min and max are NaN, and the comparisons are false.
        if not (logs.min() > -np.inf and logs.max() <= MAX_LOGPROB):
            index = int((~((logs > -np.inf) & (logs <= MAX_LOGPROB))).argmax())
            raise _row_error(
                request,
                row,
                f"log-probability {given[row, index]} at index {index}; expected a finite number "
                f"of at most 0 (up to {MAX_LOGPROB:g} for rounding)",
            )


def _row_error(request: GenerationRequest, row: int, problem: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"generation backend {request.backend}: row {request.rows[row]}: {problem}"
    )


def _refuse(
    wrong: torch.Tensor, request: GenerationRequest, describe: Callable[[int], str]
) -> None:
    """Raise an error for the first row that is ``wrong``, bool (n,)."""
    if wrong.any():
        row = int(wrong.int().argmax())
        raise _row_error(request, row, describe(row))
