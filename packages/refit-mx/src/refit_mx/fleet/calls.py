"""`Calls`: the HTTP requests of one fleet operation, with limits for all of them."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from refit_mx.deadline import Deadline

MAX_ANSWER_BYTES = 1 << 20
_MAX_TEXT = 500
_RETRY_S = 0.05
_DISCONNECTED = (httpx.ReadError, httpx.WriteError, httpx.CloseError)


class ServerCallError(Exception):
    """A failed call to one server, which becomes part of a `FleetError`.

    Attributes:
        status: HTTP status; None if what the server holds is unknown: no complete answer, only
            answers to earlier queries, a redirect, or a wrong pause state.
        disconnected: whether the server closed the connection instead of answering.
    """

    def __init__(self, text: str, *, status: int | None = None, disconnected: bool = False) -> None:
        super().__init__(text)
        self.status = status
        self.disconnected = disconnected


@dataclass(frozen=True)
class Calls:
    """Requests that share a client and a deadline."""

    # HTTP client without redirects or persistent connections. vLLM closes a connection after an
    # unhandled error; the next request on it would fail as if the server were dead.
    client: httpx.AsyncClient
    deadline: Deadline  # time limit of all requests
    max_answer_s: float = math.inf  # time limit of one query by `ask`

    # Any: JSON objects, whose fields the callers check.
    async def ask(
        self, address: str, path: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Send a query, a POST if it has a body; retry if the connection is closed.

        Raises:
            ServerCallError: as in `post`; or no answer within ``max_answer_s``.
        """
        method = "GET" if body is None else "POST"
        return await self._repeat(
            lambda: self._send(method, address, path, body, None, self.max_answer_s)
        )

    async def post(
        self,
        address: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        repeatable: bool = False,
    ) -> dict[str, Any]:
        """Send a request and return the answer's JSON object; an empty answer counts as ``{}``.

        If the connection is closed, a ``repeatable`` request is sent again, until the deadline.

        Raises:
            ServerCallError: no complete answer came in time, or its status is not 200.
        """

        def send() -> Coroutine[Any, Any, dict[str, Any]]:
            return self._send("POST", address, path, body, query, math.inf)

        return await (self._repeat(send) if repeatable else send())

    async def _repeat(
        self, send: Callable[[], Coroutine[Any, Any, dict[str, Any]]]
    ) -> dict[str, Any]:
        while True:
            try:
                return await send()
            except ServerCallError as error:
                if not error.disconnected or self.deadline.left_s <= _RETRY_S:
                    raise
            await asyncio.sleep(_RETRY_S)

    async def _send(
        self,
        method: str,
        address: str,
        path: str,
        body: Mapping[str, Any] | None,
        query: Mapping[str, str] | None,
        max_s: float,
    ) -> dict[str, Any]:
        left = min(self.deadline.left_s, max_s)
        if not left:
            raise ServerCallError(f"{path}: no time remains for the request")
        try:
            # httpx limits each read separately, so a slow server would never time out.
            async with asyncio.timeout(left):
                request = self.client.build_request(
                    method, address + path, json=body, params=query, timeout=left
                )
                response = await self.client.send(request, stream=True)
                try:
                    text = await _bounded(response)
                finally:
                    await response.aclose()
        except TimeoutError:
            raise ServerCallError(f"{path}: no answer after {left:.1f} s") from None
        except httpx.TimeoutException as error:
            raise ServerCallError(f"{path}: no answer ({type(error).__name__})") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerCallError(
                f"{path}: {type(error).__name__}: {error}",
                # Bad HTTP raises RemoteProtocolError too; only its text shows a disconnect.
                disconnected=isinstance(error, _DISCONNECTED) or "disconnected" in str(error),
            ) from None
        if 300 <= response.status_code < 400:
            raise ServerCallError(
                f"{path}: redirects elsewhere ({response.status_code}), which is refused"
            )
        if response.status_code != 200:
            raise ServerCallError(
                f"{path}: {response.status_code}: {text[:_MAX_TEXT]}", status=response.status_code
            )
        return _object(path, text)


async def _bounded(response: httpx.Response) -> str:
    parts, size = [], 0
    async for chunk in response.aiter_bytes():
        size += len(chunk)
        if size > MAX_ANSWER_BYTES:
            raise httpx.DecodingError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
        parts.append(chunk)
    return b"".join(parts).decode("utf-8", "replace")


def _object(path: str, text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        raise ServerCallError(f"{path}: the answer is not JSON", status=200) from None
    return value if isinstance(value, dict) else {"value": value}
