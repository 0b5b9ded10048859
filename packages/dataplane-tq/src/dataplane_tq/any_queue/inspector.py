"""`QueueInspector`: read-only inspector of a TransferQueue that another program started."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from itertools import compress
from multiprocessing.connection import Connection
from typing import Any, NoReturn  # Any: decoded msgpack

import msgspec
import numpy as np

from dataplane_core import (
    AssignmentSummary,
    ClaimSummary,
    PartitionNotFoundError,
    PartitionSummary,
    SampleState,
    StatePage,
    StorageSummary,
    TaskCounts,
    UnavailableError,
    UnknownTaskError,
    UnsupportedError,
)
from dataplane_core.arguments import checked_names
from dataplane_core.boundary import check_inspection
from dataplane_core.ledger.inspect import check_page
from dataplane_core.ledger.scan import check_search
from dataplane_tq.any_queue.partitions import (
    BlockedClaims,
    Claim,
    Partition,
    PartitionRead,
    add_tasks,
    column,
    merge_read,
    summarize,
)
from dataplane_tq.directory.wire import Reply

_START_S = 60.0
"""Deadline of the first answer: the reader's process imports Ray and joins the cluster."""
_GRACE_S = 1.0
_STALL_S = 5
_SHARE = 0.05
"""Share of the time for which reads of all partitions may run in the controller's process."""
_SEARCH_ROWS = 10_000
_ACKNOWLEDGED = 3
_INDEX = re.compile("#[0-9]{1,18}")
_ENDED = (
    "TransferQueue's controller no longer answers: its request thread ended (0.1.8 and 0.1.9 end "
    "it when a claim times out); restart the job"
)


class _ControllerRead(msgspec.Struct, frozen=True):
    """Answer of `remote_reads.read_controller`."""

    sampler: str
    answers: bool
    blocked_claims: list[Claim]
    partitions: dict[str, PartitionRead]
    busy_s: float


class QueueInspector:
    """Inspector of the TransferQueue of a Ray cluster, whichever program started it.

    It changes nothing. It reads through Ray, in the main thread of the controller's process; the
    controller answers its clients in another thread. Reads of all partitions take at most a
    twentieth of the time; in between, answers come from the last such read. Pages after the first
    (``start`` above 0) always do. Reads of single samples and searches are not limited. Ages
    count from the read in which a sample was first seen.

    TransferQueue has no leases, owners or required fields: a task's samples are unclaimed or
    acknowledged. Samples without a key are named by their index, such as "#17".

    Args:
        address: address of the cluster, as for `ray.init`; "auto" for the one on this machine.
        timeout_s: deadline of one query, in seconds.

    Attributes:
        tasks_claim: True: TransferQueue declares no tasks, so it lists those that have claimed.
        fault: one sentence on why the controller no longer answers the job, as of the newest read;
            None if it answers. Either way, the controller's state can be read.

    Raises:
        ConfigError: (a ValueError) the cluster's TransferQueue belongs to a data plane of this
            package: attach a client.
        UnavailableError: no cluster answers, or after ``timeout_s`` it runs no TransferQueue, or
            one older than 0.1.8.
    """

    fault: str | None = None
    tasks_claim = True

    def __init__(self, address: str, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._partitions: dict[str, Partition] = {}
        self._blocked_claims = BlockedClaims()
        self._next_read_s = 0.0
        self._reads = 0
        self._connection, other = _pair()
        with other:
            self._process = subprocess.Popen(  # noqa: S603  # this interpreter and our module
                [
                    sys.executable,
                    "-P",  # without the working directory on the module path
                    *("-m", "dataplane_tq.any_queue.reader_process"),
                    *(str(other.fileno()), address, str(timeout_s)),
                ],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal must not end the reader
            )
        try:
            self._refresh(_START_S)
        except BaseException:  # the caller gets no inspector that it could close
            self.close()
            raise

    def close(self) -> None:
        """End the reader's process. Idempotent."""
        self._connection.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel
            self._process.wait(_GRACE_S)

    def list_partitions(self) -> list[PartitionSummary]:
        with self._lock:
            self._refresh()
            now = time.monotonic()
            return [
                summarize(name, partition, self._blocked_claims, now)
                for name, partition in self._partitions.items()
            ]

    def list_storage(self) -> list[StorageSummary]:
        with self._lock:
            return self._ask("list_storage", _STORAGE)

    def read_totals(self) -> dict[str, int]:
        raise UnsupportedError("TransferQueue counts no operations; trace its clients")

    def count_samples(
        self, partition_id: str, task_name: str, required_fields: list[str]
    ) -> TaskCounts:
        operation = "count_samples"
        partition_id, task_name = check_inspection(operation, partition_id, task_name=task_name)
        names = checked_names(operation, "required_fields", required_fields)
        with self._lock:
            partition = self._partition(operation, partition_id)
        if task_name not in partition.tasks:
            raise UnknownTaskError(
                f"{operation}: partition {partition_id!r}: task {task_name!r} has not claimed; "
                f"tasks that have claimed: {', '.join(partition.tasks) or 'none'}"
            )
        acknowledged = partition.acknowledged[:, partition.tasks.index(task_name)]
        ready = ~acknowledged
        for name in names:
            ready &= column(partition, name)
        return TaskCounts(
            put=len(acknowledged),
            ready=int(ready.sum()),
            not_ready=int((~acknowledged & ~ready).sum()),
            leased=0,
            acknowledged=int(acknowledged.sum()),
            cleared=0,
        )

    def list_samples(
        self, partition_id: str, *, start: int = 0, limit: int = 100
    ) -> list[SampleState]:
        (partition_id,) = check_inspection("list_samples", partition_id)
        start, limit = check_page("list_samples", start, limit)
        with self._lock:
            partition = self._partition("list_samples", partition_id, start)
            places = range(start, min(start + limit, len(partition.rows)))
            return self._states(partition_id, partition, places)

    def read_sample(self, partition_id: str, sample_id: str) -> SampleState | None:
        partition_id, sample_id = check_inspection("read_sample", partition_id, sample_id=sample_id)
        with self._lock:
            partition = self._partition("read_sample", partition_id)
            row = self._ask("find_row", _ROW, partition_id, sample_id)
            if row is None and _INDEX.fullmatch(sample_id):
                row = int(sample_id[1:])
            places = np.flatnonzero(partition.rows == (-1 if row is None else row))
            states = self._states(partition_id, partition, places.tolist())
            return next((state for state in states if state.sample_id == sample_id), None)

    def find_samples(
        self, partition_id: str, *, tag: str, value: object, limit: int = 100
    ) -> list[SampleState]:
        partition_id, tag = check_inspection("find_samples", partition_id, tag=tag)
        wanted, limit = check_search(tag, value, limit)
        deadline = time.monotonic() + self._timeout_s
        with self._lock:
            partition = self._partition("find_samples", partition_id)
        matching: list[SampleState] = []
        # All steps search the rows of one read; some may have been cleared since.
        for start in range(0, len(partition.rows), _SEARCH_ROWS):
            if len(matching) >= limit:
                break
            if start and time.monotonic() >= deadline:
                raise UnavailableError(
                    f"find_samples: searched {start} of {len(partition.rows)} samples within "
                    f"{self._timeout_s:g} s"
                )
            places = range(start, min(start + _SEARCH_ROWS, len(partition.rows)))
            with self._lock:
                matching += self._states(partition_id, partition, places, tag, wanted)
        return matching[:limit]

    def list_claims(self, partition_id: str) -> list[ClaimSummary]:
        """Return no claims: TransferQueue has no leases."""
        check_inspection("list_claims", partition_id)
        return []

    def list_assignments(self, partition_id: str) -> list[AssignmentSummary]:
        """Return no assignments: TransferQueue does not report those of its samplers."""
        check_inspection("list_assignments", partition_id)
        return []

    def scan_states(self, partition_id: str, *, start: int = 0, limit: int = 10_000) -> StatePage:
        (partition_id,) = check_inspection("scan_states", partition_id)
        start, limit = check_page("scan_states", start, limit)
        with self._lock:
            partition = self._partition("scan_states", partition_id, start)
        page = slice(start, start + limit)
        return StatePage(
            total=len(partition.rows),
            start=start,
            fields=tuple(partition.fields),
            tasks=partition.tasks,
            written=partition.written[page].astype(np.uint8).tobytes(),
            states=(partition.acknowledged[page] * np.uint8(_ACKNOWLEDGED)).tobytes(),
        )

    def reset_consumption(self, partition_id: str, task_name: str, sample_ids: list[str]) -> int:
        """Refuse: this inspector changes nothing."""
        _refuse("reset_consumption")

    def end_claim(self, partition_id: str, claim: str, *, expired_only: bool = True) -> int:
        """Refuse: this inspector changes nothing."""
        _refuse("end_claim")

    def clear_samples(
        self, sample_ids: list[str] | None, partition_id: str, *, force: bool = False
    ) -> None:
        """Refuse: this inspector changes nothing."""
        _refuse("clear_samples")

    def _partition(self, operation: str, partition_id: str, start: int = 0) -> Partition:
        # The pages of one list come from one read, unless another query reads in between.
        if start == 0 or partition_id not in self._partitions:
            self._refresh()
        try:
            return self._partitions[partition_id]
        except KeyError:
            raise PartitionNotFoundError(
                f"{operation}: TransferQueue has no partition {partition_id!r}"
            ) from None

    def _states(
        self, partition_id: str, partition: Partition, places: range | list[int], *match: object
    ) -> list[SampleState]:
        """Return the samples at these places of the last read, except those cleared since.

        Args:
            match: name and value of a tag that the samples must have; nothing for all samples.
        """
        rows = partition.rows[list(places)].tolist()
        place_of = dict(zip(rows, places, strict=True))
        read = self._ask("read_samples", _SAMPLES, partition_id, rows, *match) if rows else []
        now = time.monotonic()
        return [
            SampleState(
                sample_id=f"#{row}" if key is None else key,
                fields=tuple(compress(partition.fields, partition.written[place])),
                tags=tags,
                tasks={
                    task: "acknowledged" if acknowledged else "unclaimed"
                    for task, acknowledged in zip(
                        partition.tasks, partition.acknowledged[place], strict=True
                    )
                },
                age_s=max(0.0, now - float(partition.since[place])),
            )
            for row, hashed, key, tags in read
            # Exclude an index that another sample has received since.
            if hashed == partition.keys[place := place_of[row]]
        ]

    def _refresh(self, timeout_s: float | None = None) -> None:
        """Read the controller, unless the reads' share of its time is used up."""
        if time.monotonic() < self._next_read_s:
            return
        checksums = {name: partition.checksum for name, partition in self._partitions.items()}
        read = self._ask("read_controller", _CONTROLLER, checksums, timeout_s=timeout_s)
        if read.sampler.startswith("dataplane_tq."):
            raise UnavailableError("this cluster's data plane is starting; attach again")
        now = time.monotonic()
        self._next_read_s = now + read.busy_s * (1 / _SHARE - 1)
        self.fault = None if read.answers else _ENDED
        self._reads += 1  # revisions continue when a partition returns
        last = self._partitions
        partitions = {
            name: merge_read(last.get(name), partition, self._reads, now)
            for name, partition in read.partitions.items()
        }
        self._blocked_claims.update(read.blocked_claims, partitions, now)
        self._partitions = {
            name: add_tasks(
                partition, self._blocked_claims.tasks(name), last.get(name), self._reads
            )
            for name, partition in partitions.items()
        }

    def _ask(
        self,
        method: str,
        decoder: msgspec.msgpack.Decoder[Any],
        *arguments: Any,
        timeout_s: float | None = None,
    ) -> Any:
        within = (self._timeout_s if timeout_s is None else timeout_s) + _GRACE_S
        try:
            self._connection.send_bytes(msgspec.msgpack.encode([method, arguments]))
            if not self._connection.poll(within):
                raise TimeoutError
            reply = _REPLY.decode(self._connection.recv_bytes())
        except (TimeoutError, BlockingIOError):
            self.close()
            raise UnavailableError(f"{method}: no answer within {within:g} s") from None
        except (EOFError, OSError):
            self.close()
            raise UnavailableError(
                f"{method}: the connection to the Ray cluster was lost"
            ) from None
        if reply.failure is not None:
            raise reply.failure.raised()
        return decoder.decode(reply.answer)


# Built on import: msgspec crashes if two threads build decoders of a new type at once.
_REPLY = msgspec.msgpack.Decoder(Reply)
_CONTROLLER = msgspec.msgpack.Decoder(_ControllerRead)
_STORAGE = msgspec.msgpack.Decoder(list[StorageSummary])
_ROW = msgspec.msgpack.Decoder(int | None)
_SAMPLES = msgspec.msgpack.Decoder(
    list[tuple[int, int, str | None, dict[str, str | int | float | bool | None]]]
)


def _pair() -> tuple[Connection, socket.socket]:
    """Return both ends of a connection; calls on the first end block up to `_STALL_S` seconds."""
    own, other = socket.socketpair()
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        own.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _STALL_S, 0))
    return Connection(own.detach()), other


def _refuse(method: str) -> NoReturn:
    raise UnsupportedError(
        f"{method}: another program started this TransferQueue; the inspector only reads it"
    )
