"""`Server`: calls to one vLLM server, and its health."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any  # Any: JSON
from urllib.parse import urlsplit

import httpx

from dataplane_core import ConfigError, InvalidRequestError
from rollout_actor.vllm.token_api import GENERATE

_PING_S = 2.0
"""Seconds between two health checks."""

_PROBE_TEMPERATURE = 0.1
_PROBE_TOKENS = 5
_PROBE_MIN_RATIO = 3.0
"""Minimum ratio of spreads in `Server.check_logprobs`; raw values give 1, processed ones 10."""

_MAX_TEXT = 300


class CallFailedError(Exception):
    """A call failed, but not because of the request, so the request can be sent again.

    Attributes:
        busy: whether the server answered that it is overloaded.
    """

    def __init__(self, text: str, *, busy: bool = False) -> None:
        super().__init__(text)
        self.busy = busy


class Server:
    """A vLLM server and its state.

    Attributes:
        address: ``http[s]://host[:port]``.
        requests: number of unanswered requests of this process.
        prepared: whether its checks passed, so that it takes requests.
        lost: future whose result is the reason, set once the server is lost; None before its first
            check.
        watcher: task that inspects it while it has requests.
    """

    def __init__(self, address: str) -> None:
        self.address = checked_address(address)
        self.requests = 0
        self.watcher: asyncio.Task[None] | None = None
        self.readmit()

    def readmit(self) -> None:
        """Reset the state, so that the server is checked again."""
        self.prepared = False
        self.lost: asyncio.Future[str] | None = None
        self._inspection: asyncio.Task[None] | None = None

    @property
    def is_lost(self) -> bool:
        """True if the server is lost."""
        return self.lost is not None and self.lost.done()

    def lose(self, reason: str) -> None:
        """Mark the server as lost; its requests move to other servers."""
        if self.lost is not None and not self.lost.done():
            self.lost.set_result(reason)

    def describe(self) -> str:
        """Return the server's state as text, for errors."""
        if self.lost is not None and self.lost.done():
            return f"{self.address} is lost: {self.lost.result()}"
        if not self.prepared:
            return f"{self.address} has not answered its first check"
        return f"{self.address} is healthy and has {self.requests} unanswered requests"

    async def generate(
        self, client: httpx.AsyncClient, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> Any:
        """Return the answer's JSON; the caller sets the deadline.

        Raises:
            CallFailedError: there was no answer, or a server error.
            InvalidRequestError: (a ValueError) the server refuses the request.
            ConfigError: (a ValueError) it lacks the route, or requires another key.
        """
        try:
            response = await client.post(
                f"{self.address}{GENERATE}", json=body, headers=headers, timeout=None
            )
        except httpx.RequestError as error:
            raise CallFailedError(_describe(error)) from error
        if response.is_success:
            try:
                return response.json()
            except ValueError as error:
                raise InvalidRequestError(
                    f"vLLM at {self.address}: the answer is not JSON: {error}"
                ) from error
        reason = f"{response.status_code} {_message(response)}"
        if response.status_code == httpx.codes.NOT_FOUND or "--enable-scale-out" in reason:
            raise ConfigError(
                f"vLLM at {self.address} does not serve {GENERATE}: {reason}; start it with "
                "--enable-scale-out (vLLM 0.30 and later)"
            )
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise ConfigError(f"vLLM at {self.address}: {reason}; pass its key as api_key")
        if response.status_code == httpx.codes.TOO_MANY_REQUESTS or response.is_server_error:
            is_busy = response.status_code == httpx.codes.TOO_MANY_REQUESTS
            raise CallFailedError(reason, busy=is_busy)
        raise InvalidRequestError(f"vLLM at {self.address} refuses the request: {reason}")

    async def inspect(self, client: httpx.AsyncClient, timeout_s: float) -> None:
        """Mark the server as lost unless its health check succeeds within ``timeout_s``.

        Concurrent callers share one check.
        """
        if self._inspection is None or self._inspection.done():
            self._inspection = asyncio.create_task(self._inspect(client, timeout_s))
        await asyncio.shield(self._inspection)

    async def watch(self, client: httpx.AsyncClient, timeout_s: float) -> None:
        """Inspect the server regularly while it has requests."""
        while self.requests and not self.is_lost:
            await asyncio.sleep(_PING_S)
            await self.inspect(client, timeout_s)

    async def _inspect(self, client: httpx.AsyncClient, timeout_s: float) -> None:
        try:
            # The deadline covers the connection and the complete answer.
            async with asyncio.timeout(timeout_s):
                response = await client.get(f"{self.address}/health", timeout=None)
        except TimeoutError:
            self.lose(f"/health did not answer within {timeout_s:g} s")
        except httpx.RequestError as error:
            self.lose(f"/health: {_describe(error)}")
        else:
            if not response.is_success:
                self.lose(f"/health answered {response.status_code} {_message(response)}".strip())

    async def check_length(
        self, client: httpx.AsyncClient, timeout_s: float, min_length: int
    ) -> None:
        """Refuse a server whose model supports fewer tokens than a conversation may have.

        Raises:
            ConfigError: (a ValueError) its maximum length is too small; names both lengths.
            CallFailedError: the server does not answer.
        """
        try:
            async with asyncio.timeout(timeout_s):
                response = await client.get(f"{self.address}/v1/models", timeout=None)
        except TimeoutError:
            raise CallFailedError(f"/v1/models did not answer within {timeout_s:g} s") from None
        except httpx.RequestError as error:
            raise CallFailedError(f"/v1/models: {_describe(error)}") from error
        if not response.is_success:
            reason = f"/v1/models answered {response.status_code} {_message(response)}"
            if response.is_server_error:
                raise CallFailedError(reason)
            raise ConfigError(f"vLLM at {self.address}: {reason}")
        length = response.json()["data"][0].get("max_model_len")
        if isinstance(length, int) and length < min_length:
            raise ConfigError(
                f"vLLM at {self.address} supports sequences of {length} tokens; expected at least "
                f"{min_length}, the max_total_sequence_length; start it with --max-model-len "
                f"{min_length}"
            )

    async def check_logprobs(self, client: httpx.AsyncClient, token_ids: list[int]) -> None:
        """Refuse a server that reports log-probabilities of the unmodified distribution.

        That is vLLM's default (``raw_logprobs``), and the API does not report the mode. Two
        requests reveal it: processed log-probabilities spread ten times as wide at a tenth of the
        temperature, raw ones do not change. The caller sets the deadline.

        Raises:
            ConfigError: (a ValueError) it reports raw log-probabilities; names the option.
            CallFailedError: the server does not answer.
        """
        spreads = []
        for temperature in (1.0, _PROBE_TEMPERATURE):
            parameters = {"max_tokens": 1, "logprobs": _PROBE_TOKENS, "temperature": temperature}
            body = {"token_ids": token_ids, "sampling_params": parameters}
            answer = await self.generate(client, body, {})
            top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            likeliest = sorted(entry["logprob"] for entry in top)[-_PROBE_TOKENS:]
            spreads.append(likeliest[-1] - likeliest[0])
        if spreads[1] < _PROBE_MIN_RATIO * spreads[0]:
            raise ConfigError(
                f"vLLM at {self.address} reports log-probabilities before temperature, top_p and "
                "top_k; expected those of the distribution from which it samples; start it with "
                "--logprobs-mode processed_logprobs"
            )


def checked_address(address: str) -> str:
    """Return ``address`` in lower case and without a trailing slash.

    Raises:
        ConfigError: (a ValueError) it is not ``http[s]://host[:port]``.
    """
    try:
        parts = urlsplit(address)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port or an IPv6 host is invalid
        valid = False
    if not valid or parts.username or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ConfigError(f"vLLM address {address!r}; expected http[s]://host[:port]")
    return f"{parts.scheme}://{parts.netloc.lower()}"


def _describe(error: httpx.RequestError) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _message(response: httpx.Response) -> str:
    """Return the message of a vLLM error, or the start of the body."""
    try:
        message = json.loads(response.content)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text
    return str(message)[:_MAX_TEXT]
