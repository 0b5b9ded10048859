"""First write, write back and read are one client call each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from column_io import (
    BatchedDataDict,
    decompose_message_log,
    kv_first_write,
    read_columns,
    round_up,
    to_nested_by_length,
    write_columns,
)
from dataplane_core import (
    DataPlaneClient,
    InMemoryDataPlaneClient,
    InvalidRequestError,
    KVBatchMeta,
    MissingDataError,
)

LENGTHS = [3, 1, 4]
IDS = ["a_g0", "a_g1", "b_g0"]


def rollout(**columns: Any) -> BatchedDataDict[Any]:
    return BatchedDataDict(
        {
            "input_ids": torch.arange(1, 13).view(3, 4),
            "input_lengths": torch.tensor(LENGTHS),
            "sample_mask": torch.ones(3),
            **columns,
        }
    )


def first_write(client: DataPlaneClient, batch: Any = None, **options: Any) -> KVBatchMeta:
    return kv_first_write(
        rollout() if batch is None else batch,
        sample_ids=IDS,
        dp_client=client,
        partition_id="train",
        **options,
    )


class CountingClient(InMemoryDataPlaneClient):
    puts = 0

    def put_samples(self, *args: Any, **kwargs: Any) -> KVBatchMeta:
        self.puts += 1
        return super().put_samples(*args, **kwargs)


@pytest.mark.parametrize(
    ("value", "multiple", "expected"),
    [(7, 4, 8), (8, 4, 8), (0, 4, 0), (7, 1, 7), (7, 0, 7), (7, -2, 7)],
)
def test_round_up_returns_the_next_multiple(value: int, multiple: int, expected: int) -> None:
    assert round_up(value, multiple) == expected


def test_first_write_is_one_put_of_tensors_and_object_arrays() -> None:
    content = np.array(["x", "y", "z"], dtype=object)
    batch = rollout(content=content, message_log=[[], [], []], reward=np.ones(3), step=3)
    with CountingClient() as client:
        client.register_partition("train", ["input_ids"], 3, ["train"])
        meta = first_write(client, batch)
        assert client.puts == 1
        assert meta.fields == ["input_ids", "input_lengths", "sample_mask", "content"]
        assert read_columns(client, meta, ["content"])["content"].tolist() == ["x", "y", "z"]


def test_first_write_returns_the_meta_of_the_rows(client: DataPlaneClient) -> None:
    assert first_write(client) == KVBatchMeta(
        partition_id="train",
        task_name="train",
        sample_ids=IDS,
        fields=["input_ids", "input_lengths", "sample_mask"],
        sequence_lengths=LENGTHS,
    )


def test_first_write_records_the_alignment_only_above_one(client: DataPlaneClient) -> None:
    info = {"rollout_metrics": {"turns": 2}}
    assert first_write(client, extra_info=info, pad_to_multiple=1).extra_info == info
    meta = first_write(client, extra_info=info, pad_to_multiple=8, task_name="logprob")
    assert meta.extra_info == {**info, "pad_to_multiple": 8}
    assert meta.task_name == "logprob"
    assert info == {"rollout_metrics": {"turns": 2}}


def test_first_write_does_not_pad(client: DataPlaneClient) -> None:
    meta = first_write(client, pad_to_multiple=16)
    assert read_columns(client, meta, ["input_ids"])["input_ids"].shape == (3, 4)


def test_tags_go_to_the_store_and_into_the_meta(client: DataPlaneClient) -> None:
    tags = [{"input_lengths": length} for length in LENGTHS]
    meta = first_write(client, tags=tags)
    assert meta.tags == tags
    client.register_partition("train", ["input_ids"], 3, ["train"])
    claimed = client.claim_meta("train", "train", ["input_ids"], 3)
    assert sorted(claimed.sequence_lengths or []) == sorted(LENGTHS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample_ids": ["a"]}, "1 sample_ids for 3 rows"),
        ({"tags": [{}]}, "1 tags for 3 rows"),
    ],
)
def test_first_write_refuses_counts_that_differ_from_the_rows(
    client: DataPlaneClient, options: dict[str, Any], message: str
) -> None:
    arguments: dict[str, Any] = {"sample_ids": IDS, **options}
    with pytest.raises(ValueError, match=message):
        kv_first_write(rollout(), dp_client=client, partition_id="train", **arguments)


def test_first_write_refuses_a_batch_without_rows(client: DataPlaneClient) -> None:
    batch: BatchedDataDict[Any] = BatchedDataDict(
        sample_mask=torch.ones(0), input_lengths=torch.ones(0)
    )
    with pytest.raises(ValueError, match="no rows"):
        kv_first_write(batch, sample_ids=[], dp_client=client, partition_id="train")


@pytest.mark.parametrize("missing", ["sample_mask", "input_lengths"])
def test_first_write_names_the_column_that_it_needs(client: DataPlaneClient, missing: str) -> None:
    batch = rollout()
    del batch[missing]
    with pytest.raises(MissingDataError, match=missing):
        first_write(client, batch)


def test_a_read_follows_the_order_of_the_meta(client: DataPlaneClient) -> None:
    meta = first_write(client).subset([2, 0])
    batch = read_columns(client, meta, ["input_ids", "input_lengths"])
    assert batch["input_lengths"].tolist() == [4, 3]
    assert batch["input_ids"].tolist() == [[9, 10, 11, 12], [1, 2, 3, 0]]


def test_read_pads_to_width_of_meta_or_longest_row(
    client: DataPlaneClient,
) -> None:
    meta = first_write(client).subset([0, 1])
    fields = ["input_ids", "sample_mask"]
    assert read_columns(client, meta, fields)["input_ids"].shape == (2, 3)
    meta.extra_info["global_forward_pad_seqlen"] = 8
    batch = read_columns(client, meta, fields, pad_value_dict={"input_ids": 99})
    assert batch["input_ids"].tolist() == [[1, 2, 3] + [99] * 5, [5] + [99] * 7]
    assert batch["sample_mask"].shape == (2,)


def test_a_jagged_read_has_the_lengths_of_the_rows(client: DataPlaneClient) -> None:
    meta = first_write(client)
    meta.extra_info["global_forward_pad_seqlen"] = 8
    rows = read_columns(client, meta, ["input_ids"], layout="jagged")["input_ids"].unbind()
    assert [len(row) for row in rows] == LENGTHS


def test_a_read_without_rows_is_empty(client: DataPlaneClient) -> None:
    assert dict(read_columns(client, KVBatchMeta("train", None, []), ["input_ids"])) == {}


def test_a_read_of_an_unwritten_field_raises(client: DataPlaneClient) -> None:
    with pytest.raises(MissingDataError, match="advantages"):
        read_columns(client, first_write(client), ["input_ids", "advantages"])


def test_message_log_is_attached_if_all_columns_are_read(client: DataPlaneClient) -> None:
    logs = [
        [
            {"role": "user", "content": "hi", "token_ids": torch.tensor([1])},
            {"role": "assistant", "content": "yo", "token_ids": torch.tensor([2, 3])},
        ],
        [{"role": "user", "content": "5", "token_ids": torch.tensor([5])}],
        [{"role": "user", "content": "9", "token_ids": torch.tensor([9, 10, 11, 12])}],
    ]
    meta = first_write(client, rollout(**decompose_message_log(logs)))
    meta.extra_info["global_forward_pad_seqlen"] = 8
    turns = ["turn_lengths", "turn_roles", "turn_contents"]
    assert "message_log" not in read_columns(client, meta, turns)
    assert "message_log" not in read_columns(client, meta, ["input_ids", *turns[:2]])
    log = read_columns(client, meta, ["input_ids", *turns])["message_log"]
    assert [[turn["content"] for turn in turns] for turns in log] == [["hi", "yo"], ["5"], ["9"]]
    assert log[0][1]["token_ids"].tolist() == [2, 3]


def test_columns_written_back_keep_the_rows_lengths(client: DataPlaneClient) -> None:
    meta = first_write(client)
    logprobs = torch.arange(24.0).view(3, 8)  # padded wider than the first put
    write_columns(client, meta, {"prev_logprobs": logprobs, "advantages": torch.ones(3)})
    batch = read_columns(client, meta, ["prev_logprobs", "advantages"])
    assert batch["prev_logprobs"].tolist() == [[0, 1, 2, 0], [8, 0, 0, 0], [16, 17, 18, 19]]
    assert batch["advantages"].tolist() == [1, 1, 1]


def test_an_object_column_is_written_back(client: DataPlaneClient) -> None:
    meta = first_write(client)
    verdicts = np.array([{"ok": True}, None, "late"], dtype=object)
    write_columns(client, meta, {"verdict": verdicts})
    assert read_columns(client, meta, ["verdict"])["verdict"].tolist() == verdicts.tolist()


def test_without_lengths_columns_are_written_as_wide_as_they_are(client: DataPlaneClient) -> None:
    meta = first_write(client)
    meta.sequence_lengths = None
    write_columns(client, meta, {"prev_logprobs": torch.ones(3, 4)})
    rows = client.get_samples(IDS, "train", ["prev_logprobs"])["prev_logprobs"]
    assert rows.tolist() == [[1] * 4] * 3


def test_a_write_without_columns_makes_no_put() -> None:
    with CountingClient() as client:
        write_columns(client, KVBatchMeta("train", None, ["a"]), {})
        assert client.puts == 0


def test_a_write_refuses_other_row_counts(client: DataPlaneClient) -> None:
    meta = first_write(client)
    with pytest.raises(ValueError, match="2 rows for 3 samples"):
        write_columns(client, meta, {"advantages": torch.ones(2)})
    meta.sequence_lengths = [1]
    with pytest.raises(ValueError, match="1 sequence_lengths for 3 samples"):
        write_columns(client, meta, {"advantages": torch.ones(3)})


def test_a_write_refuses_other_types(client: DataPlaneClient) -> None:
    with pytest.raises(TypeError, match="advantages"):
        write_columns(client, first_write(client), {"advantages": [1, 2, 3]})  # type: ignore[dict-item]


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 2), (3, 3, 2)], ids=str)
def test_a_per_sample_column_keeps_its_shape_at_any_width(
    client: DataPlaneClient, shape: tuple[int, ...]
) -> None:
    values = torch.rand(shape)
    meta = first_write(client, rollout(image_size=values))
    write_columns(client, meta, {"score": values})
    meta.extra_info["global_forward_pad_seqlen"] = 8
    batch = read_columns(client, meta, ["input_ids", "image_size", "score"])
    assert batch["input_ids"].shape == (3, 8)
    assert torch.equal(batch["image_size"], values)
    assert torch.equal(batch["score"], values)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("advantages", (3, 1), r"\(rows, >= 4, ...\), or one per sample, \(rows,\)"),
        ("sample_mask", (3, 1), "or one per sample"),
        ("prev_logprobs", (3,), r"\(rows, >= 4, ...\)"),
        ("prev_logprobs", (3, 3), r"\(rows, >= 4, ...\)"),
        ("routed_experts", (3, 2, 4), r"\(rows, >= 4, ...\)"),
    ],
)
def test_token_column_without_token_axis_is_refused(
    client: DataPlaneClient, name: str, shape: tuple[int, ...], expected: str
) -> None:
    with pytest.raises(ValueError, match=f"kv_first_write.*{name}.*{expected}"):
        first_write(client, rollout(**{name: torch.ones(shape)}))
    meta = first_write(client)
    with pytest.raises(ValueError, match=f"write_columns.*{name}.*{expected}"):
        write_columns(client, meta, {name: torch.ones(shape), "more": torch.ones(3)})
    with pytest.raises(MissingDataError):
        read_columns(client, meta, ["more"])


@pytest.mark.parametrize("lengths", [[3, 1, 2], [3, 2, 4]])
def test_nested_rows_of_other_lengths_are_refused(
    client: DataPlaneClient, lengths: list[int]
) -> None:
    meta = first_write(client)
    nested = to_nested_by_length(torch.ones(3, 4), LENGTHS)
    write_columns(client, meta, {"advantages": nested})
    wrong = to_nested_by_length(torch.ones(3, 4), lengths)
    with pytest.raises(InvalidRequestError, match=r"row \d of nested column 'prev_logprobs' has 2"):
        write_columns(client, meta, {"prev_logprobs": wrong})


def test_one_value_per_row_is_ambiguous_without_lengths(
    client: DataPlaneClient,
) -> None:
    meta = first_write(client)
    meta.sequence_lengths = None
    write_columns(client, meta, {"advantages": torch.ones(3), "token_mask": torch.ones(3, 1)})
    with pytest.raises(ValueError, match="'advantages' has shape"):
        write_columns(client, meta, {"advantages": torch.ones(3, 1)})


def test_images_of_batches_that_are_joined_keep_their_shapes(client: DataPlaneClient) -> None:
    meta = first_write(client)
    rows = [torch.ones(1, 2, 2), torch.ones(1, 2, 2), torch.ones(2, 2, 2)]
    write_columns(client, meta, {"images": torch.nested.nested_tensor(rows, layout=torch.strided)})
    parts = [
        read_columns(client, part, ["images"]) for part in (meta.slice(0, 2), meta.slice(2, 3))
    ]
    assert [part["images"].shape for part in parts] == [(2, 1, 2, 2), (1, 2, 2, 2)]
    joined = BatchedDataDict.from_batches(parts)
    assert [row.shape for row in joined["images"].unbind()] == [row.shape for row in rows]
    picked = joined.select_indices([2, 0])
    assert [row.shape for row in picked["images"].unbind()] == [(2, 2, 2), (1, 2, 2)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lengths": [9, 1]}, "9"),
        ({"lengths": [-9, 1]}, r"input_lengths\[0\] is -9"),
        ({"lengths": [1.5, 1.0]}, r"input_lengths\[0\] is 1.5 of type float"),
        ({"pad_to_multiple": -4}, "pad_to_multiple is -4"),
        ({"pad_to_multiple": 0}, "pad_to_multiple is 0"),
        ({"pad_to_multiple": "16"}, "pad_to_multiple is '16' of type str"),
    ],
)
def test_invalid_numbers_are_refused_before_the_put(changed: dict[str, Any], message: str) -> None:
    with InMemoryDataPlaneClient() as client:
        client.register_partition("train", ["input_ids"], 2, ["train"])
        batch: BatchedDataDict[Any] = BatchedDataDict(
            input_ids=torch.ones(2, 5, dtype=torch.int64),
            input_lengths=torch.tensor(changed.get("lengths", [5, 1])),
            sample_mask=torch.ones(2),
        )
        with pytest.raises(InvalidRequestError, match=message):
            kv_first_write(
                batch,
                sample_ids=["a", "b"],
                dp_client=client,
                partition_id="train",
                pad_to_multiple=changed.get("pad_to_multiple", 1),
            )
        assert client.inspector.count_samples("train", "train", []).put == 0
