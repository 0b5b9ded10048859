"""Ray's object store with one numpy buffer for each column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import ray
import torch
from integration.benchmarks.cases import OBJECTS, PER_SAMPLE, PER_TOKEN, Batch
from integration.benchmarks.systems import Operation, System


class RayFlat(System):
    """System that puts and gets flat buffers without packing or padding.

    The reader maps the writer's memory and copies nothing. There are no samples, fields or claims,
    so this is a lower bound, not an alternative.
    """

    operations: ClassVar[frozenset[Operation]] = frozenset({Operation.PUT, Operation.GET})

    def put(self, batch: Batch, partition: str) -> Any:
        """Put; return the reference in a list, in which Ray does not resolve it."""
        return [ray.put(batch.flat)]

    def get(
        self, batch: Batch, partition: str, names: Sequence[str], rows: slice, handle: Any
    ) -> Any:
        """Get views of the shared memory."""
        return ray.get(handle[0])


class RayFlatPadded(RayFlat):
    """System like `RayFlat` from padded columns to padded columns, as `DataPlane` and `Usual`."""

    def put(self, batch: Batch, partition: str) -> Any:
        """Remove the padding, then put."""
        cuts = batch.lengths.tolist()
        buffers: dict[str, np.ndarray] = {}
        for name in PER_TOKEN:
            rows = zip(batch.padded[name].numpy(), cuts, strict=True)
            buffers[name] = np.concatenate([row[:cut] for row, cut in rows])
        buffers |= {name: batch.padded[name].numpy() for name in PER_SAMPLE}
        encoded = [value.encode() for value in batch.padded[OBJECTS]]
        buffers[OBJECTS] = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        buffers[f"{OBJECTS}_lengths"] = np.array([len(value) for value in encoded])
        return [ray.put(buffers)]

    def get(
        self, batch: Batch, partition: str, names: Sequence[str], rows: slice, handle: Any
    ) -> Any:
        """Get, then pad."""
        flat = ray.get(handle[0])
        cuts = flat["input_lengths"].tolist()
        padded: dict[str, Any] = {}
        for name in PER_TOKEN:
            column = torch.zeros((len(cuts), max(cuts)), dtype=PER_TOKEN[name])
            target, start = column.numpy(), 0
            for row, cut in enumerate(cuts):
                target[row, :cut] = flat[name][start : start + cut]
                start += cut
            padded[name] = column
        for name in PER_SAMPLE:
            padded[name] = torch.from_numpy(flat[name].copy())
        stops = flat[f"{OBJECTS}_lengths"].cumsum().tolist()
        text = flat[OBJECTS].tobytes()
        padded[OBJECTS] = np.empty(len(stops), dtype=object)
        padded[OBJECTS][:] = [
            text[start:stop].decode() for start, stop in zip([0, *stops], stops, strict=False)
        ]
        return padded
