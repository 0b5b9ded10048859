"""Systems that are compared, each a `System`.

Producer and consumer each have one instance of every system. A system lists its operations, and the
harness times only these.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, ClassVar  # Any: a system's put passes any handle to its get

from integration.benchmarks.cases import Batch


class Operation(StrEnum):
    """Timed operation. `PUT_GET` is the sum of the put and the get of one round."""

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


class System:
    """System that moves a batch from one process to another.

    Attributes:
        operations: its operations; the methods of others are not called.
    """

    operations: ClassVar[frozenset[Operation]]

    def begin(self, partition: str, rows: int) -> None:
        """Prepare an empty partition; not timed."""

    def put(self, batch: Batch, partition: str) -> Any:
        """Make the batch readable elsewhere; return the handle for `get`."""
        raise NotImplementedError

    def get(
        self, batch: Batch, partition: str, names: Sequence[str], rows: slice, handle: Any
    ) -> Any:
        """Read columns of rows, in the form in which this system's readers use them."""
        raise NotImplementedError

    def write_back(self, batch: Batch, partition: str) -> None:
        """Add one per-token column to existing rows."""
        raise NotImplementedError

    def claim(self, partition: str, task: str, fields: Sequence[str], count: int) -> int:
        """Claim up to ``count`` samples; return their number."""
        raise NotImplementedError

    def clear(self, batch: Batch, partition: str) -> None:
        """Drop the batch's rows by their ids."""
        raise NotImplementedError

    def end(self, partition: str) -> None:
        """Forget the partition; not timed."""

    def fill(self, partition: str, rows: int, field: str, tasks: Sequence[str]) -> None:
        """Make many rows with one small field claimable by tasks; not timed."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the system's resources in this process."""
