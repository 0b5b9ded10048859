"""The lineage of a sample goes from its put to its clear."""

import random
from dataclasses import replace

import pytest
from made_up_runs import DRIVER, HOSTILE, POLICIES, ROLLOUT, TraceMaker, grpo_step, ns, sample_ids

from observability.records import Records
from observability.views import SampleNotFound, lineage_of, runs_of_sample


def hop_names(sample_id, records):
    return [hop.name for hop in lineage_of(sample_id, records)]


def test_lineage_is_in_time_order():
    records = grpo_step(policies=1)
    random.Random(3).shuffle(records.events)
    trained_id, dropped_id = sample_ids()[0], sample_ids()[-1]
    assert hop_names(trained_id, records) == [
        *("put", "read", "put", "put", "claimed", "read", "trained", "cleared")
    ]
    assert hop_names(dropped_id, records) == ["put", "read", "put", "put", "dropped", "cleared"]
    assert lineage_of(dropped_id, records)[4].detail == "equal_rewards"
    without_spans = Records(events=records.events)
    assert {hop.stage for hop in lineage_of(trained_id, without_spans)} == {""}


def test_each_hop_has_its_process_time_and_stage():
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


def test_a_partition_clear_ends_each_lineage_once():
    records = grpo_step()
    trained_id, dropped_id = sample_ids()[0], sample_ids()[-1]
    later = TraceMaker(step=1)
    later.event("cleared", DRIVER, 20, [])
    records.add(later.records)
    last = lineage_of(trained_id, records)[-1]
    assert (last.name, last.whole_partition, last.time_ns) == ("cleared", True, ns(9.89))
    assert [hop.whole_partition for hop in lineage_of(dropped_id, records)][-1] is False
    assert hop_names(dropped_id, records).count("cleared") == 1


def test_a_lineage_has_the_events_of_one_run():
    records = Records()
    for run_id, begin_s in (("run-a", 0), ("run-b", 90_000)):
        maker = TraceMaker(run_id=run_id)
        maker.event("put", ROLLOUT, begin_s + 1, ["a"])
        maker.event("trained", DRIVER, begin_s + 2, ["a"])
        maker.event("cleared", DRIVER, begin_s + 3, [])
        records.add(maker.records)
    random.Random(3).shuffle(records.events)
    assert runs_of_sample("a", records) == ["run-b", "run-a"]
    for run_id in (None, "run-a", "run-b"):
        hops = lineage_of("a", records, run_id=run_id)
        assert [hop.name for hop in hops] == ["put", "trained", "cleared"]
        assert {hop.run_id for hop in hops} == {run_id or "run-b"}
        assert hops[-1].seconds == 2.0
    with pytest.raises(SampleNotFound):
        lineage_of("a", records, run_id="run-c")


def test_only_later_clears_of_its_partition_end_a_lineage():
    maker = TraceMaker()
    maker.event("cleared", DRIVER, 0, [])
    maker.event("put", ROLLOUT, 1, ["a"], fields=["x"])
    maker.event("cleared", DRIVER, 2, [], partition="val")
    assert hop_names("a", maker.records) == ["put"]


def test_each_put_of_a_sample_is_ended_by_one_clear():
    maker = TraceMaker()
    maker.event("put", ROLLOUT, 1, ["a"])
    maker.event("cleared", DRIVER, 2, ["a"])
    maker.event("read", POLICIES[0], 3, ["a"])
    maker.event("cleared", DRIVER, 4, [])
    maker.event("put", ROLLOUT, 5, ["a"])
    maker.event("cleared", DRIVER, 6, [])
    assert hop_names("a", maker.records) == ["put", "cleared", "read", "put", "cleared"]


def test_a_repeated_event_is_one_hop():
    records = grpo_step()
    expected = lineage_of(sample_ids()[0], records)
    records.add(grpo_step())
    assert lineage_of(sample_ids()[0], records) == expected


def test_different_events_at_one_time_are_separate_hops():
    maker = TraceMaker()
    for _ in range(2):
        for version in (1, 2, 3):
            maker.event("trained", POLICIES[0], 1, ["a"], version=version)
    assert hop_names("a", maker.records) == ["trained"] * 3


def test_an_unknown_sample_error_suggests_similar_ids():
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
def test_an_unknown_sample_error_is_printable(hostile):
    maker = TraceMaker()
    maker.event("put", ROLLOUT, 1, [hostile + "a"])
    with pytest.raises(SampleNotFound) as caught:
        lineage_of(hostile, maker.records)
    assert str(caught.value).isprintable()
    assert lineage_of(hostile + "a", maker.records)[0].name == "put"


def test_attributes_of_an_unexpected_type_are_ignored():
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


def with_receipt_times(maker, *seconds):
    """Return the records with a receipt time for each event."""
    events = [
        replace(event, received_ns=ns(at))
        for event, at in zip(maker.records.events, seconds, strict=True)
    ]
    return Records(maker.records.spans, events)


@pytest.mark.parametrize("offset_s", [-86_400, -60, 60, 86_400])
def test_lineage_order_ignores_the_wrong_clock_of_one_host(offset_s):
    maker = TraceMaker()
    maker.event("put", ROLLOUT, 1, ["a"])
    maker.event("claimed", POLICIES[0], 2 + offset_s, ["a"], task="train")
    maker.event("trained", POLICIES[0], 3 + offset_s, ["a"], task="train")
    maker.event("cleared", DRIVER, 7, [])
    hops = lineage_of("a", with_receipt_times(maker, 1.5, 2.5, 3.5, 7.5))
    assert [hop.name for hop in hops] == ["put", "claimed", "trained", "cleared"]
    assert [hop.seconds for hop in hops] == pytest.approx([0, 1, 2, 6], abs=1)
    assert hops[1].time_ns == ns(2 + offset_s)  # the sender's time is shown


def test_lineage_order_ignores_the_order_of_exports():
    maker = TraceMaker()
    maker.event("put", ROLLOUT, 1, ["a"])
    maker.event("claimed", POLICIES[0], 2, ["a"], task="train")
    maker.event("cleared", DRIVER, 3, ["a"])
    for receipt_times in ((9, 3, 4), (600, 603, 601), (1, 20, 4)):  # a delay, an outage, a resend
        hops = lineage_of("a", with_receipt_times(maker, *receipt_times))
        assert [hop.name for hop in hops] == ["put", "claimed", "cleared"]
        assert [hop.seconds for hop in hops] == [0, 1, 2]


def test_lineage_order_ignores_a_wrong_receiver_clock():
    maker = TraceMaker()
    maker.event("put", ROLLOUT, 1, ["a"])
    maker.event("claimed", POLICIES[0], 2, ["a"], task="train")
    for offset_s in (-86_400, 86_400):
        hops = lineage_of("a", with_receipt_times(maker, 5 + offset_s, 3 + offset_s))
        assert [hop.name for hop in hops] == ["put", "claimed"]
        assert [hop.seconds for hop in hops] == [0, 1]
