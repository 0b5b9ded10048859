"""What one task of a partition has claimed, and under which leases."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any  # Any: a request's parts, by which shares are kept

from dataplane_core.declaration import tagged_lengths
from dataplane_core.ledger.queues import Queue
from dataplane_core.ledger.rows import Row


@dataclass
class Lease:
    """A claim that is not settled yet; ``rows`` shrinks as parts of it are."""

    token: str
    task_name: str
    rows: dict[str, Row]
    deadline: float
    seconds: float


@dataclass
class Claimed:
    """What a claim got.

    Attributes:
        rows: the samples.
        token: of the lease, None for a final claim or an empty one.
    """

    rows: list[Row]
    token: str | None

    @property
    def sequence_lengths(self) -> list[int] | None:
        """As `KVBatchMeta` has them: from the tags."""
        return tagged_lengths([row.tags for row in self.rows])


@dataclass
class Task:
    """One task's view; a present sample is in exactly one of open, assigned, leased, settled.

    Attributes:
        open: not claimed.
        assigned: drawn for a data-parallel rank that has not asked for its share yet.
        leased: claimed under a lease, by the lease's token.
        settled: claimed for good.
        queues: the ready ones of ``open``, by required fields and seed.
        shares: the batches that wait for their ranks.
    """

    open: dict[str, Row] = field(default_factory=dict)
    assigned: dict[str, Row] = field(default_factory=dict)
    leased: dict[str, str] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)
    queues: dict[tuple[frozenset[str], int | None], Queue] = field(default_factory=dict)
    shares: dict[Any, list[deque[list[Row]]]] = field(default_factory=dict)
