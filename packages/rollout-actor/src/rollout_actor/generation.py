"""Batches to a generation back end, and its answers checked and taken apart by row.

An answer is compared with the request before any of it is believed. A prompt token more or less
shifts every mask after it, and nothing later would notice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any  # Any: a back end's answer is a mapping of its own columns

import torch

from column_io import BatchedDataDict
from dataplane_core import INPUT_IDS, INPUT_LENGTHS, ROUTED_EXPERTS_FIELD, MissingDataError
from dataplane_core.errors import InvalidRequestError, listed

if TYPE_CHECKING:
    from rollout_actor.conversation import Conversation

MAX_LOGPROB = 1e-3
"""Largest log-probability that is taken for rounding; values up to it are kept as they are.

An engine that subtracts a rounded normalizer exceeds 0 by about 1e-5 in float32."""

_OUTPUT_IDS, _LENGTHS, _GENERATED = "output_ids", "unpadded_sequence_lengths", "generation_lengths"
_LOGPROBS, _TRUNCATED = "logprobs", "truncated"
_NEEDED_OUTPUTS = (_OUTPUT_IDS, _GENERATED, _LENGTHS, _LOGPROBS)
# Kind, number of dimensions, and how an error writes the shape.
_FORMS = {
    _OUTPUT_IDS: ("integers", 2, "(n, any width)"),
    _LOGPROBS: ("floats", 2, "(n, any width)"),
    ROUTED_EXPERTS_FIELD: ("integers", 4, "(n, any width, layers, experts per token)"),
    _GENERATED: ("integers", 1, "(n,)"),
    _LENGTHS: ("integers", 1, "(n,)"),
    _TRUNCATED: ("booleans", 1, "(n,)"),
}


@dataclass(frozen=True)
class Response:
    """What was generated for one row.

    Attributes:
        token_ids: int64 (r,).
        logprobs: float32 (r,).
        truncated: the token budget ended it.
        routed_experts: (prompt + r, layers, experts per token) or None.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    truncated: bool
    routed_experts: torch.Tensor | None


@dataclass(frozen=True)
class GenerationRequest:
    """The prompts of n rows as they were sent.

    Attributes:
        backend: names the back end in errors.
        rows: places of the rows in the rollout's batch.
        input_ids: int64 (n, width), right-padded.
        lengths: int64 (n,), tokens of each prompt.
        budgets: int64 (n,), tokens that each response may have.
        data: what `GenerationInterface.generate` takes. It shares no token tensor with this, so
            that a back end may write to its own.
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
        backend: names the back end in errors.
        pad_token_id: fills ``input_ids`` on the right.
        max_seq_len: tokens of a conversation.
        max_new_tokens: tokens of a response, None for as many as the conversation may have.
    """
    token_rows = [row.token_ids for row in rows]
    lengths = torch.tensor([len(tokens) for tokens in token_rows], dtype=torch.int64)
    input_ids = torch.full((len(rows), int(lengths.max())), pad_token_id, dtype=torch.int64)
    for target, tokens in zip(input_ids, token_rows, strict=True):
        target[: len(tokens)] = tokens
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
    """Check a back end's answer and take it apart.

    Args:
        output: `GenerationOutput` of n rows.
        request: what was asked for.

    Raises:
        MissingDataError: (a KeyError and a ValueError) if a column is missing.
        InvalidRequestError: (a ValueError) naming the back end, the row, what was found and what
            was expected: if a column has another type or shape, a row does not begin with its
            prompt, the lengths contradict each other or the budget, or a log-probability is not
            finite, above `MAX_LOGPROB`, or not 0 on the prompt.
    """
    columns = _read_columns(output, request)
    _check_lengths(columns, request)
    _check_tokens(columns, request)
    routing, truncated = columns.get(ROUTED_EXPERTS_FIELD), columns.get(_TRUNCATED)
    spans = zip(request.lengths.tolist(), columns[_LENGTHS].tolist(), strict=True)
    return [
        Response(
            # Copies: a view would keep the whole padded batch of this turn alive.
            token_ids=columns[_OUTPUT_IDS][row, start:stop].to(torch.int64, copy=True),
            logprobs=columns[_LOGPROBS][row, start:stop].to(torch.float32, copy=True),
            truncated=truncated is not None and bool(truncated[row]),
            routed_experts=None if routing is None else routing[row, :stop].clone(),
        )
        for row, (start, stop) in enumerate(spans)
    ]


def _read_columns(output: Any, request: GenerationRequest) -> dict[str, torch.Tensor]:
    """The columns as CPU tensors of the right type and shape."""
    where = f"generation back end {request.backend}"
    if not isinstance(output, Mapping):
        raise InvalidRequestError(f"{where}: a {type(output).__name__}; expected a mapping")
    missing = [name for name in _NEEDED_OUTPUTS if name not in output]
    if missing:
        raise MissingDataError(
            f"{where}: no {listed(missing)} in its answer; found {listed(output)}", fields=missing
        )
    columns = {}
    for name, (kind, dimensions, shape) in _FORMS.items():
        if output.get(name) is None and name not in _NEEDED_OUTPUTS:
            continue
        try:
            column = torch.as_tensor(output[name]).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidRequestError(
                f"{where}: {name} is a {type(output[name]).__name__}, which is no tensor: {error}"
            ) from error
        dense = column.layout == torch.strided and not column.is_nested
        fits = dense and column.dim() == dimensions and len(column) == len(request.rows)
        if not fits or _kind_of(column) != kind:
            size = f"of shape {tuple(column.shape)}" if dense else "not a dense tensor"
            raise InvalidRequestError(
                f"{where}: {name} has {_kind_of(column)} ({column.dtype}) and is {size}; expected "
                f"{kind} of shape {shape} for the n = {len(request.rows)} rows that it was given"
            )
        columns[name] = column
    return columns


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
            f"{starts[row]} tokens; expected the first two to differ by the prompt"
        ),
    )
    _refuse(
        generated > budgets,
        request,
        lambda row: (
            f"a response of {generated[row]} tokens; expected at most {budgets[row]}, by "
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
    ids, logprobs = columns[_OUTPUT_IDS], columns[_LOGPROBS]
    sent = request.input_ids
    # A row's prompt and response lie within every column: their lengths were checked.
    width = min(ids.shape[1], sent.shape[1])
    in_prompt = torch.arange(sent.shape[1]) < request.lengths[:, None]
    _refuse_places(
        in_prompt[:, :width] & (ids[:, :width] != sent[:, :width]),
        request,
        lambda row, place: (
            f"{_OUTPUT_IDS} has token {ids[row, place]} at place {place} of the prompt; expected "
            f"{sent[row, place]}, as it was sent"
        ),
    )
    places = torch.arange(max(ids.shape[1], logprobs.shape[1]))
    in_row = places < columns[_LENGTHS][:, None]
    _refuse_places(
        in_row[:, : ids.shape[1]] & (ids < 0),
        request,
        lambda row, place: (
            f"{_OUTPUT_IDS} has token {ids[row, place]} at place {place}; expected at least 0"
        ),
    )
    width = min(logprobs.shape[1], sent.shape[1])
    _refuse_places(
        in_prompt[:, :width] & (logprobs[:, :width] != 0),
        request,
        lambda row, place: (
            f"log-probability {logprobs[row, place]} at place {place} of the prompt; expected 0 "
            f"on its {request.lengths[row]} tokens"
        ),
    )
    # A comparison with NaN is false, so NaN is refused as well.
    possible = (logprobs <= MAX_LOGPROB) & (logprobs.float() > -torch.inf)  # float32 is stored
    _refuse_places(
        in_row[:, : logprobs.shape[1]] & ~possible,
        request,
        lambda row, place: (
            f"log-probability {logprobs[row, place]} at place {place}; expected a finite number "
            f"of at most 0 (up to {MAX_LOGPROB:g} for rounding)"
        ),
    )


def _refuse(
    wrong: torch.Tensor, request: GenerationRequest, describe: Callable[[int], str]
) -> None:
    """Raise for the first row that is ``wrong``, bool (n,)."""
    if wrong.any():
        row = int(wrong.int().argmax())
        raise InvalidRequestError(
            f"generation back end {request.backend}: row {request.rows[row]}: {describe(row)}"
        )


def _refuse_places(
    wrong: torch.Tensor, request: GenerationRequest, describe: Callable[[int, int], str]
) -> None:
    """Raise for the first place that is ``wrong``, bool (n, width), of the first such row."""
    if wrong.any():
        _refuse(wrong.any(1), request, lambda row: describe(row, int(wrong[row].int().argmax())))
