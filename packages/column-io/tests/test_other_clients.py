"""Columns go through any object with the documented methods."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from column_io import BatchedDataDict, kv_first_write, read_columns, write_columns
from dataplane_core import (
    GLOBAL_FORWARD_PAD_SEQLEN,
    InMemoryDataPlaneClient,
    InvalidTypeError,
    KVBatchMeta,
    MissingDataError,
)
from dataplane_core.testing import MinimalClient

FIELDS = ["input_ids", "input_lengths", "sample_mask", "text", "logits"]


def rollout():
    return BatchedDataDict(
        {
            "input_ids": torch.tensor([[1, 2, 3], [4, 5, 0]]),
            "input_lengths": torch.tensor([3, 2]),
            "sample_mask": torch.ones(2),
            "text": np.array([{"a": 1}, None], dtype=object),
        }
    )


def step(client):
    """Run a training step on a client; return the results of its reads."""
    client.register_partition("train", FIELDS, 2, ["train"])
    tags = [{"std": 0.5}, {"std": 0.0}]
    meta = kv_first_write(
        rollout(), sample_ids=["a", "b"], dp_client=client, partition_id="train", tags=tags
    )
    meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = 4
    write_columns(client, meta, {"logits": torch.arange(6.0).reshape(2, 3)})
    write_columns(client, meta, {"advantages": torch.ones(2, 3)})
    padded = read_columns(client, meta, [*FIELDS, "advantages"], pad_value_dict={"input_ids": 9})
    jagged = read_columns(client, meta, ["input_ids"], layout="jagged")
    return meta, padded, [row.tolist() for row in jagged["input_ids"].unbind()]


def test_client_with_only_the_documented_methods_suffices():
    full, minimal = step(InMemoryDataPlaneClient()), step(MinimalClient())
    assert minimal[0] == full[0]
    assert minimal[2] == full[2] == [[1, 2, 3], [4, 5]]
    assert minimal[1].keys() == full[1].keys()
    assert minimal[1]["input_ids"].tolist() == [[1, 2, 3, 9], [4, 5, 9, 9]]
    for name, column in full[1].items():
        assert minimal[1][name].tolist() == column.tolist(), name


def test_wrapped_client_uses_its_own_methods():
    class WithColumns(MinimalClient):
        put = None

        def put_columns(self, sample_ids, partition_id, columns, tags=None, **options):
            self.put = [sample_ids, partition_id, list(columns), options["lengths"]]

    client = WithColumns()
    kv_first_write(rollout(), sample_ids=["a", "b"], dp_client=client, partition_id="train")
    assert client.put == [["a", "b"], "train", list(rollout()), [3, 2]]


def test_object_without_a_documented_method_is_refused():
    with pytest.raises(InvalidTypeError, match="object with the method 'check_consumption_status'"):
        read_columns(object(), KVBatchMeta("train", None, ["a"]), ["x"])


class Shortening(MinimalClient):
    """Client that leaves unknown ids and fields out of its answers, as TransferQueue does."""

    def get_samples(self, sample_ids, partition_id, select_fields):
        known = [each for each in sample_ids if each in "ab"]
        return super().get_samples(known, partition_id, select_fields[:1])


@pytest.mark.parametrize("layout", ["padded", "jagged"])
def test_an_answer_that_lacks_a_row_or_a_field_is_refused(layout):
    client = Shortening()
    client.register_partition("train", FIELDS, 2, ["train"])
    meta = kv_first_write(rollout(), sample_ids=["a", "b"], dp_client=client, partition_id="train")
    with pytest.raises(KeyError, match="0 rows of field 'input_lengths'; expected 2"):
        read_columns(client, meta, ["input_ids", "input_lengths"], layout=layout)
    more = KVBatchMeta("train", None, ["a", "unknown", "b"])
    with pytest.raises(MissingDataError, match="2 rows of field 'input_ids'; expected 3"):
        read_columns(client, more, ["input_ids"], layout=layout)
    assert read_columns(client, KVBatchMeta("train", None, []), ["input_ids"], layout=layout) == {}


class Formless(MinimalClient):
    """Client that returns tensors of two or more dims as jagged, as TransferQueue does."""

    def get_samples(self, sample_ids, partition_id, select_fields):
        stored = super().get_samples(sample_ids, partition_id, select_fields)
        fields = {
            name: torch.nested.as_nested_tensor(list(leaf.unbind()), layout=torch.jagged)
            if leaf.is_nested or leaf.dim() > 1
            else leaf.clone()
            for name, leaf in stored.items()
        }
        return TensorDict(fields, stored.batch_size)


class PublishedColumns(InMemoryDataPlaneClient):
    """Client whose override of `get_columns` lacks later keywords."""

    def get_columns(
        self, sample_ids, partition_id, select_fields, *, pad_values=None, width=0, forms=None
    ):
        return super().get_columns(
            sample_ids, partition_id, select_fields, pad_values=pad_values, width=width, forms=forms
        )


def test_override_of_get_columns_need_not_accept_lengths():
    full, published = step(InMemoryDataPlaneClient()), step(PublishedColumns())
    assert published[1].forms == full[1].forms
    for name, column in full[1].items():
        assert published[1][name].tolist() == column.tolist(), name


def formless():
    """Return a client with two samples, their meta without lengths, and their columns."""
    client = Formless()
    client.register_partition("train", [], 2, [])
    columns = {
        "image_sizes": torch.tensor([[4, 5], [6, 7]]),
        "boxes": torch.arange(12).reshape(2, 3, 2),
        "logits": torch.nested.as_nested_tensor(
            [torch.ones(3), torch.ones(2)], layout=torch.jagged
        ),
        "token_mask": torch.ones(2, 3),
    }
    client.put_samples(["a", "b"], "train", TensorDict(columns, [2]))
    meta = KVBatchMeta("train", None, ["a", "b"])
    meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = 6
    return client, meta, columns


@pytest.mark.parametrize("sequence_lengths", [[3, 2], torch.tensor([3, 2])], ids=["list", "tensor"])
def test_columns_of_a_store_without_forms_keep_their_shape(sequence_lengths):
    client, meta, columns = formless()
    meta.sequence_lengths = sequence_lengths
    read = read_columns(client, meta, list(columns))
    for name in ("image_sizes", "boxes"):
        assert read[name].tolist() == columns[name].tolist()
    assert read["token_mask"].shape == (2, 6)
    assert read["logits"].tolist() == [[1.0] * n + [0.0] * (6 - n) for n in (3, 2)]
    assert read.forms == dict.fromkeys(["token_mask", "logits"], "ragged")
    assert read_columns(client, meta, list(columns), layout="jagged").forms == read.forms


@pytest.mark.parametrize("sequence_lengths", [None, []])
def test_without_lengths_all_jagged_columns_are_per_token(sequence_lengths):
    client, meta, columns = formless()
    meta.sequence_lengths = sequence_lengths
    read = read_columns(client, meta, list(columns))
    assert {name: column.shape[1] for name, column in read.items()} == dict.fromkeys(columns, 6)
    assert read.forms == dict.fromkeys(columns, "ragged")
    assert read_columns(client, meta, list(columns), layout="jagged").forms == read.forms
