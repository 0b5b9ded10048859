"""`NixlTransport`: one-sided reads, RDMA where there is any, else shared memory or TCP by UCX.

NIXL has no time-out and cannot take back a read: after its handle was released, and even after the
remote agent was removed, late bytes of a peer that was stopped still land in the buffer. So a read
that is abandoned keeps its handle and its remote agent, and the buffer stays busy until NIXL itself
says that the read is done or that the peer is disconnected.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any  # NIXL's agents and handles have no types

import torch

from refit_mx.deadline import Deadline
from refit_mx.errors import ProtocolError, RefitConfigError, RefitError, SourceLostError
from refit_mx.manifest import Manifest, NixlAgent
from refit_mx.source_client import SourceClient, is_gone
from refit_mx.transports.base import Fetch, FetchStats
from refit_mx.transports.batches import Batch, RowsDone, batches, split_reads
from refit_mx.transports.descriptors import descriptors, runs
from refit_mx.transports.nixl_library import (
    has_rdma,
    is_disconnect,
    is_unreachable,
    new_agent,
    nixl_available,
    prepare_environment,
)
from refit_mx.transports.nixl_source import NixlSource, register_memory
from refit_mx.transports.tcp import check_fetches

__all__ = ["NixlSource", "NixlTransport", "nixl_available", "prepare_environment"]

BATCH_BYTES = 8 << 20
"""Of one transfer where this side's processor copies: what has arrived is still in its cache."""
RDMA_BATCH_BYTES = 64 << 20
BATCH_RUNS = 1 << 14
"""Of one transfer; UCX holds a request of its own for each run."""
IN_FLIGHT = 2
"""Transfers of a source at a time, so that it never waits for this side."""
UNUSED_FETCHES = 4
"""A source that so many fetches did not read from is disconnected."""
DRAIN_S = 0.5
"""For the reads of the other sources to end after one has failed."""
GONE_PROBE_S = 0.2


class _Remote:
    """An agent that was connected to."""

    def __init__(self, source: Manifest, client: SourceClient) -> None:
        self.source = source
        self.client = client
        self.pending: list[_Read] = []
        self.lost = False
        self.unused = 0


class _Read:
    """A transfer that was posted."""

    def __init__(self, remote: _Remote, handle: Any, buffer: int) -> None:
        self.remote = remote
        self.handle = handle
        self.buffer = buffer
        self.failed = False
        self.ended = False


class _Work:
    """What is left to read from one source."""

    def __init__(self, index: int, fetch: Fetch, batch_bytes: int) -> None:
        self.index = index
        self.source = fetch.source
        self.reads, origins = split_reads(fetch.reads, batch_bytes, BATCH_RUNS)
        parts = list(
            batches(self.reads, most_bytes=batch_bytes, most_reads=BATCH_RUNS, most_runs=BATCH_RUNS)
        )
        self.rows = RowsDone(origins, parts)
        self.left = deque(parts)
        self.flying: deque[tuple[_Read, Batch]] = deque()


class NixlTransport:
    """See `refit_mx.transports.base.Transport`.

    Besides the one-sided reads it asks each source's server, before the first byte whether this is
    still the process of the manifest, and after the last one whether the version is still held.

    Args:
        connect_timeout_s: for connecting to a source's server and being greeted by it.
        threads: of UCX's own that carry out large transfers.

    Raises:
        RefitConfigError: NIXL cannot be used; `nixl_available` says why.
    """

    name = "nixl"

    def __init__(self, *, connect_timeout_s: float = 5.0, threads: int = 0) -> None:
        self._agent = new_agent("refit-receiver", serves=False, threads=threads)
        self._connect_timeout_s = connect_timeout_s
        self._registered: dict[int, tuple[torch.Tensor, Any]] = {}
        self._remotes: dict[str, _Remote] = {}
        self._abandoned: list[_Read] = []

    def register(self, scratch: torch.Tensor) -> None:
        """See `Transport.register`."""
        if scratch.data_ptr() in self._registered:
            raise RefitConfigError("the scratch buffer is registered already")
        self._registered[scratch.data_ptr()] = (scratch, register_memory(self._agent, scratch))

    def unregister(self, scratch: torch.Tensor) -> None:
        """See `Transport.unregister`.

        Raises:
            RefitConfigError: it is busy.
        """
        if self.busy(scratch):
            raise RefitConfigError("the scratch buffer is busy; an abandoned read may write to it")
        _, registration = self._registered.pop(scratch.data_ptr(), (None, None))
        if registration is not None:
            self._agent.deregister_memory(registration)

    def busy(self, scratch: torch.Tensor) -> bool:
        """See `Transport.busy`."""
        self._abandoned = [read for read in self._abandoned if not self._is_over(read)]
        return any(read.buffer == scratch.data_ptr() for read in self._abandoned)

    def fetch(
        self,
        fetches: Sequence[Fetch],
        scratch: torch.Tensor,
        *,
        deadline: Deadline,
        on_done: Callable[[int, int, int], None] | None = None,
    ) -> FetchStats:
        """See `Transport.fetch`."""
        check_fetches(fetches, scratch, set(self._registered))
        if self.busy(scratch):
            raise RefitConfigError("the scratch buffer is busy; an abandoned read may write to it")
        wanted = [fetch for fetch in fetches if len(fetch.reads)]
        for fetch in wanted:
            _agent_of(fetch.source)
        connected = sum(self._connect(fetch.source, deadline) for fetch in wanted)
        self._forget_unused(wanted)
        copies = scratch.device.type == "cpu" and not has_rdma()
        works = [
            _Work(index, fetch, BATCH_BYTES if copies else RDMA_BATCH_BYTES)
            for index, fetch in enumerate(fetches)
            if len(fetch.reads)
        ]
        started = time.monotonic()
        try:
            self._carry_out(works, scratch, deadline, on_done)
            seconds = time.monotonic() - started
            for work in works:
                remote = self._remotes[_agent_of(work.source).name]
                remote.client.check_held(version_id=work.source.version_id, deadline=deadline)
        except BaseException:
            self._abandon(works, deadline)
            raise
        nbytes = sum(fetch.reads.nbytes for fetch in fetches)
        return FetchStats(nbytes, seconds, connected)

    def close(self) -> None:
        """See `Transport.close`. Buffers that are busy stay so, and the agent with them."""
        for remote in self._remotes.values():
            remote.client.close()
        self._abandoned = [read for read in self._abandoned if not self._is_over(read)]
        for name, remote in list(self._remotes.items()):
            if not remote.pending:
                self._remove(name)

    def _carry_out(
        self,
        works: list[_Work],
        scratch: torch.Tensor,
        deadline: Deadline,
        on_done: Callable[[int, int, int], None] | None,
    ) -> None:
        idle = 0
        active = works
        while active:
            progressed = False
            for work in active:
                while work.left and len(work.flying) < IN_FLIGHT:
                    batch = work.left.popleft()
                    work.flying.append((self._post(work, batch, scratch), batch))
                    deadline.check(f"reading from {work.source.worker_id!r}")
                    if work.flying[0][0].ended:
                        break  # copied in the call itself
                while work.flying and self._is_done(work.flying[0][0]):
                    _, batch = work.flying.popleft()
                    progressed = True
                    first, last = work.rows.done(batch)
                    if on_done is not None and last > first:
                        on_done(work.index, first, last)
            active = [work for work in active if work.flying or work.left]
            if progressed:
                idle = 0
                continue
            idle += 1
            if active and not deadline.left_s:
                missing = ", ".join(repr(work.source.worker_id) for work in active[:4])
                raise deadline.error(f"reading from {missing} ({len(active)} sources)")
            # Small transfers end within microseconds; long ones should not cost a core.
            time.sleep(0 if idle < 50 else min(1e-3, idle * 1e-6))

    def _post(self, work: _Work, batch: Batch, scratch: torch.Tensor) -> _Read:
        agent = _agent_of(work.source)
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
        except Exception as error:  # noqa: BLE001 - NIXL's errors have no common base
            raise self._lost(remote, error, posted=False) from None
        read = _Read(remote, handle, scratch.data_ptr())
        remote.pending.append(read)
        try:
            if self._agent.transfer(handle) == "DONE":
                self._end(read)
        except Exception as error:  # noqa: BLE001
            read.failed = not is_disconnect(error)
            self._abandoned.append(read)
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

    def _is_over(self, read: _Read) -> bool:
        """Whether an abandoned read cannot write any more."""
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
        if read.failed and not is_gone(read.remote.source, GONE_PROBE_S):
            return False
        self._end(read)
        return True

    def _end(self, read: _Read) -> None:
        read.handle.release()
        read.remote.pending.remove(read)
        read.ended = True

    def _abandon(self, works: list[_Work], deadline: Deadline) -> None:
        self._abandoned += [read for work in works for read, _ in work.flying]
        until = time.monotonic() + min(DRAIN_S, deadline.left_s)
        while True:
            self._abandoned = [read for read in self._abandoned if not self._is_over(read)]
            if not self._abandoned or time.monotonic() >= until:
                return
            time.sleep(1e-3)

    def _connect(self, source: Manifest, deadline: Deadline) -> bool:
        agent = _agent_of(source)
        remote = self._remotes.get(agent.name)
        if remote is not None and remote.lost:
            if remote.pending:
                raise SourceLostError(
                    f"source {source.worker_id!r} was lost, and reads from it are not over",
                    (source.worker_id,),
                )
            self._remove(agent.name)
            remote = None
        if remote is not None:
            remote.client.connect(deadline)
            return False
        client = SourceClient(source, connect_timeout_s=self._connect_timeout_s)
        client.connect(deadline)
        try:
            name = self._agent.add_remote_agent(agent.metadata)
        except Exception as error:  # noqa: BLE001
            client.close()
            if is_unreachable(error):
                raise SourceLostError(
                    f"source {source.worker_id!r} lost while connecting: {error!r}",
                    (source.worker_id,),
                ) from None
            raise ProtocolError(
                f"source {source.worker_id!r}: NIXL refuses its metadata: {error!r}"
            ) from None
        name = name.decode() if isinstance(name, bytes) else name
        if name != agent.name:
            client.close()
            self._agent.remove_remote_agent(name)
            raise ProtocolError(
                f"source {source.worker_id!r}: its metadata is of agent {name!r}; "
                f"expected {agent.name!r}"
            )
        self._remotes[name] = _Remote(source, client)
        return True

    def _forget_unused(self, wanted: Sequence[Fetch]) -> None:
        used = {_agent_of(fetch.source).name for fetch in wanted}
        for name, remote in list(self._remotes.items()):
            remote.unused = 0 if name in used else remote.unused + 1
            if remote.unused > UNUSED_FETCHES and not remote.pending:
                self._remove(name)

    def _remove(self, name: str) -> None:
        self._remotes.pop(name).client.close()
        self._agent.remove_remote_agent(name)

    @staticmethod
    def _lost(remote: _Remote, error: BaseException, *, posted: bool = True) -> RefitError:
        remote.lost = remote.lost or posted
        worker_id = remote.source.worker_id
        return SourceLostError(f"source {worker_id!r} lost: {error!r}", (worker_id,))


def _agent_of(source: Manifest) -> NixlAgent:
    if source.nixl is None:
        raise RefitConfigError(f"source {source.worker_id!r} has no NIXL agent; read it over TCP")
    return source.nixl
