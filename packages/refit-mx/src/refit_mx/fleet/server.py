"""One server of the fleet: vLLM's development routes over HTTP, with bounds on all of it."""

from __future__ import annotations

import json
from asyncio import timeout as asyncio_timeout
from collections.abc import Awaitable, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from refit_mx.deadline import Deadline
from refit_mx.errors import RefitConfigError

MOST_ANSWER_BYTES = 1 << 20
_PHASES = ("/start_weight_update", "/finish_weight_update")
"""What only the newest form of vLLM's interface has."""
_BOTH_FORMS = "/update_weights"
_MISSING, _WRONG_METHOD = 404, 405
_MOST_TEXT = 500


class ServerCallError(Exception):
    """A call to one server failed; becomes part of a `FleetError`.

    Attributes:
        answered: whether the server itself said so. Otherwise nobody knows what it did.
        status: of HTTP; None if there was no whole answer.
    """

    def __init__(self, text: str, *, answered: bool, status: int | None = None) -> None:
        super().__init__(text)
        self.answered = answered
        self.status = status


def checked_address(address: str) -> str:
    """An address without a trailing slash.

    Raises:
        RefitConfigError: not ``http[s]://host[:port]``; a path, a query or a user name in it.
    """
    parts = urlsplit(address)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or port == -1
        or parts.username is not None
        or parts.password is not None
        or parts.path not in ("", "/")
        or parts.query
        or parts.fragment
    ):
        raise RefitConfigError(f"fleet: address {address!r}; expected http[s]://host[:port]")
    return f"{parts.scheme}://{parts.netloc}"


class Server:
    """What is known of one server, and the calls to it.

    Attributes:
        address: as given.
        initialised: whether its engine is known to be initialised.
        clean: whether it is known to be in no update.
        holds: the version that it is known to hold: ``None`` the one it was launched with, else an
            id; `UNKNOWN` if it did not answer or failed while it installed.
        world_size: of its workers; None if not asked yet.
        has_phases: whether it is known to receive and to install in calls of their own.
    """

    UNKNOWN = "\0unknown"

    def __init__(self, address: str, holds: str | None = None) -> None:
        self.address = checked_address(address)
        self.initialised = False
        self.clean = False
        self.holds = holds
        self.world_size: int | None = None
        self.has_phases = False

    def lost(self) -> None:
        """It did not answer: it may be gone, or come back with the weights of its launch."""
        self.initialised = False
        self.clean = False
        self.has_phases = False
        self.holds = self.UNKNOWN

    async def missing_phases(self, client: httpx.AsyncClient, deadline: Deadline) -> list[str]:
        """Routes of the newest form of vLLM's interface that it surely lacks.

        Asked with GET, which changes nothing: FastAPI answers 405 where a route takes POST alone,
        and 404 where there is none. Only beside a 405 does a 404 say so: behind a gateway or a
        prefix, or without the development routes, all may be 404, and the calls themselves tell.
        """
        if self.has_phases or await self._look(client, deadline, _BOTH_FORMS) != _WRONG_METHOD:
            return []
        found = {path: await self._look(client, deadline, path) for path in _PHASES}
        self.has_phases = set(found.values()) == {_WRONG_METHOD}
        return [path for path, status in found.items() if status == _MISSING]

    async def _look(self, client: httpx.AsyncClient, deadline: Deadline, path: str) -> int:
        """The status that GET is answered with."""
        try:
            await self._call(client, deadline, "GET", path)
        except ServerCallError as error:
            if error.status is None:
                raise
            return error.status
        return 200

    async def pause(
        self, client: httpx.AsyncClient, deadline: Deadline, mode: str, clear_cache: bool
    ) -> None:
        """Stop scheduling; returns when nothing runs."""
        query = {"mode": mode, "clear_cache": "true" if clear_cache else "false"}
        await self._call(client, deadline, "POST", "/pause", query=query)

    async def resume(self, client: httpx.AsyncClient, deadline: Deadline) -> None:
        """Go on scheduling."""
        await self._call(client, deadline, "POST", "/resume")

    async def expect_paused(
        self, client: httpx.AsyncClient, deadline: Deadline, expected: bool = True
    ) -> None:
        """See that it is paused, or that it is not. One that was restarted is not paused."""
        answer = await self._call(client, deadline, "GET", "/is_paused")
        if answer.get("is_paused") is not expected:
            raise ServerCallError(
                f"/is_paused: {answer.get('is_paused')!r}; expected {expected}"
                + ("; it was restarted, or somebody resumed it" if expected else ""),
                # What it holds now is not known from this.
                answered=False,
            )

    async def ask_world_size(self, client: httpx.AsyncClient, deadline: Deadline) -> int:
        """Number of its workers.

        Raises:
            ServerCallError: also if it is another than before.
        """
        answer = await self._call(client, deadline, "GET", "/get_world_size")
        size = answer.get("world_size")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ServerCallError(
                f"/get_world_size: {size!r}; expected an int of at least 1", answered=True
            )
        if self.world_size is not None and size != self.world_size:
            raise ServerCallError(
                f"/get_world_size: {size}; it was {self.world_size} before", answered=True
            )
        self.world_size = size
        return size

    async def init(
        self, client: httpx.AsyncClient, deadline: Deadline, info: Mapping[str, Any]
    ) -> None:
        """Initialise its engine. Again with the same info is allowed and does nothing."""
        await self._call(
            client, deadline, "POST", "/init_weight_transfer_engine", {"init_info": dict(info)}
        )
        self.initialised = True

    async def start(self, client: httpx.AsyncClient, deadline: Deadline) -> None:
        """Begin an update."""
        self.clean = False
        await self._call(client, deadline, "POST", "/start_weight_update", {})

    async def update(
        self, client: httpx.AsyncClient, deadline: Deadline, info: Mapping[str, Any]
    ) -> None:
        """Receive into scratch."""
        await self._call(client, deadline, "POST", "/update_weights", {"update_info": dict(info)})

    async def abort(self, client: httpx.AsyncClient, deadline: Deadline) -> None:
        """End an update without installing it; does nothing if there is none."""
        await self._call(
            client, deadline, "POST", "/update_weights", {"update_info": {"abort": True}}
        )
        self.clean = True

    async def settle(self, client: httpx.AsyncClient, deadline: Deadline) -> None:
        """End an update that a failed refit left. One that was restarted refuses that."""
        if self.initialised and not self.clean:
            await self._or_lost(self.abort(client, deadline))

    async def check(self, client: httpx.AsyncClient, deadline: Deadline) -> None:
        """Have all of its workers say that they may serve and hold what it is known to hold."""
        info = {"check": True, "version_id": self.holds or ""}
        await self._or_lost(
            self._call(client, deadline, "POST", "/update_weights", {"update_info": info})
        )

    async def _or_lost(self, call: Awaitable[object]) -> None:
        """A refusal says that the engine is not the one that was known, so nothing is known."""
        try:
            await call
        except ServerCallError as error:
            raise ServerCallError(str(error), answered=False) from None

    async def finish(self, client: httpx.AsyncClient, deadline: Deadline, version_id: str) -> None:
        """Install what was received."""
        self.holds = self.UNKNOWN
        await self._call(client, deadline, "POST", "/finish_weight_update", {})
        self.holds = version_id
        self.clean = True

    async def name_version(
        self, client: httpx.AsyncClient, deadline: Deadline, version_id: str
    ) -> None:
        """Set the version that it reports with its answers."""
        await self._call(
            client, deadline, "POST", "/update_weight_version", {"weight_version": version_id}
        )

    # Any: JSON objects, whose fields the callers check.
    async def _call(
        self,
        client: httpx.AsyncClient,
        deadline: Deadline,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        left = deadline.left_s
        if not left:
            raise ServerCallError(f"{path}: no time was left to ask", answered=False)
        try:
            # httpx bounds each read, and a server that trickles would never end.
            async with asyncio_timeout(left):
                request = client.build_request(
                    method, self.address + path, json=body, params=query, timeout=left
                )
                response = await client.send(request, stream=True)
                try:
                    text = await _bounded(response)
                finally:
                    await response.aclose()
        except TimeoutError:
            raise ServerCallError(f"{path}: no answer after {left:.1f} s", answered=False) from None
        except httpx.TimeoutException as error:
            raise ServerCallError(
                f"{path}: no answer ({type(error).__name__})", answered=False
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerCallError(
                f"{path}: {type(error).__name__}: {error}", answered=False
            ) from None
        if response.is_redirect or 300 <= response.status_code < 400:
            raise ServerCallError(
                f"{path}: redirects elsewhere ({response.status_code}), which is refused",
                answered=False,
                status=response.status_code,
            )
        if response.status_code != 200:
            raise ServerCallError(
                f"{path}: {response.status_code}: {text[:_MOST_TEXT]}",
                answered=True,
                status=response.status_code,
            )
        return _object(path, text)


async def _bounded(response: httpx.Response) -> str:
    parts, size = [], 0
    async for chunk in response.aiter_bytes():
        size += len(chunk)
        if size > MOST_ANSWER_BYTES:
            raise httpx.DecodingError(f"an answer of more than {MOST_ANSWER_BYTES} bytes")
        parts.append(chunk)
    return b"".join(parts).decode("utf-8", "replace")


def _object(path: str, text: str) -> dict[str, Any]:
    """A JSON object, or an empty one where a route answers with nothing."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        raise ServerCallError(
            f"{path}: the answer is not JSON", answered=True, status=200
        ) from None
    return value if isinstance(value, dict) else {"value": value}
