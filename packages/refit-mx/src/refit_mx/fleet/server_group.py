"""`ServerGroup`: concurrent calls to all servers of a fleet, with pause and resume."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from refit_mx.deadline import Deadline
from refit_mx.errors import FleetError, RefitConfigError
from refit_mx.fleet.calls import Calls, ServerCallError
from refit_mx.fleet.server import Server

PauseMode = Literal["abort", "wait", "keep"]
_Answer = TypeVar("_Answer")
_MAX_NAMED = 8


@dataclass(frozen=True)
class ServerGroup:
    """All servers of a fleet."""

    servers: Sequence[Server]
    pause_mode: PauseMode
    clear_cache: bool
    cleanup_timeout_s: float

    async def all(
        self, what: str, calls: Calls, ask: Callable[[Server, Calls], Awaitable[_Answer]]
    ) -> list[_Answer]:
        """Call all servers at once and wait for all, since no call can be cancelled.

        Raises:
            RefitConfigError: servers were started without what the fleet needs; the message names
                them.
            FleetError: servers failed; the message names them. What a server holds is unknown
                afterwards, unless it answered with status 200.
        """
        answers = await asyncio.gather(
            *(ask(server, calls) for server in self.servers), return_exceptions=True
        )
        failed: dict[str, str] = {}
        unusable: dict[str, str] = {}
        for server, answer in zip(self.servers, answers, strict=True):
            if isinstance(answer, RefitConfigError):
                unusable[server.address] = str(answer)
            elif isinstance(answer, ServerCallError):
                failed[server.address] = str(answer)
                if answer.status != 200:
                    server.held_version = Server.UNKNOWN  # it may return with other weights
            elif isinstance(answer, BaseException):
                raise answer
        if unusable:
            raise RefitConfigError(self._text(what, unusable))
        if failed:
            raise FleetError(self._text(what, failed), failed)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def pause(self, calls: Calls) -> None:
        """Pause all servers; raise if one does not confirm."""
        await self.all("pause", calls, lambda s, c: s.pause(c, self.pause_mode, self.clear_cache))

    async def resume(self, calls: Calls, *, checked: bool = False) -> float:
        """Resume all servers; on failure pause them again.

        If ``checked``, all servers have just reported what they hold; otherwise they are queried.
        Return the monotonic time at which the last server confirmed.

        Raises:
            FleetError: not all are paused and hold one version, or a server failed.
        """
        if not checked:
            await self._expect_one_version(calls)
        try:
            await self.all("resume", calls, Server.resume)
            resumed = time.monotonic()
            await self.all("resume", calls, lambda s, c: s.expect_paused(c, expected=False))
        except BaseException as error:  # pause again also on cancellation
            deadline = Deadline(self.cleanup_timeout_s, "fleet: pause again")
            retry_calls = replace(calls, deadline=deadline)
            try:
                await self.pause(retry_calls)
            except FleetError as second:
                if isinstance(error, FleetError):
                    failed = {**second.failed, **error.failed}
                    raise FleetError(f"{error}; and {second}", failed) from None
            raise
        return resumed

    async def _expect_one_version(self, calls: Calls) -> None:
        # A restarted server serves its launch weights and is not paused. Another client may have
        # updated a server, and a worker may be fenced: only the workers know.
        ranks = await self.all("resume", calls, Server.expect_paused_status)
        if (
            len({s.held_version for s in self.servers}) > 1
            or self.servers[0].held_version == Server.UNKNOWN
        ):
            failed = {
                server.address: "; ".join(map(str, statuses))
                for server, statuses in zip(self.servers, ranks, strict=True)
            }
            text = f"{self._text('resume', failed)}; not all hold one version"
            raise FleetError(text, failed)

    def _text(self, what: str, failed: Mapping[str, str]) -> str:
        named = [f"{address}: {why}" for address, why in list(failed.items())[:_MAX_NAMED]]
        if len(failed) > len(named):
            named.append(f"and {len(failed) - len(named)} more")
        return (
            f"fleet: {what} failed at {len(failed)} of {len(self.servers)} servers: "
            f"{'; '.join(named)}"
        )
