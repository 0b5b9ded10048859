"""`SyncRolloutActor` puts media of every shape; it refuses other kinds of columns at once.

Imports internals, to compare the kinds that are checked with the kinds that are put.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_doubles import DP_CFG, Adder, Arithmetic, CharTokenizer, Local, batch_of, config

from column_io import read_columns
from dataplane_core import (
    InMemoryDataPlaneClient,
    InvalidRequestError,
    PartitionNotFoundError,
    SchemaMismatchError,
)
from rollout_actor import SyncRolloutActor
from rollout_actor.step_columns import PAYLOAD_KINDS


def test_media_of_prompts_are_put_as_columns(actor_of, store):
    batch = batch_of(["1+2=", "3+4="])
    for row, log in enumerate(batch["message_log"]):
        log[0]["pixel_values"] = torch.full((2, 3), float(row))
    meta, *_ = actor_of(grpo={"deduplicate_multimodal_data": True}).rollout_to_tq(
        batch, partition_id="train", group_size=2
    )
    columns = read_columns(store, meta, ["pixel_values"])
    assert columns["pixel_values"][:, 0, 0].tolist() == [0.0, 1.0]


IMAGES = [None, (1, 2, 2), (2, 2, 2), (1, 3, 2)]
"""Shapes of a row's images: none, one, two, one of another resolution."""


@settings(max_examples=25, deadline=None)
@given(batches=st.lists(st.lists(st.sampled_from(IMAGES), min_size=2, max_size=2), max_size=4))
def test_batches_with_any_images_can_follow_each_other(batches):
    with InMemoryDataPlaneClient(DP_CFG) as store:
        store.register_partition("train", [], 100, ["train"])
        actor = SyncRolloutActor(
            Adder(), CharTokenizer(), {"sum": Local(Arithmetic())}, config(), DP_CFG
        )
        metas, images = [], []
        for shapes in [[IMAGES[1], IMAGES[1]], *batches]:
            batch = batch_of(["1+2=", "3+4="])
            for log, shape in zip(batch["message_log"], shapes, strict=True):
                if shape is not None:
                    log[0]["pixel_values"] = torch.rand(shape)
                images.append(log[0].get("pixel_values", torch.empty(0)))
            metas.append(actor.rollout_to_tq(batch, partition_id="train")[0])
        meta = metas[0].concat(*metas[1:])
        meta.extra_info["global_forward_pad_seqlen"] = 64
        columns = read_columns(store, meta, ["pixel_values", "input_ids"])
        assert columns["input_ids"].shape == (len(images), 64)
        for row, image in zip(columns["pixel_values"].unbind(), images, strict=True):
            assert torch.equal(row, image) if len(image) else not len(row)


@pytest.mark.parametrize("name", ["input_lengths", "turn_lengths", "stop_strings"])
def test_media_with_the_name_of_another_column_are_refused(actor_of, name):
    generator = Adder()
    batch = batch_of(["1+2="])
    batch["message_log"][0][0][name] = torch.ones(2, 3)
    with pytest.raises(InvalidRequestError, match=f"media '{name}' of row 0 have the name"):
        actor_of(generator).rollout_to_tq(batch, partition_id="train")
    assert generator.events == []


def test_media_of_another_partition_do_not_reach_samples_without(actor_of, store):
    store.register_partition("val", [], 4, ["val"])
    actor = actor_of()
    first, *_ = actor.rollout_to_tq(batch_of(["1+2="]), partition_id="val")
    images = batch_of(["1+2="])
    images["message_log"][0][0]["pixel_values"] = torch.ones(2, 3)
    actor.rollout_to_tq(images, partition_id="train")
    second, *_ = actor.rollout_to_tq(batch_of(["3+4="]), partition_id="val")
    assert read_columns(store, second.concat(first), second.fields).size == 2


def test_columns_that_do_not_fit_are_refused_before_generation(actor_of, store):
    generator = Adder()
    actor = actor_of(generator)
    batch = batch_of(["1+2="], score=torch.tensor([1.0]))
    batch["message_log"][0][0]["pixel_values"] = torch.ones(1, 3)
    actor.rollout_to_tq(batch, partition_id="train")
    generator.events.clear()
    batch["message_log"][0][0]["pixel_values"] = torch.ones(1, 3, dtype=torch.bfloat16)
    with pytest.raises(SchemaMismatchError, match=r"pixel_values.*float32.*bfloat16"):
        actor.rollout_to_tq(batch, partition_id="train")
    with pytest.raises(SchemaMismatchError, match=r"score.*float32.*object"):
        actor.rollout_to_tq(batch_of(["1+2="], score=["high"]), partition_id="train")
    with pytest.raises(PartitionNotFoundError, match="'nowhere' is not registered"):
        actor.rollout_to_tq(batch_of(["1+2="]), partition_id="nowhere")
    store.register_partition("words", [], 1, ["t"], enums={"level": ["easy"]})
    with pytest.raises(InvalidRequestError, match="'hard'"):
        actor.rollout_to_tq(batch_of(["1+2="], level=["hard"]), partition_id="words")
    assert generator.events == []


def test_the_kinds_that_are_checked_are_those_that_are_put(actor_of, store):
    actor_of().rollout_to_tq(batch_of(["1+2="]), partition_id="train")
    (summary,) = store.inspector.list_partitions()
    put = {field.name: field.kind for field in summary.fields if field.kind is not None}
    assert PAYLOAD_KINDS.items() <= put.items()


class Versioned(Adder):
    """An `Adder` whose weights change after the first token of every response."""

    def generate(self, data, *, greedy):
        output = super().generate(data, greedy=greedy)
        spans = [
            [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": length}]
            for length in output["generation_lengths"].tolist()
        ]
        return {**output, "weight_versions": spans}


def test_weight_versions_are_put_and_carried(actor_of, store):
    actor = actor_of(Versioned(), grpo={"max_rollout_turns": 2})
    batch = batch_of(["1+2=", "13+4="], more=["5+6="])
    meta, carry, metrics, _ = actor.rollout_to_tq(batch, partition_id="train")
    columns = read_columns(store, meta, ["weight_versions", "token_mask"])
    assert list(columns["weight_versions"]) == list(carry["weight_versions"])
    for spans, mask in zip(columns["weight_versions"], columns["token_mask"], strict=True):
        places = [place for span in spans for place in range(span["start"], span["end"])]
        assert places == mask.nonzero()[:, 0].tolist()
    assert [span["version"] for span in carry["weight_versions"][0]] == ["a", "b", "a", "b"]
    assert metrics["mixed_weight_version_rate"] == 1


def test_backend_without_weight_versions_has_no_column(actor_of, store):
    batch = batch_of(["1+2="], weight_versions=[[{"version": "earlier", "start": 4, "end": 5}]])
    _, carry, metrics, _ = actor_of().rollout_to_tq(batch, partition_id="train")
    assert "weight_versions" not in carry
    assert "mixed_weight_version_rate" not in metrics
    (summary,) = store.inspector.list_partitions()
    assert "weight_versions" not in {field.name for field in summary.fields}
