"""`PackedStorageManager`: the packed backend as a storage manager of TransferQueue.

It serves two kinds of clients. `TQDataPlaneClient` moves its values itself and uses TransferQueue
only to register rows. TransferQueue's own clients put and get through this manager, if the queue
was started by `dataplane_tq.storage.packed_bootstrap`: then the config has the key `RAW`.

`dataplane_tq.storage.packed_rows` stores the rows, and explains what a cell is. A put reports its
cells to the controller.
"""

from __future__ import annotations

import asyncio
import logging
from collections import UserDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, TypeVar  # Any: TransferQueue's metas have no static types

import numpy as np
from tensordict import TensorDict

from dataplane_core import (
    CapacityExceeded,
    DeadlineExceededError,
    InvalidRequestError,
    MissingDataError,
    UnavailableError,
    UnsupportedError,
)
from dataplane_core.errors import listed
from dataplane_tq.storage.clear_marks import cells_of_row, remove_clear_marks, reported_cells
from dataplane_tq.storage.new_keys import exchange, forget_new_keys
from dataplane_tq.storage.packed_rows import (
    Cells,
    RawStore,
    RowsConnection,
    field_schema,
    merge_columns,
)
from dataplane_tq.upstream import (
    StorageManager,
    StorageManagerFactory,
    fast_metas,
)

BACKEND = "PackedStorage"
"""Name of the backend in TransferQueue's registries, and of its configuration section."""

RAW = "raw"
"""Key of the manager's config; only `dataplane_tq.storage.packed_bootstrap` sets it."""

_MAX_PUTS = 32
"""Maximum puts of a process that run at once; others are blocked until one ends."""
_SHAPES = "per_sample_shapes"

_REFUSALS = (CapacityExceeded, InvalidRequestError, UnsupportedError)
"""Errors after which a put has stored nothing."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class RawConnection(RowsConnection, frozen=True):
    """Connection of TransferQueue's own clients, part of TransferQueue's configuration.

    Unpickling it imports this module, which registers the manager in a process that only calls
    ``transfer_queue.init()``.
    """


@StorageManagerFactory.register(BACKEND)
class PackedStorageManager(StorageManager):
    """Storage manager for TransferQueue's own clients; `TQDataPlaneClient` does not put through it.

    Args:
        controller_info: TransferQueue's description of the controller's sockets.
        config: for TransferQueue's own clients it has a `RawConnection` at `RAW`.
        zmq_context: the client's context; None creates a new context.
    """

    def __init__(
        self, controller_info: Any, config: Mapping[str, Any], zmq_context: Any = None
    ) -> None:
        super().__init__(controller_info, config, zmq_context=zmq_context)
        connection = config.get(RAW)
        # The clients of a data plane have no registration; those of `transfer_queue.init` have one.
        self._is_guest = connection is None and "registration" in config
        # A put blocks its thread while the store is full; clears and gets need other threads.
        self._putters = ThreadPoolExecutor(_MAX_PUTS, "packed-put")
        self._raw = None if connection is None else RawStore(connection)
        self._fast_metas = ExitStack()
        if self._raw is not None:
            self._fast_metas.enter_context(fast_metas(field_schema))

    async def put_data(
        self, data: TensorDict, metadata: Any, data_parser: Callable[[Any], Any] | None = None
    ) -> None:
        """Store rows, then report their schema and cells to the controller.

        A refused put removes the keys that ``kv_put`` has registered for it.

        Raises:
            UnsupportedError: (a NotImplementedError) ``data_parser`` is given, or the queue belongs
                to a data plane.
            InvalidRequestError: the rows are of several partitions, or a value cannot be stored.
            DeadlineExceededError: the rows are stored, but it is unknown whether TransferQueue's
                controller knows of them; or an earlier put of the rows is not reported yet.
            UnavailableError: the rows are stored, but the controller refused their report.
            DataPlaneError: as `RawStore.put`.
        """
        raw = self._require_raw("write")
        try:
            await self._put(raw, data, metadata, data_parser)
        except _REFUSALS:
            await self._forget_new_keys(raw, metadata)
            raise

    async def _put(
        self,
        raw: RawStore,
        data: TensorDict,
        metadata: Any,
        data_parser: Callable[[Any], Any] | None,
    ) -> None:
        if data_parser is not None:
            raise UnsupportedError(f"{BACKEND} does not run a data_parser; parse before the put")
        if metadata.size == 0 or not data.keys():
            return
        if not data.batch_size:
            raise InvalidRequestError(
                f"put_data: the values have no batch dimension; expected {metadata.size} rows"
            )
        partition_ids = set(metadata.partition_ids)
        if len(partition_ids) != 1:
            raise InvalidRequestError(
                f"put_data: rows of the partitions {listed(sorted(partition_ids))}; put each "
                "partition's rows separately"
            )
        partition_id, indexes = metadata.partition_ids[0], metadata.global_indexes
        stored = _cells_of(metadata, range(metadata.size))

        def store() -> Cells:
            report = partial(self._report, partition_id, indexes, field_schema(data), raw.timeout_s)
            return raw.put(partition_id, indexes, data, stored, report)

        # The copied context makes the caller's span the parent, as asyncio.to_thread does.
        run = partial(copy_context().run, store)
        cells = await asyncio.get_running_loop().run_in_executor(self._putters, run)
        for name, column in cells.items():
            for row, cell in zip(metadata._custom_backend_meta, column.tolist(), strict=True):
                row[name] = cell

    def _report(
        self,
        partition_id: str,
        indexes: Sequence[int],
        schema: dict[str, dict[str, Any]],
        timeout_s: float,
        cells: Cells,
    ) -> None:
        """Do what `notify_data_update` does, with a message that the controller decodes faster.

        TransferQueue's method only logs that the controller did not answer, and ignores a refusal.
        """
        body = {
            "partition_id": partition_id,
            "global_indexes": indexes,
            "field_schema": {
                name: {
                    key: dict(zip(indexes, value, strict=True)) if key == _SHAPES else value
                    for key, value in field.items()
                }
                for name, field in schema.items()
            },
            "custom_backend_meta": dict(zip(indexes, _by_row(cells), strict=True)),
        }
        # The controller copies plain dicts and lists element by element; a UserDict is one pickle.
        answered = exchange(
            self, "NOTIFY_DATA_UPDATE", "NOTIFY_DATA_UPDATE_ACK", UserDict(body), timeout_s
        )
        reported = asyncio.run_coroutine_threadsafe(answered, self._notify_loop)
        what = (
            f"put(partition={partition_id!r}): the rows are stored, but TransferQueue's controller"
        )
        try:
            answer = reported.result(timeout_s)
        except TimeoutError:
            reported.cancel()  # sent later, it could overtake the report of a later put
            raise DeadlineExceededError(
                f"{what} did not confirm their report within {timeout_s:g} s"
            ) from None
        if not answer["success"]:
            raise UnavailableError(
                f"{what} refused their report; was the partition cleared meanwhile? See the "
                "controller's log"
            )

    async def _forget_new_keys(self, raw: RawStore, metadata: Any) -> None:
        """Remove the keys of rows that have neither values nor tags; log a failure."""
        try:
            for partition_id, at in _by_partition(metadata).items():
                indexes = [metadata.global_indexes[i] for i in at]
                empty = await asyncio.to_thread(raw.missing, partition_id, indexes)
                if empty:
                    await forget_new_keys(self, partition_id, empty, raw.timeout_s)
        except Exception:  # the caller raises the put's error
            logger.warning("the keys of a refused put stay in the controller", exc_info=True)

    async def get_data(self, metadata: Any) -> TensorDict:
        """Return the values of the meta's rows and fields, in the form of SimpleStorage.

        Raises:
            UnsupportedError: the queue belongs to a data plane.
            DataPlaneError: as `RawStore.get`.
        """
        raw = self._require_raw("read")
        fields = list(metadata.field_names)
        if metadata.size == 0 or not fields:
            return TensorDict({}, batch_size=[metadata.size])
        answers = []
        for partition_id, at in _by_partition(metadata).items():
            indexes = [metadata.global_indexes[i] for i in at]
            cells = _cells_of(metadata, at)
            answers.append(
                (at, await asyncio.to_thread(raw.get, partition_id, indexes, fields, cells))
            )
        columns = answers[0][1] if len(answers) == 1 else merge_columns(answers, metadata.size)
        return TensorDict(columns, batch_size=[metadata.size])

    async def clear_data(self, metadata: Any) -> None:
        """Free the meta's rows; for a client of a data plane, its directory has freed them before.

        A writer that died before its report leaves values that no meta fits. They are freed by the
        newest meta that the controller has.

        Raises:
            UnsupportedError: the queue belongs to a data plane. By then, TransferQueue's samplers
                no longer see the rows.
            DataPlaneError: as `RawStore.clear`. After a MissingDataError, the rows that the meta
                names can be claimed again, unless TransferQueue's controller fails or does not
                answer in time; that is logged.
        """
        if self._raw is None and not self._is_guest:
            return
        raw, rows = self._require_raw("clear"), _by_partition(metadata)
        try:
            for partition_id, at in rows.items():
                indexes = [metadata.global_indexes[i] for i in at]
                cells = _cells_of(metadata, at)
                await asyncio.to_thread(self._clear, raw, partition_id, indexes, cells)
        except MissingDataError:
            for partition_id, at in rows.items():
                indexes = [metadata.global_indexes[i] for i in at]
                await asyncio.to_thread(self._remove_marks, raw, partition_id, indexes)
            raise

    def _clear(
        self, raw: RawStore, partition_id: str, indexes: Sequence[int], cells: Cells
    ) -> None:
        try:
            raw.clear(partition_id, indexes, cells)
        except MissingDataError:
            with raw.pinned(partition_id, indexes) as pinned:
                if not self._is_newest(raw, partition_id, indexes, cells):
                    raise
                pinned.clear()

    def _is_newest(
        self, raw: RawStore, partition_id: str, indexes: Sequence[int], cells: Cells
    ) -> bool:
        """Return whether no newer cells were reported; False, and log it, if that is unknown."""
        try:
            known = self._ask(reported_cells(self, partition_id, raw.timeout_s), raw)
        except Exception:  # the caller raises the clear's error
            logger.warning("the controller cannot confirm the meta of a clear", exc_info=True)
            return False
        return _has_cells(known, indexes, cells)

    def _remove_marks(self, raw: RawStore, partition_id: str, indexes: Sequence[int]) -> None:
        """Let tasks claim the rows that a refused clear has marked; log a failure."""
        try:
            with raw.pinned(partition_id, indexes) as pinned:
                marked = remove_clear_marks(self, partition_id, pinned.indexes, raw.timeout_s)
                self._ask(marked, raw)
        except Exception:  # the caller raises the clear's error
            logger.warning("tasks cannot claim the rows of a refused clear", exc_info=True)

    def _ask(self, question: Coroutine[Any, Any, T], raw: RawStore) -> T:
        """Return the controller's answer; called in a thread without an event loop."""
        answered = asyncio.run_coroutine_threadsafe(question, self._notify_loop)
        try:
            return answered.result(raw.timeout_s)
        finally:
            answered.cancel()

    async def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write all rows into a folder of TransferQueue's checkpoint.

        Raises:
            InvalidRequestError: the queue belongs to a data plane; save its partitions instead.
            DataPlaneError: as `packed_checkpoint.save`.
        """
        await asyncio.to_thread(self._raw_of_checkpoint("save").save, Path(checkpoint_dir))

    async def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Replace all rows with those of a checkpoint.

        Raises:
            InvalidRequestError: the queue belongs to a data plane.
            DataPlaneError: as `packed_checkpoint.load`.
        """
        await asyncio.to_thread(self._raw_of_checkpoint("load").load, Path(checkpoint_dir))

    def _raw_of_checkpoint(self, verb: str) -> RawStore:
        try:
            return self._require_raw(verb)
        except UnsupportedError as error:
            # TransferQueue would take a NotImplementedError for success, without saved values.
            raise InvalidRequestError(str(error)) from None

    def _require_raw(self, verb: str) -> RawStore:
        if self._raw is None:
            raise UnsupportedError(
                f"this queue belongs to a data plane; use TQDataPlaneClient to {verb}"
            )
        return self._raw

    def close(self) -> None:
        """Close every connection."""
        raw = getattr(self, "_raw", None)  # absent if the handshake failed
        if raw is not None:
            raw.close()
            self._fast_metas.close()
            self._putters.shutdown(wait=False, cancel_futures=True)
        super().close()


def _by_row(cells: Cells) -> list[dict[str, int]]:
    """Return the cells of each row; equal rows share a dict, which pickle then writes once."""
    rows = list(zip(*(column.tolist() for column in cells.values()), strict=True))
    distinct = {row: dict(zip(cells, row, strict=True)) for row in set(rows)}
    return [distinct[row] for row in rows]


def _cells_of(metadata: Any, at: Sequence[int]) -> Cells:
    """Return the meta's cells of the rows ``at``, for fields that all of them have."""
    rows = [metadata._custom_backend_meta[i] for i in at]
    names = cells_of_row(rows[0]) if rows else ()
    fields = [name for name in names if all(name in row for row in rows)]
    return {name: np.array([row[name] for row in rows], np.int64) for name in fields}


def _has_cells(known: dict[int, dict[str, int]], indexes: Sequence[int], cells: Cells) -> bool:
    """Return whether the controller has these cells, so that no newer ones were reported."""
    return all(
        known.get(index, {}).get(name) == cell
        for name, column in cells.items()
        for index, cell in zip(indexes, column.tolist(), strict=True)
    )


def _by_partition(metadata: Any) -> dict[str, list[int]]:
    """Return the positions in the meta of each partition's rows."""
    places: dict[str, list[int]] = {}
    for i, partition_id in enumerate(metadata.partition_ids):
        places.setdefault(partition_id, []).append(i)
    return places
