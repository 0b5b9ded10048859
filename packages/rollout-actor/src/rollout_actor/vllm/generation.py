"""`VllmGeneration`: a generation backend that uses vLLM's HTTP servers."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any  # Any: columns of a batch

import torch

from column_io import BatchedDataDict
from dataplane_core import INPUT_IDS, INPUT_LENGTHS, ConfigError, UnsupportedError
from dataplane_core.errors import listed
from dataplane_core.telemetry import inject
from rollout_actor.vllm.event_loop import EventLoopThread
from rollout_actor.vllm.server import checked_address
from rollout_actor.vllm.server_pool import ServerPool
from rollout_actor.vllm.token_api import RowAnswer, RowRequest, Sampling

_COLUMNS = (INPUT_IDS, INPUT_LENGTHS, "stop_strings")
_TRACE_HEADERS = ("traceparent", "tracestate")
_SEED_BITS = 63  # vLLM's seeds are int64


class VllmGeneration:
    """Generation backend that uses one or several vLLM servers.

    It implements `rollout_actor.GenerationInterface` and `rollout_actor.AsyncGenerationInterface`.
    It can be pickled for a Ray actor; each copy has separate connections and counts.

    Each row goes to the server with the fewest requests of this backend. A server is lost if it
    fails its first check or a later health check; its rows move to other servers. A lost server may
    have restarted with its initial weights. So it is tried again only after the next
    `clear_logger_metrics`, which `SyncRolloutActor` calls before each rollout. If every server is
    lost, or a server does not fit these arguments, the next call tries all lost servers again.

    Args:
        addresses: ``http[s]://host[:port]`` of each server. From vLLM 0.30 on they must be started
            with ``--enable-scale-out``.
        pad_token_id: pads ``output_ids`` on the right.
        max_total_sequence_length: maximum tokens of a conversation. A row whose prompt reaches it
            gets an empty, truncated response.
        max_new_tokens: maximum tokens of a response; with None, only the conversation limits it.
        temperature: divides the logits.
        top_p: probability mass of the tokens that can be sampled; 1 for all.
        top_k: number of most likely tokens that can be sampled; 0 for all. Unless temperature,
            ``top_p`` and ``top_k`` have their defaults, servers must be started with
            ``--logprobs-mode processed_logprobs``.
        seed: seed of all sampling; None leaves it to the servers, which is faster but not
            reproducible. The seed of a request is derived from this seed, the stream (`begin`), the
            rollout, the prompt, and the number of equal prompts before it in the rollout. So it
            depends neither on the order of rows nor on the server.
        timeout_s: deadline of one `generate`, or of one row of `generate_async`, in seconds. It
            includes waits for capacity, retries, and pauses of a server. It is also the deadline
            of the generations that check a new server.
        server_timeout_s: a server is lost if ``/health`` does not answer within this time.
        max_requests_per_server: maximum concurrent requests per server; further ones queue in the
            client.
        api_key: the servers' ``--api-key``.

    Raises:
        ConfigError: (a ValueError) an argument is out of range.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        pad_token_id: int,
        max_total_sequence_length: int,
        max_new_tokens: int | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        timeout_s: float = 1800.0,
        server_timeout_s: float = 30.0,
        max_requests_per_server: int = 256,
        api_key: str | None = None,
    ) -> None:
        self._arguments = {
            name: value for name, value in locals().items() if name not in ("self", "__class__")
        }
        _check_positive(
            max_total_sequence_length=max_total_sequence_length,
            max_new_tokens=1 if max_new_tokens is None else max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            timeout_s=timeout_s,
            server_timeout_s=server_timeout_s,
            max_requests_per_server=max_requests_per_server,
        )
        if top_p > 1 or top_k < 0:
            raise ConfigError(
                f"VllmGeneration: top_p {top_p!r} and top_k {top_k!r}; expected a top_p of at "
                "most 1 and a top_k of at least 0"
            )
        if not addresses or isinstance(addresses, str):
            raise ConfigError(
                f"VllmGeneration: addresses {addresses!r}; expected a list of at least one"
            )
        if len(set(map(checked_address, addresses))) != len(addresses):
            raise ConfigError(f"VllmGeneration: addresses {listed(addresses)}; expected each once")
        self._pool = ServerPool(
            addresses,
            sampling=Sampling(temperature=temperature, top_p=top_p, top_k=top_k),
            max_length=max_total_sequence_length,
            max_requests_per_server=max_requests_per_server,
            timeout_s=timeout_s,
            server_timeout_s=server_timeout_s,
            api_key=api_key,
        )
        self._loop = EventLoopThread("vllm-generation")
        self._pad_token_id = pad_token_id
        self._max_length = max_total_sequence_length
        self._max_new_tokens = max_new_tokens
        self._seed = seed
        self._running, self._since = 0, 0.0
        self.begin("")
        self._clear()

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = dict(self._arguments)
        addresses = arguments.pop("addresses")
        return partial(VllmGeneration, **arguments), (addresses,)

    def begin(self, stream: str) -> None:
        """Start a random stream; its name determines the samples of the following rollouts."""
        self._stream = stream
        self._rollouts = 0
        self._equal_prompts: Counter[bytes] = Counter()

    def generate(self, data: BatchedDataDict[Any], *, greedy: bool) -> Mapping[str, Any]:
        """Generate one response per row.

        Args:
            data: as for `rollout_actor.GenerationInterface.generate`; without media.
            greedy: take the most likely token instead of sampling.

        Returns:
            `rollout_actor.GenerationOutput` with ``truncated``, and with ``weight_versions`` if
            every server reports them (vLLM 0.32 and later).

        Raises:
            DeadlineExceededError: (a TimeoutError) responses are missing; names the servers.
            UnavailableError: (a RuntimeError) every server is lost, and the error lists the
                reasons; or a server repeatedly fails the same row although its health check
                succeeds.
            ConfigError: (a ValueError) a server lacks an option; names it.
            InvalidRequestError: (a ValueError) a server refuses a request, or its answer lacks
                log-probabilities.
            UnsupportedError: (a NotImplementedError) rows have media.
            ClosedError: (a RuntimeError) `close` was called meanwhile.
        """
        requests = self._requests(data, greedy=greedy)
        answers = self._loop.call(self._answer(requests, greedy=greedy))
        return self._output(requests, answers)

    async def generate_async(
        self, data: BatchedDataDict[Any], *, greedy: bool
    ) -> AsyncIterator[tuple[int, Mapping[str, Any]]]:
        """Generate responses, and yield each as soon as it is ready.

        Cancelling the caller, or closing the iterator, aborts the requests on the servers.

        Args:
            data: as for `generate`.
            greedy: as for `generate`.

        Yields:
            The index of a row in ``data``, and its `rollout_actor.GenerationOutput` of one row.

        Raises:
            DataPlaneError: as `generate`.
        """
        requests = self._requests(data, greedy=greedy)
        rows = {
            asyncio.wrap_future(self._loop.submit(self._answer([request], greedy=greedy))): row
            for row, request in enumerate(requests)
        }
        try:
            pending = set(rows)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for future in sorted(done, key=lambda future: rows[future]):
                    row = rows[future]
                    if future.cancelled():
                        raise self._loop.closed_error()
                    yield row, self._output([requests[row]], future.result())
        finally:
            for future in rows:
                future.cancel()

    def clear_logger_metrics(self) -> None:
        """Reset the accumulated metrics, and allow requests to lost servers again."""
        self._rollouts += 1
        self._equal_prompts.clear()
        self._loop.call(self._begin_rollout())

    def get_logger_metrics(self) -> dict[str, float | int]:
        """Return the metrics accumulated since the last clear.

        Returns:
            ``tokens`` generated, ``seconds`` with running requests, ``tokens_per_s``, ``requests``
            answered, ``retries`` and ``lost_servers``.
        """
        return self._loop.call(self._metrics())

    def finish_generation(self) -> None:
        """Do nothing: the servers have separate devices."""

    def close(self) -> None:
        """Close the connections and end the thread; the next call opens new ones.

        Running calls raise `ClosedError`.
        """
        self._loop.stop(self._pool.close)

    def _requests(self, data: Mapping[str, Any], *, greedy: bool) -> list[RowRequest]:
        media = [name for name in data if name not in _COLUMNS]
        if media:
            raise UnsupportedError(
                f"VllmGeneration: rows have {listed(media)}; media are not supported"
            )
        lengths = data[INPUT_LENGTHS].tolist()
        stop_strings = data.get("stop_strings") or [None] * len(lengths)
        carrier = inject()
        headers = {name: carrier[name] for name in _TRACE_HEADERS if name in carrier}
        return [
            RowRequest(
                row=row,
                token_ids=(token_ids := tokens[:length].tolist()),
                max_tokens=self._budget(length),
                stop_strings=stops or (),
                seed=None if greedy or self._seed is None else self._request_seed(token_ids),
                headers=headers,
            )
            for row, (tokens, length, stops) in enumerate(
                zip(data[INPUT_IDS], lengths, stop_strings, strict=True)
            )
        ]

    def _budget(self, length: int) -> int:
        free = max(0, self._max_length - length)
        return free if self._max_new_tokens is None else min(free, self._max_new_tokens)

    def _request_seed(self, token_ids: list[int]) -> int:
        prompt = hashlib.blake2b(repr(token_ids).encode(), digest_size=16).digest()
        number = self._equal_prompts[prompt]
        self._equal_prompts[prompt] += 1
        text = f"{self._seed}:{self._stream}:{self._rollouts}:{prompt.hex()}:{number}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> (64 - _SEED_BITS)

    async def _answer(self, requests: Sequence[RowRequest], *, greedy: bool) -> list[RowAnswer]:
        """Answer ``requests``; runs in the event loop's thread, which alone changes the counts."""
        self._running += 1
        if self._running == 1:
            self._since = time.perf_counter()
        try:
            sent = [request for request in requests if request.max_tokens]
            answered = iter(await self._pool.answer_all(sent, greedy=greedy) if sent else ())
            empty = RowAnswer([], [], truncated=True, weight_versions=[])
            answers = [next(answered) if request.max_tokens else empty for request in requests]
            self._counts["tokens"] += sum(len(answer.token_ids) for answer in answers)
            self._counts["requests"] += len(sent)
            return answers
        finally:
            self._running -= 1
            if not self._running:
                self._seconds += time.perf_counter() - self._since

    async def _begin_rollout(self) -> None:
        self._clear()
        self._pool.readmit()

    def _clear(self) -> None:
        self._counts: Counter[str] = Counter()
        self._pool.counts.clear()
        self._seconds, self._since = 0.0, time.perf_counter()

    async def _metrics(self) -> dict[str, float | int]:
        seconds = self._seconds + (time.perf_counter() - self._since if self._running else 0.0)
        tokens = self._counts["tokens"]
        return {
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_s": tokens / seconds if seconds else 0.0,
            "requests": self._counts["requests"],
            "retries": self._pool.counts["retries"],
            "lost_servers": self._pool.lost_servers,
        }

    def _output(
        self, requests: Sequence[RowRequest], answers: Sequence[RowAnswer]
    ) -> dict[str, Any]:
        rows = list(zip(requests, answers, strict=True))
        totals = [len(request.token_ids) + len(answer.token_ids) for request, answer in rows]
        width = max(totals, default=0)
        output_ids = torch.full((len(rows), width), self._pad_token_id)
        logprobs = torch.zeros((len(rows), width))
        for row, ((request, answer), total) in enumerate(zip(rows, totals, strict=True)):
            start = len(request.token_ids)
            output_ids[row, :total] = torch.tensor(request.token_ids + answer.token_ids)
            logprobs[row, start:total] = torch.tensor(answer.logprobs)
        output = {
            "output_ids": output_ids,
            "generation_lengths": torch.tensor([len(answer.token_ids) for answer in answers]),
            "unpadded_sequence_lengths": torch.tensor(totals),
            "logprobs": logprobs,
            "truncated": torch.tensor([answer.truncated for answer in answers]),
        }
        versions = [answer.weight_versions for answer in answers]
        return output if None in versions else {**output, "weight_versions": versions}


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < math.inf
        ):
            raise ConfigError(f"VllmGeneration: {name} {value!r}; expected a number above 0")
