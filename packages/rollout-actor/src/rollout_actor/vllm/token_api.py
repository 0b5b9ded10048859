"""Requests and responses of vLLM's token API, ``/inference/v1/generate``.

Unlike ``/v1/completions`` it returns the sampled token ids and their weight versions (from vLLM
0.32 on), and it ignores the sampling defaults of the model's ``generation_config.json``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any  # Any: JSON

from dataplane_core import InvalidRequestError
from rollout_actor.interfaces import WeightVersionSpan

GENERATE = "/inference/v1/generate"
ABORTED = "abort"
"""Finish reason of a request that the server aborted, for example by a pause in mode ``abort``."""

_MISSING_LOGPROB = -9999.0
"""Value that vLLM sends for a log-probability that is missing, NaN or minus infinity."""

_MAX_TEXT = 300


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The distribution from which tokens are sampled; see `rollout_actor.vllm.VllmGeneration`."""

    temperature: float
    top_p: float
    top_k: int

    @property
    def is_plain(self) -> bool:
        """True if the distribution is the model's own."""
        return self.temperature == 1 and self.top_p == 1 and self.top_k == 0


@dataclass(frozen=True)
class RowRequest:
    """The request for one row.

    Attributes:
        row: index of the row in the batch.
        token_ids: the prompt.
        max_tokens: maximum tokens of the response, at least 1.
        stop_strings: strings that end the response.
        seed: seed of the sampling; None for the server's randomness.
        headers: the trace context.
    """

    row: int
    token_ids: list[int]
    max_tokens: int
    stop_strings: Sequence[str]
    seed: int | None
    headers: Mapping[str, str]


@dataclass(frozen=True)
class RowAnswer:
    """The response for one row.

    Attributes:
        token_ids: tokens of the response, including the token that ended it.
        logprobs: log-probability of each token in the distribution that sampled it.
        truncated: whether the token budget ended the response.
        weight_versions: spans over ``token_ids``; None if the server does not report them.
    """

    token_ids: list[int]
    logprobs: list[float]
    truncated: bool
    weight_versions: list[WeightVersionSpan] | None


def request_body(request: RowRequest, sampling: Sampling, *, greedy: bool) -> dict[str, Any]:
    """Return the JSON body of a request for one response."""
    parameters: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "logprobs": 0,  # only those of sampled tokens
        "temperature": 0.0 if greedy else sampling.temperature,
    }
    if not greedy:
        parameters |= {"top_p": sampling.top_p, "top_k": sampling.top_k}
        if request.seed is not None:
            parameters["seed"] = request.seed
    if request.stop_strings:
        # A stop string may contain a special token, for example a chat template's end of turn.
        parameters |= {"stop": list(request.stop_strings), "skip_special_tokens": False}
    return {"token_ids": request.token_ids, "sampling_params": parameters}


def read_answer(answer: Any, request: RowRequest, address: str) -> RowAnswer | None:
    """Read the answer to a request.

    Returns:
        The response; None if the server aborted the request.

    Raises:
        InvalidRequestError: (a ValueError) the answer is malformed; names the server, the row, what
            was found and what was expected.
    """
    source = f"vLLM at {address}: row {request.row}"
    choice = _only_choice(answer, source)
    if choice.get("finish_reason") == ABORTED:
        return None
    token_ids = choice.get("token_ids")
    if not isinstance(token_ids, list) or not all(type(token) is int for token in token_ids):
        raise InvalidRequestError(f"{source}: token_ids is {_text(token_ids)}; expected ints")
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    if not isinstance(content, list) or len(content) != len(token_ids):
        count = len(content) if isinstance(content, list) else "no"
        raise InvalidRequestError(
            f"{source}: {count} log-probabilities for {len(token_ids)} tokens; expected one each"
        )
    return RowAnswer(
        token_ids=token_ids,
        logprobs=[_logprob(entry, index, source) for index, entry in enumerate(content)],
        truncated=choice.get("finish_reason") == "length",
        weight_versions=_spans(choice.get("weight_versions"), source),
    )


def _only_choice(answer: Any, source: str) -> Mapping[str, Any]:
    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise InvalidRequestError(f"{source}: found {_text(answer)}; expected one choice")
    return choices[0]


def _logprob(entry: Any, index: int, source: str) -> float:
    value = entry.get("logprob") if isinstance(entry, Mapping) else None
    if not isinstance(value, int | float) or value <= _MISSING_LOGPROB:
        raise InvalidRequestError(
            f"{source}: log-probability of token {index} of the response is {value!r}; expected a "
            f"finite number (vLLM sends {_MISSING_LOGPROB:g} for NaN and minus infinity)"
        )
    return float(value)


def _spans(spans: Any, source: str) -> list[WeightVersionSpan] | None:
    if spans is None:
        return None
    try:
        read: list[WeightVersionSpan] = [
            {"version": str(span["version"]), "start": int(span["start"]), "end": int(span["end"])}
            for span in spans
        ]
    except (LookupError, TypeError, ValueError):
        raise InvalidRequestError(
            f"{source}: weight_versions is {_text(spans)}; expected version, start and end of spans"
        ) from None
    return [span for span in read if span["start"] < span["end"]]


def _text(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
