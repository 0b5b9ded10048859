"""Every open wait says what it is blocked on."""

import dataclasses
import random

import pytest
from made_up_runs import DRIVER, HOSTILE, POLICIES, ROLLOUT, TraceMaker, grpo_step, ns

from dataplane_core import FieldSummary, PartitionSummary, TaskSummary
from observability.records import Event, Records
from observability.views import MissingField, why

IDS = [f"abc_g{i}" for i in range(512)]


def blocked_claim(*, put=512, advantages=0, claimed=0):
    """Return records of a trainer that is blocked on advantages of 512 samples."""
    maker = TraceMaker()
    maker.event(
        "registered",
        DRIVER,
        0,
        [],
        samples=512,
        fields=["input_ids", "advantages"],
        tasks=["prev_lp", "train"],
    )
    maker.event("put", ROLLOUT, 1, IDS[:put], fields=["input_ids"])
    if advantages:
        maker.event("put", DRIVER, 2, IDS[:advantages], fields=["advantages"])
    if claimed:
        options = {"task": "train", "fields": ["advantages"], "wait_s": 0.1}
        maker.event("claimed", POLICIES[1], 3, IDS[:claimed], **options)
    maker.event(
        "waiting",
        POLICIES[1],
        6,
        [],
        samples=32,
        wait="77-1",
        since_ns=ns(5),
        task="train",
        fields=["advantages"],
    )
    return maker


def test_a_blocked_claim_reports_task_fields_start_and_shortage():
    (wait,) = why(blocked_claim(advantages=32, claimed=32).records, ns(17.3))
    assert (wait.process, wait.task, wait.partition) == (POLICIES[1], "train", "train")
    assert (wait.fields, wait.requested, wait.since_ns) == (("advantages",), 32, ns(5))
    assert wait.seconds == pytest.approx(12.3)
    assert (wait.present, wait.ready, wait.claimed, wait.not_put) == (512, 0, 32, 0)
    assert wait.lacks == {"advantages": MissingField(480, tuple(IDS[32:42]))}


def test_each_wait_is_one_sentence():
    (wait,) = why(blocked_claim(advantages=32).records, ns(17.3))
    assert str(wait) == (
        "task 'train' in grpo.policy 1 has been blocked for 12.3 s on 32 samples "
        "of partition 'train' with "
        "advantages: 480 of 512 lack advantages (abc_g32, abc_g33, …); 32 ready; "
        "0 not put yet"
    )
    (wait,) = why(blocked_claim(put=128).records, ns(6))
    assert str(wait).endswith(": 128 of 128 lack advantages (abc_g0, abc_g1, …); 384 not put yet")
    lack = MissingField(8, ("a", "b", "c"))
    several = dataclasses.replace(wait, lacks={"x": lack, "y": MissingField(7), "z": lack})
    assert ": 8 of 128 lack x, z (a, b, …); 7 of 128 lack y; 384 not" in str(several)
    # Without examples, these may be different samples.
    counted = {"x": MissingField(7), "y": MissingField(7), "z": MissingField(128)}
    several = dataclasses.replace(wait, lacks=counted | {"w": MissingField(128)})
    assert ": 7 of 128 lack x; 7 of 128 lack y; 128 of 128 lack z, w; 384 not" in str(several)
    (wait,) = why(blocked_claim(advantages=512, claimed=512).records, ns(6))
    assert str(wait).endswith(
        ": 512 present and none lacks a field; 512 already claimed by it; 0 not put yet"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2.56e-7, "256 ns"),
        (85e-6, "85.0 µs"),
        (0.99999, "1.00 s"),
        (0.12, "120 ms"),
        (12.34, "12.3 s"),
        (125, "2 min 5 s"),
        (7_260, "2 h 1 min"),
        (108_640, "1 d 6 h"),
    ],
)
def test_durations_have_three_digits_and_a_unit(seconds, text):
    maker = TraceMaker()
    maker.event("waiting", DRIVER, 0, [], partition=None, wait="1", since_ns=ns(0), on="x")
    (wait,) = why(maker.records, ns(seconds))
    assert str(wait) == f"grpo.driver has been blocked for {text} on x"


@pytest.mark.parametrize("end_event", ["claimed", "claim_failed", "answered"])
def test_a_wait_ends_with_its_end_event_in_any_order(end_event):
    maker = blocked_claim()
    maker.event(end_event, POLICIES[1], 7, [], wait="77-1", task="train")
    random.Random(4).shuffle(maker.records.events)
    assert why(maker.records, ns(9)) == []


def test_claimed_samples_that_lack_a_field_count_as_with_live_counts():
    records = blocked_claim(advantages=32, claimed=64).records
    (wait,) = why(records, ns(9))
    advantages = FieldSummary(name="advantages", kind="f", declared=True, written=32)
    (live,) = why(records, ns(9), [live_summary(present=512, fields=(advantages,))])
    assert wait.lacks == live.lacks == {"advantages": MissingField(480, tuple(IDS[32:42]))}


def test_the_claim_of_another_wait_does_not_end_a_wait():
    maker = blocked_claim()
    maker.event("claimed", POLICIES[1], 7, [], wait="77-2", task="train")
    maker.event("claimed", POLICIES[1], 7, [], task="train")
    # Wait ids are unique only within a process.
    maker.event("claimed", POLICIES[0], 7, [], wait="77-1", task="train")
    assert len(why(maker.records, ns(9))) == 1


def test_a_wait_of_an_earlier_run_is_reported_with_its_age():
    records = blocked_claim().records
    records.add(grpo_step(0, run_id="run-b", at=3_600))
    (wait,) = why(records, ns(4_000))
    assert (wait.run_id, wait.seconds) == ("run-a", 3_995.0)
    assert wait.lacks["advantages"].count == 512


def report_wait(maker, process, at, *, since=5, wait="77-1", **details):
    maker.event("waiting", process, at, [], wait=wait, since_ns=ns(since), task="train", **details)


def test_a_repeated_wait_is_one_wait_since_its_start():
    maker = TraceMaker()
    for at in range(6, 600, 30):
        report_wait(maker, POLICIES[1], at, report_every_s=30.0)
    random.Random(4).shuffle(maker.records.events)
    (wait,) = why(maker.records, ns(605))
    assert (wait.seconds, wait.silent_s) == (600.0, 0.0)
    maker.event("claimed", POLICIES[1], 606, [], wait="77-1", task="train")
    # A report that was in flight when the wait ended.
    report_wait(maker, POLICIES[1], 607, report_every_s=30.0)
    assert why(maker.records, ns(900)) == []


@pytest.mark.parametrize("interval", [{"report_every_s": 30.0}, {}])
def test_a_wait_that_is_no_longer_repeated_is_silent_and_last(interval):
    maker = TraceMaker()
    report_wait(maker, POLICIES[0], 2, since=1, **interval)
    report_wait(maker, POLICIES[0], 32, since=1, **interval)
    report_wait(maker, POLICIES[1], 6, **interval)
    report_wait(maker, POLICIES[1], 3_600, **interval)
    waits = why(maker.records, ns(32 + 120))
    assert [(wait.process, wait.silent_s) for wait in waits] == [
        (POLICIES[0], 0.0),
        (POLICIES[1], 0.0),
    ]
    current, silent = why(maker.records, ns(3_632))
    assert (current.process, current.silent_s) == (POLICIES[1], 0.0)
    assert (silent.process, silent.seconds, silent.silent_s) == (POLICIES[0], 31.0, 3_600.0)
    assert str(silent).endswith(": the partition does not exist (process silent for 1 h 0 min)")


@pytest.mark.parametrize(("after_s", "silent_s"), [(300.0, 0.0), (199.0, 200.0)])
def test_silence_threshold_is_an_argument(after_s, silent_s):
    maker = TraceMaker()
    report_wait(maker, POLICIES[1], 6, report_every_s=30.0)
    (wait,) = why(maker.records, ns(206), silent_after_s=after_s)
    assert wait.silent_s == silent_s
    maker = TraceMaker()
    report_wait(maker, POLICIES[1], 6)  # reported once, no report_every_s: never silent
    (wait,) = why(maker.records, ns(206), silent_after_s=after_s)
    assert wait.silent_s == 0.0


def test_a_blocked_call_reports_the_fields_it_will_write():
    maker = blocked_claim(put=4)
    maker.event(
        "waiting",
        DRIVER,
        6,
        IDS[:2],
        wait="1",
        since_ns=ns(4),
        on="policy worker 1: compute_logprobs",
        fields=["prev_logprobs"],
    )
    maker.event("put", POLICIES[1], 7, IDS[:1], fields=["prev_logprobs"])
    call = why(maker.records, ns(10))[0]
    assert str(call) == (
        "grpo.driver has been blocked for 6.00 s on policy worker 1: compute_logprobs, to write "
        "prev_logprobs of 2 samples of partition 'train': 1 of 2 lack prev_logprobs (abc_g1); "
        "508 not put yet"
    )


def test_cleared_samples_lack_nothing_and_are_not_put_again():
    maker = blocked_claim(put=10)
    maker.event("cleared", DRIVER, 7, IDS[:4])
    (wait,) = why(maker.records, ns(9))
    assert (wait.present, wait.lacks["advantages"].count, wait.not_put) == (6, 6, 502)


def test_withdrawn_samples_count_as_not_put():
    maker = blocked_claim(put=10)
    maker.event("cleared", DRIVER, 7, [*IDS[:4], "never put"], withdrawn=True)
    (wait,) = why(maker.records, ns(9))
    assert (wait.present, wait.not_put) == (6, 506)


def test_released_samples_can_be_claimed_again():
    maker = blocked_claim(advantages=32, claimed=32)
    maker.event("acknowledged", POLICIES[1], 4, IDS[:8], task="train")
    maker.event("released", POLICIES[1], 4, IDS[8:32], task="train")
    (wait,) = why(maker.records, ns(9))
    assert (wait.ready, wait.claimed) == (24, 8)


def test_a_claim_blocked_on_leases_reports_their_holders():
    maker = blocked_claim(put=512, advantages=512)
    maker.event("claimed", POLICIES[0], 3, IDS[:500], task="train", leased=True)
    maker.event("claimed", POLICIES[1], 3, IDS[500:], task="train", leased=True)
    maker.event("acknowledged", POLICIES[0], 4, IDS[:480], task="train")
    (wait,) = why(maker.records, ns(9))
    assert wait.holders == {POLICIES[0].label: 20, POLICIES[1].label: 12}
    assert str(wait).endswith(
        "512 present and none lacks a field; 512 already claimed by it; it is blocked on "
        "32 leased samples: 20 held by grpo.policy 0, 12 held by grpo.policy 1; "
        "0 not put yet"
    )
    maker.event("released", POLICIES[0], 5, IDS[480:500], task="train")
    maker.event("cleared", DRIVER, 5, IDS[500:])
    (wait,) = why(maker.records, ns(9))
    assert (wait.holders, wait.ready) == ({}, 20)


def test_live_lease_holders_override_those_from_events():
    maker = blocked_claim(put=512, advantages=512)
    maker.event("claimed", POLICIES[0], 3, IDS, task="train", leased=True)
    fields = [
        FieldSummary(name=name, kind="f", declared=True, written=512)
        for name in ("input_ids", "advantages")
    ]
    task = TaskSummary(
        name="train", unclaimed=0, leased=3, acknowledged=509, leases=1, holders={"host:7": 3}
    )
    summary = live_summary(present=512, put=512, fields=tuple(fields), tasks=(task,))
    (wait,) = why(maker.records, ns(9), [summary])
    assert wait.holders == {"host:7": 3}
    assert "it is blocked on 3 leased samples: 3 held by host:7" in str(wait)


def test_a_cleared_partition_is_reported_as_missing():
    maker = blocked_claim()
    maker.event("cleared", DRIVER, 7, [])
    (wait,) = why(maker.records, ns(9))
    assert not wait.partition_exists
    assert str(wait).endswith("with advantages: the partition does not exist")


def test_a_partition_registered_twice_keeps_its_samples():
    maker = blocked_claim(put=10, advantages=10, claimed=4)
    maker.event("registered", DRIVER, 7, [], samples=20, fields=["advantages"], tasks=["train"])
    (wait,) = why(maker.records, ns(9))
    assert (wait.present, wait.not_put, wait.claimed) == (10, 10, 4)


def test_partitions_with_one_name_in_two_runs_are_separate():
    records = blocked_claim(put=3).records
    other = TraceMaker(run_id="run-b")
    other.event("put", ROLLOUT, 1, ["elsewhere"], fields=["input_ids"])
    records.add(other.records)
    (wait,) = why(records, ns(9))
    assert wait.present == 3


def live_summary(**changes):
    fields = (
        FieldSummary(name="input_ids", kind="f", declared=True, written=500),
        FieldSummary(name="advantages", kind=None, declared=True, written=300),
    )
    tasks = (TaskSummary(name="train", unclaimed=250, leased=200, acknowledged=50, leases=2),)
    return dataclasses.replace(
        PartitionSummary(
            partition_id="train",
            declared=512,
            put=504,
            present=500,
            reserved=0,
            group_size=None,
            fields=fields,
            tasks=tasks,
        ),
        **changes,
    )


def test_live_counts_override_those_from_events():
    (wait,) = why(blocked_claim(put=100).records, ns(9), [live_summary()])
    assert (wait.present, wait.ready, wait.claimed, wait.not_put) == (500, 50, 250, 8)
    assert wait.lacks == {"advantages": MissingField(200, tuple(IDS[:10]))}
    other = live_summary(partition_id="val")
    assert why(blocked_claim(put=100).records, ns(9), [other]) == why(
        blocked_claim(put=100).records, ns(9)
    )


def test_assigned_samples_are_neither_ready_nor_claimed():
    summary = live_summary()
    (task,) = summary.tasks
    task = dataclasses.replace(task, unclaimed=210, assigned=40)
    (wait,) = why(blocked_claim(put=100).records, ns(9), [live_summary(tasks=(task,))])
    assert (wait.ready, wait.claimed, wait.assigned) == (10, 250, 40)
    assert "40 assigned to ranks" in str(wait)


def test_live_counts_are_used_without_events():
    records = blocked_claim().records
    records.events = [event for event in records.events if event.name == "waiting"]
    assert not why(records, ns(9))[0].partition_exists
    (wait,) = why(records, ns(9), [live_summary()])
    assert wait.lacks == {"advantages": MissingField(200)}
    assert "200 of 500 lack advantages; 50 ready" in str(wait)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_sentence_is_printable_for_any_name(hostile):
    maker = TraceMaker()
    maker.event("put", ROLLOUT, 0, [hostile], partition=hostile, fields=["x"])
    process = dataclasses.replace(POLICIES[0], service=hostile)
    options = {"task": hostile, "wait": "1", "fields": [hostile], "since_ns": ns(0)}
    maker.event("waiting", process, 1, [], partition=hostile, **options)
    (wait,) = why(maker.records, ns(2))
    assert str(wait).isprintable()


@pytest.mark.parametrize("ahead_s", [0, 60, 86_400, -86_400])
def test_the_duration_of_a_wait_ignores_the_host_clock(ahead_s):
    second_ns = 10**9
    ahead_ns = ahead_s * second_ns
    received_ns = 1_790_000_000 * second_ns
    options = {"dataplane.wait": "w", "dataplane.report_every_s": 30}
    since_ns = received_ns + ahead_ns - 10 * second_ns
    options |= {"dataplane.task": "train", "dataplane.since_ns": since_ns}
    event = Event("waiting", received_ns + ahead_ns, options, (), DRIVER, received_ns=received_ns)
    [wait] = why(Records(events=[event]), received_ns + 50 * second_ns)
    assert (wait.seconds, wait.silent_s) == (60, 0)
    [wait] = why(Records(events=[event]), received_ns + 400 * second_ns)
    assert wait.silent_s == 400
