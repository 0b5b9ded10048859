"""One copy of the same bytes inside one process, as a bound of the memory itself."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from integration.benchmarks.cases import Batch
from integration.benchmarks.systems import Operation, System


class Memcpy(System):
    """System that copies the flat buffers into existing memory."""

    operations: ClassVar[frozenset[Operation]] = frozenset({Operation.PUT})

    def __init__(self) -> None:
        self._copies: dict[str, np.ndarray] = {}

    def put(self, batch: Batch, partition: str) -> None:
        """Copy every buffer into reused memory, so that after the warm-up no page is new."""
        for name, buffer in batch.flat.items():
            copy = self._copies.get(name)
            if copy is None or copy.size != buffer.size:
                copy = self._copies[name] = np.empty_like(buffer)
            np.copyto(copy, buffer)
