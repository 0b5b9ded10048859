"""`RefitFleet`: brings N servers to one version together; on failure none is resumed.

An update has two phases, like a two-phase commit. First every server fetches and verifies the
version while it serves another; a failure here costs nothing. Then all are paused, each installs
the version, and none is resumed before all hold it. Only the second phase is a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import threading
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args

import httpx
from opentelemetry import metrics

from refit_mx.deadline import Deadline
from refit_mx.engine.infos import MxInitInfo
from refit_mx.errors import FleetError, RefitConfigError, RefitError
from refit_mx.fleet.barrier import PhaseBarrier, Point
from refit_mx.fleet.calls import Calls
from refit_mx.fleet.server import Server
from refit_mx.fleet.server_group import PauseMode, ServerGroup
from refit_mx.spans import phase

_Result = TypeVar("_Result")
_MIN_POLL_S, _MAX_POLL_S = 0.005, 0.1
_FETCH_SHARE = 3 / 4
"""Fraction of a refit's time for the fetch by all servers; the rest is for the pause."""
_LAST_QUERY_SHARE = 7 / 8
"""Fraction of a refit's time within which servers must answer the queries sent during the fetch."""
_LOG = logging.getLogger(__name__)
_PAUSE_MS = metrics.get_meter("refit-mx").create_histogram(
    "refit.pause_ms", "ms", "Duration of the pause of a fleet of generators for a refit"
)


@dataclass(frozen=True)
class FleetStats:
    """Statistics of a fleet's refit.

    Attributes:
        servers: number of servers.
        workers: number of their workers.
        pause_ms: time from the first pause request to the last answered resume.
        seconds: duration of each phase. Servers serve during ``prepare`` and ``fetch``, and are
            paused during ``pause``, ``check``, ``install`` and ``resume``.
        stale: servers that no longer held the last refit's version when this refit began, by
            address, with what they held. A restarted server serves its launch weights until a
            refit.
    """

    servers: int
    workers: int
    pause_ms: float
    seconds: Mapping[str, float]
    stale: Mapping[str, str]


class RefitFleet:
    """Client that updates vLLM servers.

    Start each server with development routes, the backend ``mx`` and the worker extension
    `refit_mx.engine.status.RefitStatus`. If a server lacks one of these, the error of `refit` names
    the option that it needs.

    It calls only the given addresses; redirects and proxies from the environment are not used. It
    allows one refit or resume at a time. `refit`, `check` and `resume` block; `refit_async`,
    `check_async` and `resume_async` are their asynchronous forms.

    Args:
        addresses: ``http[s]://host[:port]`` of every server, each once.
        init_info: fields of `refit_mx.engine.infos.MxInitInfo` for the engines, without
            ``rank_offset`` and ``errors``, which the fleet sets.
        timeout_s: time limit of a refit. No server is paused unless all have the version within
            three quarters of this time.
        max_answer_s: time limit of a query, for example for the state of workers. Workers answer
            between two steps of generation. A server that is silent for longer counts as failed.
        pause_mode: ``keep`` freezes requests and continues them afterwards; ``wait`` lets them
            finish; ``abort`` ends them.
        clear_cache: whether servers drop the cached keys and values of the old weights.
        world_size: number of workers of all servers, if known; another number is refused.
        cleanup_timeout_s: further time after a failure, in which servers drop the fetched version
            or are paused again, and the other ranks of a barrier get a report.
        headers: headers of every request, such as authorization. Never part of an error.

    Raises:
        RefitConfigError: an address is missing, wrong or repeated, or another argument is wrong.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        init_info: Mapping[str, Any],
        timeout_s: float = 300.0,
        max_answer_s: float = 60.0,
        pause_mode: PauseMode = "keep",
        clear_cache: bool = True,
        world_size: int | None = None,
        cleanup_timeout_s: float = 10.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._servers = [Server(address) for address in addresses]
        if not self._servers:
            raise RefitConfigError("fleet: no addresses; expected at least one")
        if len({server.address for server in self._servers}) != len(self._servers):
            raise RefitConfigError(f"fleet: an address is repeated in {list(addresses)}")
        if pause_mode not in get_args(PauseMode):
            raise RefitConfigError(
                f"fleet: pause_mode {pause_mode!r}; expected {', '.join(get_args(PauseMode))}"
            )
        if not timeout_s > 0 or not cleanup_timeout_s > 0 or not max_answer_s > 0:
            raise RefitConfigError(
                f"fleet: timeout_s {timeout_s!r}, cleanup_timeout_s {cleanup_timeout_s!r}, "
                f"max_answer_s {max_answer_s!r}; expected more than 0"
            )
        self._timeout_s = timeout_s
        self._max_answer_s = max_answer_s
        self._init_info = _checked_info(init_info)
        self._group = ServerGroup(
            self._servers,
            pause_mode=pause_mode,
            clear_cache=clear_cache,
            cleanup_timeout_s=cleanup_timeout_s,
        )
        self._world_size = world_size
        self._headers = dict(headers or {})
        self._running = threading.Lock()
        self._version_id: str | None = None
        self._last_tried = ""

    @property
    def server_versions(self) -> Mapping[str, str | None]:
        """Version that all workers of a server last reported, by address.

        None is the version of the launch. Servers are omitted if they were not queried yet, did not
        answer, or hold a mixture.
        """
        return {
            s.address: s.held_version for s in self._servers if s.held_version != Server.UNKNOWN
        }

    def refit(self, version_id: str, *, barrier: PhaseBarrier | None = None) -> FleetStats:
        """Bring every server to a version, which they serve when this returns.

        Args:
            version_id: version in the control plane.
            barrier: barrier of the trainer's ranks; the others call
                `refit_mx.fleet.barrier.follow`.

        Raises:
            FleetError: servers failed; the error names them. `server_versions` has the version of
                each server. Either no server was paused and all serve as before, or servers were
                paused and none resumed. Repeating the call brings all to the version, including
                restarted servers.
            RefitTimeoutError: other ranks of the barrier did not come in time. The servers are as
                after a FleetError.
            RefitConfigError: another refit is in progress, an event loop runs in this thread, or a
                server was started without what the fleet needs; no server was paused.
        """
        return _run(lambda: self.refit_async(version_id, barrier=barrier))

    def check(self) -> Mapping[str, str]:
        """Query all servers for what they hold, without changing anything.

        Returns:
            What is wrong, by address: the server does not answer, or does not hold the version of
            the last refit, for example after a restart. Empty if all are correct.
        """
        return _run(self.check_async)

    def resume(self) -> None:
        """Resume all servers after a failed refit, if all their workers hold one version.

        Raises:
            FleetError: the workers hold different versions, or a server failed. Servers that were
                resumed are paused again.
        """
        _run(self.resume_async)

    async def refit_async(
        self, version_id: str, *, barrier: PhaseBarrier | None = None
    ) -> FleetStats:
        """Do the same as `refit`, asynchronously."""
        if not version_id:
            raise RefitConfigError("fleet: version_id is empty")
        with self._exclusive(), phase("fleet", version_id) as span:
            self._last_tried = version_id
            async with self._calls(f"fleet: version {version_id}") as calls:
                update = _Update(self, calls, version_id, barrier)
                stats = await update.run()
            span.set_attribute("refit.pause_ms", stats.pause_ms)
            span.set_attribute("refit.servers", stats.servers)
            span.set_attribute("refit.stale_servers", len(stats.stale))
            _PAUSE_MS.record(stats.pause_ms)
            return stats

    async def check_async(self) -> Mapping[str, str]:
        """Do the same as `check`, asynchronously."""
        servers = [copy.copy(server) for server in self._servers]
        versions = [server.held_version for server in servers]
        failed: Mapping[str, str] = {}
        async with self._calls("fleet: check") as calls:
            try:
                await replace(self._group, servers=servers).all("check", calls, Server.status)
            except FleetError as error:
                failed = error.failed
        wrong = {**self._stale(servers), **failed}
        for server, checked, before in zip(self._servers, servers, versions, strict=True):
            # A refit queries the servers itself; an older answer must not replace what it got.
            if server.held_version == before and not self._running.locked():
                server.held_version = checked.held_version
        return wrong

    async def resume_async(self) -> None:
        """Do the same as `resume`, asynchronously."""
        with self._exclusive():
            async with self._calls("fleet: resume") as calls:
                # Some may not be paused; a second pause changes nothing.
                await self._group.pause(calls)
                await self._group.all("abort", calls, Server.abort)
                tried = self._last_tried
                await self._group.all("resume", calls, lambda s, c: s.correct_name(c, tried))
                await self._group.resume(calls)
                self._version_id = self._servers[0].held_version

    def _stale(self, servers: Sequence[Server]) -> dict[str, str]:
        if self._version_id is None:
            return {}
        return {
            server.address: f"{server.holding}; expected version {self._version_id}"
            for server in servers
            if server.held_version != self._version_id
        }

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._running.acquire(blocking=False):
            raise RefitConfigError("fleet: a refit or resume is in progress; wait for it")
        try:
            yield
        finally:
            self._running.release()

    @contextlib.asynccontextmanager
    async def _calls(self, what: str) -> AsyncIterator[Calls]:
        # A client belongs to one event loop, and each synchronous call has its own.
        async with httpx.AsyncClient(
            headers=self._headers,
            follow_redirects=False,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        ) as client:
            yield Calls(client, Deadline(self._timeout_s, what), self._max_answer_s)


class _Update:
    """One refit of a fleet."""

    def __init__(
        self, fleet: RefitFleet, calls: Calls, version_id: str, barrier: PhaseBarrier | None
    ) -> None:
        self._fleet = fleet
        self._group = fleet._group
        self._calls = calls
        # Deadline of everything before the pause.
        fetch_deadline = Deadline(
            fleet._timeout_s * _FETCH_SHARE, f"fleet: fetch of version {version_id}"
        )
        self._before_pause = replace(calls, deadline=fetch_deadline)
        # A query that is in progress when the fetch's time ends still gets its answer: without it,
        # servers that have the version would be reported as failed.
        self._fetch_queries = replace(
            calls, deadline=Deadline(fleet._timeout_s * _LAST_QUERY_SHARE, "fleet: fetch")
        )
        self._version_id = version_id
        self._barrier = barrier
        self._next = next(iter(Point))
        self._started = False
        self._paused = False
        self._seconds: dict[str, float] = {}
        self._stale: Mapping[str, str] = {}

    async def run(self) -> FleetStats:
        if self._barrier is not None:
            self._barrier.begin()
        group, calls = self._group, self._calls
        try:
            await self._timed("prepare", self._prepare())
            await self._timed("fetch", self._fetch())
            await self._meet(Point.RECEIVED, self._before_pause.deadline)
            with phase("pause", self._version_id):
                self._paused, began = True, time.monotonic()
                await self._timed("pause", group.pause(calls))
                await self._meet(Point.PAUSED)
                # Before live weights change: all have the version, and none serves.
                await self._timed(
                    "check",
                    group.all("check", calls, lambda s, c: s.expect_ready(c, self._version_id)),
                )
                await self._timed(
                    "install",
                    group.all("install", calls, lambda s, c: s.finish(c, self._version_id)),
                )
                await self._meet(Point.FINISHED)
                # `finish` has queried all servers, but a barrier may take long: then query again.
                checked = self._barrier is None
                resumed = await self._timed("resume", group.resume(calls, checked=checked))
        except BaseException as error:  # clean up also on cancellation
            if self._paused:
                self._fleet._version_id = None  # no server serves
            await self._give_up(error)
            raise
        self._fleet._version_id = self._version_id
        # All servers serve the version now, whatever happens to a rank or the store.
        if self._barrier is not None:
            with contextlib.suppress(RefitError):
                await asyncio.to_thread(
                    self._barrier.arrive, Point.RESUMED, timeout_s=group.cleanup_timeout_s
                )
        return FleetStats(
            servers=len(group.servers),
            workers=sum(server.world_size or 0 for server in group.servers),
            pause_ms=(resumed - began) * 1e3,
            seconds=self._seconds,
            stale=self._stale,
        )

    async def _prepare(self) -> None:
        """Prepare every engine for a fetch, while all serve."""
        group, calls, expected = self._group, self._before_pause, self._fleet._world_size
        await group.all("identify", calls, Server.identify)
        self._stale = self._fleet._stale(group.servers)
        for address, reason in self._stale.items():
            _LOG.warning("refit-mx: %s did not hold the last refit's version: %s", address, reason)
        sizes = {server: server.world_size or 0 for server in group.servers}
        workers = sum(sizes.values())
        if expected is not None and workers != expected:
            raise FleetError(
                f"fleet: {workers} workers in all; expected {expected}",
                {server.address: f"{size} workers" for server, size in sizes.items()},
            )
        offsets, offset = {}, 0
        for server, size in sizes.items():
            offsets[server] = offset
            offset += size
        info = self._fleet._init_info
        await group.all("init", calls, lambda s, c: s.init(c, {**info, "rank_offset": offsets[s]}))
        self._started = True
        await group.all("start", calls, Server.start)

    async def _fetch(self) -> None:
        """Make all servers fetch and verify the version, while all serve."""
        group, deadline = self._group, self._before_pause.deadline
        timeout_s = max(deadline.left_s, _MIN_POLL_S)
        await group.all(
            "fetch", self._before_pause, lambda s, c: s.fetch(c, self._version_id, timeout_s)
        )
        poll_s = _MIN_POLL_S
        while not all(
            fetched := await group.all(
                "fetch", self._fetch_queries, lambda s, c: s.fetched(c, self._version_id)
            )
        ):
            await asyncio.sleep(min(poll_s, deadline.left_s))
            poll_s = min(2 * poll_s, _MAX_POLL_S)
            if not deadline.left_s:
                failed = {
                    server.address: "still fetching"
                    for server, done in zip(group.servers, fetched, strict=True)
                    if not done
                }
                text = f"{deadline.error()}; the rest of timeout_s is reserved for the pause"
                raise FleetError(text, failed)

    async def _give_up(self, error: BaseException) -> None:
        """Make all servers drop the fetched version, and query what each holds."""
        if isinstance(error, FleetError):
            outcome = "The fleet was not resumed" if self._paused else "No server was paused"
            error.args = (f"{error}. {outcome}",)
        reporting = asyncio.create_task(self._report(error))
        deadline = Deadline(self._group.cleanup_timeout_s, "fleet: abort")
        try:
            if self._started:
                calls = replace(self._calls, deadline=deadline)
                await self._group.all("abort", calls, Server.abort)
        except RefitError as second:
            # The next refit aborts again; the first error has the cause.
            if isinstance(error, FleetError) and isinstance(second, FleetError):
                error.failed = {**second.failed, **error.failed}
        finally:
            await reporting

    async def _report(self, error: BaseException) -> None:
        if self._barrier is not None:
            # Ranks that do not get the report wait until their deadlines; the first error has the
            # cause.
            with contextlib.suppress(RefitError):
                await asyncio.to_thread(
                    self._barrier.fail,
                    self._next,
                    f"{type(error).__name__}: {error}",
                    timeout_s=self._group.cleanup_timeout_s,
                )

    async def _meet(self, point: Point, deadline: Deadline | None = None) -> None:
        self._next = point
        if self._barrier is not None:
            await asyncio.to_thread(self._barrier.meet, point, deadline or self._calls.deadline)
        points = list(Point)
        self._next = points[min(points.index(point) + 1, len(points) - 1)]

    async def _timed(self, name: str, work: Awaitable[_Result]) -> _Result:
        began = time.monotonic()
        try:
            return await work
        finally:
            self._seconds[name] = time.monotonic() - began


# Any: JSON.
def _checked_info(init_info: Mapping[str, Any]) -> dict[str, Any]:
    for name in ("rank_offset", "errors"):
        if name in init_info:
            raise RefitConfigError(f"fleet: init_info has {name!r}, which the fleet sets")
    # If ranks raise, vLLM reads one answer, and mistakes the others for answers to later calls.
    info = {**init_info, "errors": "status"}
    try:
        MxInitInfo(**info)
    except TypeError as error:  # an unknown field
        raise RefitConfigError(f"fleet: init_info: {error}") from None
    return info


class _UnawaitedThreads(ThreadPoolExecutor):
    """Threads that do not delay the end of an event loop.

    A loop resolves host names in threads, which outlast any deadline while a name server is silent.
    """

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=cancel_futures)


def _run(make: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
    async def run() -> _Result:
        asyncio.get_running_loop().set_default_executor(_UnawaitedThreads())
        return await make()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(run())
    raise RefitConfigError("fleet: an event loop runs here; await the asynchronous method instead")
