"""Row operations of a batch, for every type of column."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from column_io import BatchedDataDict, to_nested_by_length
from dataplane_core import InvalidRequestError, MissingDataError


def batch_of(rows: int) -> BatchedDataDict[Any]:
    """One column of each kind, in which row i holds i."""
    objects = np.empty(rows, dtype=object)
    objects[:] = [{"row": row} for row in range(rows)]
    padded = torch.arange(rows).unsqueeze(1).expand(-1, 3)
    return BatchedDataDict(
        scalar=torch.arange(rows),
        padded=padded.clone(),
        jagged=to_nested_by_length(padded, [row % 4 for row in range(rows)]),
        objects=objects,
        numbers=np.arange(rows),
        texts=[str(row) for row in range(rows)],
    )


def check_rows(batch: BatchedDataDict[Any], rows: list[int]) -> None:
    assert batch.size == len(rows)
    assert batch["scalar"].tolist() == rows
    assert batch["padded"].tolist() == [[row] * 3 for row in rows]
    jagged = batch["jagged"].unbind() if rows else []
    assert [row.tolist() for row in jagged] == [[row] * (row % 4) for row in rows]
    assert batch["objects"].tolist() == [{"row": row} for row in rows]
    assert batch["numbers"].tolist() == rows
    assert batch["texts"] == [str(row) for row in rows]


def test_a_batch_is_a_dict_of_its_columns() -> None:
    batch: BatchedDataDict[Any] = BatchedDataDict({"a": torch.ones(2)}, b=[1, 2])
    assert set(batch) == {"a", "b"}
    assert batch.get_dict() is batch.data
    batch["c"] = torch.zeros(2)
    del batch["a"]
    assert batch.size == 2
    assert set(BatchedDataDict[Any](batch)) == {"b", "c"}


def test_the_size_is_the_number_of_rows() -> None:
    assert BatchedDataDict[Any]().size == 0
    assert batch_of(3).size == 3


@pytest.mark.parametrize(
    ("column", "message"),
    [(torch.ones(()), "scalar"), (3.0, "float"), ("abc", "str"), (torch.ones(3), "a: 2, b: 3")],
)
def test_columns_without_a_common_row_count_are_refused(column: Any, message: str) -> None:
    batch: BatchedDataDict[Any] = BatchedDataDict(a=torch.ones(2), b=column)
    with pytest.raises(ValueError, match=message):
        _ = batch.size


@given(data=st.data(), size=st.integers(1, 6))
def test_select_indices_takes_rows_of_every_column(data: st.DataObject, size: int) -> None:
    rows = data.draw(st.lists(st.integers(0, size - 1), max_size=8))
    as_asked: Callable[[list[int]], Any] = data.draw(st.sampled_from([list, torch.tensor]))
    check_rows(batch_of(size).select_indices(as_asked(rows)), rows)


def test_select_indices_takes_masks_and_negative_indices() -> None:
    check_rows(batch_of(3).select_indices(torch.tensor([True, False, True])), [0, 2])
    check_rows(batch_of(3).select_indices([-1, 0]), [2, 0])


def test_select_indices_refuses_indices_outside_the_batch() -> None:
    with pytest.raises(IndexError, match="3 outside a batch of 3 samples"):
        batch_of(3).select_indices([3])
    with pytest.raises(ValueError, match="mask"):
        batch_of(3).select_indices(torch.tensor([True]))


@given(size=st.integers(0, 5), start=st.integers(-6, 6), end=st.integers(-6, 6))
def test_slice_follows_the_rules_of_python(size: int, start: int, end: int) -> None:
    check_rows(batch_of(size).slice(start, end), list(range(size))[start:end])


def test_slices_are_views() -> None:
    batch = batch_of(3)
    batch.slice(1, 2)["scalar"][0] = 9
    assert batch["scalar"].tolist() == [0, 9, 2]


@given(size=st.integers(1, 9), chunks=st.integers(1, 5))
def test_chunks_are_contiguous_and_cover_the_batch(size: int, chunks: int) -> None:
    parts = [batch_of(size).chunk(rank, chunks) for rank in range(chunks)]
    joined = [row for part in parts for row in part["scalar"].tolist()]
    assert joined == list(range(size))
    assert parts[0].size == -(-size // chunks)


def test_a_chunk_pickles_without_the_rest_of_the_batch() -> None:
    batch: BatchedDataDict[Any] = BatchedDataDict(x=torch.zeros(1000, 100))
    assert len(pickle.dumps(batch.chunk(0, 1000))) < 10_000


def test_a_rank_outside_the_chunks_is_refused() -> None:
    with pytest.raises(ValueError, match="rank is 2; expected an int of 0 to 1"):
        batch_of(4).chunk(2, 2)


@given(parts=st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_from_batches_joins_rows_in_order(parts: list[int]) -> None:
    complete = batch_of(sum(parts))
    ends = [sum(parts[: place + 1]) for place in range(len(parts))]
    batches = [complete.slice(end - part, end) for part, end in zip(parts, ends, strict=True)]
    check_rows(BatchedDataDict.from_batches(batches), list(range(sum(parts))))


def test_from_batches_pads_dim_1_to_the_widest() -> None:
    batches = [
        {"ids": torch.ones(1, 2), "mask": torch.ones(1, 2), "experts": torch.ones(1, 2, 2)},
        {"ids": torch.ones(2, 3), "mask": torch.ones(2, 3), "experts": torch.ones(2, 3, 2)},
    ]
    batch: BatchedDataDict[Any] = BatchedDataDict.from_batches(batches, pad_value_dict={"ids": 9})
    assert batch["ids"].tolist() == [[1, 1, 9], [1, 1, 1], [1, 1, 1]]
    assert batch["mask"].tolist() == [[1, 1, 0], [1, 1, 1], [1, 1, 1]]
    assert batch["experts"].shape == (3, 3, 2)


def test_from_batches_keeps_dtypes() -> None:
    batches = [{"x": torch.ones(1, width, dtype=torch.bfloat16)} for width in (1, 2)]
    assert BatchedDataDict.from_batches(batches)["x"].dtype == torch.bfloat16


def test_from_batches_joins_jagged_with_dense() -> None:
    batches = [
        {"x": to_nested_by_length(torch.ones(2, 2), [1, 2])},
        {"x": torch.ones(1, 3)},
    ]
    rows = BatchedDataDict.from_batches(batches)["x"].unbind()
    assert [len(row) for row in rows] == [1, 2, 3]


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "no batches"),
        ([{"x": torch.ones(1)}, {"x": torch.ones(1).int()}], "several dtypes"),
        ([{"x": torch.ones(1)}, {"x": [1]}], "different kinds: Tensor, list"),
        ([{"x": torch.ones(1, 2, 3)}, {"x": torch.ones(1, 2, 4)}], "dims 0 and 1 only"),
        ([{"x": torch.ones(1)}, {"x": torch.ones(1, 2)}], "dims 0 and 1 only"),
        ([{"x": torch.tensor(1)}, {"x": torch.tensor(2)}], "'x': a scalar"),
        ([{"x": "ab"}, {"x": "cd"}], "'x': found str"),
        ([{"x": np.ones(1)}, {"x": np.ones(1, int)}], "several dtypes: float64, int64"),
        ([{"x": np.ones((1, 2))}, {"x": np.ones((1, 3))}], "dim 0 only"),
    ],
)
def test_from_batches_refuses_what_cannot_be_joined(batches: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        BatchedDataDict.from_batches(batches)


def test_from_batches_joins_arrays_of_texts_of_any_length() -> None:
    batches = [{"x": np.array([text])} for text in ("a", "bcd")]
    assert BatchedDataDict.from_batches(batches)["x"].tolist() == ["a", "bcd"]


@pytest.mark.parametrize("lacking", [0, 1])
def test_from_batches_never_drops_a_column(lacking: int) -> None:
    batches = [{"x": torch.ones(1), "y": torch.ones(1)} for _ in range(2)]
    del batches[lacking]["y"]
    with pytest.raises(MissingDataError, match=f"batch {lacking} of 2 lacks columns 'y'"):
        BatchedDataDict.from_batches(batches)


@given(order=st.permutations(range(5)))
def test_reorder_data_moves_row_i_to_the_given_place(order: list[int]) -> None:
    batch = batch_of(5)
    batch.reorder_data(order)
    assert [batch["scalar"][place].item() for place in order] == list(range(5))
    check_rows(batch, batch["scalar"].tolist())


@pytest.mark.parametrize("order", [[0, 0, 1], [0, 1], [0, 1, 3]])
def test_reorder_data_needs_a_permutation(order: list[int]) -> None:
    with pytest.raises(ValueError, match="permutation"):
        batch_of(3).reorder_data(order)


def test_repeat_interleave_repeats_rows_consecutively() -> None:
    check_rows(batch_of(3).repeat_interleave(2), [0, 0, 1, 1, 2, 2])
    check_rows(batch_of(3).repeat_interleave(0), [])


def test_repeated_python_values_share_no_state() -> None:
    batch: BatchedDataDict[Any] = BatchedDataDict(log=[[{"role": "user"}]])
    batch["objects"] = batch_of(1)["objects"]
    repeated = batch.repeat_interleave(2)
    repeated["log"][0].append({"role": "assistant"})
    repeated["objects"][0]["row"] = 7
    assert len(repeated["log"][1]) == 1
    assert repeated["objects"][1] == {"row": 0}
    assert batch["objects"][0] == {"row": 0}


def test_truncate_tensors_cuts_wider_tensors_only() -> None:
    batch = batch_of(2)
    batch["narrow"] = torch.ones(2, 1)
    batch.truncate_tensors(dim=1, truncated_len=2)
    assert batch["padded"].shape == (2, 2)
    assert batch["narrow"].shape == (2, 1)
    assert batch["scalar"].shape == (2,)


def test_to_moves_tensors_in_place() -> None:
    batch = batch_of(2)
    assert batch.to("cpu") is batch
    assert batch.to("meta")["scalar"].device.type == "meta"
    assert batch["texts"] == ["0", "1"]


def test_a_copy_and_a_pickle_keep_columns_and_plan() -> None:
    batch = batch_of(2)
    batch.micro_batch_indices = [[[0, 2]]]
    for twin in (copy.copy(batch), pickle.loads(pickle.dumps(batch))):
        check_rows(twin, [0, 1])
        assert twin.micro_batch_indices == [[[0, 2]]]


@pytest.mark.parametrize("wrong", [1.9, True, "1", None, torch.tensor(1.0)], ids=repr)
def test_index_that_is_not_an_int_is_refused(wrong: Any) -> None:
    batch = BatchedDataDict(x=torch.arange(3))
    for call in (
        lambda: batch.select_indices([0, wrong]),
        lambda: batch.reorder_data([0, wrong, 2]),
        lambda: batch.get_batch(wrong, 1),
    ):
        with pytest.raises(InvalidRequestError, match="expected an int"):
            call()
    if wrong is not None:
        for other in (lambda: batch.slice(wrong, 3), lambda: batch.get_batch(0, wrong)):
            with pytest.raises(InvalidRequestError, match="expected an int"):
                other()
    assert batch["x"].tolist() == [0, 1, 2]


def test_description_has_types_and_shapes_without_values():
    rows = [torch.zeros(2), torch.zeros(3)]
    batch = BatchedDataDict(
        {
            "ids": torch.full((2, 4), 777),
            "ragged": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
            "array": np.zeros((2, 1)),
            "text": ["<b>", "y"],
        }
    )
    assert repr(batch) == (
        "BatchedDataDict(ids: int64[2, 4], ragged: float32[2, ragged], "
        "array: numpy float64[2, 1], text: list of 2 (str))"
    )
    html = batch._repr_html_()
    assert "int64[2, 4]" in html
    assert "777" not in html
