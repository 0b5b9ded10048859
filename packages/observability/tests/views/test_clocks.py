"""Times of hosts whose clocks disagree are put right by what calls say, and never without cause."""

from dataclasses import replace
from io import StringIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from told_runs import BEGIN, DRIVER, GENERATION, POLICIES, ROLLOUT, Teller, grpo_step, ns

from observability.records import Records
from observability.views import critical_path, life_of, page_of, step_view, steps_of
from observability.views.clocks import LEAST_NS, clocks_ahead, moved_event, moved_span
from observability.views.tree import Tree

HOSTS = ("node-b", "node-c")
OPEN_NS = 100_000_000
"""How much room the made-up calls leave their callers at one of the ends, at most."""


def skewed(records, ahead):
    """What the same run tells with clocks that are ahead by so many nanoseconds."""
    back = {host: -by for host, by in ahead.items()}
    return Records(
        spans=[moved_span(span, back) for span in records.spans],
        events=[moved_event(event, back) for event in records.events],
    )


def step_of(records):
    (step,) = steps_of(records)
    return step


@settings(max_examples=50)
@given(st.fixed_dictionaries(dict.fromkeys(HOSTS, st.integers(-(10**12), 10**12))))
def test_every_call_lies_within_its_caller_whatever_the_clocks_said(ahead):
    step = step_of(skewed(grpo_step(), ahead))
    for span in step.spans:
        for called in step.children(span.span_id):
            assert span.start_ns - LEAST_NS < called.start_ns
            assert called.end_ns < span.end_ns + LEAST_NS
    for host, by in step.clocks.items():
        # Never by more than is true, and never the wrong way.
        assert 0 < abs(by) <= abs(ahead[host])
        assert (by > 0) == (ahead[host] > 0)


@settings(max_examples=50)
@given(st.fixed_dictionaries(dict.fromkeys(HOSTS, st.integers(-(10**12), 10**12))))
def test_the_waterfall_is_that_of_right_clocks_but_for_what_calls_leave_open(ahead):
    right = {span.span_id: span for span in step_of(grpo_step()).spans}
    step = step_of(skewed(grpo_step(), ahead))
    open_ns = OPEN_NS + LEAST_NS
    for span in step.spans:
        assert abs(span.start_ns - right[span.span_id].start_ns) <= open_ns
        assert span.end_ns - span.start_ns == right[span.span_id].seconds * 1e9
    assert {one.span.name for one in critical_path(step)} >= {"forward", "optimizer_step"}


def test_clocks_that_may_be_right_are_left_alone():
    for ahead in ({}, {"node-b": 9_000_000}, {"node-c": -9_000_000}):
        records = skewed(grpo_step(), ahead)
        step = step_of(records)
        assert step.clocks == {}
        assert step.clock_notes == []
        assert {span.start_ns for span in step.spans} == {s.start_ns for s in records.spans}


def test_events_are_moved_with_the_spans_of_their_host():
    right = [(event.name, event.time_ns) for event in step_of(grpo_step()).events]
    found = step_of(skewed(grpo_step(), {"node-c": 60 * 10**9})).events
    assert [name for name, _ in right] == [event.name for event in found]
    assert all(
        abs(event.time_ns - told) <= OPEN_NS + LEAST_NS
        for event, (_, told) in zip(found, right, strict=True)
    )


@pytest.mark.parametrize("seconds", [-3600, 3600])
def test_the_life_of_a_sample_has_its_order_though_clocks_disagree(seconds):
    records = grpo_step()
    sample_id = next(e for e in records.events if e.name == "put").sample_ids[0]
    names = [hop.name for hop in life_of(sample_id, records)]
    found = life_of(sample_id, skewed(records, {"node-c": seconds * 10**9}))
    assert [hop.name for hop in found] == names
    assert all(0 <= hop.seconds < 10 for hop in found)


def test_what_was_sent_off_may_outlive_who_sent_it():
    tell = Teller()
    root = tell.span("grpo.step", DRIVER, 0, 10)
    late = tell.span("late", GENERATION, 11, 15, root)
    assert clocks_ahead(Tree([root, late]), root) == {"node-b": 5 * 10**9}
    assert clocks_ahead(Tree([root, replace(late, kind="consumer")]), root) == {}
    assert clocks_ahead(Tree([sender := replace(root, kind="producer"), late]), sender) == {}
    # Nothing is received before it is sent, however.
    early = replace(late, kind="consumer", start_ns=ns(-3))
    assert clocks_ahead(Tree([root, early]), root) == {"node-b": -3 * 10**9}


def test_calls_that_contradict_each_other_say_nothing():
    tell = Teller()
    root = tell.span("grpo.step", DRIVER, 0, 10)
    tell.span("early", GENERATION, -2, 1, root)
    tell.span("late", GENERATION, 9, 12, root)
    assert step_of(tell.records).clocks == {}


def test_a_host_that_only_another_called_is_put_right_by_that_one():
    tell = Teller()
    root = tell.span("grpo.step", DRIVER, 0, 10)
    middle = tell.span("train", POLICIES[0], 31, 39, root)
    tell.span("generate", GENERATION, -20, -15, middle)
    assert step_of(tell.records).clocks == {"node-c": 29 * 10**9, "node-b": -22 * 10**9}


def test_two_hosts_with_one_wrong_clock_are_both_put_right_though_one_call_alone_would_not_tell():
    tell = Teller()
    root = tell.span("grpo.step", DRIVER, 0, 100)
    near = tell.span("train", POLICIES[0], 40, 50, root)
    tell.span("generate", GENERATION, 95, 105, root)
    tell.span("generate", GENERATION, 42, 49, near)
    assert step_of(tell.records).clocks == {"node-b": 5 * 10**9, "node-c": 3 * 10**9}


def test_calls_that_contradict_each_other_along_a_ring_of_hosts_say_nothing():
    tell = Teller()
    root = tell.span("grpo.step", DRIVER, 0, 100)
    near = tell.span("train", POLICIES[0], 40, 50, root)
    tell.span("generate", GENERATION, 0, 100, root)
    tell.span("generate", GENERATION, 200, 210, near)
    assert step_of(tell.records).clocks == {}


def test_a_trace_of_more_wrong_clocks_than_there_are_machines_is_left_as_it_was_told():
    tell = Teller()
    root = tell.span("grpo.step", DRIVER, 0, 100)
    hosts = [replace(GENERATION, host=f"host-{number}") for number in range(20_000)]
    spans = [root, *(tell.span("generate", host, 110, 120, root) for host in hosts)]
    assert clocks_ahead(Tree(spans), root) == {}
    assert len(clocks_ahead(Tree(spans[:1000]), root)) == 999


def test_without_a_root_or_a_host_s_name_nothing_is_said():
    tell = Teller()
    tell.span("generate", GENERATION, 5, 6, "0" * 16)
    assert step_of(tell.records).clocks == {}
    tell = Teller()
    root = tell.span("grpo.step", DRIVER, 0, 1)
    tell.span("generate", replace(ROLLOUT, host=""), 5, 6, root)
    assert step_of(tell.records).clocks == {}


def test_it_is_told_on_the_terminal_and_on_the_page():
    step = step_of(skewed(grpo_step(), {"node-b": -(7 * 10**9), "node-c": 4 * 10**9}))
    assert step.clock_notes == [
        "the clock of host node-b is 6.98 s or more behind; what it told is shown later by that",
        "the clock of host node-c is 3.90 s or more ahead; what it told is shown earlier by that",
    ]
    console = Console(file=StringIO(), width=200)
    console.print(step_view(step))
    shown = console.file.getvalue()
    for note in step.clock_notes:
        assert f"clocks: {note}" in shown
        assert f"<li>{note}</li>" in page_of([step])
    assert min(span.start_ns for span in step.spans) == BEGIN
