"""The bookkeeping of a data plane: which samples have which fields, and which claims hold them.

Public to authors of adapters. Pure state: no locks, no I/O, no threads, no torch. A client calls it
under its lock (`InMemoryDataPlaneClient`), a server from a single thread. The values of samples are
stored elsewhere; the ledger holds one opaque cell for each.
"""

from dataplane_core.ledger.cells import SharedCells
from dataplane_core.ledger.inspect import (
    AssignmentSummary,
    ClaimSummary,
    FieldSummary,
    PartitionSummary,
    SampleState,
    StatePage,
    StorageSummary,
    TaskSummary,
)
from dataplane_core.ledger.ledger import Ledger, PutTicket
from dataplane_core.ledger.order import ClaimOrder, load_order
from dataplane_core.ledger.partition import Partition
from dataplane_core.ledger.rows import Row
from dataplane_core.ledger.selection import ClaimRequest, TagFilter, balance
from dataplane_core.ledger.shortage import Shortage
from dataplane_core.ledger.tasks import Claimed

__all__ = [
    "AssignmentSummary",
    "ClaimOrder",
    "ClaimRequest",
    "ClaimSummary",
    "Claimed",
    "FieldSummary",
    "Ledger",
    "Partition",
    "PartitionSummary",
    "PutTicket",
    "Row",
    "SampleState",
    "SharedCells",
    "Shortage",
    "StatePage",
    "StorageSummary",
    "TagFilter",
    "TaskSummary",
    "balance",
    "load_order",
]
