"""Ledger with the partition ``p`` and the tasks ``a`` and ``b``."""

from __future__ import annotations

from dataplane_core.declaration import PartitionDeclaration
from dataplane_core.ledger import ClaimRequest, Ledger

FIELDS = ("x", "y")


def nbytes(cells):
    """Return the bytes of cells (field, sample, bytes)."""
    return sum(cell[2] for cell in cells)


def declared(num_samples=0, group_size=None):
    return PartitionDeclaration.checked("p", FIELDS, num_samples, ["a", "b"], group_size)


def new_ledger(num_samples=0, group_size=None, capacity=None, **options):
    ledger = Ledger(capacity, **options)
    ledger.register(declared(num_samples, group_size))
    return ledger


def put(ledger, ids, fields=("x",), tags=None, token=None):
    ticket = ledger.begin_put("p", ids, dict.fromkeys(fields, "torch.int64"), token)
    cells = {name: [(name, sample_id) for sample_id in ids] for name in fields}
    ledger.commit_put(ticket, cells, tags)


def claimed(ledger, size, *, task="a", required=("x",), now=0.0, **options):
    """Claim samples; return None if a blocking claim has to wait."""
    return ledger.partition("p").claim(ClaimRequest(task, tuple(required), size, **options), now)


def claim(ledger, size, **options):
    """Claim samples; return their ids."""
    result = claimed(ledger, size, **options)
    return None if result is None else [row.sample_id for row in result.rows]
