"""`AsyncDataPlaneClient`: any client, awaited.

Every call runs in a thread, because bulk copies have to leave the event loop anyway. What can wait
for another call has threads of its own: claims wait for puts, puts wait for clears, and neither may
stand in the way of what they wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, TypeVar  # Any: tags hold the caller's own primitives

import structlog

from dataplane_core.arguments import checked_bool, checked_int, checked_seconds
from dataplane_core.async_inspector import AsyncInspector
from dataplane_core.client import LEASE, Capabilities, DataPlaneClient
from dataplane_core.errors import (
    ClaimTimeoutError,
    ClosedError,
    DataPlaneError,
    DeadlineExceededError,
)
from dataplane_core.ledger.selection import narrowing

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from tensordict import TensorDict

    from dataplane_core.columns import Column
    from dataplane_core.ledger.selection import TagFilter
    from dataplane_core.meta import KVBatchMeta
    from dataplane_core.schema import Form

_T = TypeVar("_T")

logger = structlog.get_logger("dataplane_core.async_client")


class AsyncDataPlaneClient(AsyncInspector):
    """The methods of `DataPlaneClient` as coroutines, with the same arguments and errors.

    Use it from one event loop. Cancelling an awaited call returns at once; the call itself goes on
    in its thread to its own deadline, because a put or a claim cannot be taken back half-way. A put
    may so still become visible. A claim that succeeds after its await was cancelled is released if
    it carries a lease; without one its samples are settled, and they are logged as lost.

    Args:
        inner: the client that does the work; it is closed together with this one.
        threads: most threads for each of puts, reads and other calls. Further calls queue.
        claim_threads: most claims that wait at once. Further ones wait for their turn, within
            their own deadline.
        close_timeout_s: how long `close` waits for calls under way, in seconds.
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
        threads = checked_int(call, "threads", threads, least=1)
        claim_threads = checked_int(call, "claim_threads", claim_threads, least=1)
        self._inner = inner
        self._close_timeout_s = checked_seconds(call, "close_timeout_s", close_timeout_s)
        self._puts = ThreadPoolExecutor(threads, "dataplane-put")
        self._reads = ThreadPoolExecutor(threads, "dataplane-read")
        self._calls = ThreadPoolExecutor(threads, "dataplane-call")
        # An executor starts a thread only when none is idle, so claims have as many as wait.
        self._claims = ThreadPoolExecutor(claim_threads, "dataplane-claim")
        self._claim_threads = claim_threads
        self._claim_turns = asyncio.Semaphore(claim_threads)
        self._running: set[Future[Any]] = set()
        self._waiting: set[Future[Any]] = set()
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:
        """What the inner client promises."""
        return self._inner.capabilities

    async def register_partition(
        self,
        partition_id: str,
        fields: list[str],
        num_samples: int,
        consumer_tasks: list[str],
        grpo_group_size: int | None = None,
        enums: dict[str, list[str]] | None = None,
    ) -> None:
        """As `DataPlaneClient.register_partition`."""
        await self._call(
            lambda: self._inner.register_partition(
                partition_id, fields, num_samples, consumer_tasks, grpo_group_size, enums
            )
        )

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
    ) -> KVBatchMeta:
        """As `DataPlaneClient.claim_meta`.

        Raises:
            ClaimTimeoutError: also when ``claim_threads`` other claims waited all the time.
        """
        self._check_open()
        # The inner client checks every argument; these are what this one computes with.
        blocking = checked_bool("claim_meta", "blocking", blocking)
        timeout_s = checked_seconds("claim_meta", "timeout_s", timeout_s)
        deadline = time.monotonic() + timeout_s
        waited = blocking and self._claim_turns.locked()

        def claim() -> KVBatchMeta:
            return self._inner.claim_meta(
                partition_id,
                task_name,
                required_fields,
                batch_size,
                dp_rank,
                blocking,
                timeout_s if not waited else max(0.0, deadline - time.monotonic()),
                **narrowing(dp_world, where, seed, wait_for_leased),
            )

        if not blocking:
            return await self._claimed(self._start(self._calls, claim))
        try:
            async with asyncio.timeout(timeout_s if waited else None):
                await self._claim_turns.acquire()
        except TimeoutError:
            raise ClaimTimeoutError(
                f"claim_meta(partition={partition_id!r}, task={task_name!r}): "
                f"{self._claim_threads} other claims of this client still wait after "
                f"{timeout_s:g} s; raise claim_threads"
            ) from None
        loop = asyncio.get_running_loop()
        try:
            future = self._start(self._claims, claim)
        except BaseException:
            self._claim_turns.release()
            raise
        self._waiting.add(future)

        def ended(future: Future[KVBatchMeta]) -> None:
            self._waiting.discard(future)
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits for a turn
                loop.call_soon_threadsafe(self._claim_turns.release)

        future.add_done_callback(ended)
        return await self._claimed(future)

    async def _claimed(self, future: Future[KVBatchMeta]) -> KVBatchMeta:
        try:
            return await asyncio.wrap_future(future)
        except (asyncio.CancelledError, GeneratorExit):
            future.add_done_callback(self._abandoned)
            raise

    def _abandoned(self, future: Future[KVBatchMeta]) -> None:
        """Give back what nobody waits for any more; runs in the loop or in the claim's thread."""
        if future.cancelled() or future.exception() is not None or not future.result().size:
            return
        meta = future.result()
        try:
            self._track(self._calls.submit(self._give_back, meta))
        except RuntimeError:  # the threads are shut down: the client was closed meanwhile
            self._give_back(meta)

    def _give_back(self, meta: KVBatchMeta) -> None:
        reason = "the claim carries no lease"
        if LEASE in meta.extra_info:
            try:
                self._inner.release(meta)
                return
            except DataPlaneError as error:
                reason = f"{error}; they come back when the lease expires"
        logger.warning(
            "claimed_samples_lost",
            partition_id=meta.partition_id,
            task_name=meta.task_name,
            sample_ids=meta.sample_ids,
            reason=f"the await was cancelled and {reason}",
        )

    async def get_data(
        self,
        meta: KVBatchMeta,
        select_fields: list[str] | None = None,
        *,
        origins: dict[str, int] | None = None,
    ) -> TensorDict:
        """As `DataPlaneClient.get_data`."""
        more = _asked(origins)
        return await self._run(
            self._reads, lambda: self._inner.get_data(meta, select_fields, **more)
        )

    async def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        """As `DataPlaneClient.check_consumption_status`."""
        return await self._call(
            lambda: self._inner.check_consumption_status(partition_id, task_names)
        )

    async def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
        *,
        claim: KVBatchMeta | None = None,
        origin: str | None = None,
    ) -> KVBatchMeta:
        """As `DataPlaneClient.put_samples`. Leave the arguments alone until it returned."""
        # Adapters for the published contract alone do not know the keyword.
        more: dict[str, Any] = {} if claim is None else {"claim": claim}
        if origin is not None:
            more["origin"] = origin
        return await self._run(
            self._puts,
            lambda: self._inner.put_samples(sample_ids, partition_id, fields, tags, **more),
        )

    async def get_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        select_fields: list[str],
        *,
        origins: dict[str, int] | None = None,
    ) -> TensorDict:
        """As `DataPlaneClient.get_samples`."""
        more = _asked(origins)
        return await self._run(
            self._reads,
            lambda: self._inner.get_samples(sample_ids, partition_id, select_fields, **more),
        )

    async def put_columns(
        self,
        sample_ids: list[str],
        partition_id: str,
        columns: Mapping[str, Column],
        tags: list[dict[str, Any]] | None = None,
        *,
        lengths: Sequence[int] | None = None,
        ragged: Collection[str] = (),
        claim: KVBatchMeta | None = None,
        origin: str | None = None,
    ) -> KVBatchMeta:
        """As `DataPlaneClient.put_columns`. Leave the arguments alone until it returned."""
        return await self._run(
            self._puts,
            lambda: self._inner.put_columns(
                sample_ids,
                partition_id,
                columns,
                tags,
                lengths=lengths,
                ragged=ragged,
                claim=claim,
                origin=origin,
            ),
        )

    async def get_columns(
        self,
        sample_ids: list[str],
        partition_id: str,
        select_fields: list[str],
        *,
        pad_values: Mapping[str, float] | None = None,
        width: int = 0,
        origins: dict[str, int] | None = None,
        forms: dict[str, Form] | None = None,
    ) -> dict[str, Column]:
        """As `DataPlaneClient.get_columns`."""
        more: dict[str, Any] = _asked(origins)
        if forms is not None:
            more["forms"] = forms
        return await self._run(
            self._reads,
            lambda: self._inner.get_columns(
                sample_ids,
                partition_id,
                select_fields,
                pad_values=pad_values,
                width=width,
                **more,
            ),
        )

    async def acknowledge(self, meta: KVBatchMeta) -> None:
        """As `DataPlaneClient.acknowledge`."""
        await self._call(lambda: self._inner.acknowledge(meta))

    async def renew(self, meta: KVBatchMeta) -> None:
        """As `DataPlaneClient.renew`."""
        await self._call(lambda: self._inner.renew(meta))

    async def release(self, meta: KVBatchMeta) -> None:
        """As `DataPlaneClient.release`."""
        await self._call(lambda: self._inner.release(meta))

    async def close(self) -> None:
        """Close the inner client. Closing twice is fine.

        Puts, reads and other calls under way may finish; blocked claims end when the inner client
        is closed.

        Raises:
            DeadlineExceededError: (a TimeoutError) calls are still under way after
                ``close_timeout_s``; their threads end at the calls' own deadlines.
        """
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + self._close_timeout_s
        pools = (self._claims, self._puts, self._reads, self._calls)
        await _unfinished(self._running - self._waiting, deadline)
        closing = self._calls.submit(self._inner.close)
        left = await _unfinished({closing}, deadline)
        left |= await _unfinished(set(self._running), deadline)
        for pool in pools:
            pool.shutdown(wait=False)
        if closing.done():
            closing.result()
        if left:
            raise DeadlineExceededError(
                f"close(): {len(left)} calls are still under way after {self._close_timeout_s:g} s"
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

    async def _call(self, call: Callable[[], _T]) -> _T:
        return await self._run(self._calls, call)

    async def _run(self, pool: ThreadPoolExecutor, call: Callable[[], _T]) -> _T:
        return await asyncio.wrap_future(self._start(pool, call))

    def _start(self, pool: ThreadPoolExecutor, call: Callable[[], _T]) -> Future[_T]:
        self._check_open()
        # Spans of the caller are parents of those inside, as with asyncio.to_thread.
        return self._track(pool.submit(contextvars.copy_context().run, call))

    def _track(self, future: Future[_T]) -> Future[_T]:
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the client was closed; build a new one")


async def _unfinished(futures: set[Future[Any]], deadline: float) -> set[Future[Any]]:
    """Wait until the deadline; those that are not done then."""
    if not futures:
        return set()
    left = max(0.0, deadline - time.monotonic())
    return (await asyncio.to_thread(wait, futures, left)).not_done


def _asked(origins: dict[str, int] | None) -> dict[str, Any]:
    """Adapters for the published contract alone do not know the keyword."""
    return {} if origins is None else {"origins": origins}
