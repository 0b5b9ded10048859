"""Padded to jagged and back, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from column_io import (
    TOKEN_ALIGNED_FIELDS,
    materialize,
    pack_jagged_fields,
    pack_per_token_field,
    response_from_nested,
    to_nested_by_length,
)

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.bool,
    torch.int32,
    torch.int64,
    torch.complex64,
]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bit pattern of ``dtype``, NaNs of every payload and negative zeros included."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = int(torch.tensor(shape).prod()) * dtype.itemsize
    raw = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> list[int]:
    # A tensor of one value counts as contiguous with any stride, but the view needs a stride of 1.
    fresh = tensor.flatten().clone(memory_format=torch.contiguous_format)
    return fresh.view(torch.uint8).tolist()


def object_array(values: list[Any]) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


lengths_lists = st.lists(st.integers(0, 7), min_size=1, max_size=6)


@given(
    lengths=lengths_lists,
    extra=st.integers(0, 3),
    features=st.sampled_from([(), (2,), (2, 3), (0,)]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32),
    transposed=st.booleans(),
)
def test_rows_keep_their_bits_from_padded_to_jagged_to_padded(
    lengths: list[int],
    extra: int,
    features: tuple[int, ...],
    dtype: torch.dtype,
    seed: int,
    transposed: bool,
) -> None:
    width = max(lengths) + extra
    padded = random_bits((len(lengths), width, *features), dtype, seed)
    if transposed:
        padded = padded.transpose(0, 1).contiguous().transpose(0, 1)
    fields = pack_jagged_fields({"input_ids": padded}, torch.tensor(lengths))
    back = materialize(fields, pad_to_seqlen=width)["input_ids"]
    assert back.dtype == dtype
    assert back.shape == padded.shape
    for row, length in enumerate(lengths):
        assert bits(back[row, :length]) == bits(padded[row, :length])
        assert not back[row, length:].any()


def test_only_token_aligned_fields_become_jagged() -> None:
    fields = {name: torch.ones(2, 4) for name in ("input_ids", "attention_mask", "turn_lengths")}
    packed = pack_jagged_fields(fields, [1, 4])
    assert {name for name, leaf in packed.items() if leaf.is_nested} == {"input_ids"}


def test_token_aligned_fields_are_those_of_the_contract() -> None:
    assert set(TOKEN_ALIGNED_FIELDS) == {
        "input_ids",
        "generation_logprobs",
        "prev_logprobs",
        "reference_policy_logprobs",
        "advantages",
        "token_mask",
        "sample_mask",
        "routed_experts",
    }


def test_the_fields_to_cut_can_be_named() -> None:
    fields = {"input_ids": torch.ones(2, 4), "entropy": torch.ones(2, 4)}
    packed = pack_jagged_fields(fields, [1, 4], token_aligned_fields={"entropy"})
    assert packed["entropy"].is_nested
    assert not packed["input_ids"].is_nested


@pytest.mark.parametrize(
    ("tensor", "lengths"),
    [
        pytest.param(torch.ones(2), [1, 1], id="one dimension"),
        pytest.param(torch.ones(3, 4), [1, 1], id="another number of rows"),
        pytest.param(torch.ones(2, 4), [1, 5], id="narrower than the longest row"),
    ],
)
def test_columns_that_cannot_be_cut_stay_dense(tensor: torch.Tensor, lengths: list[int]) -> None:
    assert pack_per_token_field(tensor, lengths) is tensor
    packed = pack_jagged_fields({"input_ids": tensor}, lengths)
    assert packed["input_ids"].tolist() == tensor.tolist()


def test_jagged_column_is_packed_unchanged() -> None:
    nested = to_nested_by_length(torch.ones(2, 4), [1, 2])
    assert pack_per_token_field(nested, [1, 2]) is nested
    assert pack_jagged_fields({"input_ids": nested}, [1, 2])["input_ids"].is_nested


def test_without_lengths_the_batch_size_is_the_row_count() -> None:
    """Regression test: upstream sets a batch size of 0, which makes any tensor raise."""
    packed = pack_jagged_fields({"input_ids": torch.ones(3, 4), "sample_mask": torch.ones(3)})
    assert packed.batch_size == (3,)
    assert not packed["input_ids"].is_nested


def test_object_arrays_are_packed_row_by_row() -> None:
    values = [{"a": [1]}, None, "text", [1, 2]]
    packed = pack_jagged_fields({"content": object_array(values)})
    assert materialize(packed)["content"].tolist() == values


def test_empty_inputs_are_packed() -> None:
    assert pack_jagged_fields({}).batch_size == (0,)
    packed = pack_jagged_fields(
        {"input_ids": torch.ones(0, 4), "content": object_array([])}, lengths=[]
    )
    back = materialize(packed)
    assert packed.batch_size == (0,)
    assert back["input_ids"].shape[0] == 0
    assert back["content"].shape == (0,)


@pytest.mark.parametrize("column", [[1, 2], np.ones(2), "ab", None], ids=repr)
def test_other_types_are_refused_by_name(column: Any) -> None:
    with pytest.raises(TypeError, match="'reward'"):
        pack_jagged_fields({"reward": column})


def test_columns_of_different_row_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="a: 2, b: 3"):
        pack_jagged_fields({"a": torch.ones(2), "b": torch.ones(3)})


@pytest.mark.parametrize(
    ("tensor", "lengths", "message"),
    [
        (torch.ones(3), [1, 1, 1], "shape"),
        (torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), [1], "nested tensor"),
        (torch.ones(3, 2), [1, 1], "2 lengths for 3 rows"),
        (torch.ones(2, 2), [1, 3], "row 1 has a length of 3; expected 0 to the width 2"),
        (torch.ones(2, 2), [-1, 2], r"lengths\[0\] is -1"),
        (torch.ones(2, 2), [1.5, 2], r"lengths\[0\] is 1.5 of type float"),
        (torch.ones(2, 2), torch.ones(2), r"lengths\[0\] is 1.0 of type float"),
    ],
)
def test_nesting_refuses_what_does_not_fit(
    tensor: torch.Tensor, lengths: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        to_nested_by_length(tensor, lengths)


def test_gradients_flow_through_the_codec() -> None:
    padded = torch.ones(2, 3, requires_grad=True)
    packed = pack_jagged_fields({"input_ids": padded}, [1, 3])
    materialize(packed)["input_ids"].sum().backward()
    assert padded.grad is not None
    assert padded.grad.tolist() == [[1, 0, 0], [1, 1, 1]]


def test_a_response_is_its_last_tokens_shifted_one_to_the_left() -> None:
    values = to_nested_by_length(torch.arange(10).view(2, 5), [5, 4])
    rows = response_from_nested(values, torch.tensor([2, 3])).unbind()
    assert [row.tolist() for row in rows] == [[2, 3], [5, 6, 7]]


def test_response_lengths_can_come_from_a_jagged_mask() -> None:
    values = to_nested_by_length(torch.arange(10).view(2, 5), [5, 4])
    mask = to_nested_by_length(torch.ones(2, 3), [1, 0])
    rows = response_from_nested(values, mask).unbind()
    assert [row.tolist() for row in rows] == [[3], []]


@given(data=st.data(), lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_a_response_never_reaches_into_another_row(data: st.DataObject, lengths: list[int]) -> None:
    responses = [data.draw(st.integers(0, length - 1)) for length in lengths]
    padded = torch.arange(len(lengths)).unsqueeze(1).expand(-1, max(lengths))
    rows = response_from_nested(to_nested_by_length(padded, lengths), responses).unbind()
    for place, (row, response) in enumerate(zip(rows, responses, strict=True)):
        assert row.tolist() == [place] * response


@pytest.mark.parametrize("responses", [[2, 1], [1], [-1, 1]])
def test_a_response_without_a_prompt_token_is_refused(responses: list[int]) -> None:
    values = to_nested_by_length(torch.ones(2, 2), [2, 2])
    with pytest.raises(ValueError, match="response"):
        response_from_nested(values, responses)


def test_response_of_a_dense_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="to_nested_by_length"):
        response_from_nested(torch.ones(2, 2), [1, 1])
