"""Columns through a real unit, over shared memory and over TCP.

Imports internals: tests select the transport and the threshold of parallel transfers.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane_core.tensors.columns import columns_of_fields, fields_of_columns
from dataplane_tq.directory.catalogue import Catalogue
from dataplane_tq.packed import parallel, unit_wire
from dataplane_tq.packed.access import UnitAccess
from dataplane_tq.packed.arena import Arena
from dataplane_tq.packed.encoding import encode_columns
from dataplane_tq.packed.layout import FieldParts
from dataplane_tq.packed.unit import UnitServer
from dataplane_tq.packed.unit_wire import UnitSpec

CAPACITY = 1 << 20
TOKEN = b"secret"


@pytest.fixture(scope="module", params=["shm", "tcp", "tcp parallel"])
def access(request):
    transport, *is_parallel = request.param.split()
    with (
        Arena.create("unit", CAPACITY) as arena,
        UnitServer(arena, TOKEN, "127.0.0.1") as unit,
        pytest.MonkeyPatch.context() as patch,
    ):
        if is_parallel:
            patch.setattr(parallel, "MIN_BYTES", 0)
        access = UnitAccess({"unit": unit.address}, TOKEN, transport=transport, timeout_s=10)
        yield access
        access.close()


def write(access, columns, lengths):
    """Write columns of which "tokens" is ragged; return their blocks."""
    encoded = encode_columns(columns, lengths, ["tokens"])
    catalogue = Catalogue([UnitSpec("unit", "node", CAPACITY)])
    blocks = catalogue.place([field.layout for field in encoded], preferred_node=None)
    access.write(blocks, encoded)
    return blocks


def parts_of(block, rows):
    complete = rows == list(range(block.layout.rows))
    return FieldParts([block], b"", b"" if complete else np.array(rows, np.int64).tobytes())


@settings(max_examples=60)
@given(data=st.data())
def test_columns_are_read_padded_for_any_rows(access, data):
    count = data.draw(st.integers(1, 6))
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    width = max(lengths) + data.draw(st.integers(0, 2))
    tail = data.draw(st.sampled_from([(), (2,), (0,)]))
    dtype = data.draw(st.sampled_from([torch.int64, torch.bfloat16, torch.bool]))
    texts = np.empty(count, object)
    texts[:] = ["x" * length for length in lengths]
    columns = {
        "tokens": torch.randint(0, 2, (count, width, *tail)).to(dtype),
        "dense": torch.rand(count, 3),
        "texts": texts,
    }
    blocks = write(access, columns, lengths)
    first = data.draw(st.integers(0, count - 1))
    run = list(range(first, data.draw(st.integers(first + 1, count))))
    drawn = data.draw(st.lists(st.sampled_from(range(count)), min_size=1, max_size=8))
    for rows in (list(range(count)), run, drawn):
        minimum = data.draw(st.integers(0, 7))
        expected = columns_of_fields(
            fields_of_columns(
                {name: column[rows] for name, column in columns.items()},
                len(rows),
                [lengths[row] for row in rows],
                ["tokens"],
            ),
            pad_values={"tokens": 1},
            width=minimum,
        )
        parts = [parts_of(block, rows) for block in blocks]
        names = [block.layout.name for block in blocks]
        widths = {"tokens": minimum, "dense": 0, "texts": 0}
        actual = access.read_columns(names, parts, {"tokens": 1}, widths)
        assert actual["texts"].tolist() == expected["texts"].tolist()
        for name in ("tokens", "dense"):
            assert actual[name].dtype == expected[name].dtype
            assert actual[name].shape == expected[name].shape
            assert torch.equal(actual[name], expected[name])
    jagged = access.read(["tokens"], [parts_of(blocks[0], list(range(count)))])["tokens"]
    for row, length, values in zip(columns["tokens"], lengths, jagged.unbind(), strict=True):
        assert torch.equal(values, row[:length])


def test_reads_of_more_ranges_than_a_frame_holds_are_complete(access, monkeypatch):
    monkeypatch.setattr(unit_wire, "MAX_RANGES", 7)
    lengths = [1 + row % 3 for row in range(60)]
    columns = {"tokens": torch.arange(180).reshape(60, 3)}
    blocks = write(access, columns, lengths)
    rows = list(range(0, 60, 2))
    parts = [parts_of(blocks[0], rows)]
    tokens = access.read_columns(["tokens"], parts, {}, {"tokens": 0})["tokens"]
    for row, values in zip(rows, tokens.tolist(), strict=True):
        cut = columns["tokens"][row, : lengths[row]].tolist()
        assert values == cut + [0] * (3 - len(cut))
