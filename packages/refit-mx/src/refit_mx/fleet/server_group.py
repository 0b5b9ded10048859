"""`ServerGroup`: asking all servers of a fleet at once, and what pausing and resuming all means."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal

import httpx

from refit_mx.deadline import Deadline
from refit_mx.errors import FleetError
from refit_mx.fleet.server import Server, ServerCallError

PauseMode = Literal["abort", "wait", "keep"]
Ask = Callable[[Server, httpx.AsyncClient, Deadline], Awaitable[object]]
_MOST_NAMED = 8


class ServerGroup:
    """All servers of a fleet.

    Args:
        servers: each once.
        pause_mode: of `Server.pause`.
        clear_cache: likewise.
        cleanup_timeout_s: for what is put right after a failure.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        pause_mode: PauseMode,
        clear_cache: bool,
        cleanup_timeout_s: float,
    ) -> None:
        self.servers = servers
        self.cleanup_timeout_s = cleanup_timeout_s
        self._pause_mode = pause_mode
        self._clear_cache = clear_cache

    async def all(
        self,
        what: str,
        client: httpx.AsyncClient,
        deadline: Deadline,
        ask: Ask,
        servers: Sequence[Server] | None = None,
    ) -> None:
        """Ask servers at once and wait for all, since one that still works cannot be told more.

        Raises:
            FleetError: names each that failed; of one that did not answer nothing is known then.
        """
        servers = self.servers if servers is None else servers
        answers = await asyncio.gather(
            *(ask(server, client, deadline) for server in servers), return_exceptions=True
        )
        failed: dict[str, str] = {}
        for server, answer in zip(servers, answers, strict=True):
            if isinstance(answer, ServerCallError):
                failed[server.address] = str(answer)
                if not answer.answered:
                    server.lost()
            elif isinstance(answer, BaseException):
                raise answer
        if failed:
            raise FleetError(_text(f"{what} failed", failed, len(self.servers)), failed)

    async def resume(self, client: httpx.AsyncClient, deadline: Deadline) -> None:
        """Resume all, or pause again those that were.

        Raises:
            FleetError: not all are paused and known to hold one version, or one failed.
        """
        versions = {server.holds for server in self.servers}
        if len(versions) > 1 or Server.UNKNOWN in versions:
            failed = {
                s.address: "unknown" if s.holds == Server.UNKNOWN else f"holds {s.holds}"
                for s in self.servers
            }
            raise FleetError(
                _text("resume refused: not all hold one version", failed, len(self.servers)),
                failed,
            )
        # One that was restarted meanwhile serves the weights of its launch, and is not paused.
        await self.all("resume", client, deadline, Server.expect_paused)
        # Another client may have updated it, and a worker may be fenced: the workers know.
        await self.all("resume", client, deadline, Server.check)
        try:
            await self.all("resume", client, deadline, Server.resume)
            await self.all(
                "resume",
                client,
                deadline,
                lambda server, *rest: server.expect_paused(*rest, expected=False),
            )
        except BaseException as error:
            again = Deadline(self.cleanup_timeout_s, "fleet: pause again")
            try:
                await self.pause(client, again)
            except FleetError as second:
                if isinstance(error, FleetError):
                    error.failed = {**second.failed, **error.failed}
                    raise FleetError(f"{error}; and {second}", error.failed) from None
            raise

    async def pause(self, client: httpx.AsyncClient, deadline: Deadline) -> None:
        """Pause all.

        Raises:
            FleetError: one is not paused.
        """
        await self.all(
            "pause",
            client,
            deadline,
            lambda server, *rest: server.pause(*rest, self._pause_mode, self._clear_cache),
        )
        await self.all("pause", client, deadline, Server.expect_paused)


def _text(what: str, failed: Mapping[str, str], servers: int) -> str:
    named = [f"{address}: {why}" for address, why in list(failed.items())[:_MOST_NAMED]]
    if len(failed) > len(named):
        named.append(f"and {len(failed) - len(named)} more")
    return (
        f"fleet: {what} at {len(failed)} of {servers} servers: {'; '.join(named)}. "
        "No server was resumed with another version"
    )
