"""`NixlTransport`: one-sided reads, RDMA where there is any, else shared memory or TCP by UCX.

Where no network card copies, this side's processor does, and one thread fills one core. So large
fetches are carried out by several lanes, an agent and a thread each.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from refit_mx.deadline import Deadline
from refit_mx.errors import RefitConfigError, SourceLostError
from refit_mx.manifest import Manifest
from refit_mx.side_by_side import together
from refit_mx.source_client import SourceClient
from refit_mx.transports.base import UNUSED_FETCHES, Fetch, FetchStats
from refit_mx.transports.nixl_lane import DRAIN_S, IN_FLIGHT, Lane, agent_of
from refit_mx.transports.nixl_library import has_rdma, nixl_available, prepare_environment
from refit_mx.transports.nixl_source import NixlSource
from refit_mx.transports.tcp import check_fetches
from refit_mx.transports.work import OnDone, Work

__all__ = ["NixlSource", "NixlTransport", "nixl_available", "prepare_environment"]

BATCH_BYTES = 16 << 20
"""Of one transfer where this side's processor copies: a whole piece, which the thread that copied
it verifies. Smaller ones cost more in calls than the processor's cache gives back: for 0.5 GiB a
sixth more time with 4 MiB, a third more with 2."""
RDMA_BATCH_BYTES = 64 << 20
IN_FLIGHT_BYTES = 64 << 20
"""Of all sources together where this side's processor copies. NIXL tells of whole transfers alone,
and all that are under way share one network: the more sources, the smaller the batches, so that one
ends long before a fetch is taken for stalled. A longer stall limit for more bytes would find a
source that fell silent later, and the more sources there are the later."""
LOCAL_IN_FLIGHT_BYTES = 256 << 20
"""Of all sources together where all are of this machine: nothing slower than memory is between."""
LEAST_BATCH_BYTES = 1 << 20
"""Smaller ones would cost speed."""
RDMA_IN_FLIGHT_BYTES = 1 << 30
RDMA_LEAST_BATCH_BYTES = 8 << 20
BATCH_RUNS = 1 << 14
"""Of one transfer; UCX holds a request of its own for each run."""
LANE_BYTES = 64 << 20
"""Of a fetch from which on it takes all lanes."""
MOST_LANES = 2


def batch_bytes(readers: int, *, copies: bool, local: bool) -> int:
    """Of one transfer.

    Args:
        readers: sources times lanes, each of which has `IN_FLIGHT` transfers under way.
        copies: whether this side's processor copies.
        local: whether all sources are of this machine.
    """
    most = BATCH_BYTES if copies else RDMA_BATCH_BYTES
    least = LEAST_BATCH_BYTES if copies else RDMA_LEAST_BATCH_BYTES
    by_copying = LOCAL_IN_FLIGHT_BYTES if local else IN_FLIGHT_BYTES
    all_of_them = by_copying if copies else RDMA_IN_FLIGHT_BYTES
    return min(most, max(least, all_of_them // (readers * IN_FLIGHT)))


class _Source:
    """One that was connected to."""

    def __init__(self, client: SourceClient) -> None:
        self.client = client
        self.unused = 0


class NixlTransport:
    """See `refit_mx.transports.base.Transport`.

    Besides the one-sided reads it asks each source's server, before the first byte whether this is
    still the process of the manifest, and after the last one whether the version is still held.

    Args:
        connect_timeout_s: for connecting to a source's server and being greeted by it, and for
            connecting to its agent; at most half of the time that is left for a fetch.
        threads: of UCX's own that carry out large transfers.
        lanes: that carry out large fetches side by side where there is no RDMA; None is one a core
            that this process may use, at most `MOST_LANES`.

    Raises:
        RefitConfigError: NIXL cannot be used; `nixl_available` says why.
    """

    name = "nixl"
    piece_bytes = BATCH_BYTES

    def __init__(
        self, *, connect_timeout_s: float = 5.0, threads: int = 0, lanes: int | None = None
    ) -> None:
        if lanes is not None and lanes < 1:
            raise RefitConfigError(f"lanes {lanes}; expected at least 1")
        self._ucx_threads = threads
        self._lanes = [Lane(threads=threads)]
        # Blocked by an attempt to connect, or with reads of before.
        self._abandoned_lanes: list[Lane] = []
        self._most_lanes = lanes or min(MOST_LANES, len(os.sched_getaffinity(0)))
        self._threads: ThreadPoolExecutor | None = None
        self._connect_timeout_s = connect_timeout_s
        self._registered: dict[int, torch.Tensor] = {}
        self._sources: dict[str, _Source] = {}

    def register(self, scratch: torch.Tensor) -> None:
        """See `Transport.register`."""
        if scratch.data_ptr() in self._registered:
            raise RefitConfigError("the scratch buffer is registered already")
        try:
            for lane in self._lanes:
                lane.register(scratch)
        except BaseException:
            for lane in self._lanes:
                lane.unregister(scratch)
            raise
        self._registered[scratch.data_ptr()] = scratch

    def unregister(self, scratch: torch.Tensor) -> None:
        """See `Transport.unregister`.

        Raises:
            RefitConfigError: it is busy.
        """
        if self.busy(scratch):
            raise RefitConfigError("the scratch buffer is busy; an abandoned read may write to it")
        self._registered.pop(scratch.data_ptr(), None)
        for lane in (*self._lanes, *self._abandoned_lanes):
            lane.unregister(scratch)

    def busy(self, scratch: torch.Tensor) -> bool:
        """See `Transport.busy`."""
        # Reads continue only while they are polled, so every lane is.
        busy = [lane.busy(scratch) for lane in (*self._lanes, *self._abandoned_lanes)]
        self._abandoned_lanes = [
            lane for lane in self._abandoned_lanes if lane.blocked or not lane.is_drained()
        ]
        return any(busy)

    def is_stuck(self, source: Manifest) -> bool:
        """Whether a source was lost, and cannot be read from since reads from it are not over."""
        name = agent_of(source).name
        if not any(lane.is_lost(name) for lane in self._lanes):
            return False
        for lane in self._lanes:
            lane.is_drained()  # reads go on only while asked about
        return not self._is_idle(name)

    def fetch(
        self,
        fetches: Sequence[Fetch],
        scratch: torch.Tensor,
        *,
        deadline: Deadline,
        on_done: OnDone | None = None,
    ) -> FetchStats:
        """See `Transport.fetch`."""
        check_fetches(fetches, scratch, set(self._registered))
        if self.busy(scratch):
            raise RefitConfigError("the scratch buffer is busy; an abandoned read may write to it")
        wanted = [fetch for fetch in fetches if len(fetch.reads)]
        for fetch in wanted:
            agent_of(fetch.source)
        nbytes = sum(fetch.reads.nbytes for fetch in fetches)
        copies = scratch.device.type == "cpu" and not has_rdma()
        lanes = self._lanes_for(nbytes if copies else 0)
        connected = sum(self._connect(fetch.source, lanes, deadline) for fetch in wanted)
        self._forget_unused(wanted)
        if not wanted:
            return FetchStats(0, 0.0, 0)
        local = all(self._client(fetch.source).local for fetch in wanted)
        most_bytes = batch_bytes(len(wanted) * len(lanes), copies=copies, local=local)
        works = [
            Work(
                index,
                fetch,
                batch_bytes=most_bytes,
                batch_reads=BATCH_RUNS,
                batch_runs=BATCH_RUNS,
            )
            for index, fetch in enumerate(fetches)
            if len(fetch.reads)
        ]
        started = time.monotonic()
        try:
            self._carry_out(lanes, works, scratch, deadline, on_done)
            seconds = time.monotonic() - started
            for work in works:
                client = self._client(work.source)
                client.check_held(version_id=work.source.version_id, deadline=deadline)
        except BaseException:
            self._abandon(lanes, deadline)
            raise
        return FetchStats(nbytes, seconds, connected)

    def close(self) -> None:
        """See `Transport.close`. Buffers that are busy stay so, and the agents with them."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        for source in self._sources.values():
            source.client.close()
        for lane in self._lanes:
            lane.is_drained()
        for name in list(self._sources):
            if self._is_idle(name):
                self._remove(name)

    def _lanes_for(self, copied_bytes: int) -> list[Lane]:
        wanted = 1 if copied_bytes < LANE_BYTES else self._most_lanes
        while len(self._lanes) < wanted:
            try:
                lane = Lane(threads=self._ucx_threads)
                for scratch in self._registered.values():
                    lane.register(scratch)
            except RefitConfigError:
                if not self._lanes:
                    raise
                self._most_lanes = len(self._lanes)  # fewer do as well
                break
            self._lanes.append(lane)
        return self._lanes[:wanted]

    def _carry_out(
        self,
        lanes: Sequence[Lane],
        works: Sequence[Work],
        scratch: torch.Tensor,
        deadline: Deadline,
        on_done: OnDone | None,
    ) -> None:
        def carry_out(lane: Lane, stopped: Callable[[], bool]) -> None:
            lane.carry_out(works, scratch, deadline=deadline, on_done=on_done, stopped=stopped)

        if len(lanes) > 1 and self._threads is None:
            self._threads = ThreadPoolExecutor(
                self._most_lanes - 1, thread_name_prefix="refit-nixl"
            )
        together(self._threads, [partial(carry_out, lane) for lane in lanes])

    def _abandon(self, lanes: Sequence[Lane], deadline: Deadline) -> None:
        for lane in lanes:
            lane.abandon()
        until = time.monotonic() + min(DRAIN_S, deadline.left_s)
        while True:
            drained = [lane.is_drained() for lane in lanes]  # every one is asked
            if all(drained) or time.monotonic() >= until:
                return
            time.sleep(1e-3)

    def _connect(self, source: Manifest, lanes: Sequence[Lane], deadline: Deadline) -> bool:
        name = agent_of(source).name
        if any(lane.is_lost(name) for lane in self._lanes):
            if not self._is_idle(name):
                raise SourceLostError(
                    f"source {source.worker_id!r} was lost, and reads from it are not over",
                    (source.worker_id,),
                )
            self._remove(name)
        known = self._sources.get(name)
        if known is None:
            client = SourceClient(source, connect_timeout_s=self._connect_timeout_s)
            client.connect(deadline)
            self._sources[name] = _Source(client)
        else:
            known.client.connect(deadline)
        try:
            for lane in lanes:
                # Not all of the time: what then reads from the source over TCP needs some.
                lane.connect(source, min(self._connect_timeout_s, deadline.check() / 2))
        except BaseException:
            self._abandoned_lanes += [lane for lane in self._lanes if lane.blocked]
            self._lanes = [lane for lane in self._lanes if not lane.blocked]
            if known is None:
                self._remove(name)
            raise
        return known is None

    def _client(self, source: Manifest) -> SourceClient:
        return self._sources[agent_of(source).name].client

    def _forget_unused(self, wanted: Sequence[Fetch]) -> None:
        used = {agent_of(fetch.source).name for fetch in wanted}
        for name, source in list(self._sources.items()):
            source.unused = 0 if name in used else source.unused + 1
            if source.unused > UNUSED_FETCHES and self._is_idle(name):
                self._remove(name)

    def _is_idle(self, name: str) -> bool:
        return all(lane.is_idle(name) for lane in self._lanes)

    def _remove(self, name: str) -> None:
        source = self._sources.pop(name, None)
        if source is not None:
            source.client.close()
        for lane in self._lanes:
            lane.remove(name)
