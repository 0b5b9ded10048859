"""`Server`: one vLLM server of the fleet, with its development routes and its workers' state.

HTTP answers alone are not trusted. vLLM reads the ranks' answers up to the first failure, and
mistakes the others for answers to later calls. An answer may also be lost. So after each call that
changes something, all ranks are queried, and their state decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit
from uuid import uuid4

from refit_mx.engine.registration import check_vllm_version
from refit_mx.errors import RefitConfigError
from refit_mx.fleet.calls import Calls, ServerCallError
from refit_mx.fleet.rank_status import RankStatus, parse_statuses

_First = TypeVar("_First")
_Second = TypeVar("_Second")
EXTENSION = "refit_mx.engine.status.RefitStatus"
_RPC = "/collective_rpc"
_NOT_FOUND = 404
_LAUNCH_NAME = "default"
"""vLLM's name for the weights of the launch."""
_MAX_STALE = 16
"""Limit of stale answers for which a query is repeated."""


def checked_address(address: str) -> str:
    """Return ``http[s]://host[:port]`` without a trailing slash.

    Any other address, such as one with a path, a query or a user, is a `RefitConfigError`.
    """
    refusal = RefitConfigError(f"fleet: address {address!r}; expected http[s]://host[:port]")
    try:
        parts = urlsplit(address)
        _ = parts.port  # raises, too
    except ValueError:
        raise refusal from None
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or parts.username is not None
        or parts.password is not None
        or parts.path not in ("", "/")
        or parts.query
        or parts.fragment
    ):
        raise refusal
    return f"{parts.scheme}://{parts.netloc}"


class Server:
    """One server, with its state and the calls to it.

    ``held_version`` is the version that all workers last reported; None for that of the launch;
    `UNKNOWN` if the server was not queried, did not answer, or is fenced. ``world_size``, the
    number of its workers, is None before the first query.
    """

    UNKNOWN = "\0unknown"

    def __init__(self, address: str) -> None:
        self.address = checked_address(address)
        self.held_version: str | None = self.UNKNOWN
        self.world_size: int | None = None

    @property
    def holding(self) -> str:
        """Description of what it holds, for a message."""
        if self.held_version == self.UNKNOWN:
            return "an unknown version"
        return (
            "weights of the launch" if self.held_version is None else f"version {self.held_version}"
        )

    async def identify(self, calls: Calls) -> None:
        """Check that the fleet can drive the server, without changing anything.

        Raises:
            RefitConfigError: its vLLM is not supported, or was started without what the fleet
                needs. The message says what to do.
            ServerCallError: it does not answer, or has another number of workers than before.
        """
        version = (await calls.ask(self.address, "/version")).get("version")
        check_vllm_version(version)
        try:
            ranks = await self.status(calls)
        except ServerCallError as error:
            if error.status == _NOT_FOUND:
                raise RefitConfigError(
                    f"{_RPC} does not exist; start vLLM with VLLM_SERVER_DEV_MODE=1"
                ) from None
            if _is_without_extension(error):
                raise RefitConfigError(
                    f"its workers lack refit_status; start vLLM with --worker-extension-cls "
                    f"{EXTENSION}"
                ) from None
            raise
        if {rank.backend for rank in ranks} != {"mx"}:
            raise RefitConfigError(
                f"its weight transfer backend is {ranks[0].backend!r}; start vLLM with "
                '--weight-transfer-config \'{"backend": "mx"}\''
            )
        size = (await calls.ask(self.address, "/get_world_size")).get("world_size")
        if type(size) is not int or size != len(ranks):
            raise RefitConfigError(
                f"/get_world_size is {size!r}, but {len(ranks)} workers answer; start one server "
                "for each data-parallel replica"
            )
        if len({rank.session for rank in ranks}) > 1:
            raise RefitConfigError("only some of its workers have an open session; restart it")
        if self.world_size not in (None, size):
            raise ServerCallError(
                f"/get_world_size: {size}; it was {self.world_size} before", status=200
            )
        self.world_size = size

    async def status(self, calls: Calls) -> tuple[RankStatus, ...]:
        """Query the state of its workers, in the order of the ranks.

        Raises:
            ServerCallError: no answer, or not from all workers; the state is then unknown.
        """
        try:
            ranks = await self._query_status(calls)
        except ServerCallError:
            self.held_version = self.UNKNOWN
            raise
        versions = {rank.version_id for rank in ranks}
        certain = len(versions) == 1 and not any(rank.fenced for rank in ranks)
        self.held_version = versions.pop() if certain else self.UNKNOWN
        return ranks

    async def _query_status(self, calls: Calls) -> tuple[RankStatus, ...]:
        nonce = uuid4().hex
        query = {"method": "refit_status", "args": [nonce]}
        failure = ServerCallError(f"{_RPC}: a worker keeps answering earlier queries")
        for _ in range(_MAX_STALE):
            try:
                answer = await calls.ask(self.address, _RPC, query)
                ranks = parse_statuses(_RPC, answer)
            except ServerCallError as error:
                # This may be an unread answer to an earlier call.
                if error.status not in (200, 500) or _is_without_extension(error):
                    raise
                failure = error
                continue
            if all(rank.nonce == nonce for rank in ranks):
                return ranks
        raise failure

    async def pause(self, calls: Calls, mode: str, clear_cache: bool) -> None:
        """Pause scheduling; return when nothing runs."""
        query = {"mode": mode, "clear_cache": "true" if clear_cache else "false"}
        await calls.post(self.address, "/pause", query=query, repeatable=True)

    async def resume(self, calls: Calls) -> None:
        """Resume scheduling."""
        await calls.post(self.address, "/resume", repeatable=True)

    async def expect_paused(self, calls: Calls, expected: bool = True) -> None:
        """Check that the server is paused or, if not ``expected``, is not paused.

        A restarted server is not paused.
        """
        paused = (await calls.ask(self.address, "/is_paused")).get("is_paused")
        if paused is not expected:
            raise ServerCallError(
                f"/is_paused: {paused!r}; expected {expected}"
                + ("; it was restarted, or another client resumed it" if expected else "")
            )

    async def init(self, calls: Calls, info: Mapping[str, Any]) -> None:
        """Connect its workers to a control plane; do nothing if connected with the same info."""
        await self._reach(
            calls,
            "/init_weight_transfer_engine",
            {"init_info": dict(info)},
            lambda rank: rank.initialized,
            repeatable=True,
        )

    async def start(self, calls: Calls) -> None:
        """Open vLLM's session, after closing one that was left open."""
        if (await self.status(calls))[0].session:
            await self.abort(calls)
        await self._reach(calls, "/start_weight_update", {}, lambda rank: rank.session)

    async def fetch(self, calls: Calls, version_id: str, timeout_s: float) -> None:
        """Begin to fetch a version while another is served."""
        info = {"version_id": version_id, "timeout_s": timeout_s, "background": True}
        await self._reach(
            calls,
            "/update_weights",
            {"update_info": info},
            lambda rank: rank.fetch is not None and rank.fetch.version_id == version_id,
        )

    async def fetched(self, calls: Calls, version_id: str) -> bool:
        """Return whether all workers have fetched a version.

        Raises:
            ServerCallError: a worker failed, or dropped the fetch.
        """
        ranks = await self.status(calls)
        for rank in ranks:
            if rank.fetch is None or rank.fetch.version_id != version_id:
                raise ServerCallError(f"fetch: it was restarted or reset: {rank}", status=200)
            if rank.fetch.state == "failed":
                raise ServerCallError(f"fetch: rank {rank.rank}: {rank.fetch.error}", status=200)
        return all(rank.has_received(version_id) for rank in ranks)

    async def expect_ready(self, calls: Calls, version_id: str) -> None:
        """Check that it is paused and that all workers have fetched a version."""
        _, fetched = await _gather_pair(self.expect_paused(calls), self.fetched(calls, version_id))
        if not fetched:
            raise ServerCallError(
                "fetch: it is fetching again; another client drives it", status=200
            )

    async def expect_paused_status(self, calls: Calls) -> tuple[RankStatus, ...]:
        """Return its `status`, and check that it is paused."""
        _, ranks = await _gather_pair(self.expect_paused(calls), self.status(calls))
        return ranks

    async def finish(self, calls: Calls, version_id: str) -> None:
        """Install the received version, which vLLM then reports with its answers."""
        self.held_version = self.UNKNOWN
        await self._reach(
            calls,
            "/finish_weight_update",
            {"weight_version": version_id},
            lambda rank: rank.version_id == version_id and not rank.fenced and not rank.session,
        )

    async def abort(self, calls: Calls) -> None:
        """Drop the fetch and close the session; do nothing if none is open."""
        if not (await self.status(calls))[0].session:
            return
        await self._reach(
            calls,
            "/update_weights",
            {"update_info": {"abort": True}},
            lambda rank: rank.fetch is None,
            repeatable=True,
        )
        # Nothing is fetched, so this installs nothing and keeps vLLM's name of the weights.
        await self._reach(calls, "/finish_weight_update", {}, lambda rank: not rank.session)

    async def correct_name(self, calls: Calls, wrong: str) -> None:
        """Make vLLM report the version that its workers hold.

        ``wrong`` is the version of the failed refit, which vLLM may report although it was not
        installed.
        """
        if self.held_version in (wrong, self.UNKNOWN):
            return
        try:
            name = (await calls.ask(self.address, "/weight_info")).get("weight_version")
        except ServerCallError as error:
            if error.status == _NOT_FOUND:  # versions before 0.27 have no names
                return
            raise
        if name == wrong:
            name = self.held_version or _LAUNCH_NAME
            await calls.post(self.address, "/update_weight_version", {"new_version": name})

    async def _reach(
        self,
        calls: Calls,
        path: str,
        body: Mapping[str, Any],
        reached: Callable[[RankStatus], bool],
        *,
        repeatable: bool = False,
    ) -> None:
        """Make a call, and check afterwards that every rank has reached a state."""
        failure: ServerCallError | None = None
        try:
            await calls.post(self.address, path, body, repeatable=repeatable)
        except ServerCallError as error:
            failure = error
        try:
            ranks = await self.status(calls)
        except ServerCallError as error:
            raise failure or error from None
        wrong = [str(rank) for rank in ranks if not reached(rank)]
        if wrong:
            text = f"{path}: {'; '.join(wrong)}"
            raise ServerCallError(f"{text}; {failure}" if failure else text, status=200)


async def _gather_pair(
    first: Awaitable[_First], second: Awaitable[_Second]
) -> tuple[_First, _Second]:
    """Await two queries at once; if one fails, await the other too."""
    answers = await asyncio.gather(first, second, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return cast("tuple[_First, _Second]", tuple(answers))


def _is_without_extension(error: ServerCallError) -> bool:
    return "refit_status" in str(error) and "has no attribute" in str(error)
