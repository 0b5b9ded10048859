"""`RefitFleet`: N servers are brought to one version together, or none of them is resumed.

An update has two halves, as a two-phase commit. In the first every server receives and verifies the
version beside its live weights; a failure there costs nothing, all keep what they had. In the
second each copies what it has received over its live weights, which needs no network. No server is
resumed before all have said that they did it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import httpx

from refit_mx.deadline import Deadline
from refit_mx.errors import FleetError, RefitConfigError, RefitError
from refit_mx.fleet.barrier import PhaseBarrier, Point
from refit_mx.fleet.server import Server, ServerCallError
from refit_mx.fleet.server_group import Ask, PauseMode, ServerGroup

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class FleetStats:
    """What a refit of a fleet took.

    Attributes:
        servers: number of servers.
        workers: number of their workers.
        paused_s: from the first pause asked for to the last server resumed.
        seconds: of each phase: pause, init, start, update, finish, resume.
    """

    servers: int
    workers: int
    paused_s: float
    seconds: Mapping[str, float]


class RefitFleet:
    """Drives vLLM servers that were started with ``VLLM_SERVER_DEV_MODE=1``.

    Only the given addresses are ever called; redirects and proxies of the environment are not
    followed. One refit at a time. `refit` and `resume` block; `refit_async` and `resume_async` are
    the same for asynchronous callers.

    Args:
        addresses: ``http[s]://host[:port]`` of every server, each once.
        timeout_s: for one refit, all of it.
        init_info: for the engine of each server (`refit_mx.engine.infos.MxInitInfo`);
            ``rank_offset`` is filled in.
        pause_mode: ``keep`` freezes the queue and goes on after it; ``wait`` lets what runs finish;
            ``abort`` ends it.
        clear_cache: whether servers drop the cached keys and values of the old weights.
        world_size: workers of all servers together, if known; another number is refused.
        cleanup_timeout_s: after a failure, for telling servers to drop what they received, and the
            other ranks of a barrier that it failed; beyond ``timeout_s``.
        headers: for every request, such as an authorization. Never part of an error.
        holds: the version that all servers hold, of an earlier client; None for the weights of
            their launch. Looked at before any is resumed.

    Raises:
        RefitConfigError: no address, a wrong one or one twice, or another wrong argument.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        timeout_s: float = 300.0,
        init_info: Mapping[str, Any] | None = None,
        pause_mode: PauseMode = "keep",
        clear_cache: bool = True,
        world_size: int | None = None,
        cleanup_timeout_s: float = 10.0,
        headers: Mapping[str, str] | None = None,
        holds: str | None = None,
    ) -> None:
        self._servers = [Server(address, holds) for address in addresses]
        if not self._servers:
            raise RefitConfigError("fleet: no addresses")
        if len({server.address for server in self._servers}) != len(self._servers):
            raise RefitConfigError(f"fleet: an address comes twice in {list(addresses)}")
        if pause_mode not in get_args(PauseMode):
            raise RefitConfigError(
                f"fleet: pause_mode {pause_mode!r}; expected {', '.join(get_args(PauseMode))}"
            )
        if not timeout_s > 0 or not cleanup_timeout_s > 0:
            raise RefitConfigError(
                f"fleet: timeout_s {timeout_s!r}, cleanup_timeout_s {cleanup_timeout_s!r}; "
                "expected more than 0"
            )
        self._timeout_s = timeout_s
        self._init_info = dict(init_info or {})
        self._group = ServerGroup(
            self._servers,
            pause_mode=pause_mode,
            clear_cache=clear_cache,
            cleanup_timeout_s=cleanup_timeout_s,
        )
        self._world_size = world_size
        self._headers = dict(headers or {})
        self._under_way = False

    @property
    def holds(self) -> Mapping[str, str | None]:
        """Address to the version that the server is known to hold: None the one of its launch.

        Servers of which it is not known are left out.
        """
        return {s.address: s.holds for s in self._servers if s.holds != Server.UNKNOWN}

    def refit(
        self,
        version_id: str,
        *,
        update_info: Mapping[str, Any] | None = None,
        barrier: PhaseBarrier | None = None,
    ) -> FleetStats:
        """Bring every server to a version. They serve it when this returns.

        Args:
            version_id: of the control plane.
            update_info: more fields for the engines, see
                `refit_mx.engine.infos.MxUpdateInfo`.
            barrier: of the trainer's ranks; the others call `refit_mx.fleet.barrier.follow`.

        Raises:
            FleetError: a server failed; names each. No server was resumed, and each holds what
                `holds` says. The same call made again brings them to the version, also a server
                that was restarted under its address.
            RefitTimeoutError: other ranks of the barrier did not come in time; as above.
            RefitConfigError: another refit is under way, an event loop runs in this thread, or a
                server has the older form of vLLM's interface; then none was paused.
        """
        return _run(lambda: self.refit_async(version_id, update_info=update_info, barrier=barrier))

    def resume(self) -> None:
        """Resume all servers after a failed refit, if all are known to hold the same version, and
        all their workers say so.

        Raises:
            FleetError: they do not, or one failed; then none is left resumed.
        """
        _run(self.resume_async)

    async def refit_async(
        self,
        version_id: str,
        *,
        update_info: Mapping[str, Any] | None = None,
        barrier: PhaseBarrier | None = None,
    ) -> FleetStats:
        """As `refit`."""
        if not version_id:
            raise RefitConfigError("fleet: version_id is empty")
        deadline = Deadline(self._timeout_s, f"fleet: version {version_id}")
        with self._alone():
            async with self._client() as client:
                update = _Update(self, client, deadline, version_id, barrier)
                return await update.run({"version_id": version_id, **(update_info or {})})

    async def resume_async(self) -> None:
        """As `resume`."""
        deadline = Deadline(self._timeout_s, "fleet: resume")
        with self._alone():
            async with self._client() as client:
                # Some may never have been paused; a second pause changes nothing.
                await self._group.pause(client, deadline)
                await self._group.all("resume", client, deadline, Server.settle)
                await self._group.resume(client, deadline)

    def _alone(self) -> _Alone:
        return _Alone(self)

    def _client(self) -> httpx.AsyncClient:
        # A client belongs to one event loop, and synchronous calls have one each.
        return httpx.AsyncClient(
            headers=self._headers,
            follow_redirects=False,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )


class _Alone:
    """That one operation of a fleet is under way."""

    def __init__(self, fleet: RefitFleet) -> None:
        self._fleet = fleet

    def __enter__(self) -> None:
        if self._fleet._under_way:
            raise RefitConfigError("fleet: a refit or resume is under way; wait for it")
        self._fleet._under_way = True

    def __exit__(self, *_: object) -> None:
        self._fleet._under_way = False


class _Update:
    """One refit of a fleet."""

    def __init__(
        self,
        fleet: RefitFleet,
        client: httpx.AsyncClient,
        deadline: Deadline,
        version_id: str,
        barrier: PhaseBarrier | None,
    ) -> None:
        self._fleet = fleet
        self._client = client
        self._deadline = deadline
        self._version_id = version_id
        self._barrier = barrier
        self._next = Point.PAUSED
        self._seconds: dict[str, float] = {}
        self._offsets: dict[Server, int] = {}

    async def run(self, update_info: Mapping[str, Any]) -> FleetStats:
        fleet = self._fleet
        if self._barrier is not None:
            self._barrier.begin()
        try:
            await self._expect_phases()
            began = time.monotonic()
            await self._timed("pause", fleet._group.pause(self._client, self._deadline))
            await self._meet(Point.PAUSED)
            await self._timed("init", self._initialise())
            await self._timed("start", self._ask_known("start", Server.start))
            await self._timed(
                "update",
                self._ask("update", lambda server, *rest: server.update(*rest, update_info)),
            )
            # The last look before live weights change: all have it, all are there, none serves.
            await self._ask("update", Server.expect_paused)
            await self._meet(Point.RECEIVED)
        except BaseException as error:
            await self._give_up(error)
            raise
        try:
            await self._timed("finish", self._finish())
            await self._meet(Point.FINISHED)
            await self._timed("resume", fleet._group.resume(self._client, self._deadline))
            resumed = time.monotonic()
        except BaseException as error:
            await self._tell(error)
            raise
        # All serve the version now; a rank or a store that dies from here on changes nothing about
        # that.
        if self._barrier is not None:
            with contextlib.suppress(RefitError):
                await asyncio.to_thread(
                    self._barrier.arrive, Point.RESUMED, timeout_s=fleet._group.cleanup_timeout_s
                )
        return FleetStats(
            servers=len(fleet._servers),
            workers=sum(server.world_size or 0 for server in fleet._servers),
            paused_s=resumed - began,
            seconds=self._seconds,
        )

    async def _expect_phases(self) -> None:
        """See, while all still serve, that all can be driven."""
        missing: dict[str, list[str]] = {}

        async def ask(server: Server, client: httpx.AsyncClient, deadline: Deadline) -> None:
            if routes := await server.missing_phases(client, deadline):
                missing[server.address] = routes

        await self._ask("look at the routes", ask)
        if missing:
            named = "; ".join(f"{each} lacks {' and '.join(missing[each])}" for each in missing)
            raise RefitConfigError(
                f"fleet: {named}. That is the older form of vLLM's weight transfer, which receives "
                "and installs in one call, so that servers cannot wait for each other. Use a vLLM "
                "of the newest form, or call /update_weights of these yourself. None was paused"
            )

    async def _initialise(self) -> None:
        """Bring every engine to where an update can start."""
        fleet = self._fleet
        await self._ask("get_world_size", Server.ask_world_size)
        sizes = [server.world_size or 0 for server in fleet._servers]
        if fleet._world_size is not None and sum(sizes) != fleet._world_size:
            failed = {
                server.address: f"{size} workers"
                for server, size in zip(fleet._servers, sizes, strict=True)
            }
            raise FleetError(
                f"fleet: {sum(sizes)} workers in all; expected {fleet._world_size}", failed
            )
        self._offsets = {server: sum(sizes[:i]) for i, server in enumerate(fleet._servers)}
        await self._initialise_some([s for s in fleet._servers if not s.initialised])
        # What an earlier refit left half done, of this client or of one that died.
        unclean = [s for s in fleet._servers if not s.clean]
        await self._ask_known("abort", Server.abort, unclean)

    async def _initialise_some(self, servers: Sequence[Server]) -> None:
        await self._ask(
            "init",
            lambda server, *rest: server.init(
                *rest, {**self._fleet._init_info, "rank_offset": self._offsets[server]}
            ),
            servers,
        )

    async def _ask_known(
        self, what: str, ask: Ask, servers: Sequence[Server] | None = None
    ) -> None:
        """As `_ask`, for what no engine refuses that is as it was known to be. One that does was
        restarted: it is initialised once more."""
        refused: list[Server] = []

        async def ask_once(server: Server, client: httpx.AsyncClient, deadline: Deadline) -> None:
            try:
                await ask(server, client, deadline)
            except ServerCallError as error:
                if not error.answered:
                    raise
                server.lost()
                refused.append(server)

        await self._ask(what, ask_once, servers)
        if refused:
            await self._initialise_some(refused)
            await self._ask("abort", Server.abort, refused)
            await self._ask(what, ask, refused)

    async def _finish(self) -> None:
        await self._ask("finish", lambda server, *rest: server.finish(*rest, self._version_id))
        await self._ask(
            "update_weight_version",
            lambda server, *rest: server.name_version(*rest, self._version_id),
        )

    async def _give_up(self, error: BaseException) -> None:
        """Before any live weight changed: have all servers drop what they received."""
        telling = asyncio.create_task(self._tell(error))
        fleet = self._fleet
        started = [server for server in fleet._servers if server.initialised and not server.clean]
        try:
            await fleet._group.all(
                "abort",
                self._client,
                Deadline(fleet._group.cleanup_timeout_s, "fleet: abort"),
                Server.abort,
                started,
            )
        except FleetError as second:
            # Known from `clean`, and the next refit begins with it; the first error says why.
            if isinstance(error, FleetError):
                error.failed = {**second.failed, **error.failed}
        finally:
            await telling

    async def _tell(self, error: BaseException) -> None:
        if self._barrier is not None:
            # Other ranks that are not told wait until their deadlines; the first error says why.
            with contextlib.suppress(RefitError):
                await asyncio.to_thread(
                    self._barrier.fail,
                    self._next,
                    f"{type(error).__name__}: {error}",
                    timeout_s=self._fleet._group.cleanup_timeout_s,
                )

    async def _meet(self, point: Point) -> None:
        self._next = point
        if self._barrier is not None:
            await asyncio.to_thread(self._barrier.meet, point, self._deadline)
        points = list(Point)
        self._next = points[min(points.index(point) + 1, len(points) - 1)]

    async def _ask(self, what: str, ask: Ask, servers: Sequence[Server] | None = None) -> None:
        await self._fleet._group.all(what, self._client, self._deadline, ask, servers)

    async def _timed(self, phase: str, work: Awaitable[None]) -> None:
        began = time.monotonic()
        try:
            await work
        finally:
            self._seconds[phase] = time.monotonic() - began


class _UnawaitedThreads(ThreadPoolExecutor):
    """Threads that the end of an event loop does not wait for.

    A loop looks up host names in threads, which outlast any deadline while a name server is silent.
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
