"""Layouts find every row again, also after they crossed the wire."""

import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane_tq.packed.layout import FieldLayout


def layout_of(sizes, *, shapes=None):
    if sizes and len(set(sizes)) == 1:
        return FieldLayout("f", "torch.int8", True, (), b"", sizes[0], len(sizes), shapes)
    ends = np.cumsum(sizes, dtype="<i8").tobytes()
    return FieldLayout("f", "torch.int8", True, (), ends, 0, len(sizes), shapes)


row_sizes = st.lists(st.integers(0, 20), max_size=12) | st.integers(1, 12).map(lambda n: [4] * n)


@given(row_sizes)
def test_rows_lie_back_to_back(sizes):
    layout = layout_of(sizes)
    ranges = [layout.row_range(row) for row in range(len(sizes))]
    assert [stop - start for start, stop in ranges] == sizes
    assert [start for start, _ in ranges] == [0, *[stop for _, stop in ranges]][: len(sizes)]
    assert layout.nbytes == sum(sizes)
    starts, stops = layout.row_ranges()
    assert list(zip(starts.tolist(), stops.tolist(), strict=True)) == ranges


@given(st.data())
def test_rows_taken_in_any_order_keep_their_bytes(data):
    sizes = data.draw(row_sizes.filter(bool))
    layout = layout_of(sizes)
    rows = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=8))
    flat = np.random.default_rng(0).bytes(layout.nbytes)
    parts = [flat[slice(*layout.row_range(row))] for row in rows]
    starts, stops = layout.row_ranges(rows)
    assert [flat[a:b] for a, b in zip(starts, stops, strict=True)] == parts
    taken = layout.take(rows)
    packed = b"".join(flat[a:b] for a, b in layout.runs(rows))
    assert packed == b"".join(parts)
    assert [packed[slice(*taken.row_range(row))] for row in range(taken.rows)] == parts


@given(st.data())
def test_a_slice_is_the_layout_of_its_rows_alone(data):
    sizes = data.draw(row_sizes)
    start = data.draw(st.integers(0, len(sizes)))
    stop = data.draw(st.integers(start, len(sizes)))
    part = layout_of(sizes).slice(start, stop)
    assert part.rows == stop - start
    assert [b - a for a, b in map(part.row_range, range(part.rows))] == sizes[start:stop]


@pytest.mark.parametrize("shapes", [None, [(2, 1), (1, 3), ()]])
def test_a_layout_survives_msgpack(shapes):
    layout = layout_of([2, 3, 1], shapes=shapes)
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=FieldLayout)
    assert copy == layout
    assert copy.slice(1, 3).shapes == (shapes and shapes[1:])
    assert copy.take([2, 0]).shapes == (shapes and [shapes[2], shapes[0]])


@pytest.mark.parametrize("row", [-1, 2])
def test_a_row_that_is_not_there_is_refused(row):
    for sizes in ([4, 4], [4, 5]):
        with pytest.raises(IndexError, match="'f'"):
            layout_of(sizes).row_range(row)
        with pytest.raises(IndexError, match="'f'"):
            layout_of(sizes).row_ranges([0, row])
    with pytest.raises(IndexError, match="'f'"):
        layout_of([4, 5]).slice(0, 3)


@pytest.mark.parametrize(
    ("ends", "row_nbytes", "rows", "shapes"),
    [
        (b"\0" * 8, 0, 2, None),
        (np.array([4, 3], "<i8").tobytes(), 0, 2, None),
        (np.array([-1, 3], "<i8").tobytes(), 0, 2, None),
        (b"", -1, 2, None),
        (b"", 1, -2, None),
        (b"", 1, 2, [(1,)]),
    ],
)
def test_a_layout_that_contradicts_itself_does_not_cross_the_wire(ends, row_nbytes, rows, shapes):
    data = msgspec.msgpack.encode(("f", "object", True, (), ends, row_nbytes, rows, shapes))
    with pytest.raises(msgspec.ValidationError, match="'f'"):
        msgspec.msgpack.decode(data, type=FieldLayout)


def test_what_the_directorys_process_imports_needs_no_torch():
    code = "import sys, dataplane_tq.packed.catalogue; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
