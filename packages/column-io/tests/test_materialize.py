"""Columns materialized from a store's reads."""

from __future__ import annotations

from typing import Any  # Any: classes of clients

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from column_io import BatchedDataDict, materialize, read_columns, to_nested_by_length
from dataplane_core import (
    DataPlaneClient,
    InMemoryDataPlaneClient,
    InvalidRequestError,
    KVBatchMeta,
)
from dataplane_core.testing import MinimalClient


def jagged() -> torch.Tensor:
    return to_nested_by_length(torch.tensor([[1, 2, 3], [4, 0, 0]]), [3, 1])


def test_each_field_is_padded_with_its_value() -> None:
    fields = TensorDict({"input_ids": jagged(), "token_mask": jagged()}, [2])
    batch = materialize(fields, pad_value_dict={"input_ids": 9})
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch["token_mask"].tolist() == [[1, 2, 3], [4, 0, 0]]


def test_dense_leaves_are_untouched() -> None:
    dense, scalars = torch.ones(2, 2), torch.ones(2)
    batch = materialize(TensorDict({"x": dense, "y": scalars}, [2]))
    assert batch["x"] is dense
    assert batch["y"] is scalars


def test_layout_jagged_passes_nested_leaves_through() -> None:
    nested = jagged()
    fields = TensorDict({"input_ids": nested}, [2])
    assert materialize(fields, layout="jagged", pad_to_seqlen=8)["input_ids"] is nested


def test_pad_width_widens_only_per_token_columns() -> None:
    fields = TensorDict(
        {
            "input_ids": jagged(),
            "values": jagged(),
            "score": torch.ones(2, 1),
            "image_size": torch.ones(2, 3, 2),
            "token_mask": torch.ones(2, 2, dtype=torch.bool),
            "routed_experts": torch.ones(2, 3, 1, 2, dtype=torch.int8),
            "advantages": torch.ones(2),
        },
        [2],
    )
    batch = materialize(fields, pad_value_dict={"token_mask": True}, pad_to_seqlen=4)
    for name in ("input_ids", "values"):
        assert batch[name].tolist() == [[1, 2, 3, 0], [4, 0, 0, 0]]
    assert batch["token_mask"].tolist() == [[True] * 4] * 2
    assert batch["routed_experts"].shape == (2, 4, 1, 2)
    for name in ("score", "image_size", "advantages"):
        assert batch[name] is fields[name]
    assert batch.forms == {"input_ids": "ragged", "values": "ragged"}


def test_a_pad_width_never_cuts() -> None:
    batch = materialize(TensorDict({"input_ids": jagged()}, [2]), pad_to_seqlen=2)
    assert batch["input_ids"].shape == (2, 3)


def test_rows_that_differ_in_several_dims_keep_their_shapes() -> None:
    images = torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(2, 1)], layout=torch.strided)
    batch = materialize(TensorDict({"pixels": images}, [2]), pad_to_seqlen=4)
    assert [row.shape for row in batch["pixels"].unbind()] == [(1, 2), (2, 1)]


def test_a_zero_length_row_comes_back_as_padding() -> None:
    nested = to_nested_by_length(torch.tensor([[1, 2], [3, 4]]), [0, 2])
    batch = materialize(TensorDict({"input_ids": nested}, [2]), pad_value_dict={"input_ids": 7})
    assert batch["input_ids"].tolist() == [[7, 7], [3, 4]]


def test_object_stacks_become_one_object_array_per_field() -> None:
    stack = NonTensorStack(*(NonTensorData(value) for value in (["a"], None, {"b": 1})))
    column = materialize(TensorDict({"content": stack}, [3]))["content"]
    assert column.dtype == object
    assert column.shape == (3,)
    assert column.tolist() == [["a"], None, {"b": 1}]


def test_rows_that_are_lists_of_one_length_stay_lists() -> None:
    stack = NonTensorStack(NonTensorData(["user", "assistant"]), NonTensorData(["user", "tool"]))
    column = materialize(TensorDict({"turn_roles": stack}, [2]))["turn_roles"]
    assert column.shape == (2,)
    assert column[1] == ["user", "tool"]


def test_an_array_that_has_not_been_through_a_store_has_shape_n() -> None:
    """Regression test: upstream returns the shape (1, n)."""
    array = np.empty(3, dtype=object)
    array[:] = [{"a": 1}, ["x"], None]
    column = materialize(TensorDict({"content": array}, [3]))["content"]
    assert column.shape == (3,)
    assert column.tolist() == [{"a": 1}, ["x"], None]


def test_one_value_for_the_batch_is_repeated() -> None:
    assert materialize(TensorDict({"task": "math"}, [2]))["task"].tolist() == ["math", "math"]


def test_a_value_stripped_in_transport_is_none() -> None:
    stack = LazyStackedTensorDict(NonTensorData(1), TensorDict({}, []), NonTensorData("x"))
    assert materialize(TensorDict({"content": stack}, [3]))["content"].tolist() == [1, None, "x"]


def test_a_nested_tensordict_is_refused() -> None:
    fields = TensorDict({"inner": TensorDict({"x": torch.ones(2)}, [2])}, [2])
    with pytest.raises(TypeError, match="'inner'"):
        materialize(fields)


def test_a_stack_of_tensordicts_with_content_is_refused() -> None:
    stack = LazyStackedTensorDict(NonTensorData(1), TensorDict({"x": torch.ones(())}, []))
    with pytest.raises(TypeError, match="'content'"):
        materialize(TensorDict({"content": stack}, [2]))


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="'ragged'"):
        materialize(TensorDict({}, [0]), layout="ragged")  # type: ignore[arg-type]


def test_read_without_rows_is_an_empty_batch(client: DataPlaneClient) -> None:
    assert materialize(client.get_samples([], "train", ["input_ids"])).size == 0


@pytest.mark.parametrize("make_client", [InMemoryDataPlaneClient, MinimalClient])
def test_a_read_and_materialize_agree_on_token_columns(make_client: Any) -> None:
    client = make_client()
    client.register_partition("p", [], 2, [])
    images = torch.nested.nested_tensor([torch.ones(1, 4), torch.ones(0, 4)], layout=torch.strided)
    tokens = to_nested_by_length(torch.ones(2, 5), [5, 5])
    fields = TensorDict({"images": images, "tokens": tokens, "size": torch.ones(2, 2)}, [2])
    client.put_samples(["a", "b"], "p", fields)
    names = ["images", "tokens", "size"]
    meta = KVBatchMeta("p", None, ["a", "b"], extra_info={"global_forward_pad_seqlen": 64})
    fetched = client.get_samples(["a", "b"], "p", names)
    for columns, width in (
        (materialize(fetched, pad_to_seqlen=64), 64),
        (read_columns(client, meta, names), 64),
        (read_columns(client, meta, names, layout="jagged"), 5),
    ):
        assert columns["tokens"].shape == (2, width)
        assert columns["size"].shape == (2, 2)
        assert [tuple(row.shape) for row in columns["images"].unbind()] == [(1, 4), (0, 4)]
        assert columns.forms == {"images": "shaped", "tokens": "ragged"}


def test_value_per_sample_is_not_padded_after_a_read(client: DataPlaneClient) -> None:
    client.register_partition("p", [], 2, [])
    client.put_samples(["a", "b"], "p", TensorDict({"advantages": torch.ones(2, 1)}, [2]))
    fetched = client.get_samples(["a", "b"], "p", ["advantages"])
    with pytest.raises(InvalidRequestError, match="'advantages' was put dense"):
        materialize(fetched, pad_to_seqlen=8)


def test_a_batch_is_refused_with_a_hint() -> None:
    batch = BatchedDataDict({"x": torch.ones(2, 3)})
    with pytest.raises(TypeError, match=r"found BatchedDataDict.*layout='padded'"):
        materialize(batch, "jagged")  # type: ignore[arg-type]
