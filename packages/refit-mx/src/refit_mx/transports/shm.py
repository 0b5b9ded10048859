"""`ShmTransport`: reads sources of the same machine where they lie, in memory that both map.

It needs no library and no right to look into another process's memory, which UCX needs between two
processes of a machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from refit_mx.byte_spans import host_bytes
from refit_mx.deadline import Deadline
from refit_mx.errors import ProtocolError, RefitConfigError, SourceLostError
from refit_mx.manifest import Manifest, SharedMemory
from refit_mx.reads import ReadTable
from refit_mx.shared_memory import attach, shared_memory_missing
from refit_mx.side_by_side import together
from refit_mx.source_client import SourceClient
from refit_mx.transports.base import UNUSED_FETCHES, Fetch, FetchStats
from refit_mx.transports.tcp import check_fetches
from refit_mx.transports.work import OnDone, Work

BATCH_BYTES = 2 << 20
"""Copied at a time: a whole piece, which the thread that copied it verifies while it is in the
core's own cache: for 0.5 GiB a sixth less time than with 16 MiB."""
BATCH_READS = 1 << 12
LANE_BYTES = 32 << 20
"""Of a fetch from which on several threads copy."""
MOST_LANES = 2

_Bytes = npt.NDArray[np.uint8]


class _Key(NamedTuple):
    """All that a manifest says of a mapped memory: one that says something else is another."""

    shared: SharedMemory
    arena_bytes: int
    worker_id: str
    endpoint: str
    incarnation: str


class _Source:
    """One whose memory is mapped."""

    def __init__(self, memory: _Bytes, client: SourceClient) -> None:
        self.memory = memory
        self.client = client
        self.unused = 0


class ShmTransport:
    """See `refit_mx.transports.base.Transport`. Into memory of the CPU alone.

    As `refit_mx.transports.nixl.NixlTransport` it asks each source's server, before the first byte
    whether this is still the process of the manifest, and after the last one whether the version is
    still held. Nobody else writes into its buffers, so they are never busy after a fetch.

    Args:
        connect_timeout_s: for connecting to a source's server and being greeted by it.
        lanes: threads that copy a large fetch; None is one a core that this process may use, at
            most `MOST_LANES`.

    Raises:
        RefitConfigError: this system has no such memory.
    """

    name = "shm"
    piece_bytes = BATCH_BYTES

    def __init__(self, *, connect_timeout_s: float = 5.0, lanes: int | None = None) -> None:
        why = shared_memory_missing()
        if why is not None:
            raise RefitConfigError(f"transport 'shm': {why}")
        if lanes is not None and lanes < 1:
            raise RefitConfigError(f"lanes {lanes}; expected at least 1")
        self._connect_timeout_s = connect_timeout_s
        self._most_lanes = lanes or min(MOST_LANES, len(os.sched_getaffinity(0)))
        self._threads: ThreadPoolExecutor | None = None
        self._registered: set[int] = set()
        self._sources: dict[_Key, _Source] = {}

    def register(self, scratch: torch.Tensor) -> None:
        """See `Transport.register`."""
        host_bytes(scratch)  # refuses what it cannot write to
        self._registered.add(scratch.data_ptr())

    def unregister(self, scratch: torch.Tensor) -> None:
        """See `Transport.unregister`."""
        self._registered.discard(scratch.data_ptr())

    def busy(self, scratch: torch.Tensor) -> bool:
        """Always False: `fetch` ends its threads before it raises."""
        return False

    def fetch(
        self,
        fetches: Sequence[Fetch],
        scratch: torch.Tensor,
        *,
        deadline: Deadline,
        on_done: OnDone | None = None,
    ) -> FetchStats:
        """See `Transport.fetch`."""
        check_fetches(fetches, scratch, self._registered)
        wanted = [fetch for fetch in fetches if len(fetch.reads)]
        keys = [_key(fetch.source) for fetch in wanted]
        nbytes = sum(fetch.reads.nbytes for fetch in fetches)
        try:
            connected = sum(self._connect(fetch.source, deadline) for fetch in wanted)
            self._forget_unused(keys)
            works = [
                Work(index, fetch, batch_bytes=BATCH_BYTES, batch_reads=BATCH_READS)
                for index, fetch in enumerate(fetches)
                if len(fetch.reads)
            ]
            memories = {
                work.index: self._sources[key].memory for work, key in zip(works, keys, strict=True)
            }
            started = time.monotonic()
            copying = partial(_copy, works, memories, host_bytes(scratch), deadline, on_done)
            lanes = self._most_lanes if nbytes >= LANE_BYTES else 1
            if lanes > 1 and self._threads is None:
                self._threads = ThreadPoolExecutor(lanes - 1, thread_name_prefix="refit-shm")
            together(self._threads, [copying] * lanes)
            seconds = time.monotonic() - started
            memories.clear()  # the frame lives as long as an error that is kept
            for fetch, key in zip(wanted, keys, strict=True):
                self._sources[key].client.check_held(
                    version_id=fetch.source.version_id, deadline=deadline
                )
        except SourceLostError as error:
            # Its memory would stay for as long as it is mapped.
            lost = set(error.worker_ids)
            self._forget(key for key in list(self._sources) if key.worker_id in lost)
            raise
        return FetchStats(nbytes, seconds, connected)

    def close(self) -> None:
        """See `Transport.close`."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        self._forget(list(self._sources))

    def _connect(self, source: Manifest, deadline: Deadline) -> bool:
        """Whether its server had to be connected to."""
        try:
            mapped = self._mapped(source)
        except OSError as error:
            client = SourceClient(source, connect_timeout_s=self._connect_timeout_s)
            with closing(client):  # one that is gone is lost
                client.check_held(version_id=source.version_id, deadline=deadline)
            raise RefitConfigError(
                f"transport 'shm': the memory of source {source.worker_id!r} cannot be mapped here "
                f"({error}); expected a process of this machine and user, whose PID can be seen "
                "from here; use 'auto', 'nixl' or 'tcp'"
            ) from None
        return mapped.client.connect(deadline)

    def _mapped(self, source: Manifest) -> _Source:
        key = _key(source)
        if key not in self._sources:
            nbytes = source.arena_bytes
            memory = np.frombuffer(attach(key.shared, nbytes), np.uint8, nbytes)
            client = SourceClient(source, connect_timeout_s=self._connect_timeout_s)
            self._sources[key] = _Source(memory, client)
        return self._sources[key]

    def _forget_unused(self, used: Sequence[_Key]) -> None:
        for key, source in list(self._sources.items()):
            source.unused = 0 if key in used else source.unused + 1
            if source.unused > UNUSED_FETCHES:
                self._forget([key])

    def _forget(self, keys: Iterable[_Key]) -> None:
        for key in keys:
            source = self._sources.pop(key, None)
            if source is not None:
                source.client.close()


def reaches(source: Manifest) -> bool:
    """Whether this process can map a source's memory."""
    if source.shm is None:
        return False
    try:
        attach(source.shm, source.arena_bytes).close()
    except (OSError, ProtocolError):
        return False
    return True


def _copy(
    works: Sequence[Work],
    memories: Mapping[int, _Bytes],
    scratch: _Bytes,
    deadline: Deadline,
    on_done: OnDone | None,
    stopped: Callable[[], bool],
) -> None:
    """Copy what other threads do not take."""
    active = list(works)
    while active and not stopped():
        for work in tuple(active):
            batch = work.take()
            if batch is None:
                active.remove(work)
                continue
            deadline.check(f"reading from {work.source.worker_id!r}")
            _copy_reads(batch.of(work.reads), memories[work.index], scratch)
            deadline.moved()
            work.done(batch, on_done)


def _copy_reads(reads: ReadTable, source: _Bytes, scratch: _Bytes) -> None:
    """All of them are inside of both memories, which `check_fetches` has seen to."""
    for src, dst, run, n1, src1, dst1, n2, src2, dst2 in reads.rows.tolist():
        if n1 == n2 == 1:
            np.copyto(scratch[dst : dst + run], source[src : src + run])
        else:
            shape = (n2, n1, run)
            np.copyto(
                np.ndarray(shape, np.uint8, scratch, dst, (dst2, dst1, 1)),
                np.ndarray(shape, np.uint8, source, src, (src2, src1, 1)),
            )


def _key(source: Manifest) -> _Key:
    """Which memory of which source.

    Raises:
        RefitConfigError: it does not share it.
    """
    if source.shm is None:
        raise RefitConfigError(
            f"source {source.worker_id!r} does not share its memory; read it over NIXL or TCP"
        )
    return _Key(
        source.shm, source.arena_bytes, source.worker_id, source.endpoint, source.incarnation
    )
