"""`AsyncDataPlaneClient`: the asyncio interface of any client.

Every call runs in a thread, because bulk copies would block the event loop. A claim waits for puts,
and a put waits for clears. Each kind of call has a separate pool, so that a blocked call never
occupies the thread of the call that it waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar  # Any: any result

import structlog

from dataplane_core.arguments import checked_bool, checked_int, checked_seconds
from dataplane_core.capabilities import Capabilities
from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import (
    ClaimTimeoutError,
    ClosedError,
    DataPlaneError,
    DeadlineExceededError,
)
from dataplane_core.ledger.selection import optional_claim_keywords
from dataplane_core.meta import LEASE

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from dataplane_core.ledger.selection import TagFilter
    from dataplane_core.meta import KVBatchMeta

_P = ParamSpec("_P")
_T = TypeVar("_T")

logger = structlog.get_logger("dataplane_core.async_client")


def _coroutine_method(
    method: Callable[Concatenate[DataPlaneClient, _P], _T], pool: str = "_calls"
) -> Callable[Concatenate[AsyncDataPlaneClient, _P], Coroutine[Any, Any, _T]]:
    """Return the coroutine function that runs a client's method in a pool of threads.

    Only the given arguments are passed on, because an adapter may lack the other keywords.
    """

    @functools.wraps(method)
    async def call(self: AsyncDataPlaneClient, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        inner: Callable[..., _T] = getattr(self._inner, method.__name__)
        future = self._start(getattr(self, pool), lambda: inner(*args, **kwargs))
        return await asyncio.wrap_future(future)

    return call


class AsyncDataPlaneClient:
    """Client with the methods of `DataPlaneClient` as coroutines: same arguments, same errors.

    It has no inspector; use the inner client's in a thread.

    Use it from one event loop. A cancelled await returns at once, but the call continues in its
    thread until its deadline, because a put or a claim cannot be interrupted. So a put may still
    become visible. A claim that succeeds after its await was cancelled is released if it has a
    lease; without one its samples are lost, which is logged.

    Args:
        inner: the client that does the work; closed together with this one.
        threads: maximum threads for each of puts, reads and other calls. Further calls queue.
        claim_threads: maximum number of blocked claims. Further ones queue, within their own
            deadline.
        close_timeout_s: how long `close` waits for running calls, in seconds.
    """

    def __init__(
        self,
        inner: DataPlaneClient,
        *,
        threads: int = 8,
        claim_threads: int = 256,
        close_timeout_s: float = 30.0,
    ) -> None:
        call = "AsyncDataPlaneClient"
        threads = checked_int(call, "threads", threads, minimum=1)
        claim_threads = checked_int(call, "claim_threads", claim_threads, minimum=1)
        self._inner = inner
        self._close_timeout_s = checked_seconds(call, "close_timeout_s", close_timeout_s)
        self._puts = ThreadPoolExecutor(threads, "dataplane-put")
        self._reads = ThreadPoolExecutor(threads, "dataplane-read")
        self._calls = ThreadPoolExecutor(threads, "dataplane-call")
        # An executor starts a thread only if none is idle, so there is one per blocked claim.
        self._claims = ThreadPoolExecutor(claim_threads, "dataplane-claim")
        self._claim_threads = claim_threads
        self._claim_slots = asyncio.Semaphore(claim_threads)
        self._running: set[Future[Any]] = set()
        self._blocked: set[Future[Any]] = set()
        self._closed = self._ended = False

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the inner client."""
        return self._inner.capabilities

    # Callers must not change the arguments of a put before it returns.
    put_samples = _coroutine_method(DataPlaneClient.put_samples, "_puts")
    put_columns = _coroutine_method(DataPlaneClient.put_columns, "_puts")
    get_data = _coroutine_method(DataPlaneClient.get_data, "_reads")
    get_samples = _coroutine_method(DataPlaneClient.get_samples, "_reads")
    get_columns = _coroutine_method(DataPlaneClient.get_columns, "_reads")
    register_partition = _coroutine_method(DataPlaneClient.register_partition)
    check_consumption_status = _coroutine_method(DataPlaneClient.check_consumption_status)
    clear_samples = _coroutine_method(DataPlaneClient.clear_samples)
    withdraw_samples = _coroutine_method(DataPlaneClient.withdraw_samples)
    acknowledge = _coroutine_method(DataPlaneClient.acknowledge)
    renew = _coroutine_method(DataPlaneClient.renew)
    release = _coroutine_method(DataPlaneClient.release)
    read_origins = _coroutine_method(DataPlaneClient.read_origins)

    async def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: list[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float = 60.0,
        *,
        dp_world: int | None = None,
        where: Sequence[TagFilter] = (),
        seed: int | None = None,
        wait_for_leased: bool = True,
        sample_ids: Sequence[str] | None = None,
    ) -> KVBatchMeta:
        """Claim samples; see `DataPlaneClient.claim_meta`.

        Raises:
            ClaimTimeoutError: also if ``claim_threads`` other claims stayed blocked until the
                deadline.
        """
        self._check_open()
        # The inner client checks every argument; this one checks those that it computes with.
        blocking = checked_bool("claim_meta", "blocking", blocking)
        timeout_s = checked_seconds("claim_meta", "timeout_s", timeout_s)
        deadline = time.monotonic() + timeout_s
        queued = blocking and self._claim_slots.locked()

        def claim() -> KVBatchMeta:
            return self._inner.claim_meta(
                partition_id,
                task_name,
                required_fields,
                batch_size,
                dp_rank,
                blocking,
                timeout_s if not queued else max(0.0, deadline - time.monotonic()),
                **optional_claim_keywords(dp_world, where, seed, wait_for_leased, sample_ids),
            )

        if not blocking:
            return await self._await_claim(self._start(self._calls, claim))
        try:
            async with asyncio.timeout(timeout_s if queued else None):
                await self._claim_slots.acquire()
        except TimeoutError:
            raise ClaimTimeoutError(
                f"claim_meta(partition={partition_id!r}, task={task_name!r}): "
                f"{self._claim_threads} other claims of this client are still blocked after "
                f"{timeout_s:g} s; raise claim_threads"
            ) from None
        loop = asyncio.get_running_loop()
        try:
            future = self._start(self._claims, claim)
        except BaseException:  # whatever prevents the start, release the slot
            self._claim_slots.release()
            raise
        self._blocked.add(future)

        def on_end(future: Future[KVBatchMeta]) -> None:
            self._blocked.discard(future)
            with contextlib.suppress(RuntimeError):  # the loop was closed: no claim needs a slot
                loop.call_soon_threadsafe(self._claim_slots.release)

        future.add_done_callback(on_end)
        return await self._await_claim(future)

    async def _await_claim(self, future: Future[KVBatchMeta]) -> KVBatchMeta:
        try:
            return await asyncio.wrap_future(future)
        except (asyncio.CancelledError, GeneratorExit):
            future.add_done_callback(self._on_abandoned)
            raise

    def _on_abandoned(self, future: Future[KVBatchMeta]) -> None:
        """Release a claim whose await was cancelled; runs in the loop or in the claim's thread."""
        if future.cancelled() or future.exception() is not None or not future.result().size:
            return
        meta = future.result()
        try:
            self._track(self._calls.submit(self._release_abandoned, meta))
        except RuntimeError:  # the threads are shut down: the client was closed meanwhile
            self._release_abandoned(meta)

    def _release_abandoned(self, meta: KVBatchMeta) -> None:
        reason = "the claim carries no lease"
        if LEASE in meta.extra_info:
            try:
                self._inner.release(meta)
                return
            except DataPlaneError as error:
                reason = f"{error}; the samples can be claimed again when the lease expires"
        logger.warning(
            "claimed_samples_lost",
            partition_id=meta.partition_id,
            task_name=meta.task_name,
            sample_ids=meta.sample_ids,
            reason=f"the await was cancelled and {reason}",
        )

    async def close(self) -> None:
        """Close the inner client; closing twice is allowed.

        Running puts, reads and other calls may finish; blocked claims end when the inner client is
        closed.

        Raises:
            DeadlineExceededError: (a TimeoutError) calls are still running after
                ``close_timeout_s``; their threads end at the calls' own deadlines.
        """
        if self._ended:
            return
        self._closed = True  # if this await is cancelled, `close` can be called again
        deadline = time.monotonic() + self._close_timeout_s
        await _wait_for_all(self._running - self._blocked, deadline)
        # A separate thread: calls that are stuck would delay the close, and with it the end of the
        # blocked claims.
        closer = ThreadPoolExecutor(1, "dataplane-close")
        closing = closer.submit(self._inner.close)
        unfinished = await _wait_for_all({closing}, deadline)
        unfinished |= await _wait_for_all(set(self._running), deadline)
        self._ended = True
        for pool in (self._claims, self._puts, self._reads, self._calls, closer):
            pool.shutdown(wait=False)
        if closing.done():
            closing.result()
        if unfinished:
            raise DeadlineExceededError(
                f"close(): {len(unfinished)} calls are still running after "
                f"{self._close_timeout_s:g} s"
            )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def _start(self, pool: ThreadPoolExecutor, call: Callable[[], _T]) -> Future[_T]:
        self._check_open()
        # The copied context makes the caller's span the parent, as asyncio.to_thread does.
        return self._track(pool.submit(contextvars.copy_context().run, call))

    def _track(self, future: Future[_T]) -> Future[_T]:
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the client was closed; build a new one")


async def _wait_for_all(futures: set[Future[Any]], deadline: float) -> set[Future[Any]]:
    """Wait until the deadline; return the futures that are not done then."""
    if not futures:
        return set()
    remaining_s = max(0.0, deadline - time.monotonic())
    return (await asyncio.to_thread(wait, futures, remaining_s)).not_done
