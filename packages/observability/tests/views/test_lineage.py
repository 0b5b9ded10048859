"""The life of a sample goes from its put to its clear."""

import random
from dataclasses import replace

import pytest
from made_up_runs import DRIVER, HOSTILE, POLICIES, ROLLOUT, TraceMaker, grpo_step, ns, sample_ids

from observability.records import Records
from observability.views import SampleNotFound, lineage_of


def names(sample_id, records):
    return [hop.name for hop in lineage_of(sample_id, records)]


def test_a_life_is_in_the_order_of_time():
    records = grpo_step(policies=1)
    random.Random(3).shuffle(records.events)
    kept, dropped = sample_ids()[0], sample_ids()[-1]
    assert names(kept, records) == [
        *("put", "read", "put", "put", "claimed", "read", "trained", "cleared")
    ]
    assert names(dropped, records) == ["put", "read", "put", "put", "dropped", "cleared"]
    assert lineage_of(dropped, records)[4].detail == "equal_rewards"
    without_spans = Records(events=records.events)
    assert {hop.stage for hop in lineage_of(kept, without_spans)} == {""}


def test_each_hop_says_where_when_and_during_what():
    hops = lineage_of(sample_ids()[0], grpo_step(policies=1))
    first, read, *_ = hops
    assert (first.process, first.partition, first.stage) == (ROLLOUT, "train", "rollout")
    assert (first.seconds, first.step, first.weight_version) == (0.0, 0, 0)
    assert (first.fields, first.n_bytes, first.batch) == (("input_ids",), 1_000.0, 8)
    assert (read.process, read.stage) == (POLICIES[0], "logprobs")
    assert read.seconds == pytest.approx(5.1 - 4.98)
    claimed = hops[4]
    assert (claimed.task, claimed.detail, claimed.n_bytes) == ("train", "blocked 0.040 s", None)
    assert hops[6].weight_version == 1


def test_a_clear_of_the_partition_ends_its_samples_once():
    records = grpo_step()
    kept, dropped = sample_ids()[0], sample_ids()[-1]
    later = TraceMaker(step=1)
    later.event("cleared", DRIVER, 20, [])
    records.add(later.records)
    last = lineage_of(kept, records)[-1]
    assert (last.name, last.whole_partition, last.time_ns) == ("cleared", True, ns(9.89))
    assert [hop.whole_partition for hop in lineage_of(dropped, records)][-1] is False
    assert names(dropped, records).count("cleared") == 1


def test_only_later_clears_of_its_partition_end_a_life():
    maker = TraceMaker()
    maker.event("cleared", DRIVER, 0, [])
    maker.event("put", ROLLOUT, 1, ["a"], fields=["x"])
    maker.event("cleared", DRIVER, 2, [], partition="val")
    assert names("a", maker.records) == ["put"]


def test_a_sample_that_is_put_again_has_a_second_end():
    maker = TraceMaker()
    maker.event("put", ROLLOUT, 1, ["a"])
    maker.event("cleared", DRIVER, 2, ["a"])
    maker.event("read", POLICIES[0], 3, ["a"])
    maker.event("cleared", DRIVER, 4, [])
    maker.event("put", ROLLOUT, 5, ["a"])
    maker.event("cleared", DRIVER, 6, [])
    assert names("a", maker.records) == ["put", "cleared", "read", "put", "cleared"]


def test_a_repeated_event_happened_once():
    records = grpo_step()
    once = lineage_of(sample_ids()[0], records)
    records.add(grpo_step())
    assert lineage_of(sample_ids()[0], records) == once


def test_different_events_of_one_moment_all_happened():
    maker = TraceMaker()
    for _ in range(2):
        for version in (1, 2, 3):
            maker.event("trained", POLICIES[0], 1, ["a"], version=version)
    assert names("a", maker.records) == ["trained"] * 3


def test_an_unknown_sample_is_named_with_ids_that_begin_alike():
    ids = [f"abc_g{i}" for i in range(8)]
    maker = TraceMaker()
    maker.event("put", ROLLOUT, 1, [*ids, "zzz"])
    with pytest.raises(SampleNotFound) as caught:
        lineage_of("abc_g9", maker.records)
    assert isinstance(caught.value, LookupError)
    assert caught.value.suggestions == tuple(ids[:5])
    assert str(caught.value) == (
        "no event names the sample 'abc_g9'; similar ids: abc_g0, abc_g1, abc_g2, abc_g3, abc_g4"
    )
    with pytest.raises(SampleNotFound, match=r"no event names the sample 'q'$"):
        lineage_of("q", maker.records)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_an_unknown_sample_is_named_in_printable_text(hostile):
    maker = TraceMaker()
    maker.event("put", ROLLOUT, 1, [hostile + "a"])
    with pytest.raises(SampleNotFound) as caught:
        lineage_of(hostile, maker.records)
    assert str(caught.value).isprintable()
    assert lineage_of(hostile + "a", maker.records)[0].name == "put"


def test_attributes_of_another_type_are_ignored():
    maker = TraceMaker()
    event = maker.event("put", ROLLOUT, 1, ["a"])
    event.attributes.update(
        {
            "dataplane.fields": "x",
            "dataplane.bytes": "many",
            "rl.step": [1],
            "dataplane.samples": -3,
            "dataplane.wait_s": "long",
        }
    )
    (hop,) = lineage_of("a", maker.records)
    assert (hop.fields, hop.n_bytes, hop.step, hop.batch) == ((), None, None, 1)


def received(maker, *seconds):
    """Return the records with the time of receipt of each event."""
    events = [
        replace(event, received_ns=ns(at))
        for event, at in zip(maker.records.events, seconds, strict=True)
    ]
    return Records(maker.records.spans, events)


@pytest.mark.parametrize("off", [-86_400, -60, 60, 86_400])
def test_a_life_is_in_order_whatever_the_clock_of_one_host_says(off):
    maker = TraceMaker()
    maker.event("put", ROLLOUT, 1, ["a"])
    maker.event("claimed", POLICIES[0], 2 + off, ["a"], task="train")
    maker.event("trained", POLICIES[0], 3 + off, ["a"], task="train")
    maker.event("cleared", DRIVER, 7, [])
    hops = lineage_of("a", received(maker, 1.5, 2.5, 3.5, 7.5))
    assert [hop.name for hop in hops] == ["put", "claimed", "trained", "cleared"]
    assert [hop.seconds for hop in hops] == pytest.approx([0, 1, 2, 6], abs=1)
    assert hops[1].time_ns == ns(2 + off)  # the sender's is shown


def test_a_life_is_ordered_by_time_despite_unordered_exports():
    maker = TraceMaker()
    maker.event("put", ROLLOUT, 1, ["a"])
    maker.event("claimed", POLICIES[0], 2, ["a"], task="train")
    maker.event("cleared", DRIVER, 3, ["a"])
    for late in ((9, 3, 4), (600, 603, 601), (1, 20, 4)):  # one delayed, an outage, one resent
        hops = lineage_of("a", received(maker, *late))
        assert [hop.name for hop in hops] == ["put", "claimed", "cleared"]
        assert [hop.seconds for hop in hops] == [0, 1, 2]


def test_a_receiver_with_a_wrong_clock_changes_no_order():
    maker = TraceMaker()
    maker.event("put", ROLLOUT, 1, ["a"])
    maker.event("claimed", POLICIES[0], 2, ["a"], task="train")
    for off in (-86_400, 86_400):
        hops = lineage_of("a", received(maker, 5 + off, 3 + off))
        assert [hop.name for hop in hops] == ["put", "claimed"]
        assert [hop.seconds for hop in hops] == [0, 1]
