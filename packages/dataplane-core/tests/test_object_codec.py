"""Python values are stored and read without pickle."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane_core import InMemoryDataPlaneClient, InvalidRequestError

text = st.text(st.characters(exclude_categories=["Cs"]))
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | text
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(text, inner),
    max_leaves=12,
)


def stored(value):
    """Return a value as a store returns it."""
    column = np.empty(1, dtype=object)
    column[0] = value
    with InMemoryDataPlaneClient() as client:
        client.register_partition("p", ["f"], 1, [])
        client.put_columns(["a"], "p", {"f": column})
        return client.get_columns(["a"], "p", ["f"])["f"][0]


class Image(np.ndarray):
    """Array subclass with a meaning beyond its numbers."""


@given(plain)
def test_plain_values_come_back_equal(value):
    assert stored(value) == value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)], ids=str)
def test_tensors_inside_values_keep_dtype_and_shape(dtype, shape):
    tensor = torch.ones(shape).to(dtype)
    [copied] = stored([tensor])
    assert copied.dtype == dtype
    assert copied.shape == tensor.shape
    assert torch.equal(copied, tensor)


def test_arrays_inside_values_come_back_writable():
    copied = stored({"a": np.arange(6, dtype=np.int16).reshape(2, 3)})
    copied["a"] += 1
    assert copied["a"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert copied["a"].dtype == np.int16


def test_numpy_scalars_become_python_numbers():
    assert stored([np.int64(3), np.float32(0.5), np.bool_(True)]) == [3, 0.5, True]


@pytest.mark.parametrize(
    "value",
    [
        object(),
        2**80,
        np.array([object()]),
        "\ud800",
        np.longdouble(1),
        np.zeros(1, [("x", "f4")])[0],
    ],
    ids=[
        "an object",
        "a large number",
        "an array of objects",
        "half a surrogate pair",
        "a number that Python has not",
        "a record",
    ],
)
def test_value_that_cannot_be_stored_names_its_field(value):
    with pytest.raises(InvalidRequestError, match="field 'f'"):
        stored([value])


@pytest.mark.parametrize(
    ("array", "named"),
    [
        (np.zeros(2, [("x", "f4"), ("y", "i8")]), r"ndarray of dtype \[\('x', '<f4'\)"),
        (np.zeros(2, "V2"), r"ndarray of dtype \|V2"),
        (np.ma.masked_array([1, 2], [True, False]), "MaskedArray of dtype int64"),
        (np.rec.array([(1, 2.0)]), "recarray of dtype"),
        (np.zeros(2, np.int64).view(Image), "Image of dtype int64"),
    ],
    ids=["records", "bytes without a meaning", "masked", "a record array", "a subclass"],
)
def test_array_that_would_decode_differently_is_refused(array, named):
    with pytest.raises(InvalidRequestError, match=f"field 'f': {named}.* cannot be stored"):
        stored({"a": [array]})


@pytest.mark.parametrize("dtype", [">i4", "<U3", "S2", "M8[ns]", "m8[s]", "c8", "f2", "?"])
def test_arrays_of_plain_dtypes_come_back_as_they_were(dtype):
    array = np.array([0, 1, 0]).astype(dtype)
    [copied] = stored([array])
    assert copied.dtype == array.dtype
    assert copied.tolist() == array.tolist()


def test_an_array_in_a_file_comes_back_as_an_array(tmp_path):
    np.arange(6).tofile(tmp_path / "numbers")
    mapped = np.memmap(tmp_path / "numbers", dtype=np.int64, mode="r")
    [copied] = stored([mapped])
    assert type(copied) is np.ndarray
    assert copied.tolist() == list(range(6))
