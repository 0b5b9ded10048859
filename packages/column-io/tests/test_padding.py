"""Padding goes and comes back bit for bit, whatever the dtype, the layout and the lengths."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from column_io.codec import to_nested_by_length
from dataplane_core.columns import padded_from_nested

DTYPES = [
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


def bits(tensor):
    if not tensor.numel():
        return tensor.shape
    return torch.cat([tensor.reshape(-1), tensor.new_empty(0)]).view(torch.uint8).tolist()


@given(
    dtype=st.sampled_from(DTYPES),
    lengths=st.lists(st.integers(0, 5), max_size=6),
    features=st.sampled_from([(), (2,), (2, 3), (0,)]),
    more=st.integers(0, 3),
    transposed=st.booleans(),
)
def test_padding_goes_and_comes_back(dtype, lengths, features, more, transposed):
    width = max(lengths, default=0) + more
    tensor = torch.randint(0, 2, (len(lengths), width, *features)).to(dtype)
    if transposed:
        tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1)
    nested = to_nested_by_length(tensor, lengths)
    assert nested.dtype == dtype
    padded = padded_from_nested(nested, 1)
    assert padded.shape[:2] == (len(lengths), max(lengths, default=0))
    one = torch.ones((), dtype=torch.float32).to(dtype)
    for row, before, length in zip(padded, tensor, lengths, strict=True):
        assert bits(row[:length]) == bits(before[:length])
        rest = row[length:]
        assert bits(rest) == bits(one.expand(rest.shape))


def test_a_gradient_passes_through_the_cut():
    padded = torch.arange(6.0).reshape(2, 3).requires_grad_()
    sum(row.sum() for row in to_nested_by_length(padded, [1, 3]).unbind()).backward()
    assert padded.grad.tolist() == [[1, 0, 0], [1, 1, 1]]
