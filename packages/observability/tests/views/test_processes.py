"""Busy and bubble time of each process add up to the duration of its step."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_runs import (
    BEGIN,
    DRIVER,
    GENERATION,
    POLICIES,
    ROLLOUT,
    TraceMaker,
    grpo_step,
    ns,
    step_of,
    trees,
)
from rich.console import Console

from observability.views import bucket_seconds, page_of, process_times, step_view

BUCKETS = ("productive", "overhead", "wasted", "idle")
"""Buckets in the order in which overlapping spans of a process count."""


def times_of(records):
    return {item.process: item for item in process_times(step_of(records))}


def bucket_of(span):
    bucket = span.attributes.get("rl.bucket")
    return bucket if bucket in BUCKETS else None


def bucket_at(step, process, second):
    """Return the bucket of a process at a second: that of its innermost span with a bucket."""
    process_spans = [span for span in step.spans if span.process == process and bucket_of(span)]
    at = BEGIN + second * 10**9
    active_spans = [span for span in process_spans if span.start_ns <= at < span.end_ns]
    outer = set()  # spans that contain a span with a bucket
    for span in active_spans:
        ancestors = step.tree.ancestry(span.span_id)[1:]
        outer |= {
            next((ancestor.span_id for ancestor in ancestors if ancestor in process_spans), None)
        }
    buckets = {bucket_of(span) for span in active_spans if span.span_id not in outer}
    return next((bucket for bucket in BUCKETS if bucket in buckets), None)


@given(trees())
def test_each_second_counts_for_innermost_bucket_or_bubble(records):
    step = step_of(records)
    sums = dict.fromkeys(BUCKETS, 0.0)
    for item in process_times(step):
        seconds = [bucket_at(step, item.process, at) for at in range(round(step.seconds))]
        if item.busy_seconds is None:
            assert (item.bubble_seconds, item.seconds, item.busy) == (None, {}, ())
            assert not any(bucket_of(s) for s in step.spans if s.process == item.process)
            continue
        assert item.seconds == {bucket: seconds.count(bucket) for bucket in BUCKETS}
        busy_at = {at for at, bucket in enumerate(seconds) if bucket not in (None, "idle")}
        assert item.busy_seconds == len(busy_at)
        assert item.bubble_seconds == step.seconds - len(busy_at)
        intervals = [((start - BEGIN) // 10**9, (end - BEGIN) // 10**9) for start, end in item.busy]
        assert sorted(busy_at) == [at for start, end in intervals for at in range(start, end)]
        sums = {bucket: sums[bucket] + item.seconds[bucket] for bucket in BUCKETS}
    assert bucket_seconds(step) in ({}, sums)


def test_the_innermost_of_10000_nested_spans_counts():
    maker = TraceMaker()
    span = maker.span("root", DRIVER, 0, 10, bucket="idle")
    for _ in range(9_998):
        span = maker.span("deeper", DRIVER, 0, 10, span, "overhead")
    maker.span("innermost", DRIVER, 2, 3, span, "productive")
    [times] = process_times(step_of(maker.records))
    assert times.seconds == {"productive": 1.0, "overhead": 9.0, "wasted": 0.0, "idle": 0.0}


def test_idle_time_is_not_busy_time():
    times = times_of(grpo_step())
    assert times[GENERATION].busy_seconds == pytest.approx(0.38 + 2 * 1.46)
    assert times[ROLLOUT].busy_seconds == pytest.approx(0.05 + 0.13)
    assert times[DRIVER].bubble_seconds / times[DRIVER].step_seconds > 0.9


def test_the_process_of_the_root_comes_first():
    step = step_of(grpo_step())
    labels = [item.label for item in process_times(step)]
    assert labels[0] == "grpo.driver"
    assert labels[1:] == sorted(labels[1:])


def test_busy_time_is_unknown_without_buckets():
    maker = TraceMaker()
    root = maker.span("grpo.step", DRIVER, 0, 4)
    maker.span("generate", GENERATION, 1, 2, root)
    step = step_of(maker.records)
    assert bucket_seconds(step) == {}
    console = Console(width=100)
    with console.capture() as captured:
        console.print(step_view(step))
    assert captured.get().count("n/a") == 4 * 2
    assert "Process-seconds" not in captured.get()
    maker.span("forward", POLICIES[0], 1, 2, root, "productive")  # does not affect other processes
    times = times_of(maker.records)
    assert times[GENERATION].bubble_seconds is None
    assert times[POLICIES[0]].bubble_seconds == 3.0


def test_work_in_other_traces_is_no_bubble():
    step = TraceMaker()
    root = step.span("grpo.step", DRIVER, 0, 10, bucket="idle")
    step.span("install_weights", GENERATION, 0, 1, root, "overhead")
    records = step.records
    for number, (start, end) in enumerate([(-2, 2), (1.5, 3), (8, 30), (10, 40), (-9, 0)]):
        other = TraceMaker(trace_id=f"{7000 + number:032x}")
        claim = other.span("grpo.generator", ROLLOUT, start, end)
        other.span("generate", GENERATION, start, end, claim, "productive")
        records.spans += [
            replace(span, attributes=without_step(span)) for span in other.records.spans
        ]
    times = times_of(records)
    generation = times[GENERATION]
    assert generation.busy_seconds == 1.0
    assert generation.busy_elsewhere == ((ns(1), ns(3)), (ns(8), ns(10)))
    assert (generation.elsewhere_seconds, generation.bubble_seconds) == (4.0, 5.0)
    assert (times[DRIVER].elsewhere_seconds, times[DRIVER].bubble_seconds) == (0.0, 10.0)
    assert ROLLOUT not in times  # it has no span in the step
    console = Console(width=80)
    with console.capture() as captured:
        console.print(step_view(step_of(records)))
    assert "other traces" in captured.get()
    page = page_of([step_of(records)])
    assert "10.0 % busy, 40.0 % in other traces" in page
    assert "bubble 5.00 s" in page


def without_step(span):
    return {name: value for name, value in span.attributes.items() if name != "rl.step"}


@given(trees(), st.lists(st.tuples(st.integers(-5, 30), st.integers(1, 9)), max_size=6))
def test_busy_elsewhere_and_bubble_add_up_to_the_step(records, others):
    [process, *_] = step_of(records).processes
    for number, (start, seconds) in enumerate(others):
        other = TraceMaker(trace_id=f"{7000 + number:032x}")
        span = other.span("generate", process, start, start + seconds, None, "productive")
        records.spans.append(replace(span, attributes=without_step(span)))
    step = step_of(records)
    for item in process_times(step):
        if item.busy_seconds is not None:
            parts = item.busy_seconds, item.elsewhere_seconds, item.bubble_seconds
            assert sum(parts) == pytest.approx(step.seconds)
            assert min(parts) >= 0
