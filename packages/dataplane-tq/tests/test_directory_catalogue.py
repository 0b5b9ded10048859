"""The catalogue never allocates a byte twice, and frees every byte.

Imports internals: a client sees only the free bytes.
"""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dataplane_core import CapacityExceeded
from dataplane_tq.directory.allocator import ALIGNMENT
from dataplane_tq.directory.catalogue import Catalogue, bytes_of
from dataplane_tq.packed.layout import Block, FieldLayout
from dataplane_tq.packed.unit_wire import UnitSpec

UNITS = [UnitSpec("u0", "a", 4096), UnitSpec("u1", "a", 2048), UnitSpec("u2", "b", 3000)]


def layout_of(name, sizes):
    ends = np.cumsum(sizes, dtype="<i8").tobytes()
    return FieldLayout(name, "object", True, (), ends, 0, len(sizes))


def used(catalogue):
    return sum(usage.used for usage in catalogue.usage())


sizes = st.lists(st.integers(0, 900) | st.integers(250, 260) | st.just(8), min_size=1, max_size=6)


class CatalogueMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.catalogue = Catalogue(UNITS)
        self.alive = {}

    @rule(fields=st.lists(sizes, min_size=1, max_size=4), node=st.sampled_from([None, "a", "b"]))
    def place(self, fields, node):
        layouts = [layout_of(str(at), rows) for at, rows in enumerate(fields)]
        before = self.catalogue.usage()
        try:
            blocks = self.catalogue.place(layouts, preferred_node=node)
        except CapacityExceeded:
            assert sum(layout.nbytes for layout in layouts) > 4096
            return
        if blocks is None:
            assert self.catalogue.usage() == before
            return
        for layout in layouts:
            of_field = [block for block in blocks if block.layout.name == layout.name]
            assert [block.first_row for block in of_field] == list(
                np.cumsum([0, *(block.layout.rows for block in of_field)])[:-1]
            )
            assert sum(block.layout.rows for block in of_field) == layout.rows
            for block in of_field:
                assert block.layout == layout.slice(
                    block.first_row, block.first_row + block.layout.rows
                )
                self.alive[block.id] = (block, set(range(block.layout.rows)))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def free(self, data):
        cells = [(block, row) for block, rows in self.alive.values() for row in sorted(rows)]
        freed = data.draw(st.lists(st.sampled_from(cells), unique_by=lambda c: (c[0].id, c[1])))
        self.catalogue.free(freed)
        for block, row in freed:
            rows = self.alive[block.id][1]
            rows.remove(row)
            if not rows:
                del self.alive[block.id]
        if freed:
            with pytest.raises(ValueError, match="free"):
                self.catalogue.free([data.draw(st.sampled_from(freed))])

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def free_block(self, data):
        block, _ = self.alive.pop(data.draw(st.sampled_from(sorted(self.alive))))
        self.catalogue.free_block(block)
        with pytest.raises(ValueError, match="were freed before"):
            self.catalogue.free_block(block)

    @invariant()
    def live_rows_do_not_overlap(self):
        taken = {unit.name: np.zeros(unit.capacity, bool) for unit in UNITS}
        for block, rows in self.alive.values():
            for row in rows:
                start, stop = block.layout.row_range(row)
                memory = taken[block.unit][block.offset + start : block.offset + stop]
                assert len(memory) == stop - start
                assert not memory.any()
                memory[:] = True

    @invariant()
    def used_bytes_are_those_of_live_rows(self):
        maximum = minimum = 0
        for block, rows in self.alive.values():
            layout = block.layout
            if layout.nbytes < 256 * layout.rows:
                minimum += layout.nbytes
                maximum += layout.nbytes + ALIGNMENT
            else:
                live = sum(stop - start for start, stop in map(layout.row_range, rows))
                minimum += live
                maximum += live + ALIGNMENT
        assert minimum <= used(self.catalogue) <= maximum

    def teardown(self):
        self.catalogue.free((block, row) for block, rows in self.alive.values() for row in rows)
        assert used(self.catalogue) == 0


TestCatalogue = CatalogueMachine.TestCase
TestCatalogue.settings = settings(max_examples=40, stateful_step_count=20)


def test_put_is_one_extent_on_the_preferred_node():
    catalogue = Catalogue(UNITS)
    blocks = catalogue.place(
        [layout_of("a", [100] * 3), layout_of("b", [8] * 3)], preferred_node="b"
    )
    assert [(block.unit, block.offset) for block in blocks] == [("u2", 0), ("u2", 320)]


def test_put_without_a_preferred_node_uses_the_emptiest_unit():
    catalogue = Catalogue(UNITS)
    catalogue.place([layout_of("a", [2000])], preferred_node=None)
    [block] = catalogue.place([layout_of("a", [100])], preferred_node=None)
    assert block.unit == "u2"


def test_put_larger_than_a_unit_is_split_by_fields_then_rows():
    catalogue = Catalogue(UNITS)
    blocks = catalogue.place(
        [layout_of("a", [1024] * 5), layout_of("b", [1024] * 2)], preferred_node=None
    )
    assert [(block.unit, block.layout.name, block.first_row) for block in blocks] == [
        ("u0", "a", 0),
        ("u2", "a", 4),
        ("u1", "b", 0),
    ]


@pytest.mark.parametrize("sizes", [[5000], [1000] * 10])
def test_put_that_could_never_fit_is_refused(sizes):
    with pytest.raises(CapacityExceeded, match="bytes exceed"):
        Catalogue(UNITS).place([layout_of("a", sizes)], preferred_node=None)


def test_refused_free_changes_nothing():
    catalogue = Catalogue(UNITS)
    a, b = catalogue.place(
        [layout_of("a", [300] * 3), layout_of("b", [8] * 3)], preferred_node=None
    )
    before = used(catalogue)
    for cells in ([(a, 0), (b, 1), (b, 1)], [(a, 0), (a, 3)], [(a, 0), (b, -1)]):
        with pytest.raises(ValueError, match="free"):
            catalogue.free(cells)
    assert used(catalogue) == before
    catalogue.free([(a, 0), (b, 1)])


def test_fields_without_bytes_or_rows_use_no_memory():
    catalogue = Catalogue(UNITS)
    [block] = catalogue.place([layout_of("a", [0, 0]), layout_of("b", [])], preferred_node=None)
    assert used(catalogue) == 0
    catalogue.free([(block, 1), (block, 0)])


def test_blocks_survive_msgpack_and_are_freed_by_their_copies():
    catalogue = Catalogue(UNITS)
    [block] = catalogue.place([layout_of("a", [300, 200])], preferred_node=None)
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(block), type=Block)
    assert copy == block
    catalogue.free([(copy, 0)])
    with pytest.raises(ValueError, match="freed before"):
        catalogue.free([(block, 0)])


@given(data=st.data(), fields=st.lists(sizes, min_size=1, max_size=3), fixed=st.booleans())
def test_bytes_of_rows_add_up_to_the_put(data, fields, fixed):
    lengths = [[rows[0]] * len(rows) if fixed else rows for rows in fields]
    layouts = [
        FieldLayout("x", "object", True, (), b"", rows[0], len(rows))
        if fixed
        else layout_of("x", rows)
        for rows in lengths
    ]
    blocks = Catalogue([UnitSpec("u", "a", 1 << 20)]).place(layouts, preferred_node=None)
    cells = [(block, row) for block in blocks for row in range(block.layout.rows)]
    expected = {
        (block.id, row): rows[row]
        for block, rows in zip(blocks, lengths, strict=True)
        for row in range(block.layout.rows)
    }
    drawn = data.draw(
        st.lists(st.sampled_from(cells), min_size=1, unique_by=lambda c: (c[0].id, c[1]))
    )
    assert bytes_of(drawn) == sum(expected[block.id, row] for block, row in drawn)
    assert bytes_of(cells) == sum(layout.nbytes for layout in layouts)
