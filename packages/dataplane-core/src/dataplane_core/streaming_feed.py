"""`Feed`: what a worker of a `StreamingDataLoader` runs, and what it hands to the loader."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any  # Any: what a collate callable makes is the caller's own

from tensordict import TensorDict
from torch.utils.data import IterableDataset

from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import DataPlaneError, DeadlineExceededError, InvalidRequestError
from dataplane_core.meta import KVBatchMeta
from dataplane_core.streaming_dataset import StreamingDataset

_LONGEST_S = 1e6  # what the poll below a worker's queue can wait for


@dataclass
class Delivered:
    """A batch as it was collated, and the claim it belongs to."""

    content: Any
    meta: KVBatchMeta

    def pin_memory(self) -> Delivered:
        from torch.utils.data._utils.pin_memory import pin_memory

        content = self.content
        if isinstance(content, tuple) and content and isinstance(content[0], TensorDict):
            return Delivered((content[0].pin_memory(), *content[1:]), self.meta)
        return Delivered(pin_memory(content), self.meta)  # type: ignore[no-untyped-call]


def collated(
    batch: TensorDict,
    meta: KVBatchMeta,
    collate: Callable[[TensorDict, KVBatchMeta], Any] | None,
) -> Delivered:
    """A fetched batch as the loop gets it."""
    return Delivered((batch, meta) if collate is None else collate(batch, meta), meta)


@dataclass
class Failed:
    """An error of a worker as a value, which keeps its class and attributes on the way."""

    error: DataPlaneError


class _Packed:
    """An item that is bytes on its way out of a worker, and itself once it arrives.

    The queue of a DataLoader pickles in a thread, which drops what it cannot pickle: the loop would
    wait for it for ever.
    """

    def __init__(self, item: Delivered | Failed) -> None:
        self._pickled = bytes(ForkingPickler.dumps(item))

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self._pickled,)


class Feed(IterableDataset[Any]):
    """What a worker, or with a client of its own the training process, runs."""

    def __init__(
        self,
        dataset: StreamingDataset,
        collate: Callable[[TensorDict, KVBatchMeta], Any] | None,
        claimed: Callable[[KVBatchMeta], None],
        client: DataPlaneClient | None,
        *,
        wait_for_leased: bool = False,
    ) -> None:
        self._dataset = dataset
        self._collate = collate
        self._claimed = claimed
        self._client = client
        self._wait_for_leased = wait_for_leased

    def __iter__(self) -> Iterator[Delivered | Failed | _Packed]:
        return self._items() if self._client is not None else self._packed()

    def _items(self) -> Iterator[Delivered | Failed]:
        try:
            with contextlib.ExitStack() as stack:
                client = self._client or stack.enter_context(self._dataset.make_client())
                batches = self._dataset.batches(
                    client, self._claimed, wait_for_leased=self._wait_for_leased
                )
                for batch, meta in batches:
                    yield collated(batch, meta, self._collate)
        except DataPlaneError as error:
            yield Failed(error)

    def _packed(self) -> Iterator[_Packed]:
        for item in self._items():
            try:
                packed = _Packed(item)
            except Exception as error:  # noqa: BLE001  # what a batch contains raises what it likes
                yield _Packed(self._refused(item, error))
                return
            yield packed

    def _refused(self, item: Delivered | Failed, error: Exception) -> Failed:
        if isinstance(item, Failed):
            return Failed(DataPlaneError(f"{type(item.error).__name__}: {item.error}"))
        made = "the batch" if self._collate is None else "what collate made"
        return Failed(
            InvalidRequestError(
                f"StreamingDataLoader(partition={self._dataset.partition_id!r}, "
                f"task={self._dataset.task_name!r}): {made} of {item.meta.size} samples, a "
                f"{type(item.content).__name__}, cannot be pickled, which it has to be to leave a "
                f"worker: {error}; use num_workers=0 or collate to tensors and plain values"
            )
        )


def in_time(
    items: Iterable[Any], dataset: StreamingDataset, batch_timeout_s: float
) -> Iterator[Any]:
    """The items of a DataLoader whose ``timeout`` is `longest_wait_s`.

    Raises:
        DeadlineExceededError: that time passed without one.
    """
    try:
        yield from items
    except RuntimeError as error:
        if not str(error).startswith("DataLoader timed out"):
            raise
        raise DeadlineExceededError(
            f"StreamingDataLoader(partition={dataset.partition_id!r}, "
            f"task={dataset.task_name!r}): no worker handed a batch over within timeout_s="
            f"{dataset.timeout_s:g} and batch_timeout_s={batch_timeout_s:g}; it is stuck in "
            "make_client, get_data or collate, or needs a longer batch_timeout_s"
        ) from error


def longest_wait_s(dataset: StreamingDataset, batch_timeout_s: float) -> float:
    """How long a worker may be silent: while it waits for a claim, and works on a batch."""
    return min(dataset.timeout_s + batch_timeout_s, _LONGEST_S)
