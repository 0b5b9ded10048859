"""The life of a sample is told from its put to its clear."""

import random

import pytest
from told_runs import DRIVER, HOSTILE, POLICIES, ROLLOUT, Teller, grpo_step, ns, sample_ids

from observability.records import Records
from observability.views import SampleNotFound, life_of


def names(sample_id, records):
    return [hop.name for hop in life_of(sample_id, records)]


def test_a_life_is_told_in_the_order_of_time():
    records = grpo_step(policies=1)
    random.Random(3).shuffle(records.events)
    kept, dropped = sample_ids()[0], sample_ids()[-1]
    assert names(kept, records) == [
        *("put", "read", "put", "put", "claimed", "read", "trained", "cleared")
    ]
    assert names(dropped, records) == ["put", "read", "put", "put", "dropped", "cleared"]


def test_each_hop_says_where_when_and_during_what():
    hops = life_of(sample_ids()[0], grpo_step(policies=1))
    first, read, *_ = hops
    assert (first.process, first.partition, first.stage) == (ROLLOUT, "train", "rollout")
    assert (first.seconds, first.step, first.weight_version) == (0.0, 0, 0)
    assert (first.fields, first.n_bytes, first.batch) == (("input_ids",), 1_000.0, 8)
    assert (read.process, read.stage) == (POLICIES[0], "logprobs")
    assert read.seconds == pytest.approx(5.1 - 4.98)
    claimed = hops[4]
    assert (claimed.task, claimed.detail, claimed.n_bytes) == ("train", "waited 0.040 s", None)
    assert hops[6].weight_version == 1


def test_a_drop_says_why():
    hops = life_of(sample_ids()[-1], grpo_step())
    assert [hop.detail for hop in hops if hop.name == "dropped"] == ["equal_rewards"]


def test_a_clear_of_the_whole_partition_ends_its_samples_once():
    records = grpo_step()
    kept, dropped = sample_ids()[0], sample_ids()[-1]
    later = Teller(step=1)
    later.event("cleared", DRIVER, 20, [])
    records.add(later.records)
    last = life_of(kept, records)[-1]
    assert (last.name, last.whole_partition, last.time_ns) == ("cleared", True, ns(9.89))
    assert [hop.whole_partition for hop in life_of(dropped, records)][-1] is False
    assert names(dropped, records).count("cleared") == 1


def test_clears_of_other_partitions_and_before_the_put_are_not_of_its_life():
    tell = Teller()
    tell.event("cleared", DRIVER, 0, [])
    tell.event("put", ROLLOUT, 1, ["a"], fields=["x"])
    tell.event("cleared", DRIVER, 2, [], partition="val")
    assert names("a", tell.records) == ["put"]


def test_a_sample_that_is_put_again_has_a_second_end():
    tell = Teller()
    tell.event("put", ROLLOUT, 1, ["a"])
    tell.event("cleared", DRIVER, 2, ["a"])
    tell.event("read", POLICIES[0], 3, ["a"])
    tell.event("cleared", DRIVER, 4, [])
    tell.event("put", ROLLOUT, 5, ["a"])
    tell.event("cleared", DRIVER, 6, [])
    assert names("a", tell.records) == ["put", "cleared", "read", "put", "cleared"]


def test_what_was_told_twice_happened_once():
    records = grpo_step()
    once = life_of(sample_ids()[0], records)
    records.add(grpo_step())
    assert life_of(sample_ids()[0], records) == once


def test_a_life_is_told_without_any_span():
    records = Records(events=grpo_step().events)
    assert {hop.stage for hop in life_of(sample_ids()[0], records)} == {""}


def test_an_unknown_sample_is_named_with_ids_that_begin_alike():
    ids = [f"abc_g{i}" for i in range(8)]
    tell = Teller()
    tell.event("put", ROLLOUT, 1, [*ids, "zzz"])
    with pytest.raises(SampleNotFound) as caught:
        life_of("abc_g9", tell.records)
    assert isinstance(caught.value, LookupError)
    assert caught.value.suggestions == tuple(ids[:5])
    assert str(caught.value) == (
        "no event names the sample 'abc_g9'; ids that begin as it does: "
        "abc_g0, abc_g1, abc_g2, abc_g3, abc_g4"
    )
    with pytest.raises(SampleNotFound, match=r"no event names the sample 'q'$"):
        life_of("q", tell.records)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_an_unknown_sample_is_named_in_printable_text(hostile):
    tell = Teller()
    tell.event("put", ROLLOUT, 1, [hostile + "a"])
    with pytest.raises(SampleNotFound) as caught:
        life_of(hostile, tell.records)
    assert str(caught.value).isprintable()
    assert life_of(hostile + "a", tell.records)[0].name == "put"


def test_attributes_of_another_kind_than_told_do_no_harm():
    tell = Teller()
    event = tell.event("put", ROLLOUT, 1, ["a"])
    event.attributes.update(
        {
            "dataplane.fields": "x",
            "dataplane.bytes": "many",
            "rl.step": [1],
            "dataplane.samples": -3,
            "dataplane.wait_s": "long",
        }
    )
    (hop,) = life_of("a", tell.records)
    assert (hop.fields, hop.n_bytes, hop.step, hop.batch) == ((), None, None, 1)
