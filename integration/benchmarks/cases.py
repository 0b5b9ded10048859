"""Batches that the systems move, and the forms in which the systems take them.

A batch depends only on its case. So producer and consumer build the same batch, and the consumer
can check what it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any  # Any: columns are tensors or object arrays, answers a system's own form

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

PER_TOKEN = {
    "input_ids": torch.int64,
    "generation_logprobs": torch.float32,
    "token_mask": torch.int64,
    "advantages": torch.float32,
}
PER_SAMPLE = ("sample_mask", "input_lengths")
OBJECTS = "content"
FIELDS = (*PER_TOKEN, *PER_SAMPLE, OBJECTS)
SMALL_FIELD = "sample_mask"
WRITTEN_BACK = "prev_logprobs"
CLAIM_FIELDS = ("input_ids", "advantages")


@dataclass(frozen=True)
class Case:
    """Size of a batch.

    Attributes:
        name: part of the names of results.
        rows: number of samples.
        min_tokens: minimum tokens of a sample.
        max_tokens: maximum tokens of a sample; lengths are uniform between the two.
    """

    name: str
    rows: int
    min_tokens: int
    max_tokens: int

    @property
    def title(self) -> str:
        """Title in tables and pictures."""
        tokens = f"{self.min_tokens:,}-{self.max_tokens:,}"
        if self.min_tokens == self.max_tokens:
            tokens = f"{self.max_tokens:,}"
        return f"{self.rows:,} rows of {tokens} tokens"


QUICK_CASES = (Case("512", 512, 200, 2048),)
FULL_CASES = (
    Case("256", 256, 200, 2048),
    *QUICK_CASES,
    Case("256_long", 256, 2048, 8192),
    Case("1024_8k", 1024, 8192, 8192),
)


class Batch:
    """Columns of a case.

    Attributes:
        ids: one id per row.
        lengths: (rows,) int64, in tokens.
        cuts: ``lengths`` as Python integers.
        padded: name to column as a trainer holds it: (rows, width), (rows,) or objects (rows,).
    """

    def __init__(self, case: Case) -> None:
        random = torch.Generator().manual_seed(case.rows * 100_003 + case.max_tokens)
        shape = (case.rows, case.max_tokens)
        self.ids = [f"sample-{row:06d}" for row in range(case.rows)]
        self.lengths = torch.randint(
            case.min_tokens, case.max_tokens + 1, (case.rows,), generator=random
        )
        self.cuts = self.lengths.tolist()
        self._real = torch.arange(case.max_tokens)[None, :] < self.lengths[:, None]
        content = np.empty(case.rows, dtype=object)
        content[:] = [f"the answer of row {row} is {row * 7 % 13}" for row in range(case.rows)]
        floats = {
            name: torch.randn(shape, generator=random).masked_fill_(~self._real, 0)
            for name in ("generation_logprobs", "advantages", WRITTEN_BACK)
        }
        self._written_back = floats.pop(WRITTEN_BACK)
        tokens = torch.randint(1, 150_000, shape, generator=random)
        self.padded: dict[str, Any] = {
            "input_ids": tokens.masked_fill_(~self._real, 0),
            "generation_logprobs": floats["generation_logprobs"],
            "token_mask": self._real.to(torch.int64),
            "advantages": floats["advantages"],
            "sample_mask": torch.randint(0, 2, (case.rows,), generator=random).float(),
            "input_lengths": self.lengths,
            OBJECTS: content,
        }

    def column(self, name: str) -> Any:
        """Return a padded column, also the one that is written back."""
        return self._written_back if name == WRITTEN_BACK else self.padded[name]

    @cached_property
    def jagged(self) -> TensorDict:
        """Columns as TransferQueue takes them: token columns nested, strings in a stack."""
        return self._jagged(FIELDS)

    @cached_property
    def jagged_written_back(self) -> TensorDict:
        """Column that is written back, nested."""
        return self._jagged([WRITTEN_BACK])

    def _jagged(self, names: Sequence[str]) -> TensorDict:
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])
        leaves: dict[str, object] = {}
        for name in names:
            column = self.column(name)
            if isinstance(column, np.ndarray):
                leaves[name] = NonTensorStack(*(NonTensorData(value) for value in column))
            elif column.dim() == 2:
                leaves[name] = torch.nested.nested_tensor_from_jagged(column[self._real], offsets)
            else:
                leaves[name] = column
        return TensorDict(leaves, batch_size=[len(self.ids)])

    @cached_property
    def flat(self) -> dict[str, np.ndarray]:
        """One buffer per column, without padding; strings as UTF-8 with their lengths."""
        buffers = {name: self.padded[name][self._real].numpy() for name in PER_TOKEN}
        buffers |= {name: self.padded[name].numpy() for name in PER_SAMPLE}
        encoded = [str(value).encode() for value in self.padded[OBJECTS]]
        buffers[OBJECTS] = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        buffers[f"{OBJECTS}_lengths"] = np.array([len(value) for value in encoded])
        return buffers

    def stored_bytes(self, names: Sequence[str]) -> int:
        """Return the bytes of columns, without padding and without a system's overhead."""
        tokens = int(self.lengths.sum())
        total = 0
        for name in names:
            column = self.column(name)
            if isinstance(column, np.ndarray):
                total += self.flat[name].nbytes
            else:
                count = tokens if column.dim() == 2 else len(column)
                total += count * column.element_size()
        return total


class WrongAnswer(AssertionError):
    """Error of a system that returned other values than were put."""


def check_answer(batch: Batch, names: Sequence[str], answer: Any, *, system: str) -> None:
    """Compare the sums of what a read returned with those of the batch.

    Args:
        batch: the batch that was put.
        names: columns that were read.
        answer: name to column: nested or padded tensors, flat arrays, or strings per row.
        system: name of the system, for the message.

    Raises:
        WrongAnswer: a column differs; the message names it.
    """
    for name in names:
        actual = _sum(answer[name])
        expected = _sum(batch.column(name))
        if not np.isclose(actual, expected, rtol=1e-9, atol=1e-6):
            raise WrongAnswer(f"{system}: {name!r} sums to {actual}; expected {expected}")


def _sum(column: Any) -> float:
    if isinstance(column, torch.Tensor):
        return float((column.values() if column.is_nested else column).double().sum())
    if isinstance(column, np.ndarray) and column.dtype != object:
        return float(column.sum(dtype=np.float64))
    values = column.tolist() if hasattr(column, "tolist") else column
    return float(sum(sum(str(value).encode()) for value in values))
