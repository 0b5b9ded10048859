"""Media are the same in every batch of a partition, or refused before generation."""

import pytest
import torch
from rollout_doubles import Adder, batch_of

from column_io import read_columns
from dataplane_core import ConfigError, SchemaMismatchError

DECLARED = {"media": {"pixel_values": {"dtype": "float32", "dims": 3}}}


def batch_with(image):
    batch = batch_of(["1+2="])
    if image is not None:
        batch["message_log"][0][0]["pixel_values"] = image
    return batch


def read_together(store, metas):
    columns = read_columns(store, metas[0].concat(*metas[1:]), ["pixel_values", "input_ids"])
    return [tuple(row.shape) for row in columns["pixel_values"].unbind()]


def test_declared_media_may_come_with_any_batch(actor_of, store):
    images = [None, torch.ones(1, 2, 2), None, torch.ones(2, 3, 2)]
    metas = [  # each batch by a separate actor
        actor_of(policy=DECLARED).rollout_to_tq(batch_with(image), partition_id="train")[0]
        for image in images
    ]
    counts = [shape[0] for shape in read_together(store, metas)]
    assert counts == [0, 1, 0, 2]


def test_other_actors_put_the_media_of_the_partition(actor_of, store):
    first, *_ = actor_of().rollout_to_tq(batch_with(torch.ones(1, 2, 2)), partition_id="train")
    second, *_ = actor_of().rollout_to_tq(batch_with(None), partition_id="train")
    assert [shape[0] for shape in read_together(store, [first, second])] == [1, 0]


def test_media_put_by_others_during_generation_are_added(actor_of, store):
    metas = []

    class Slow(Adder):
        def generate(self, data, *, greedy):
            image = batch_with(torch.ones(1, 2, 2))
            metas.append(actor_of().rollout_to_tq(image, partition_id="train")[0])
            return super().generate(data, greedy=greedy)

    metas.append(actor_of(Slow()).rollout_to_tq(batch_with(None), partition_id="train")[0])
    assert sorted(shape[0] for shape in read_together(store, metas)) == [0, 1]


def test_media_that_earlier_samples_lack_are_refused(actor_of, store):
    meta, *_ = actor_of().rollout_to_tq(batch_with(None), partition_id="train")
    generator = Adder()
    late = batch_with(torch.ones(1, 2, 2))
    with pytest.raises(
        SchemaMismatchError, match=r"1 samples without media 'pixel_values'.*dims 3"
    ):
        actor_of(generator).rollout_to_tq(late, partition_id="train")
    assert generator.events == []
    store.clear_samples(meta.sample_ids, "train")
    actor_of(generator).rollout_to_tq(late, partition_id="train")


@pytest.mark.parametrize("policy", [{}, DECLARED], ids=["held", "declared"])
def test_media_of_other_dimensions_are_refused_before_generation(actor_of, policy):
    actor_of().rollout_to_tq(batch_with(torch.ones(1, 2, 2)), partition_id="train")
    generator = Adder()
    with pytest.raises(SchemaMismatchError, match=r"'pixel_values'.*[23] dimensions"):
        actor_of(generator, policy=policy).rollout_to_tq(
            batch_with(torch.ones(1, 2)), partition_id="train"
        )
    assert generator.events == []


@pytest.mark.parametrize(
    ("media", "named"),
    [
        ({"x": {"dtype": "float33", "dims": 2}}, r"media\.x\.dtype: found 'float33'"),
        ({"x": {"dtype": "float32"}}, r"media\.x\.dims is missing"),
        ({"x": {"dtype": "float32", "dims": 0}}, r"media\.x\.dims: found 0"),
        ({"x": {"dtype": "float32", "dims": 2, "size": 1}}, r"media\.x: unknown key 'size'"),
        ({"input_ids": {"dtype": "int64", "dims": 2}}, r"media\.input_ids"),
        ({"x": 3}, r"media\.x: found 3"),
    ],
)
def test_a_wrong_declaration_is_refused_by_name(actor_of, media, named):
    with pytest.raises(ConfigError, match=named):
        actor_of(policy={"media": media})
