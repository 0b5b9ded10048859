"""The dtypes and boxes that can be published."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refit_mx.tensor_types import ITEM_SIZES, MOST_AXES, Box, TensorSpec


@pytest.mark.parametrize("name", ITEM_SIZES)
def test_every_dtype_is_one_of_torch_with_that_size(name: str) -> None:
    assert torch.empty(0, dtype=getattr(torch, name)).element_size() == ITEM_SIZES[name]


def test_a_spec_counts_the_bytes_of_the_whole_tensor() -> None:
    assert TensorSpec("w", "bfloat16", (3, 5)).nbytes == 30
    assert TensorSpec("w", "float32", ()).nbytes == 4
    assert TensorSpec("w", "float32", (3, 0)).nbytes == 0


def test_a_spec_of_an_unknown_dtype_or_a_shape_of_no_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"w: dtype 'float99'; expected one of float32, "):
        TensorSpec("w", "float99", (1,))
    with pytest.raises(ValueError, match="none negative"):
        TensorSpec("w", "float32", (1, -1))
    with pytest.raises(ValueError, match="at most 4 axes"):
        TensorSpec("w", "float32", (1,) * (MOST_AXES + 1))


def test_a_box_of_negative_or_unequal_numbers_is_refused() -> None:
    for start, shape in (((-1,), (1,)), ((0,), (-1,)), ((0, 0), (1,))):
        with pytest.raises(ValueError, match="as many starts as sizes"):
            Box(start, shape)


def test_a_box_without_axes_has_one_element() -> None:
    assert Box((), ()).size == 1
    assert Box.whole(()) == Box((), ())


def test_slices_with_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a step of 1"):
        Box.of_slices((slice(0, 4, 2),), (4,))


@given(
    st.lists(
        st.tuples(
            st.integers(0, 6),
            st.none() | st.integers(-8, 8),
            st.none() | st.integers(-8, 8),
        ),
        max_size=4,
    )
)
def test_a_box_of_slices_takes_what_the_slices_take(
    axes: list[tuple[int, int | None, int | None]],
) -> None:
    shape = tuple(size for size, _, _ in axes)
    content = np.arange(int(np.prod(shape))).reshape(shape)
    slices = tuple(slice(a, b) for _, a, b in axes)
    box = Box.of_slices(slices, shape)
    assert box.shape == content[slices].shape
    assert box.size == content[slices].size
    assert (content[box.slices()] == content[slices]).all()
