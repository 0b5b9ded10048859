"""The bookkeeping behind a data plane: which sample has which field, who claimed it, who holds it.

Public to authors of adapters. Pure state: no locks, no I/O, no threads, and no torch. A client
calls it under a lock of its own (`InMemoryDataPlaneClient`), a server from its one thread; the
values of samples are somewhere else, and the ledger keeps an opaque cell for each.
"""

from dataplane_core.ledger.books import Ledger, PutTicket
from dataplane_core.ledger.inspect import (
    ClaimSummary,
    FieldSummary,
    PartitionSummary,
    SampleState,
    ShareSummary,
    StatePage,
    StorageSummary,
    TaskSummary,
)
from dataplane_core.ledger.order import ClaimOrder, load_order
from dataplane_core.ledger.partition import PartitionBook
from dataplane_core.ledger.rows import Row
from dataplane_core.ledger.selection import ClaimRequest, TagFilter, balance
from dataplane_core.ledger.tasks import Claimed

__all__ = [
    "ClaimOrder",
    "ClaimRequest",
    "ClaimSummary",
    "Claimed",
    "FieldSummary",
    "Ledger",
    "PartitionBook",
    "PartitionSummary",
    "PutTicket",
    "Row",
    "SampleState",
    "ShareSummary",
    "StatePage",
    "StorageSummary",
    "TagFilter",
    "TaskSummary",
    "balance",
    "load_order",
]
