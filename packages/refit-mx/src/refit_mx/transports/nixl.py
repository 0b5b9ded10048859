"""`NixlTransport`: one-sided reads by RDMA if available, else by UCX over shared memory or TCP.

Without RDMA the receiver's CPU copies, and one thread is limited to one core. So large fetches use
several lanes, each with an agent and a thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from refit_mx.concurrency import run_concurrently
from refit_mx.deadline import Deadline
from refit_mx.errors import RefitConfigError
from refit_mx.manifest.format import Manifest
from refit_mx.transports.base import UNUSED_FETCHES, ReadStats, SourceReads, source_lost
from refit_mx.transports.batches import BatchQueue, OnDone
from refit_mx.transports.nixl_lane import DRAIN_S, IN_FLIGHT, Lane, agent_of
from refit_mx.transports.nixl_library import has_rdma
from refit_mx.transports.source_client import SourceClient
from refit_mx.transports.tcp import check_source_reads

BATCH_BYTES = 16 << 20
"""Size of one transfer if the receiver's CPU does the copying: a read of maximum length, verified
by the thread that copied it. Smaller transfers stay in the cache, but need more calls, which cost
more than that saves: 0.5 GiB takes a sixth longer with 4 MiB and a third longer with 2 MiB."""
RDMA_BATCH_BYTES = 64 << 20
IN_FLIGHT_BYTES = 64 << 20
"""Limit of bytes in flight from all sources, if the receiver's CPU does the copying. NIXL reports
only complete transfers, and all transfers in flight share one network. So with more sources the
batches get smaller, and each completes long before a fetch counts as stalled. With a longer stall
limit instead, silent sources would be detected later."""
LOCAL_IN_FLIGHT_BYTES = 256 << 20
"""The same limit if all sources are local: nothing slower than memory is in between."""
MIN_BATCH_BYTES = 1 << 20
"""Lower limit of a batch: smaller ones are slow."""
RDMA_IN_FLIGHT_BYTES = 1 << 30
RDMA_MIN_BATCH_BYTES = 8 << 20
BATCH_RUNS = 1 << 14
"""Limit of the runs in one transfer; UCX holds a request for each run."""
LANE_BYTES = 64 << 20
"""Size from which a fetch uses all lanes."""
MAX_LANES = 2


def batch_bytes(readers: int, *, copies: bool, local: bool) -> int:
    """Return the size of one transfer.

    The readers are sources times lanes; each has `IN_FLIGHT` transfers in flight. ``copies`` is
    whether the receiver's CPU does the copying, ``local`` whether all sources are on this machine.
    """
    maximum = BATCH_BYTES if copies else RDMA_BATCH_BYTES
    minimum = MIN_BATCH_BYTES if copies else RDMA_MIN_BATCH_BYTES
    copied = LOCAL_IN_FLIGHT_BYTES if local else IN_FLIGHT_BYTES
    in_flight = copied if copies else RDMA_IN_FLIGHT_BYTES
    return min(maximum, max(minimum, in_flight // (readers * IN_FLIGHT)))


@dataclass(eq=False)
class _Source:
    """A connected source."""

    client: SourceClient
    unused: int = 0


class NixlTransport:
    """Transport over NIXL; see `refit_mx.transports.base.Transport`.

    It also sends two requests to each source's server: before the first byte, to check that the
    process is still the one in the manifest, and after the last, that the version is still held.

    Args:
        connect_timeout_s: time limit for connecting to a source's server, with its greeting, and
            for connecting to a source's agent. Connecting to the agent also gets at most half of
            the time that remains for the fetch.
        lanes: parallel lanes of large fetches without RDMA; None is one per core that this process
            may use, up to `MAX_LANES`.

    Raises:
        RefitConfigError: NIXL cannot be used.
    """

    name = "nixl"
    max_read_bytes = BATCH_BYTES

    def __init__(self, *, connect_timeout_s: float = 5.0, lanes: int | None = None) -> None:
        self._lanes = [Lane()]
        # Lanes that an attempt to connect blocks, or that still have reads in progress.
        self._abandoned_lanes: list[Lane] = []
        self._max_lanes = lanes or min(MAX_LANES, len(os.sched_getaffinity(0)))
        self._threads: ThreadPoolExecutor | None = None
        self._connect_timeout_s = connect_timeout_s
        self._registered: dict[int, torch.Tensor] = {}
        self._sources: dict[str, _Source] = {}

    def register(self, scratch: torch.Tensor) -> None:
        if scratch.data_ptr() in self._registered:
            raise RefitConfigError("the scratch buffer is already registered")
        try:
            for lane in self._lanes:
                lane.register(scratch)
        except BaseException:  # unregister all lanes also on an interrupt
            for lane in self._lanes:
                lane.unregister(scratch)
            raise
        self._registered[scratch.data_ptr()] = scratch

    def unregister(self, scratch: torch.Tensor) -> None:
        """See `Transport.unregister`.

        Raises:
            RefitConfigError: the buffer is busy.
        """
        if self.busy(scratch):
            raise RefitConfigError("the scratch buffer is busy; an abandoned read may write to it")
        self._registered.pop(scratch.data_ptr(), None)
        for lane in (*self._lanes, *self._abandoned_lanes):
            lane.unregister(scratch)

    def busy(self, scratch: torch.Tensor) -> bool:
        # Reads progress only while they are polled, so poll every lane.
        busy = [lane.busy(scratch) for lane in (*self._lanes, *self._abandoned_lanes)]
        self._abandoned_lanes = [
            lane for lane in self._abandoned_lanes if lane.blocked or not lane.is_drained()
        ]
        return any(busy)

    def is_stuck(self, source: Manifest) -> bool:
        """Return whether a source was lost and abandoned reads from it are still in progress."""
        name = agent_of(source).name
        if not any(lane.is_lost(name) for lane in self._lanes):
            return False
        for lane in self._lanes:
            lane.is_drained()  # reads progress only while polled
        return not self._is_idle(name)

    def read(
        self,
        source_reads: Sequence[SourceReads],
        scratch: torch.Tensor,
        *,
        deadline: Deadline,
        on_done: OnDone | None = None,
    ) -> ReadStats:
        check_source_reads(source_reads, scratch, set(self._registered))
        if self.busy(scratch):
            raise RefitConfigError("the scratch buffer is busy; an abandoned read may write to it")
        wanted = [each for each in source_reads if len(each.reads)]
        for each in wanted:
            agent_of(each.source)
        nbytes = sum(each.reads.nbytes for each in source_reads)
        copies = scratch.device.type == "cpu" and not has_rdma()
        lanes = self._lanes_for(nbytes if copies else 0)
        connected = sum(self._connect(each.source, lanes, deadline) for each in wanted)
        self._forget_unused(wanted)
        if not wanted:
            return ReadStats(0, 0.0, 0)
        local = all(self._client(each.source).local for each in wanted)
        max_bytes = batch_bytes(len(wanted) * len(lanes), copies=copies, local=local)
        queues = [
            BatchQueue(
                index,
                each,
                on_done,
                batch_bytes=max_bytes,
                batch_reads=BATCH_RUNS,
                batch_runs=BATCH_RUNS,
            )
            for index, each in enumerate(source_reads)
            if len(each.reads)
        ]
        started = time.monotonic()
        try:
            if len(lanes) > 1 and self._threads is None:
                self._threads = ThreadPoolExecutor(
                    self._max_lanes - 1, thread_name_prefix="refit-nixl"
                )
            calls = [partial(lane.read_batches, queues, scratch, deadline) for lane in lanes]
            run_concurrently(self._threads, calls)
            seconds = time.monotonic() - started
            for queue in queues:
                client = self._client(queue.source)
                client.check_held(version_id=queue.source.version_id, deadline=deadline)
        except BaseException:  # an interrupt also leaves reads in progress
            self._abandon(lanes, deadline)
            raise
        return ReadStats(nbytes, seconds, connected)

    def close(self) -> None:
        """See `Transport.close`. Busy buffers stay busy, and their agents stay connected."""
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
        wanted = 1 if copied_bytes < LANE_BYTES else self._max_lanes
        while len(self._lanes) < wanted:
            try:
                lane = Lane()
                for scratch in self._registered.values():
                    lane.register(scratch)
            except RefitConfigError:
                if not self._lanes:
                    raise
                self._max_lanes = len(self._lanes)  # continue with fewer lanes
                break
            self._lanes.append(lane)
        return self._lanes[:wanted]

    def _abandon(self, lanes: Sequence[Lane], deadline: Deadline) -> None:
        for lane in lanes:
            lane.abandon()
        until = time.monotonic() + min(DRAIN_S, deadline.left_s)
        while True:
            drained = [lane.is_drained() for lane in lanes]  # poll every lane
            if all(drained) or time.monotonic() >= until:
                return
            time.sleep(1e-3)

    def _connect(self, source: Manifest, lanes: Sequence[Lane], deadline: Deadline) -> bool:
        name = agent_of(source).name
        if any(lane.is_lost(name) for lane in self._lanes):
            if not self._is_idle(name):
                raise source_lost(source, "was lost with reads still in progress")
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
                # At most half of the time: a fallback to TCP needs the rest.
                lane.connect(source, min(self._connect_timeout_s, deadline.check() / 2))
        except BaseException:  # an interrupt may also leave a lane blocked
            self._abandoned_lanes += [lane for lane in self._lanes if lane.blocked]
            self._lanes = [lane for lane in self._lanes if not lane.blocked]
            if known is None:
                self._remove(name)
            raise
        return known is None

    def _client(self, source: Manifest) -> SourceClient:
        return self._sources[agent_of(source).name].client

    def _forget_unused(self, wanted: Sequence[SourceReads]) -> None:
        used = {agent_of(each.source).name for each in wanted}
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
