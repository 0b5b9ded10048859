"""The systems that are compared, each behind `System`.

A system lives in the producer's and in the consumer's process, once in each. It says which
operations it has; the harness times them and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, ClassVar, Protocol  # Any: what one system's put hands to its own get

from integration.benchmarks.cases import Batch


class Operation(StrEnum):
    """What is timed. `PUT_GET` is the sum of the put and the get of one round."""

    PUT = "put"
    GET = "get"
    PUT_GET = "put_get"
    SLICES8 = "slices8"
    ONE_FIELD = "one_field"
    WRITE_BACK = "write_back"
    CLAIM_32 = "claim32"
    CLAIM_ALL = "claim_all"
    CLEAR = "clear"


STORE_OPERATIONS = frozenset(Operation) - {Operation.PUT_GET}
TASKS = ("first", "second")


class System(Protocol):
    """One way to bring a batch from one process to another.

    Attributes:
        operations: those that it has; the methods behind others are not called.
    """

    operations: ClassVar[frozenset[Operation]]

    def begin(self, partition: str, rows: int) -> None:
        """Prepare an empty partition; not timed."""

    def put(self, batch: Batch, partition: str) -> Any:
        """Make the whole batch readable elsewhere; returns what `get` needs."""

    def get(
        self, batch: Batch, partition: str, names: Sequence[str], rows: slice, handle: Any
    ) -> Any:
        """Read columns of some rows, in the form that this system's readers compute with."""

    def write_back(self, batch: Batch, partition: str) -> None:
        """Add one per-token column to rows that are there."""

    def claim(self, partition: str, task: str, fields: Sequence[str], count: int) -> int:
        """Claim up to ``count`` samples; returns how many."""

    def clear(self, batch: Batch, partition: str) -> None:
        """Drop the batch's rows by their ids."""

    def end(self, partition: str) -> None:
        """Forget the partition; not timed."""

    def fill(self, partition: str, rows: int, field: str, tasks: Sequence[str]) -> None:
        """Make many rows with one small field claimable by tasks; not timed."""

    def close(self) -> None:
        """Release what the system holds in this process."""


class Stateless:
    """The part of `System` that something without partitions leaves out."""

    def begin(self, partition: str, rows: int) -> None:
        """Nothing to prepare."""

    def write_back(self, batch: Batch, partition: str) -> None:
        """Not offered."""
        raise NotImplementedError

    def claim(self, partition: str, task: str, fields: Sequence[str], count: int) -> int:
        """Not offered."""
        raise NotImplementedError

    def clear(self, batch: Batch, partition: str) -> None:
        """Not offered."""
        raise NotImplementedError

    def end(self, partition: str) -> None:
        """Nothing to forget."""

    def fill(self, partition: str, rows: int, field: str, tasks: Sequence[str]) -> None:
        """Not offered."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to release."""
