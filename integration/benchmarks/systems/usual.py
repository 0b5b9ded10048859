"""TransferQueue as today's trainers use it: packing, the raw calls, and padding.

Packing and padding use torch's own functions here, so the baseline does not change when column-io
becomes faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from integration.benchmarks.cases import WRITTEN_BACK, Batch
from integration.benchmarks.systems.raw import Raw
from tensordict import NonTensorStack, TensorDict


class Usual(Raw):
    """System with padded columns in and out, on the same TransferQueue as `Raw`."""

    def put(self, batch: Batch, partition: str) -> None:
        """Pack and put."""
        self._put(batch.ids, partition, _pack(batch.padded, batch.lengths))

    def get(
        self, batch: Batch, partition: str, names: Sequence[str], rows: slice, handle: Any
    ) -> Any:
        """Get and pad."""
        return _pad(super().get(batch, partition, names, rows, handle))

    def write_back(self, batch: Batch, partition: str) -> None:
        """Pack one column and put it."""
        packed = _pack({WRITTEN_BACK: batch.column(WRITTEN_BACK)}, batch.lengths)
        self._put(batch.ids, partition, packed)

    def claim(self, partition: str, task: str, fields: Sequence[str], count: int) -> int:
        """Claim, and request the keys with which the rows are then read."""
        meta = self._claim(partition, task, fields, count)
        return len(self._client.kv_retrieve_keys(meta.global_indexes, partition))


def _pack(columns: Mapping[str, torch.Tensor | np.ndarray], lengths: torch.Tensor) -> TensorDict:
    leaves: dict[str, Any] = {}
    cuts = lengths.tolist()
    for name, column in columns.items():
        if isinstance(column, np.ndarray):
            leaves[name] = NonTensorStack(*column.tolist())
        elif column.dim() > 1:
            rows = [row[:cut] for row, cut in zip(column, cuts, strict=True)]
            leaves[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        else:
            leaves[name] = column
    return TensorDict(leaves, batch_size=[len(cuts)])


def _pad(fields: TensorDict) -> dict[str, torch.Tensor | np.ndarray]:
    columns: dict[str, torch.Tensor | np.ndarray] = {}
    for name, leaf in fields.items():
        if not isinstance(leaf, torch.Tensor):
            columns[name] = np.array(leaf.tolist(), dtype=object)
        elif leaf.is_nested:
            columns[name] = torch.nested.to_padded_tensor(leaf, 0)
        else:
            columns[name] = leaf
    return columns
