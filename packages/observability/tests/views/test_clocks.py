"""Host clocks are corrected only where calls between hosts prove them wrong."""

from dataclasses import replace
from io import StringIO

import pytest
from hypothesis import given, settings
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
)
from rich.console import Console

from observability.records import Records
from observability.views import critical_path, lineage_of, page_of, step_view

HOSTS = ("node-b", "node-c")
MIN_NS = 1_000_000
"""Clock differences below this are not corrected."""
MAX_GAP_NS = 100_000_000
"""Maximum gap at either end between a made-up call and its caller."""


def skewed(records, ahead_ns):
    """Return the records with each clock ahead by the nanoseconds given for its host."""

    def shift(record, *names):
        offset_ns = ahead_ns.get(record.process.host, 0)
        return replace(record, **{name: getattr(record, name) + offset_ns for name in names})

    return Records(
        spans=[shift(span, "start_ns", "end_ns") for span in records.spans],
        events=[shift(event, "time_ns") for event in records.events],
    )


def clocks_of(*spans):
    return step_of(Records(spans=list(spans))).clock_offsets


@settings(max_examples=50)
@given(st.fixed_dictionaries(dict.fromkeys(HOSTS, st.integers(-(10**12), 10**12))))
def test_corrected_calls_are_within_their_callers(ahead_ns):
    step = step_of(skewed(grpo_step(), ahead_ns))
    for span in step.spans:
        for callee in step.children(span.span_id):
            assert span.start_ns - MIN_NS < callee.start_ns
            assert callee.end_ns < span.end_ns + MIN_NS
    for host, offset_ns in step.clock_offsets.items():
        # The correction never exceeds the true error, and never has the wrong sign.
        assert 0 < abs(offset_ns) <= abs(ahead_ns[host])
        assert (offset_ns > 0) == (ahead_ns[host] > 0)


@settings(max_examples=50)
@given(st.fixed_dictionaries(dict.fromkeys(HOSTS, st.integers(-(10**12), 10**12))))
def test_correction_restores_the_waterfall_of_correct_clocks(ahead_ns):
    expected = {span.span_id: span for span in step_of(grpo_step()).spans}
    step = step_of(skewed(grpo_step(), ahead_ns))
    max_shift_ns = MAX_GAP_NS + MIN_NS
    for span in step.spans:
        assert abs(span.start_ns - expected[span.span_id].start_ns) <= max_shift_ns
        assert span.end_ns - span.start_ns == expected[span.span_id].seconds * 1e9
    assert {item.span.name for item in critical_path(step)} >= {"forward", "optimizer_step"}


def test_clocks_that_may_be_correct_are_not_changed():
    for ahead_ns in ({}, {"node-b": 9_000_000}, {"node-c": -9_000_000}):
        records = skewed(grpo_step(), ahead_ns)
        step = step_of(records)
        assert step.clock_offsets == {}
        assert step.clock_notes == []
        assert {span.start_ns for span in step.spans} == {s.start_ns for s in records.spans}


def test_events_are_shifted_with_the_spans_of_their_host():
    expected = [(event.name, event.time_ns) for event in step_of(grpo_step()).events]
    events = step_of(skewed(grpo_step(), {"node-c": 60 * 10**9})).events
    for event, (name, time_ns) in zip(events, expected, strict=True):
        assert event.name == name
        assert abs(event.time_ns - time_ns) <= MAX_GAP_NS + MIN_NS


@pytest.mark.parametrize("seconds", [-3600, 3600])
def test_lineage_order_ignores_wrong_host_clocks(seconds):
    records = grpo_step()
    sample_id = next(event for event in records.events if event.name == "put").sample_ids[0]
    names = [hop.name for hop in lineage_of(sample_id, records)]
    result = lineage_of(sample_id, skewed(records, {"node-c": seconds * 10**9}))
    assert [hop.name for hop in result] == names
    assert all(0 <= hop.seconds < 10 for hop in result)


def test_asynchronous_call_may_outlive_its_caller():
    maker = TraceMaker()
    root = maker.span("grpo.step", DRIVER, 0, 10)
    late = maker.span("late", GENERATION, 11, 15, root)
    assert clocks_of(root, late) == {"node-b": 5 * 10**9}
    assert clocks_of(root, replace(late, kind="consumer")) == {}
    assert clocks_of(replace(root, kind="producer"), late) == {}
    # But no message is received before it is sent.
    before = replace(late, kind="consumer", start_ns=ns(-3))
    assert clocks_of(root, before) == {"node-b": -3 * 10**9}


@pytest.mark.parametrize(
    ("calls", "clocks"),
    [
        # Each call: callee, start, end, index of the parent call (None: the root, on node-a).
        # The two calls contradict each other.
        ([(GENERATION, -2, 1, None), (GENERATION, 99, 102, None)], {}),
        (  # node-c calls node-b; the root's host does not
            [(POLICIES[0], 130, 138, None), (GENERATION, -20, -15, 0)],
            {"node-c": 38, "node-b": -112},
        ),
        (  # the correction of node-b shows that node-c is wrong too
            [(POLICIES[0], 40, 50, None), (GENERATION, 95, 105, None), (GENERATION, 42, 49, 0)],
            {"node-b": 5, "node-c": 3},
        ),
        (  # the calls contradict each other around a cycle of hosts
            [(POLICIES[0], 40, 50, None), (GENERATION, 0, 100, None), (GENERATION, 200, 210, 0)],
            {},
        ),
    ],
)
def test_all_calls_together_determine_the_wrong_clocks(calls, clocks):
    maker = TraceMaker()
    spans = [maker.span("grpo.step", DRIVER, 0, 100)]
    for process, start, end, parent_index in calls:
        parent = spans[0] if parent_index is None else spans[1 + parent_index]
        spans.append(maker.span("call", process, start, end, parent))
    assert clocks_of(*spans) == {host: seconds * 10**9 for host, seconds in clocks.items()}


def test_a_trace_with_too_many_wrong_clocks_is_not_corrected():
    maker = TraceMaker()
    root = maker.span("grpo.step", DRIVER, 0, 100)
    processes = [replace(GENERATION, host=f"host-{number}") for number in range(20_000)]
    spans = [root, *(maker.span("generate", process, 110, 120, root) for process in processes)]
    assert clocks_of(*spans) == {}
    assert len(clocks_of(*spans[:1000])) == 999


def test_clocks_are_not_corrected_without_root_or_host_name():
    maker = TraceMaker()
    maker.span("generate", GENERATION, 5, 6, "0" * 16)
    assert step_of(maker.records).clock_offsets == {}
    maker = TraceMaker()
    root = maker.span("grpo.step", DRIVER, 0, 1)
    maker.span("generate", replace(ROLLOUT, host=""), 5, 6, root)
    assert step_of(maker.records).clock_offsets == {}


def test_a_correction_is_shown_on_terminal_and_page():
    step = step_of(skewed(grpo_step(), {"node-b": -(7 * 10**9), "node-c": 4 * 10**9}))
    assert step.clock_notes == [
        "the clock of host node-b is 6.98 s or more behind; its times are shifted later",
        "the clock of host node-c is 3.90 s or more ahead; its times are shifted earlier",
    ]
    console = Console(file=StringIO(), width=200)
    console.print(step_view(step))
    text = console.file.getvalue()
    for note in step.clock_notes:
        assert f"clocks: {note}" in text
        assert f"<li>{note}</li>" in page_of([step])
    assert min(span.start_ns for span in step.spans) == BEGIN
