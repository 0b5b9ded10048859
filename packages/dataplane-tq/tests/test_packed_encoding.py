"""Fields survive encoding, placement and decoding bit by bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from dataplane_core import InvalidRequestError
from dataplane_core.columns import fields_of_columns, padded_tensor
from dataplane_core.rows import collate_rows, split_rows
from dataplane_tq.packed.catalogue import Catalogue, UnitSpec
from dataplane_tq.packed.decoding import Piece, decode, decode_column
from dataplane_tq.packed.encoding import encode, encode_columns, writes

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


def assert_same(found, expected):
    """Same class, layout, dtype, shapes and bits; NaNs included."""
    if not isinstance(expected, torch.Tensor):
        assert type(found) is type(expected)
        assert found.tolist() == expected.tolist()
        return
    assert (found.dtype, found.layout, found.is_nested) == (
        expected.dtype,
        expected.layout,
        expected.is_nested,
    )
    found, expected = list(found.unbind()), list(expected.unbind())
    assert [row.shape for row in found] == [row.shape for row in expected]
    assert [raw(row) for row in found] == [raw(row) for row in expected]


def put(leaf, count):
    """The leaf's layout and its flat buffer."""
    [field] = encode(TensorDict({"f": leaf}, batch_size=[count]), count)
    return field.layout, field.slices.joined()


@st.composite
def batches(draw):
    """Leaves of one dtype, as their rows in several puts."""
    dtype = draw(st.sampled_from(DTYPES))
    kind = draw(st.sampled_from(["dense", "jagged", "mixed", "strided"]))
    tail = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    if kind == "strided" and dtype == torch.float8_e4m3fn:
        kind = "jagged"  # torch has no strided nested tensors of it
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
def test_tensors_come_back_as_collated_rows(data):
    leaves = data.draw(batches())
    puts = [put(leaf, leaf.size(0)) for leaf in leaves]
    rows = [list(leaf.unbind()) for leaf in leaves]
    pieces, expected = [], []
    for (layout, flat), mine in zip(puts, rows, strict=True):
        wanted = None
        if data.draw(st.booleans()):
            wanted = np.array(data.draw(st.permutations(range(len(mine)))))
            wanted = wanted[: data.draw(st.integers(1, len(mine)))]
        if wanted is not None and data.draw(st.booleans()):
            runs = [flat[:0], *(flat[start:stop] for start, stop in layout.runs(wanted))]
            pieces.append(Piece(layout.take(wanted), np.concatenate(runs)))
        else:
            pieces.append(Piece(layout, flat, wanted))
        expected += [mine[row] for row in (range(len(mine)) if wanted is None else wanted)]
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
    found = decode(pieces)
    assert_same(found, collate_rows(str(expected[0].dtype), expected))
    width = data.draw(st.none() | st.integers(0, 5))
    pad_value = data.draw(st.sampled_from([0, 1]))
    column = decode_column(pieces, pad_value, width)
    assert_same(column, padded_tensor(found, pad_value, width))
    for answer in (found, column):
        assert not any(flat.size and shares(answer, flat) for _, flat in puts)


@given(st.data())
def test_padded_columns_are_stored_as_their_cut_rows(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    shape = (len(lengths), max(lengths) + data.draw(st.integers(0, 2)))
    padded = random_tensor((*shape, *data.draw(st.sampled_from([(), (2,), (0,)]))), dtype, 1)
    if data.draw(st.booleans()):
        padded = padded.transpose(0, 1).contiguous().transpose(0, 1)
    ids = np.array([str(length) for length in lengths], object)
    columns = {"cut": padded, "whole": padded, "ids": ids}
    encoded = encode_columns(columns, lengths, ["cut"])
    fields = fields_of_columns(columns, len(lengths), lengths, ["cut"])
    for field, expected in zip(encoded, encode(fields, len(lengths)), strict=True):
        assert field.layout == expected.layout
        assert field.slices.joined().tobytes() == expected.slices.joined().tobytes()


def shares(tensor, flat):
    storage = (tensor.values() if tensor.is_nested else tensor).untyped_storage()
    first = flat.__array_interface__["data"][0]
    return first <= storage.data_ptr() < first + flat.size


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(dtype):
    tensor = random_tensor((4, 3), dtype, 7)
    for leaf in (tensor, tensor[:, 0], tensor[:, :1], jagged([tensor[0, :1], tensor[1]])):
        layout, flat = put(leaf, leaf.size(0))
        assert layout.kind == str(dtype)
        assert_same(decode([Piece(layout, flat)]), collate_rows("", list(leaf.unbind())))


def holed():
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
    "jagged with holes": holed,
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
def test_what_split_rows_takes_is_taken_alike(make):
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
    found = decode([Piece(layout, flat)])
    assert [row.tolist() for row in found.unbind()] == [[2, 3], [], [4, 5, 6]]


def test_a_lazy_stack_is_taken():
    rows = [TensorDict({"a": torch.tensor([i]), "b": NonTensorData(str(i))}) for i in range(3)]
    fields = {
        field.layout.name: decode([Piece(field.layout, field.slices.joined())])
        for field in encode(LazyStackedTensorDict(*rows), 3)
    }
    assert fields["a"].tolist() == [[0], [1], [2]]
    assert fields["b"].tolist() == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (NonTensorData(["a", "b"], batch_size=[3]), "field 'f': 2 rows; expected 3"),
        (TensorDict({"a": torch.rand(3)}, batch_size=[3]), "field 'f': nested TensorDicts"),
        (NonTensorStack("a", object(), "c"), "field 'f': object cannot be stored"),
        (torch.rand(3, 2).to_sparse(), "field 'f' is a tensor that is torch.sparse_coo"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_the_fields_name(leaf, message):
    with pytest.raises(InvalidRequestError, match=message):
        encode(TensorDict({"f": leaf}, batch_size=[3]), 3)


def test_another_number_of_rows_is_refused():
    with pytest.raises(InvalidRequestError, match="expected 2 rows"):
        encode(TensorDict({"f": torch.rand(3)}, batch_size=[3]), 2)
    for leaf in (torch.rand(3), torch.tensor(1), jagged([torch.rand(2)] * 3), NonTensorStack("a")):
        with pytest.raises(InvalidRequestError, match=r"'f': \d rows; expected 2"):
            encode(TensorDict({"f": leaf}, batch_size=[]), 2)


def test_pieces_that_contradict_each_other_are_refused():
    layout, flat = put(torch.arange(3), 3)
    other, floats = put(torch.rand(3), 3)
    rows = np.array([0, 1])
    for pieces, message in (
        ([], "no rows"),
        ([Piece(layout, flat), Piece(other, floats)], "torch.int64 and of torch.float32"),
        ([Piece(layout, flat[:-1])], "23 bytes for 3 rows"),
        ([Piece(layout, flat, rows, np.array([0, 0]))], "not every one"),
        ([Piece(layout, flat, rows, np.array([0, 2]))], "outside the answer"),
        ([Piece(layout, flat, rows, np.array([0]))], "1 positions for 2 rows"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            decode(pieces)
    for rows in ([0, 3], [-1, 0], [2, 5, 1]):
        with pytest.raises(IndexError):
            decode([Piece(layout, flat, np.array(rows))])


def test_a_put_that_is_split_over_units_comes_back():
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
    blocks = catalogue.place([field.layout for field in encoded], near=None)
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
