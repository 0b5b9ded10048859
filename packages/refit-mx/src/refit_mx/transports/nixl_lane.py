"""`Lane`: one NIXL agent that reads, used by one thread at a time.

NIXL has no timeout and cannot cancel a read. Even after its handle was released and the remote
agent removed, late bytes of a stopped peer still arrive in the buffer. So an abandoned read keeps
its handle and its remote agent, and the buffer stays busy until NIXL reports that the read is done
or that the peer is disconnected.

Connecting has no timeout either. While a peer's packets are dropped, the call blocks for as long as
the kernel retransmits (about 130 s on Linux), and holds the agent's lock. Such a call is abandoned
with its thread and agent, and the peer is avoided until the call returns.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any  # NIXL's agents and handles have no types

import numpy as np
import numpy.typing as npt
import torch

from refit_mx.concurrency import BoundedCalls
from refit_mx.deadline import Deadline
from refit_mx.errors import ProtocolError, RefitConfigError, SourceLostError
from refit_mx.manifest.format import Manifest, NixlAgent
from refit_mx.manifest.reads import Int64s, ReadTable
from refit_mx.transports.base import source_lost
from refit_mx.transports.batches import Batch, BatchQueue
from refit_mx.transports.nixl_library import is_disconnect, is_unreachable, new_agent
from refit_mx.transports.nixl_source import register_memory
from refit_mx.transports.source_client import is_gone

IN_FLIGHT = 2
"""Concurrent transfers per source and lane, so that the source never waits for the receiver."""
DRAIN_S = 0.5
"""Time in which the reads from other sources may end after one source has failed."""
GONE_PROBE_S = 0.2
MAX_ABANDONED_CONNECTS = 8
"""Limit of abandoned attempts in this process: at most one per peer, each with a thread and an
agent. Beyond the limit no further peer is connected."""


# Abandoned attempts to connect, by name of the remote agent. All lanes share them: an agent that is
# silent to one lane is silent to all.
_abandoned_connects: dict[str, BoundedCalls] = {}
_abandoned_lock = threading.Lock()


def abandoned_connects() -> set[str]:
    """Return the names of remote agents with an abandoned attempt to connect in progress."""
    with _abandoned_lock:
        for name in [name for name, calls in _abandoned_connects.items() if not calls.busy]:
            del _abandoned_connects[name]
        return set(_abandoned_connects)


@dataclass(eq=False)
class _Remote:
    """A connected remote agent."""

    source: Manifest
    pending: list[_Read] = field(default_factory=list)
    lost: bool = False


@dataclass(eq=False)
class _Read:
    """A posted transfer."""

    remote: _Remote
    handle: Any
    buffer: int
    failed: bool = False
    ended: bool = False


@dataclass(eq=False)
class _Flight:
    """Reads from one source that are in progress in a lane."""

    queue: BatchQueue
    more: bool = True
    reads: deque[tuple[_Read, Batch]] = field(default_factory=deque)


class Lane:
    """A NIXL agent that reads, used by one thread at a time.

    Raises:
        RefitConfigError: NIXL cannot be used.
    """

    def __init__(self) -> None:
        self._agent = new_agent("refit-receiver", serves=False)
        self._connecting = BoundedCalls("refit-nixl-connect")
        self._registered: dict[int, Any] = {}
        self._remotes: dict[str, _Remote] = {}
        self._abandoned: list[_Read] = []

    def register(self, scratch: torch.Tensor) -> None:
        """Prepare a buffer for reads."""
        self._registered[scratch.data_ptr()] = register_memory(self._agent, scratch)

    def unregister(self, scratch: torch.Tensor) -> None:
        """Forget a buffer that is not busy."""
        registration = self._registered.pop(scratch.data_ptr(), None)
        # No read writes into it. If the agent is blocked, the registration ends with the agent.
        if registration is not None and not self.blocked:
            self._agent.deregister_memory(registration)

    @property
    def blocked(self) -> bool:
        """True while an abandoned attempt to connect holds the agent: its calls would block."""
        return self._connecting.busy

    def busy(self, scratch: torch.Tensor) -> bool:
        """Return whether an abandoned read may still write into the buffer."""
        self.is_drained()
        return any(read.buffer == scratch.data_ptr() for read in self._abandoned)

    def is_lost(self, name: str) -> bool:
        """Return whether a remote agent was lost after it was connected."""
        remote = self._remotes.get(name)
        return remote is not None and remote.lost

    def connect(self, source: Manifest, timeout_s: float) -> None:
        """Connect to a source's agent unless it is connected. A timeout leaves the lane blocked.

        Raises:
            SourceLostError: the source cannot be reached, or not in time.
            ProtocolError: its metadata is invalid or belongs to another agent.
        """
        agent = agent_of(source)
        if agent.name in self._remotes:
            return
        blocked = abandoned_connects()
        if agent.name in blocked or len(blocked) >= MAX_ABANDONED_CONNECTS:
            raise source_lost(
                source,
                f"is not connected over NIXL: {len(blocked)} abandoned attempts are still blocked",
            )
        try:
            name = self._connecting.call(
                partial(self._agent.add_remote_agent, agent.metadata), timeout_s
            )
        except TimeoutError:
            raise source_lost(source, f"did not answer over NIXL for {timeout_s:.3g} s") from None
        except Exception as error:  # noqa: BLE001 - NIXL's errors have no common base
            if is_unreachable(error):
                raise source_lost(source, f"lost while connecting: {error!r}") from None
            raise ProtocolError(
                f"source {source.worker_id!r}: NIXL refuses its metadata: {error!r}"
            ) from None
        finally:
            if self.blocked:  # also after an interrupt
                with _abandoned_lock:
                    _abandoned_connects[agent.name] = self._connecting
        name = name.decode() if isinstance(name, bytes) else name
        if name != agent.name:
            self._agent.remove_remote_agent(name)
            raise ProtocolError(
                f"source {source.worker_id!r}: its metadata belongs to agent {name!r}; "
                f"expected {agent.name!r}"
            )
        self._remotes[name] = _Remote(source)

    def is_idle(self, name: str) -> bool:
        """Return whether no read from a remote agent is in progress."""
        remote = self._remotes.get(name)
        return remote is None or not remote.pending

    def remove(self, name: str) -> None:
        """Disconnect from a remote agent that is idle."""
        if self._remotes.pop(name, None) is not None:
            self._agent.remove_remote_agent(name)

    def read_batches(
        self,
        queues: Sequence[BatchQueue],
        scratch: torch.Tensor,
        deadline: Deadline,
        stopped: Callable[[], bool],
    ) -> None:
        """Read the batches that other lanes do not take.

        If this raises, the caller must abandon the reads in progress. If ``stopped`` returns True
        because another lane has failed, this method returns with reads in progress.
        """
        idle_rounds = 0
        active = [_Flight(queue) for queue in queues]
        while active and not stopped():
            progressed = False
            for flight in active:
                queue = flight.queue
                while flight.more and len(flight.reads) < IN_FLIGHT:
                    batch = queue.take()
                    if batch is None:
                        flight.more = False
                        break
                    flight.reads.append((self._post(queue, batch, scratch), batch))
                    deadline.check(f"reading from {queue.source.worker_id!r}")
                    if flight.reads[0][0].ended:
                        break  # copied within the call
                while flight.reads and self._is_done(flight.reads[0][0]):
                    _, batch = flight.reads.popleft()
                    progressed = True
                    deadline.record_progress()
                    queue.done(batch)
            active = [flight for flight in active if flight.reads or flight.more]
            if progressed:
                idle_rounds = 0
                continue
            idle_rounds += 1
            if active and not deadline.left_s:
                missing = ", ".join(repr(flight.queue.source.worker_id) for flight in active[:4])
                raise deadline.error(f"reading from {missing} ({len(active)} sources)")
            # Poll without sleep at first, for small transfers that take microseconds; then sleep,
            # so that long ones do not use a core.
            time.sleep(0 if idle_rounds < 50 else min(1e-3, idle_rounds * 1e-6))

    def abandon(self) -> None:
        """Abandon the reads in progress; `busy` polls them from now on."""
        # All posted reads: an interrupt may have come before a read was recorded elsewhere.
        self._abandoned = [read for remote in self._remotes.values() for read in remote.pending]

    def is_drained(self) -> bool:
        """Poll abandoned reads; return whether none remains."""
        if self.blocked:
            return not self._abandoned
        probed: dict[str, bool] = {}
        self._abandoned = [read for read in self._abandoned if not self._is_finished(read, probed)]
        return not self._abandoned

    def _post(self, queue: BatchQueue, batch: Batch, scratch: torch.Tensor) -> _Read:
        agent = agent_of(queue.source)
        remote = self._remotes[agent.name]
        src, dst, length = runs(batch.rows_of(queue.reads))
        local_memory = "DRAM" if scratch.device.type == "cpu" else "VRAM"
        local = descriptors(dst, length, scratch.data_ptr(), scratch.device.index or 0)
        remote_runs = descriptors(src, length, queue.source.arena_address, agent.device_id)
        try:
            handle = self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(local, local_memory),
                self._agent.get_xfer_descs(remote_runs, agent.memory),
                agent.name,
                backends=["UCX"],
            )
        except Exception as error:  # noqa: BLE001 - as above
            raise self._lost(remote, error, posted=False) from None
        read = _Read(remote, handle, scratch.data_ptr())
        remote.pending.append(read)
        try:
            if self._agent.transfer(handle) == "DONE":
                self._end(read)
        except Exception as error:  # noqa: BLE001 - as above
            read.failed = not is_disconnect(error)
            raise self._lost(remote, error) from None
        return read

    def _is_done(self, read: _Read) -> bool:
        if read.ended:
            return True
        try:
            state = self._agent.check_xfer_state(read.handle)
        except Exception as error:  # noqa: BLE001 - as above
            raise self._lost(read.remote, error) from None
        if state == "ERR":
            raise self._lost(read.remote, RuntimeError("NIXL reports an error"))
        if state == "PROC":
            return False
        self._end(read)
        return True

    def _is_finished(self, read: _Read, probed: dict[str, bool]) -> bool:
        """Return whether an abandoned read can no longer write.

        Whether a worker is gone is stored in ``probed``, by worker id: each is probed once, since
        probing an unreachable one takes `GONE_PROBE_S`.
        """
        if read.ended:
            return True
        if not read.failed:
            try:
                state = self._agent.check_xfer_state(read.handle)
            except Exception as error:  # noqa: BLE001 - as above
                read.remote.lost = True
                state = "DONE" if is_disconnect(error) else "ERR"
            if state == "PROC":
                return False
            read.failed = state == "ERR"
        # After an error in one part of a transfer, other parts may write until the source is gone.
        if read.failed:
            source = read.remote.source
            if source.worker_id not in probed:
                probed[source.worker_id] = is_gone(source, GONE_PROBE_S)
            if not probed[source.worker_id]:
                return False
        self._end(read)
        return True

    def _end(self, read: _Read) -> None:
        read.handle.release()
        read.remote.pending.remove(read)
        read.ended = True

    @staticmethod
    def _lost(remote: _Remote, error: BaseException, *, posted: bool = True) -> SourceLostError:
        remote.lost = remote.lost or posted
        return source_lost(remote.source, f"lost: {error!r}")


def agent_of(source: Manifest) -> NixlAgent:
    """Return the NIXL agent of a source.

    Raises:
        RefitConfigError: the source has none.
    """
    if source.nixl is None:
        raise RefitConfigError(f"source {source.worker_id!r} has no NIXL agent; read it over TCP")
    return source.nixl


Descriptors = npt.NDArray[np.uint64]


def runs(reads: ReadTable) -> tuple[Int64s, Int64s, Int64s]:
    """Return the contiguous runs of reads, with adjacent ones joined.

    Returns:
        Source offset, destination offset and length of each, int64 (runs,).
    """
    src, dst, run, n1, src1, dst1, n2, src2, dst2 = reads.rows.T.copy()
    if (reads.rows[:, (3, 6)] > 1).any():
        joins = (n1 > 1) & (src1 == run) & (dst1 == run)
        run = np.where(joins, run * n1, run)
        n1 = np.where(joins, 1, n1)
        joins = (n1 == 1) & (n2 > 1) & (src2 == run) & (dst2 == run)
        run = np.where(joins, run * n2, run)
        n2 = np.where(joins, 1, n2)
    counts = n1 * n2
    if (counts > 1).any():
        row = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        j, i = np.divmod(within, n1[row])
        src = src[row] + j * src2[row] + i * src1[row]
        dst = dst[row] + j * dst2[row] + i * dst1[row]
        run = run[row]
    if len(run) > 1:
        ends = (src[:-1] + run[:-1] != src[1:]) | (dst[:-1] + run[:-1] != dst[1:])
        firsts = np.concatenate([[0], np.flatnonzero(ends) + 1])
        src, dst, run = src[firsts], dst[firsts], np.add.reduceat(run, firsts)
    return src, dst, run


def descriptors(at: Int64s, length: Int64s, address: int, device_id: int) -> Descriptors:
    """Return descriptors of runs at offsets from an address: uint64 (runs, 3)."""
    table = np.empty((len(at), 3), np.uint64)
    table[:, 0] = at.astype(np.uint64) + np.uint64(address)
    table[:, 1] = length
    table[:, 2] = device_id
    return table
