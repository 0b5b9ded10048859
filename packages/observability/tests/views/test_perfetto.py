"""The Chrome trace nests, names its processes, and draws arrows along the data."""

import json
from collections import defaultdict

import pytest
from hypothesis import given
from told_runs import BEGIN, DRIVER, HOSTILE, POLICIES, ROLLOUT, Teller, grpo_step, run_of, trees

from observability.views import chrome_trace, steps_of, write_perfetto


def entries(records, phase):
    return [
        entry for entry in chrome_trace(steps_of(records))["traceEvents"] if entry["ph"] == phase
    ]


def by_thread(slices):
    threads = defaultdict(list)
    for one in slices:
        begin = round(one["ts"] * 1000)
        threads[one["pid"], one["tid"]].append((begin, begin + round(one["dur"] * 1000)))
    return threads


def assert_nested(slices):
    for stretches in by_thread(slices).values():
        ends = []
        for begin, end in sorted(stretches, key=lambda one: (one[0], -one[1])):
            while ends and ends[-1] <= begin:
                ends.pop()
            assert not ends or end <= ends[-1]
            ends.append(end)


@given(trees())
def test_slices_of_a_thread_nest(records):
    slices = entries(records, "X")
    assert len(slices) == len(records.spans)
    assert_nested(slices)


def test_slices_of_steps_that_overlap_nest_too():
    records = grpo_step(0, at=0)
    records.add(grpo_step(1, at=4))
    assert_nested(entries(records, "X"))


def test_steps_after_each_other_share_their_threads():
    slices = entries(run_of(3), "X")
    assert {one["tid"] for one in slices} == {0}


def test_spans_that_overlap_without_nesting_are_on_two_threads():
    tell = Teller()
    root = tell.span("grpo.step", DRIVER, 0, 10)
    tell.span("one", ROLLOUT, 0, 5, root)
    tell.span("two", ROLLOUT, 3, 8, root)
    tids = {one["name"]: one["tid"] for one in entries(tell.records, "X")}
    assert (tids["one"], tids["two"]) == (0, 1)
    threads = [one["args"]["name"] for one in entries(tell.records, "M") if one["tid"]]
    assert threads == ["spans that overlap, 1"]


def test_processes_have_their_names_and_the_driver_comes_first():
    named = {
        one["pid"]: one["args"]["name"]
        for one in entries(grpo_step(), "M")
        if one["name"] == "process_name"
    }
    assert named[1] == "grpo.driver"
    assert set(named.values()) == {
        *("grpo.driver", "grpo.environment", "grpo.generation"),
        *("grpo.policy 0", "grpo.policy 1", "grpo.rollout"),
    }


def test_times_are_microseconds_from_the_first_span_on_and_keep_their_nanoseconds():
    tell = Teller()
    root = tell.span("grpo.step", DRIVER, 0, 10)
    tell.span("refit", DRIVER, 1.000000001, 2.000000003, root)
    trace = chrome_trace(steps_of(tell.records))
    assert trace["otherData"] == {"begin_ns": str(BEGIN)}
    refit = next(one for one in trace["traceEvents"] if one["name"] == "refit")
    assert (refit["ts"], refit["dur"]) == (1_000_000.001, 1_000_000.002)


def arrows(records, kind):
    """Pairs of slice names that arrows of a kind join."""
    slices = entries(records, "X")

    def at(entry):
        found = [
            one["name"]
            for one in slices
            if (one["pid"], one["tid"], one["ts"]) == (entry["pid"], entry["tid"], entry["ts"])
        ]
        return found[0]

    begins = {one["id"]: at(one) for one in entries(records, "s") if one["cat"] == kind}
    ends = {one["id"]: at(one) for one in entries(records, "f") if one["cat"] == kind}
    assert begins.keys() == ends.keys()
    assert all(one["bp"] == "e" for one in entries(records, "f"))
    return [(begins[number], ends[number]) for number in begins]


def test_arrows_go_from_puts_to_what_read_them():
    found = arrows(grpo_step(policies=2), "data")
    assert set(found) == {("send train", "get train")}
    assert len(found) == 2 * 1 + 2 * 4


def test_arrows_go_from_parents_to_children_in_other_processes():
    found = arrows(grpo_step(policies=2), "call")
    assert found.count(("train", "train")) == 2
    assert ("refit", "install_weights") in found
    assert ("turn", "flatten") not in found
    assert ("grpo.step", "rollout") not in found


def test_a_link_to_a_span_that_did_not_arrive_is_no_arrow():
    records = grpo_step()
    records.spans = [span for span in records.spans if span.name != "send train"]
    assert arrows(records, "data") == []


def test_attributes_are_told_with_the_slice():
    told = next(one for one in entries(grpo_step(), "X") if one["name"] == "get train")["args"]
    assert told["dataplane.bytes"] == 8_000
    assert told["dataplane.fields"] == ["input_ids"]
    assert len(told["span_id"]) == 16


@pytest.mark.parametrize("hostile", HOSTILE)
def test_the_file_is_json_whatever_the_names_and_values(hostile, tmp_path):
    tell = Teller()
    odd = {
        hostile: hostile,
        "nan": float("nan"),
        "bytes": b"\xff\x00",
        "deep": {"a": [1, None, True, {hostile: 0.5}]},
    }
    tell.span(hostile, POLICIES[0], 0, 1, attributes=odd, outcome="error", message=hostile)
    write_perfetto(steps_of(tell.records), tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text("ascii"))
    (found,) = [one for one in trace["traceEvents"] if one["ph"] == "X"]
    assert found["name"].isprintable()
    assert (found["args"]["nan"], found["args"]["bytes"]) == ("nan", "ff00")


def test_no_steps_are_an_empty_trace():
    assert chrome_trace([])["traceEvents"] == []
