"""Fields survive encoding, placement and decoding bit by bit.

Imports internals: tests check exact bytes and index arithmetic; a client shows only values.
"""

import io
import threading
from collections import Counter

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from dataplane_core import InvalidRequestError
from dataplane_core.tensors.columns import fields_of_columns, padded_tensor
from dataplane_core.tensors.rows import collate_rows, split_rows
from dataplane_tq.directory.catalogue import Catalogue
from dataplane_tq.packed.decoding import Piece, decode, decode_column
from dataplane_tq.packed.encoding import encode, encode_columns, writes
from dataplane_tq.packed.layout import FieldLayout
from dataplane_tq.packed.unit_wire import UnitSpec

DTYPES = [
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
]


def random_tensor(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    if dtype == torch.bool:
        raw %= 2
    return raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)


def jagged(rows):
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.cat(rows), offsets)


def raw(tensor):
    return torch.stack([tensor]).view(torch.uint8).tolist() if tensor.numel() else []


def assert_same(actual, expected):
    """Check for the same class, layout, dtype, shapes and bits, NaNs included."""
    if not isinstance(expected, torch.Tensor):
        assert type(actual) is type(expected)
        assert actual.tolist() == expected.tolist()
        return
    assert (actual.dtype, actual.layout, actual.is_nested) == (
        expected.dtype,
        expected.layout,
        expected.is_nested,
    )
    actual, expected = list(actual.unbind()), list(expected.unbind())
    assert [row.shape for row in actual] == [row.shape for row in expected]
    assert [raw(row) for row in actual] == [raw(row) for row in expected]


def put(leaf, count):
    """Encode a leaf; return its layout and its flat buffer."""
    [field] = encode(TensorDict({"f": leaf}, batch_size=[count]), count)
    return field.layout, field.slices.joined()


@st.composite
def batches(draw):
    """Draw leaves of one dtype, one per put."""
    dtype = draw(st.sampled_from(DTYPES))
    kind = draw(st.sampled_from(["dense", "jagged", "mixed", "strided"]))
    tail = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    if kind == "strided" and dtype == torch.float8_e4m3fn:
        kind = "jagged"  # torch has no strided nested tensors of this dtype
    leaves = []
    for seed in range(draw(st.integers(1, 3))):
        count = draw(st.integers(1, 5))
        if kind == "dense" or (kind == "mixed" and draw(st.booleans())):
            shape = tail if kind == "dense" else (2, *tail)
            leaves.append(random_tensor((count, *shape), dtype, seed))
            continue
        lengths = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
        if kind == "strided":
            rows = [random_tensor((n + 1, 1 + n % 2), dtype, n) for n in lengths]
            leaves.append(torch.nested.nested_tensor(rows, layout=torch.strided))
        else:
            leaves.append(jagged([random_tensor((n, *tail), dtype, n) for n in lengths]))
    return leaves


@settings(max_examples=150)
@given(st.data())
def test_tensors_are_read_as_collated_rows(data):
    leaves = data.draw(batches())
    puts = [put(leaf, leaf.size(0)) for leaf in leaves]
    rows = [list(leaf.unbind()) for leaf in leaves]
    pieces, expected = [], []
    for (layout, flat), put_rows in zip(puts, rows, strict=True):
        wanted = None
        if data.draw(st.booleans()):
            wanted = np.array(data.draw(st.permutations(range(len(put_rows)))))
            wanted = wanted[: data.draw(st.integers(1, len(put_rows)))]
        if wanted is not None and data.draw(st.booleans()):
            runs = [flat[:0], *(flat[start:stop] for start, stop in layout.runs(wanted))]
            pieces.append(Piece(layout.take(wanted), np.concatenate(runs)))
        else:
            pieces.append(Piece(layout, flat, wanted))
        expected += [put_rows[row] for row in (range(len(put_rows)) if wanted is None else wanted)]
    if data.draw(st.booleans()):
        order = data.draw(st.permutations(range(len(expected))))
        answer = [None] * len(order)
        for at, row in zip(order, expected, strict=True):
            answer[at] = row
        expected, at, placed = answer, 0, []
        for piece in pieces:
            positions = np.array(order[at : at + piece.count])
            placed.append(Piece(piece.layout, piece.flat, piece.rows, positions))
            at += piece.count
        pieces = placed
    decoded = decode(pieces)
    assert_same(decoded, collate_rows(str(expected[0].dtype), expected))
    width = data.draw(st.none() | st.integers(0, 5))
    pad_value = data.draw(st.sampled_from([0, 1]))
    column = decode_column(pieces, pad_value, width)
    assert_same(column, padded_tensor(decoded, pad_value, width))
    for answer in (decoded, column):
        assert not any(flat.size and shares_memory(answer, flat) for _, flat in puts)


@given(st.data())
def test_padded_columns_are_stored_as_cut_rows(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    shape = (len(lengths), max(lengths) + data.draw(st.integers(0, 2)))
    padded = random_tensor((*shape, *data.draw(st.sampled_from([(), (2,), (0,)]))), dtype, 1)
    if data.draw(st.booleans()):
        padded = padded.transpose(0, 1).contiguous().transpose(0, 1)
    ids = np.array([str(length) for length in lengths], object)
    columns = {"cut": padded, "uncut": padded, "ids": ids}
    encoded = encode_columns(columns, lengths, ["cut"])
    fields = fields_of_columns(columns, len(lengths), lengths, ["cut"])
    for field, expected in zip(encoded, encode(fields, len(lengths)), strict=True):
        assert field.layout == expected.layout
        assert field.slices.joined().tobytes() == expected.slices.joined().tobytes()


def shares_memory(tensor, flat):
    storage = (tensor.values() if tensor.is_nested else tensor).untyped_storage()
    first = flat.__array_interface__["data"][0]
    return first <= storage.data_ptr() < first + flat.size


def jagged_with_holes():
    return torch.nested.narrow(
        torch.arange(12).reshape(3, 4), 1, torch.tensor([0, 1, 0]), torch.tensor([2, 3, 1]),
        layout=torch.jagged,
    )  # fmt: skip


LEAVES = {
    "non-contiguous": lambda: torch.arange(12).reshape(4, 3).t(),
    "one element, strided": lambda: torch.arange(6).reshape(3, 2)[:, :1],
    "expanded": lambda: torch.arange(4).expand(3, 4),
    "gradient": lambda: torch.rand(3, 2, requires_grad=True) * 2,
    "parameter": lambda: torch.nn.Parameter(torch.rand(3, 2)),
    "conjugate": lambda: torch.view_as_complex(torch.rand(3, 2, 2)).conj(),
    "jagged with holes": jagged_with_holes,
    "jagged with gradient": lambda: jagged([torch.rand(n, requires_grad=True) for n in (1, 2, 3)]),
    "jagged rows of one length": lambda: jagged([torch.rand(2, 3) for _ in range(3)]),
    "jagged rows of no length": lambda: jagged([torch.rand(0) for _ in range(3)]),
    "jagged rows of no bytes": lambda: jagged([torch.rand(n, 0) for n in (1, 2, 3)]),
    "transposed jagged": lambda: jagged([torch.rand(n, 2) for n in (1, 2, 3)]).transpose(1, 2),
    "strided nested": lambda: torch.nested.nested_tensor(
        [torch.rand(2, 3), torch.rand(1, 3), torch.rand(2, 1)]
    ),
    "strided nested of one tail": lambda: torch.nested.nested_tensor(
        [torch.rand(2, 3), torch.rand(1, 3), torch.rand(4, 3)]
    ),
    "stack": lambda: NonTensorStack("a", {"b": [1, None]}, 2.5),
    "strings": lambda: NonTensorStack("a", "", "ccc"),
    "one value for all rows": lambda: NonTensorData("same", batch_size=[3]),
    "a list": lambda: NonTensorData(["a", "b", "c"], batch_size=[3]),
    "an array": lambda: NonTensorData(np.array([1, 2, 3]), batch_size=[3]),
}


@pytest.mark.parametrize("make", LEAVES.values(), ids=LEAVES)
def test_encode_accepts_what_split_rows_accepts(make):
    fields = TensorDict({"f": make()}, batch_size=[3])
    column = split_rows(fields, 3)["f"]
    rows = column.rows
    if isinstance(rows[0], np.generic):
        rows = [row.item() for row in rows]
    [field] = encode(fields, 3)
    assert field.layout.kind == column.kind
    assert_same(
        decode([Piece(field.layout, field.slices.joined())]), collate_rows(column.kind, rows)
    )


def test_offsets_need_not_cover_the_values():
    leaf = torch.nested.nested_tensor_from_jagged(torch.arange(10), torch.tensor([2, 4, 4, 7]))
    layout, flat = put(leaf, 3)
    decoded = decode([Piece(layout, flat)])
    assert [row.tolist() for row in decoded.unbind()] == [[2, 3], [], [4, 5, 6]]
    empty = torch.nested.nested_tensor_from_jagged(torch.empty(10, 0), torch.tensor([2, 4, 4, 7]))
    decoded = decode([Piece(*put(empty, 3))])
    assert [row.shape for row in decoded.unbind()] == [(2, 0), (0, 0), (3, 0)]


def test_lazy_stack_is_encoded():
    rows = [TensorDict({"a": torch.tensor([i]), "b": NonTensorData(str(i))}) for i in range(3)]
    fields = {
        field.layout.name: decode([Piece(field.layout, field.slices.joined())])
        for field in encode(LazyStackedTensorDict(*rows), 3)
    }
    assert fields["a"].tolist() == [[0], [1], [2]]
    assert fields["b"].tolist() == ["0", "1", "2"]


def test_values_that_msgpack_lacks_are_pickled_if_allowed():
    unusual = [threading.Event, "\ud800", Counter(a=2**70), {2**70: 1}]
    fields = TensorDict({"f": NonTensorStack(*unusual)}, [4])
    (field,) = encode(fields, 4, allow_pickle=True)
    pieces = [Piece(field.layout, field.slices.joined())]
    assert decode(pieces, allow_pickle=True).tolist() == unusual
    with pytest.raises(ValueError, match="is a pickle"):
        decode(pieces)
    images = pytest.importorskip("PIL.Image")
    frames = [images.new("L", (2, 2), shade) for shade in (0, 99)]
    frames[0].save(file := io.BytesIO(), "GIF", save_all=True, append_images=frames[1:])
    animated = TensorDict({"f": NonTensorStack(images.open(file))}, [1])
    with pytest.raises(InvalidRequestError, match="field 'f': an image of 2 frames"):
        encode(animated, 1, allow_pickle=True)


def test_wrong_number_of_rows_is_refused():
    with pytest.raises(InvalidRequestError, match="expected 2 rows"):
        encode(TensorDict({"f": torch.rand(3)}, batch_size=[3]), 2)
    for leaf in (torch.rand(3), torch.tensor(1), jagged([torch.rand(2)] * 3), NonTensorStack("a")):
        with pytest.raises(InvalidRequestError, match=r"'f': \d rows; expected 2"):
            encode(TensorDict({"f": leaf}, batch_size=[]), 2)


def test_inconsistent_pieces_are_refused():
    layout, flat = put(torch.arange(3), 3)
    other, floats = put(torch.rand(3), 3)
    rows = np.array([0, 1])
    for pieces, message in (
        ([], "no rows"),
        ([Piece(layout, flat), Piece(other, floats)], "torch.int64 and of torch.float32"),
        ([Piece(layout, flat[:-1])], "23 bytes for 3 rows"),
        ([Piece(layout, flat, rows, np.array([0, 0]))], "do not cover"),
        ([Piece(layout, flat, rows, np.array([0, 2]))], "outside the answer"),
        ([Piece(layout, flat, rows, np.array([0]))], "1 positions for 2 rows"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            decode(pieces)
    for rows in ([0, 3], [-1, 0], [2, 5, 1]):
        with pytest.raises(IndexError):
            decode([Piece(layout, flat, np.array(rows))])


def test_put_split_over_units_is_read_back():
    rows = [torch.rand(n, 8) for n in (3, 0, 12, 7, 1)]
    fields = TensorDict(
        {
            "a": jagged(rows),
            "b": torch.arange(5),
            "c": NonTensorStack(*("x" * n for n in (9, 0, 300, 40, 5))),
            "d": torch.nested.nested_tensor(rows),
        },
        batch_size=[5],
    )
    units = "stuvwxyz"
    catalogue = Catalogue([UnitSpec(name, "n", 512) for name in units])
    encoded = encode(fields, 5)
    blocks = catalogue.place([field.layout for field in encoded], preferred_node=None)
    assert len(blocks) > 4
    memory = {name: np.zeros(512, np.uint8) for name in units}
    for unit, pieces in writes(blocks, encoded).items():
        for offset, part in pieces:
            part.copy_into(memory[unit][offset : offset + part.nbytes])
    for name in "abcd":
        pieces = [
            Piece(b.layout, memory[b.unit][b.offset : b.offset + b.layout.nbytes])
            for b in blocks
            if b.layout.name == name
        ]
        column = split_rows(fields, 5)[name]
        assert_same(decode(pieces), collate_rows(column.kind, column.rows))


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
def test_inconsistent_layout_is_refused_on_decode(ends, row_nbytes, rows, shapes):
    data = msgspec.msgpack.encode(("f", "object", True, (), ends, row_nbytes, rows, shapes))
    with pytest.raises(msgspec.ValidationError, match="'f'"):
        msgspec.msgpack.decode(data, type=FieldLayout)
