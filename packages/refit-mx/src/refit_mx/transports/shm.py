"""`ShmTransport`: copies from local sources out of memory that both processes map.

Unlike UCX between two processes of a machine, it needs no library and no permission to read another
process's memory.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from refit_mx.concurrency import run_concurrently
from refit_mx.deadline import Deadline
from refit_mx.errors import ProtocolError, RefitConfigError, SourceLostError
from refit_mx.manifest.byte_spans import host_bytes
from refit_mx.manifest.format import Manifest, SharedMemory
from refit_mx.manifest.reads import ReadTable
from refit_mx.memory.cuda import on_separate_stream
from refit_mx.memory.mapping import attach, shared_memory_missing
from refit_mx.transports.base import UNUSED_FETCHES, ReadStats, SourceReads
from refit_mx.transports.batches import BatchQueue, OnDone
from refit_mx.transports.source_client import SourceClient
from refit_mx.transports.tcp import check_source_reads

BATCH_BYTES = 2 << 20
"""Size of one copy: a read of maximum length, verified by the thread that copied it while it is in
that core's cache. 0.5 GiB takes a sixth less time than with 16 MiB."""
BATCH_READS = 1 << 12
LANE_BYTES = 32 << 20
"""Size from which several threads copy a fetch."""
MAX_LANES = 2

_Bytes = npt.NDArray[np.uint8]


class _Key(NamedTuple):
    """All that a manifest says about a mapped memory; any difference means another memory."""

    shared: SharedMemory
    arena_bytes: int
    worker_id: str
    endpoint: str
    incarnation: str


@dataclass(eq=False)
class _Source:
    """A source with mapped memory."""

    memory: _Bytes
    client: SourceClient
    unused: int = 0


class ShmTransport:
    """Transport from shared CPU memory into CPU or GPU memory; see `Transport`.

    Like `refit_mx.transports.nixl.NixlTransport` it sends two requests to each source's server:
    before the first byte, to check that the process is still the one in the manifest, and after the
    last, that the version is still held. Only its threads write into its buffers, so they are never
    busy after a fetch.

    ``lanes`` is the number of threads that copy a large fetch; None is one per core that this
    process may use, up to `MAX_LANES`.

    Raises:
        RefitConfigError: this system cannot share memory.
    """

    name = "shm"
    max_read_bytes = BATCH_BYTES

    def __init__(self, *, connect_timeout_s: float = 5.0, lanes: int | None = None) -> None:
        why = shared_memory_missing()
        if why is not None:
            raise RefitConfigError(f"transport 'shm': {why}")
        self._connect_timeout_s = connect_timeout_s
        self._max_lanes = lanes or min(MAX_LANES, len(os.sched_getaffinity(0)))
        self._threads: ThreadPoolExecutor | None = None
        self._registered: set[int] = set()
        self._sources: dict[_Key, _Source] = {}

    def register(self, scratch: torch.Tensor) -> None:
        _destination(scratch)  # raises if it cannot write to the buffer
        self._registered.add(scratch.data_ptr())

    def unregister(self, scratch: torch.Tensor) -> None:
        self._registered.discard(scratch.data_ptr())

    def busy(self, scratch: torch.Tensor) -> bool:
        """Return False: `read` ends its threads before it raises."""
        return False

    def read(
        self,
        source_reads: Sequence[SourceReads],
        scratch: torch.Tensor,
        *,
        deadline: Deadline,
        on_done: OnDone | None = None,
    ) -> ReadStats:
        check_source_reads(source_reads, scratch, self._registered)
        queues = [
            BatchQueue(index, each, on_done, batch_bytes=BATCH_BYTES, batch_reads=BATCH_READS)
            for index, each in enumerate(source_reads)
            if len(each.reads)
        ]
        keys = [_key(queue.source) for queue in queues]
        nbytes = sum(each.reads.nbytes for each in source_reads)
        try:
            connected = sum(self._connect(queue.source, deadline) for queue in queues)
            self._forget_unused(keys)
            memories = {
                queue.index: self._sources[key].memory
                for queue, key in zip(queues, keys, strict=True)
            }
            started = time.monotonic()
            copying = partial(_copy, queues, memories, _destination(scratch), deadline)
            lanes = self._max_lanes if nbytes >= LANE_BYTES else 1
            if lanes > 1 and self._threads is None:
                self._threads = ThreadPoolExecutor(lanes - 1, thread_name_prefix="refit-shm")
            run_concurrently(self._threads, [copying] * lanes)
            seconds = time.monotonic() - started
            memories.clear()  # a stored error would keep the frame and so the mappings alive
            for queue, key in zip(queues, keys, strict=True):
                client = self._sources[key].client
                client.check_held(version_id=queue.source.version_id, deadline=deadline)
        except SourceLostError as error:
            # The kernel does not free a lost source's memory while it is mapped here.
            lost = set(error.worker_ids)
            self._forget(key for key in list(self._sources) if key.worker_id in lost)
            raise
        return ReadStats(nbytes, seconds, connected)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        self._forget(list(self._sources))

    def _connect(self, source: Manifest, deadline: Deadline) -> bool:
        """Map and connect a source; return whether its server had to be connected."""
        try:
            # Keep only the client: an error keeps the locals of its frames, and so a mapping.
            client = self._mapped(source).client
        except OSError as error:
            client = SourceClient(source, connect_timeout_s=self._connect_timeout_s)
            with closing(client):  # if the source is gone, report it as lost
                client.check_held(version_id=source.version_id, deadline=deadline)
            raise RefitConfigError(
                f"transport 'shm': the memory of source {source.worker_id!r} cannot be mapped here "
                f"({error}); expected a process of the same machine and user, with a PID visible "
                "here; use 'auto', 'nixl' or 'tcp'"
            ) from None
        return client.connect(deadline)

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


def can_map(source: Manifest) -> bool:
    """Return whether this process can map a source's memory."""
    if source.shm is None:
        return False
    try:
        attach(source.shm, source.arena_bytes).close()
    except (OSError, ProtocolError):
        return False
    return True


def _copy(
    queues: Sequence[BatchQueue],
    memories: Mapping[int, _Bytes],
    scratch: _Bytes | torch.Tensor,
    deadline: Deadline,
    stopped: Callable[[], bool],
) -> None:
    """Copy the batches that other threads do not take."""
    active = list(queues)
    while active and not stopped():
        for queue in tuple(active):
            batch = queue.take()
            if batch is None:
                active.remove(queue)
                continue
            deadline.check(f"reading from {queue.source.worker_id!r}")
            reads, memory = batch.rows_of(queue.reads), memories[queue.index]
            if isinstance(scratch, torch.Tensor):
                _copy_to_device(reads, _as_tensor(memory), scratch)
            else:
                _copy_reads(reads, memory, scratch)
            deadline.record_progress()
            queue.done(batch)


def _copy_reads(reads: ReadTable, source: _Bytes, scratch: _Bytes) -> None:
    """Copy reads, which `check_source_reads` has found to be inside both memories."""
    for src, dst, run, n1, src1, dst1, n2, src2, dst2 in reads.rows.tolist():
        if n1 == n2 == 1:
            np.copyto(scratch[dst : dst + run], source[src : src + run])
        else:
            shape = (n2, n1, run)
            np.copyto(
                np.ndarray(shape, np.uint8, scratch, dst, (dst2, dst1, 1)),
                np.ndarray(shape, np.uint8, source, src, (src2, src1, 1)),
            )


def _copy_to_device(reads: ReadTable, source: torch.Tensor, scratch: torch.Tensor) -> None:
    """Copy reads as `_copy_reads` does, and wait for the copies."""
    with on_separate_stream(scratch.device):
        for src, dst, run, n1, src1, dst1, n2, src2, dst2 in reads.rows.tolist():
            shape = (n2, n1, run)
            into = scratch.as_strided(shape, (dst2, dst1, 1), scratch.storage_offset() + dst)
            into.copy_(source.as_strided(shape, (src2, src1, 1), src))


def _as_tensor(memory: _Bytes) -> torch.Tensor:
    """Return mapped memory as a tensor, which must not be used longer than ``memory``."""
    # torch warns when it makes a tensor from a read-only array.
    unowned = (ctypes.c_uint8 * memory.nbytes).from_address(memory.ctypes.data)
    return torch.frombuffer(unowned, dtype=torch.uint8)


def _destination(scratch: torch.Tensor) -> _Bytes | torch.Tensor:
    return host_bytes(scratch) if scratch.device.type == "cpu" else scratch


def _key(source: Manifest) -> _Key:
    """Return the key of a source's memory.

    Raises:
        RefitConfigError: the source does not share its memory.
    """
    if source.shm is None:
        raise RefitConfigError(
            f"source {source.worker_id!r} does not share its memory; read it over NIXL or TCP"
        )
    return _Key(
        source.shm, source.arena_bytes, source.worker_id, source.endpoint, source.incarnation
    )
