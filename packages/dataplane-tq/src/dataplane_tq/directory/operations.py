"""Operations of a connection: one class per state, each of which can undo its operation.

A connection has one operation at a time. Closing the connection undoes the operation, so a process
that fails or dies half-way leaves nothing behind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import ClassVar

from dataplane_core import UnavailableError
from dataplane_core.ledger import Row
from dataplane_tq.directory.backlog import Fields
from dataplane_tq.directory.store_state import StoreState


class State(Enum):
    """State of a connection; the value names its operation in errors."""

    IDLE = "no operation"
    PUTTING = "a put"
    REPORTING = "the report of a put"
    RESTORING = "a restore"
    READING = "a read"
    CLEARING = "a clear"
    BOUND = "the binding of an actor"


class Operation(ABC):
    """Operation under way in one `State`."""

    state: ClassVar[State]

    @abstractmethod
    def undo(self) -> None:
        """End the operation and remove its effects."""


class Idle(Operation):
    """No operation is under way."""

    state = State.IDLE

    def undo(self) -> None:
        pass


class Bound(Operation):
    """Connection of an actor: when its process dies, every request fails from then on."""

    state = State.BOUND

    def __init__(self, store: StoreState, name: str) -> None:
        self._store = store
        self._name = name

    def undo(self) -> None:
        self._store.fail(
            UnavailableError(
                f"{self._name} is dead: its process ended, or its machine is unreachable"
            )
        )


class Reading(Operation):
    """Read under way: its rows are pinned, so their memory stays allocated if they are cleared."""

    state = State.READING

    def __init__(self, store: StoreState, rows: list[Row]) -> None:
        self._store = store
        self._rows = rows
        store.ledger.pin(rows)

    def undo(self) -> None:
        self._store.ledger.unpin(self._rows)
        if any(row.dropped for row in self._rows):
            self._store.everything_changed()


class Drops:
    """Rows of a partition that one client drops in TransferQueue."""

    def __init__(self, store: StoreState, partition_id: str, samples: Fields) -> None:
        self._store = store
        self._partition_id = partition_id
        self.samples = samples

    def end(self) -> None:
        """Record that TransferQueue has dropped the rows."""
        self._store.backlog[self._partition_id].dropping.difference_update(self.samples)
        self._store.tidy(self._partition_id)
        self._store.changed(self._partition_id)

    def undo(self) -> None:
        """Leave the rows to the next put or clear."""
        self._store.backlog[self._partition_id].orphans.update(self.samples)
        self.end()
