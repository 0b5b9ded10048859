"""`Feed`: what a worker of a `StreamingDataLoader` runs, and what it hands to the loader."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any  # Any: what a collate callable makes is the caller's own

from tensordict import TensorDict
from torch.utils.data import IterableDataset

from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import DataPlaneError
from dataplane_core.meta import KVBatchMeta

if TYPE_CHECKING:
    from dataplane_core.streaming import StreamingDataset


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


class Feed(IterableDataset[Any]):
    """What a worker, or with a client of its own the training process, runs."""

    def __init__(
        self,
        dataset: StreamingDataset,
        collate: Callable[[TensorDict, KVBatchMeta], Any] | None,
        claimed: Callable[[KVBatchMeta], None],
        client: DataPlaneClient | None,
    ) -> None:
        self._dataset = dataset
        self._collate = collate
        self._claimed = claimed
        self._client = client

    def __iter__(self) -> Iterator[Delivered | Failed]:
        try:
            with contextlib.ExitStack() as stack:
                client = self._client or stack.enter_context(self._dataset.make_client())
                for batch, meta in self._dataset.batches(client, self._claimed):
                    yield collated(batch, meta, self._collate)
        except DataPlaneError as error:
            yield Failed(error)
