"""`ServerPool`: distribution of requests over servers, and retries.

Everything here runs in one event loop, so counts and states change without locks. A request has no
side effect on a server, so it can be sent again, also to another server; with a seed it samples the
same tokens.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Coroutine, Sequence
from typing import Any  # Any: JSON, and what a coroutine sends and receives

import httpx

from dataplane_core import ConfigError, DataPlaneError, DeadlineExceededError, UnavailableError
from rollout_actor.vllm.server import CallFailedError, Server
from rollout_actor.vllm.token_api import (
    RowAnswer,
    RowRequest,
    Sampling,
    read_answer,
    request_body,
)

MAX_FAILURES = 4
"""Number of failed calls on healthy servers after which a row fails."""

_FIRST_CHECKS_S = 2.0
"""Maximum seconds that the first rows wait for the first checks of all servers."""

_FIRST_WAIT_S = 0.05
_MAX_WAIT_S = 2.0
_KEEP_ALIVE_S = 2.0
"""Seconds that an idle connection stays open; vLLM itself would close it after 5 s.

A request on a connection that vLLM is closing would fail.
"""


class ServerPool:
    """The servers of one backend.

    Every server must support conversations of ``max_length`` tokens. ``timeout_s`` is the deadline
    of `answer_all`. The other arguments are those of `rollout_actor.vllm.VllmGeneration`.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        sampling: Sampling,
        max_length: int,
        max_requests_per_server: int,
        timeout_s: float,
        server_timeout_s: float,
        api_key: str | None,
    ) -> None:
        self._servers = [Server(address) for address in addresses]
        self._sampling = sampling
        self._max_length = max_length
        self._max_requests = max_requests_per_server
        self._timeout_s = timeout_s
        self._server_timeout_s = server_timeout_s
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._client: httpx.AsyncClient | None = None
        self._refusal: DataPlaneError | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._first_checks_end = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter()

    async def answer_all(self, requests: Sequence[RowRequest], *, greedy: bool) -> list[RowAnswer]:
        """Return the answers to ``requests`` in order; if one fails, abort the others.

        Raises:
            DeadlineExceededError: (a TimeoutError) responses are missing; names the servers.
            UnavailableError: (a RuntimeError) every server is lost, and the error lists the
                reasons; or a server repeatedly fails the same row although its health check
                succeeds.
            InvalidRequestError, ConfigError: (ValueErrors) a server refuses a request, or cannot
                be used with these settings.
        """
        if self._refusal is not None or all(server.is_lost for server in self._servers):
            self.readmit()
        tasks = [asyncio.create_task(self._answer(request, greedy=greedy)) for request in requests]
        try:
            done, pending = await asyncio.wait(
                tasks, timeout=self._timeout_s, return_when=asyncio.FIRST_EXCEPTION
            )
            for task in done:
                task.result()
            if pending:
                raise DeadlineExceededError(
                    f"vLLM: {len(pending)} of {len(tasks)} responses are missing after "
                    f"{self._timeout_s:g} s; {self._states()}"
                )
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            # Closing the connections aborts the requests, so wait until they are closed.
            await asyncio.gather(*tasks, return_exceptions=True)

    def readmit(self) -> None:
        """Allow requests to lost servers again; each is checked first."""
        self._refusal = None
        for server in self._servers:
            if server.is_lost:
                server.readmit()

    @property
    def lost_servers(self) -> int:
        """Number of lost servers."""
        return sum(server.is_lost for server in self._servers)

    async def close(self) -> None:
        """Close the connections; no other task may run. The next request may use another loop."""
        for server in self._servers:
            server.readmit()  # its futures belong to this loop
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _answer(self, request: RowRequest, *, greedy: bool) -> RowAnswer:
        body = request_body(request, self._sampling, greedy=greedy)
        failures, wait_s = 0, _FIRST_WAIT_S
        while True:
            server = await self._acquire(request)
            try:
                answer = await self._call(server, body, request)
                if answer is not None:
                    return answer
            except CallFailedError as error:
                await server.inspect(self._connections(), self._server_timeout_s)
                if not server.is_lost and not error.busy:
                    failures += 1
                    if failures == MAX_FAILURES:
                        raise UnavailableError(
                            f"vLLM at {server.address} is healthy but failed row {request.row} "
                            f"{failures} times; last error: {error}"
                        ) from error
            finally:
                self._release(server)
            self.counts["retries"] += 1
            if not server.is_lost:
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _MAX_WAIT_S)

    async def _call(
        self, server: Server, body: dict[str, Any], request: RowRequest
    ) -> RowAnswer | None:
        """Return the answer; None if the server was lost meanwhile or aborted the request."""
        assert server.lost is not None
        call = asyncio.create_task(server.generate(self._connections(), body, request.headers))
        try:
            await asyncio.wait({call, server.lost}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                return None
            return read_answer(call.result(), request, server.address)
        finally:
            if not call.done():
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)

    async def _acquire(self, request: RowRequest) -> Server:
        """Wait until a server has capacity, and reserve a request on the least loaded one."""
        loop = asyncio.get_running_loop()
        for server in self._servers:
            if server.lost is None:
                server.lost = loop.create_future()
                self._start(self._prepare(server, request.token_ids))
                self._first_checks_end = loop.time() + _FIRST_CHECKS_S
                # A timer may fire early by the resolution of the loop's clock.
                loop.call_at(self._first_checks_end + 0.05, self._wake_all)
        while not (usable := self._with_capacity()) or self._refusal is not None:
            if self._refusal is not None:  # also if other servers have capacity
                raise self._refusal
            if all(server.is_lost for server in self._servers):
                raise UnavailableError(f"vLLM: every server is lost; {self._states()}")
            await self._wait()
        server = min(usable, key=lambda server: server.requests)
        self._reserve(server)
        return server

    def _reserve(self, server: Server) -> None:
        """Count a request on the server, and watch its health while it has requests."""
        server.requests += 1
        if server.watcher is None or server.watcher.done():
            server.watcher = self._start(server.watch(self._connections(), self._server_timeout_s))

    def _with_capacity(self) -> list[Server]:
        """Return the servers that can take a request; none during the first checks."""
        unknown = any(not server.prepared and not server.is_lost for server in self._servers)
        if unknown and asyncio.get_running_loop().time() < self._first_checks_end:
            return []
        return [
            server
            for server in self._servers
            if server.prepared and not server.is_lost and server.requests < self._max_requests
        ]

    def _release(self, server: Server) -> None:
        server.requests -= 1
        self._wake(len(self._waiting) if server.is_lost else 1)

    def _wake_all(self) -> None:
        self._wake(len(self._waiting))

    async def _wait(self) -> None:
        """Wait to be woken, in FIFO order."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():  # woken and cancelled at once: wake the next one instead
                self._wake(1)
            raise

    def _wake(self, count: int) -> None:
        while count and self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():  # otherwise its caller was cancelled
                waiter.set_result(None)
                count -= 1

    async def _prepare(self, server: Server, token_ids: list[int]) -> None:
        """Check a server before its first request."""
        client = self._connections()
        try:
            await server.check_length(client, self._server_timeout_s, self._max_length)
            if not self._sampling.is_plain:
                await self._check_logprobs(server, token_ids)
            server.prepared = True
        except CallFailedError as error:
            server.lose(str(error))
        except DataPlaneError as error:
            self._refuse(server, error)
        except Exception as error:  # noqa: BLE001  # else the rows would wait until their deadline
            self._refuse(
                server,
                ConfigError(
                    f"vLLM at {server.address}: unexpected answer ({type(error).__name__}: "
                    f"{error}); expected vLLM 0.25 or later"
                ),
            )
        finally:
            self._wake_all()

    async def _check_logprobs(self, server: Server, token_ids: list[int]) -> None:
        """Check the log-probabilities of a server; its health is checked meanwhile.

        The deadline is the same as for rows, because a busy or paused server delays both.
        """
        assert server.lost is not None
        self._reserve(server)
        check = asyncio.create_task(server.check_logprobs(self._connections(), token_ids))
        try:
            awaited: set[asyncio.Future[Any]] = {check, server.lost}
            await asyncio.wait(
                awaited, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not check.done():
                raise CallFailedError(
                    "the generations that check its log-probabilities did not finish within "
                    f"{self._timeout_s:g} s"
                )
            check.result()
        finally:
            if not check.done():
                check.cancel()
                await asyncio.gather(check, return_exceptions=True)
            self._release(server)

    def _refuse(self, server: Server, error: DataPlaneError) -> None:
        self._refusal = error
        server.lose(str(error))

    def _states(self) -> str:
        return "; ".join(server.describe() for server in self._servers)

    def _connections(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = httpx.AsyncClient(
                headers=self._headers,
                limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEEP_ALIVE_S),
                trust_env=False,  # ignore proxies of the environment, which are for the internet
            )
        return self._client

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``coroutine`` in the background; keep a reference, or the task could be collected."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
