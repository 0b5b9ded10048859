"""The directory's memory for one sample is bounded, and the cells of a put match its blocks.

Imports internals: the memory of one sample shows only within the directory.
"""

from __future__ import annotations

import asyncio
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane_core.declaration import PartitionDeclaration
from dataplane_core.ledger import ClaimRequest
from dataplane_tq.directory import protocol as p
from dataplane_tq.directory.cells import cells_of_put
from dataplane_tq.directory.puts import begin_put
from dataplane_tq.directory.store_state import StoreState
from dataplane_tq.packed.layout import Block, FieldLayout
from dataplane_tq.packed.unit_wire import UnitSpec

FIELDS = [f"field_{number}" for number in range(8)]
TASKS = ["train", "evaluate"]
MAX_BYTES_PER_ROW = 1_000


class Samples:
    """State of one partition, filled by puts of 128 samples."""

    def __init__(self, loop):
        self.loop = loop
        self.store = StoreState(100_000, [UnitSpec("u", "n", 1 << 30)], None, loop, mirrored=False)
        self.store.ledger.register(PartitionDeclaration.checked("p", [], 0, TASKS[:1]))

    def put(self, number, fields):
        ids = [f"step_{number:04d}_p{row // 8:04d}_g{row % 8}" for row in range(128)]
        ends = (np.arange(128, dtype="<i8") * 64 + 64).tobytes()
        layouts = [FieldLayout(name, "torch.int64", True, (), ends, 0, 128) for name in fields]
        kinds = dict.fromkeys(fields, "torch.int64")
        request = p.BeginPut("p", ids, kinds, layouts, "n", None, 5.0)
        _, putting = self.loop.run_until_complete(begin_put(self.store, request))
        tags = [{"weight_version": number, "input_lengths": 8 + row} for row in range(128)]
        putting.commit(p.CommitPut(tags))

    def claim_all(self):
        partition = self.store.ledger.partition("p")
        wanted = ClaimRequest("train", tuple(FIELDS), 32, blocking=False, lease_s=60.0)
        while (claimed := partition.claim(wanted, 0.0)).rows:
            partition.acknowledge(claimed.token, [row.sample_id for row in claimed.rows])


@pytest.mark.parametrize("puts_per_sample", [1, 4])
def test_row_with_eight_fields_takes_less_than_a_kilobyte(puts_per_sample):
    loop = asyncio.new_event_loop()
    samples, rows = Samples(loop), 8192
    size = len(FIELDS) // puts_per_sample
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(rows // 128):
            for first in range(0, len(FIELDS), size):
                samples.put(number, FIELDS[first : first + size])
        samples.claim_all()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        loop.close()
    assert len(samples.store.ledger.partition("p").rows) == rows
    assert (after - before) / rows < MAX_BYTES_PER_ROW


@given(st.data(), st.integers(1, 12))
def test_cells_of_a_put_follow_its_blocks(data, count):
    blocks, expected = [], [{} for _ in range(count)]
    for name in ("a", "b", "c"):
        cuts = data.draw(st.lists(st.integers(1, count), unique=True).map(sorted)) if count else []
        starts = [0, *(cut for cut in cuts if cut < count)]
        for start, stop in zip(starts, [*starts[1:], count], strict=True):
            layout = FieldLayout(name, "torch.int64", False, (), b"", 8, stop - start)
            block = Block(len(blocks), "u", 0, layout, start, 0)
            blocks.append(block)
            for row in range(start, stop):
                expected[row][name] = block, row - start
    cells = cells_of_put(dict.fromkeys("abc", "torch.int64"), blocks, count)
    located = [
        {name: (block, place[layer]) for name, (block, layer) in fields.items()}
        for fields, place in cells.samples
    ]
    assert located == expected
