"""Busy and bubble are the whole of a step for every process."""

import pytest
from hypothesis import given
from told_runs import DRIVER, GENERATION, POLICIES, ROLLOUT, Teller, grpo_step, ns, trees

from observability.views import attributes, bucket_seconds, process_times, steps_of
from observability.views.intervals import length, union
from observability.views.processes import BUCKETS
from observability.views.tables import tables_of


def times_of(records):
    (step,) = steps_of(records)
    return {one.process: one for one in process_times(step)}


@given(trees())
def test_busy_and_bubble_are_the_step(records):
    (step,) = steps_of(records)
    for one in process_times(step):
        if one.busy_seconds is None:
            assert not any(
                attributes.bucket(span) in BUCKETS
                for span in step.spans
                if span.process == one.process
            )
            continue
        assert 0 <= one.bubble_seconds <= step.seconds
        assert one.busy_seconds + one.bubble_seconds == pytest.approx(step.seconds)
        assert list(one.busy) == union(one.busy)
        assert length(one.busy) / 1e9 == pytest.approx(one.busy_seconds)
        assert all(step.start_ns <= start < end <= step.end_ns for start, end in one.busy)


@given(trees())
def test_a_process_is_in_one_bucket_at_a_time(records):
    (step,) = steps_of(records)
    times = process_times(step)
    for one in times:
        if one.busy_seconds is None:
            continue
        assert sum(one.seconds.values()) <= step.seconds + 1e-9
        worked = sum(one.seconds[bucket] for bucket in ("productive", "overhead", "wasted"))
        assert worked == pytest.approx(one.busy_seconds)
    assert sum(bucket_seconds(step).values()) <= step.seconds * len(times) + 1e-9


def test_waiting_is_not_work():
    times = times_of(grpo_step())
    assert times[GENERATION].busy_seconds == pytest.approx(0.38 + 2 * 1.46)
    assert times[ROLLOUT].busy_seconds == pytest.approx(0.05 + 0.13)
    assert times[DRIVER].bubble_seconds / times[DRIVER].step_seconds > 0.9


def test_overlapping_work_counts_once():
    tell = Teller()
    root = tell.span("grpo.step", DRIVER, 0, 10)
    tell.span("forward", POLICIES[0], 1, 5, root, "productive")
    tell.span("send train", POLICIES[0], 4, 6, root, "overhead")
    one = times_of(tell.records)[POLICIES[0]]
    assert one.busy == ((ns(1), ns(6)),)
    assert one.seconds == {"productive": 4.0, "overhead": 1.0, "wasted": 0.0, "idle": 0.0}


def test_a_wait_inside_of_work_is_a_bubble():
    tell = Teller()
    root = tell.span("grpo.step", DRIVER, 0, 10)
    outer = tell.span("refit", POLICIES[0], 0, 10, root, "overhead")
    between = tell.span("groups", POLICIES[0], 2, 8, outer)
    tell.span("receive", POLICIES[0], 3, 7, between, "idle")
    assert times_of(tell.records)[POLICIES[0]].busy == ((ns(0), ns(3)), (ns(7), ns(10)))


def test_work_outside_of_the_step_does_not_count():
    tell = Teller()
    root = tell.span("grpo.step", DRIVER, 0, 10)
    tell.span("forward", POLICIES[0], -5, 2, root, "productive")
    tell.span("forward", POLICIES[0], 9, 20, root, "productive")
    assert times_of(tell.records)[POLICIES[0]].busy_seconds == 3.0


def test_the_process_of_the_root_comes_first():
    (step,) = steps_of(grpo_step())
    labels = [one.label for one in process_times(step)]
    assert labels[0] == "grpo.driver"
    assert labels[1:] == sorted(labels[1:])


def test_without_buckets_nobody_knows_when_a_process_worked():
    tell = Teller()
    root = tell.span("grpo.step", DRIVER, 0, 4)
    tell.span("generate", GENERATION, 1, 2, root)
    (step,) = steps_of(tell.records)
    for one in process_times(step):
        assert (one.busy, one.seconds) == ((), {})
        assert one.busy_seconds is one.bubble_seconds is None
    assert bucket_seconds(step) == {}
    tables = {table.title: table for table in tables_of(step, ())}
    assert all(list(row[1:]) == ["n/a"] * 4 for row in tables["Processes"].rows)
    assert "Process-seconds" not in tables


def test_a_process_without_buckets_leaves_those_of_others_alone():
    tell = Teller()
    root = tell.span("grpo.step", DRIVER, 0, 4, bucket="idle")
    tell.span("generate", GENERATION, 1, 2, root)
    times = times_of(tell.records)
    assert times[GENERATION].bubble_seconds is None
    assert times[DRIVER].bubble_seconds == 4.0
