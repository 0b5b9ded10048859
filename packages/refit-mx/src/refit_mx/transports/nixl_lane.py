"""`Lane`: one NIXL agent that reads, for one thread at a time.

NIXL has no time-out and cannot take back a read: after its handle was released, and even after the
remote agent was removed, late bytes of a peer that was stopped still land in the buffer. So a read
that is abandoned keeps its handle and its remote agent, and the buffer stays busy until NIXL itself
says that the read is done or that the peer is disconnected.

Nor has it a time-out for connecting, which blocks in the kernel for as long as that resends (some
130 s on Linux) while a peer's packets are dropped, and holds the agent's lock. Such a call is
abandoned with its thread and its agent, and the peer is avoided until the call returns.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any  # NIXL's agents and handles have no types

import torch

from refit_mx.bounded_calls import BoundedCalls
from refit_mx.deadline import Deadline
from refit_mx.errors import ProtocolError, RefitConfigError, RefitError, SourceLostError
from refit_mx.manifest import Manifest, NixlAgent
from refit_mx.source_client import is_gone
from refit_mx.transports.batches import Batch
from refit_mx.transports.descriptors import descriptors, runs
from refit_mx.transports.nixl_library import is_disconnect, is_unreachable, new_agent
from refit_mx.transports.nixl_source import register_memory
from refit_mx.transports.work import OnDone, Work

IN_FLIGHT = 2
"""Transfers of a source at a time and lane, so that it never waits for this side."""
DRAIN_S = 0.5
"""For the reads of the other sources to end after one has failed."""
GONE_PROBE_S = 0.2
MAX_ABANDONED_CONNECTS = 8
"""Of this process. Each is a thread and an agent, one a peer; beyond it none is connected to."""


# Attempts to connect that were abandoned, by the remote agent's name; of all lanes, since the agent
# is as silent to the others.
_abandoned_connects: dict[str, BoundedCalls] = {}
_abandoned_lock = threading.Lock()


def abandoned_connects() -> set[str]:
    """Names of the remote agents to which an abandoned attempt to connect is still under way."""
    with _abandoned_lock:
        for name in [name for name, calls in _abandoned_connects.items() if not calls.busy]:
            del _abandoned_connects[name]
        return set(_abandoned_connects)


class _Remote:
    """An agent that was connected to."""

    def __init__(self, source: Manifest) -> None:
        self.source = source
        self.pending: list[_Read] = []
        self.lost = False


class _Read:
    """A transfer that was posted."""

    def __init__(self, remote: _Remote, handle: Any, buffer: int) -> None:
        self.remote = remote
        self.handle = handle
        self.buffer = buffer
        self.failed = False
        self.ended = False


class _Flight:
    """What one lane has under way of a work."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.more = True
        self.reads: deque[tuple[_Read, Batch]] = deque()


class Lane:
    """Reads.

    Args:
        threads: of UCX's own that carry out large transfers.

    Raises:
        RefitConfigError: NIXL cannot be used.
    """

    def __init__(self, *, threads: int = 0) -> None:
        self._agent = new_agent("refit-receiver", serves=False, threads=threads)
        self._connecting = BoundedCalls("refit-nixl-connect")
        self._registered: dict[int, Any] = {}
        self._remotes: dict[str, _Remote] = {}
        self._abandoned: list[_Read] = []

    def register(self, scratch: torch.Tensor) -> None:
        """Make a buffer ready to be read into."""
        self._registered[scratch.data_ptr()] = register_memory(self._agent, scratch)

    def unregister(self, scratch: torch.Tensor) -> None:
        """Forget a buffer that is not busy."""
        registration = self._registered.pop(scratch.data_ptr(), None)
        # Nothing is read into it, and the registration ends with the agent.
        if registration is not None and not self.blocked:
            self._agent.deregister_memory(registration)

    @property
    def blocked(self) -> bool:
        """Whether an abandoned attempt to connect holds the agent, whose calls would block."""
        return self._connecting.busy

    def busy(self, scratch: torch.Tensor) -> bool:
        """Whether an abandoned read may still write into the buffer."""
        self.is_drained()
        return any(read.buffer == scratch.data_ptr() for read in self._abandoned)

    def is_lost(self, name: str) -> bool:
        """Whether a remote agent was lost since it was connected to."""
        remote = self._remotes.get(name)
        return remote is not None and remote.lost

    def connect(self, source: Manifest, timeout_s: float) -> None:
        """Read its agent's metadata, if that was not done yet. A time-out leaves the lane blocked.

        Raises:
            SourceLostError: it cannot be reached, or not in time.
            ProtocolError: its metadata is none, or another agent's.
        """
        agent = agent_of(source)
        if agent.name in self._remotes:
            return
        blocked = abandoned_connects()
        if agent.name in blocked or len(blocked) >= MAX_ABANDONED_CONNECTS:
            raise SourceLostError(
                f"source {source.worker_id!r} is not connected to over NIXL: {len(blocked)} "
                "attempts that were abandoned are still blocked",
                (source.worker_id,),
            )
        try:
            name = self._connecting.call(
                partial(self._agent.add_remote_agent, agent.metadata), timeout_s
            )
        except TimeoutError:
            raise SourceLostError(
                f"source {source.worker_id!r} did not answer over NIXL for {timeout_s:.3g} s",
                (source.worker_id,),
            ) from None
        except Exception as error:  # noqa: BLE001 - NIXL's errors have no common base
            if is_unreachable(error):
                raise SourceLostError(
                    f"source {source.worker_id!r} lost while connecting: {error!r}",
                    (source.worker_id,),
                ) from None
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
                f"source {source.worker_id!r}: its metadata is of agent {name!r}; "
                f"expected {agent.name!r}"
            )
        self._remotes[name] = _Remote(source)

    def is_idle(self, name: str) -> bool:
        """Whether no read from a remote agent is under way."""
        remote = self._remotes.get(name)
        return remote is None or not remote.pending

    def remove(self, name: str) -> None:
        """Disconnect from a remote agent that `is_idle`."""
        if self._remotes.pop(name, None) is not None:
            self._agent.remove_remote_agent(name)

    def carry_out(
        self,
        works: Sequence[Work],
        scratch: torch.Tensor,
        *,
        deadline: Deadline,
        on_done: OnDone | None,
        stopped: Callable[[], bool],
    ) -> None:
        """Read what other lanes do not take. What is under way when this raises has to be
        abandoned.

        Args:
            works: one a source.
            scratch: registered.
            deadline: for all of it.
            on_done: as `Transport.fetch`.
            stopped: whether another lane has failed; then this returns with reads under way.
        """
        idle = 0
        active = [_Flight(work) for work in works]
        while active and not stopped():
            progressed = False
            for flight in active:
                work = flight.work
                while flight.more and len(flight.reads) < IN_FLIGHT:
                    batch = work.take()
                    if batch is None:
                        flight.more = False
                        break
                    flight.reads.append((self._post(work, batch, scratch), batch))
                    deadline.check(f"reading from {work.source.worker_id!r}")
                    if flight.reads[0][0].ended:
                        break  # copied in the call itself
                while flight.reads and self._is_done(flight.reads[0][0]):
                    _, batch = flight.reads.popleft()
                    progressed = True
                    deadline.moved()
                    work.done(batch, on_done)
            active = [flight for flight in active if flight.reads or flight.more]
            if progressed:
                idle = 0
                continue
            idle += 1
            if active and not deadline.left_s:
                missing = ", ".join(repr(flight.work.source.worker_id) for flight in active[:4])
                raise deadline.error(f"reading from {missing} ({len(active)} sources)")
            # Small transfers end within microseconds; long ones should not cost a core.
            time.sleep(0 if idle < 50 else min(1e-3, idle * 1e-6))

    def abandon(self) -> None:
        """What is under way is to be asked about by `busy` from now on."""
        # Of all that was posted: an interrupt may have come before a read was noted elsewhere.
        self._abandoned = [read for remote in self._remotes.values() for read in remote.pending]

    def is_drained(self) -> bool:
        """Whether no abandoned read is left."""
        if self.blocked:
            return not self._abandoned
        probed: dict[str, bool] = {}
        self._abandoned = [read for read in self._abandoned if not self._is_over(read, probed)]
        return not self._abandoned

    def _post(self, work: Work, batch: Batch, scratch: torch.Tensor) -> _Read:
        agent = agent_of(work.source)
        remote = self._remotes[agent.name]
        src, dst, length = runs(batch.of(work.reads))
        local_memory = "DRAM" if scratch.device.type == "cpu" else "VRAM"
        local = descriptors(dst, length, scratch.data_ptr(), scratch.device.index or 0)
        far = descriptors(src, length, work.source.arena_address, agent.device_id)
        try:
            handle = self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(local, local_memory),
                self._agent.get_xfer_descs(far, agent.memory),
                agent.name,
                backends=["UCX"],
            )
        except Exception as error:  # noqa: BLE001
            raise self._lost(remote, error, posted=False) from None
        read = _Read(remote, handle, scratch.data_ptr())
        remote.pending.append(read)
        try:
            if self._agent.transfer(handle) == "DONE":
                self._end(read)
        except Exception as error:  # noqa: BLE001
            read.failed = not is_disconnect(error)
            raise self._lost(remote, error) from None
        return read

    def _is_done(self, read: _Read) -> bool:
        if read.ended:
            return True
        try:
            state = self._agent.check_xfer_state(read.handle)
        except Exception as error:  # noqa: BLE001
            raise self._lost(read.remote, error) from None
        if state == "ERR":
            raise self._lost(read.remote, RuntimeError("NIXL reports an error"))
        if state == "PROC":
            return False
        self._end(read)
        return True

    def _is_over(self, read: _Read, probed: dict[str, bool]) -> bool:
        """Whether an abandoned read cannot write any more.

        Args:
            read: that was abandoned.
            probed: by worker id, whether it is gone; each is asked once, since one that cannot be
                reached takes `GONE_PROBE_S`.
        """
        if read.ended:
            return True
        if not read.failed:
            try:
                state = self._agent.check_xfer_state(read.handle)
            except Exception as error:  # noqa: BLE001
                read.remote.lost = True
                state = "DONE" if is_disconnect(error) else "ERR"
            if state == "PROC":
                return False
            read.failed = state == "ERR"
        # An error of one part of a transfer says nothing of its other parts.
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
    def _lost(remote: _Remote, error: BaseException, *, posted: bool = True) -> RefitError:
        remote.lost = remote.lost or posted
        worker_id = remote.source.worker_id
        return SourceLostError(f"source {worker_id!r} lost: {error!r}", (worker_id,))


def agent_of(source: Manifest) -> NixlAgent:
    """The agent that a source serves with.

    Raises:
        RefitConfigError: it has none.
    """
    if source.nixl is None:
        raise RefitConfigError(f"source {source.worker_id!r} has no NIXL agent; read it over TCP")
    return source.nixl
