"""`Feed`: the dataset that a worker of a `StreamingDataLoader` runs, and the items it yields."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any  # Any: the result of a collate callable

from tensordict import TensorDict
from torch.utils.data import IterableDataset

from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import DataPlaneError, DeadlineExceededError, InvalidRequestError
from dataplane_core.meta import KVBatchMeta
from dataplane_core.schema import Form
from dataplane_core.streaming.dataset import StreamingDataset
from dataplane_core.tensors.rows import recorded_forms, set_forms

_MAX_WAIT_S = 1e6  # limit of the poll that reads a worker's queue


@dataclass
class DeliveredBatch:
    """A collated batch, and the claim it belongs to."""

    content: Any
    meta: KVBatchMeta

    def pin_memory(self) -> DeliveredBatch:
        from torch.utils.data._utils.pin_memory import pin_memory

        batch = self._batch()
        if batch is not None:
            content = (batch.pin_memory(), *self.content[1:])
            return _with_forms(content, self.meta, recorded_forms(batch))
        return DeliveredBatch(pin_memory(self.content), self.meta)  # type: ignore[no-untyped-call]

    def _batch(self) -> TensorDict | None:
        """Return the content's first item if that is a TensorDict, as `get_data` returns it."""
        content = self.content
        is_batch = isinstance(content, tuple) and content and isinstance(content[0], TensorDict)
        return content[0] if is_batch else None

    def __reduce__(self) -> tuple[Callable[..., DeliveredBatch], tuple[Any, ...]]:
        batch = self._batch()
        forms = None if batch is None else recorded_forms(batch)
        return _with_forms, (self.content, self.meta, forms)


def _with_forms(content: Any, meta: KVBatchMeta, forms: dict[str, Form] | None) -> DeliveredBatch:
    """Return a batch with its tensors' forms, which pinning and a worker's queue drop."""
    if forms is not None:
        set_forms(content[0], forms)
    return DeliveredBatch(content, meta)


def collate_batch(
    batch: TensorDict,
    meta: KVBatchMeta,
    collate: Callable[[TensorDict, KVBatchMeta], Any] | None,
) -> DeliveredBatch:
    """Return a fetched batch as the loop gets it, collated if ``collate`` is given."""
    return DeliveredBatch((batch, meta) if collate is None else collate(batch, meta), meta)


@dataclass
class WorkerFailure:
    """An error of a worker as a value, so that pickling keeps its class and attributes."""

    error: DataPlaneError


class _PickledItem:
    """An item pickled in advance, which unpickles to the item itself.

    A DataLoader's queue pickles in a thread that drops what it cannot pickle, and the loop would
    wait for it forever. Here the error is raised in the worker.
    """

    def __init__(self, item: DeliveredBatch | WorkerFailure) -> None:
        self._pickled = bytes(ForkingPickler.dumps(item))

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self._pickled,)


class Feed(IterableDataset[Any]):
    """Dataset of collated batches; with ``client`` it runs in the training process."""

    def __init__(
        self,
        dataset: StreamingDataset,
        collate: Callable[[TensorDict, KVBatchMeta], Any] | None,
        on_claim: Callable[[KVBatchMeta], None],
        client: DataPlaneClient | None,
        *,
        wait_for_leased: bool = False,
    ) -> None:
        self._dataset = dataset
        self._collate = collate
        self._on_claim = on_claim
        self._client = client
        self._wait_for_leased = wait_for_leased

    def __iter__(self) -> Iterator[DeliveredBatch | WorkerFailure | _PickledItem]:
        return self._items() if self._client is not None else self._pickled_items()

    def _items(self) -> Iterator[DeliveredBatch | WorkerFailure]:
        try:
            with contextlib.ExitStack() as stack:
                client = self._client or stack.enter_context(self._dataset.make_client())
                batches = self._dataset.batches(
                    client, self._on_claim, wait_for_leased=self._wait_for_leased
                )
                for batch, meta in batches:
                    yield collate_batch(batch, meta, self._collate)
        except DataPlaneError as error:
            yield WorkerFailure(error)

    def _pickled_items(self) -> Iterator[_PickledItem]:
        for item in self._items():
            try:
                packed = _PickledItem(item)
            except Exception as error:  # noqa: BLE001  # pickling user values can raise anything
                yield _PickledItem(self._pickling_failure(item, error))
                return
            yield packed

    def _pickling_failure(
        self, item: DeliveredBatch | WorkerFailure, error: Exception
    ) -> WorkerFailure:
        if isinstance(item, WorkerFailure):
            return WorkerFailure(DataPlaneError(f"{type(item.error).__name__}: {item.error}"))
        content = "the batch" if self._collate is None else "the result of collate"
        return WorkerFailure(
            InvalidRequestError(
                f"StreamingDataLoader(partition={self._dataset.partition_id!r}, "
                f"task={self._dataset.task_name!r}): {content} for {item.meta.size} samples, a "
                f"{type(item.content).__name__}, cannot be pickled and sent by a worker: {error}; "
                "use num_workers=0 or collate to tensors and plain values"
            )
        )


def with_timeout(
    items: Iterable[Any], dataset: StreamingDataset, batch_timeout_s: float
) -> Iterator[Any]:
    """Yield the items of a DataLoader whose ``timeout`` is `max_wait_s`.

    Raises:
        DeadlineExceededError: no item arrived within that time.
    """
    try:
        yield from items
    except RuntimeError as error:
        if not str(error).startswith("DataLoader timed out"):
            raise
        raise DeadlineExceededError(
            f"StreamingDataLoader(partition={dataset.partition_id!r}, "
            f"task={dataset.task_name!r}): no worker delivered a batch within timeout_s="
            f"{dataset.timeout_s:g} and batch_timeout_s={batch_timeout_s:g}; a worker is stuck in "
            "make_client, get_data or collate, or needs a longer batch_timeout_s"
        ) from error


def max_wait_s(dataset: StreamingDataset, batch_timeout_s: float) -> float:
    """Return how long a worker may take for an item, up to the limit of torch's queue."""
    return min(dataset.timeout_s + batch_timeout_s, _MAX_WAIT_S)
