"""The Chrome trace nests slices, names processes and draws arrows from puts to reads."""

import json
from collections import defaultdict

import pytest
from hypothesis import given
from made_up_runs import (
    BEGIN,
    DRIVER,
    HOSTILE,
    POLICIES,
    ROLLOUT,
    TraceMaker,
    grpo_step,
    run_of,
    trees,
)

from observability.views import chrome_trace, steps_of, write_perfetto


def entries(records, phase):
    return [
        entry for entry in chrome_trace(steps_of(records))["traceEvents"] if entry["ph"] == phase
    ]


def by_thread(slices):
    threads = defaultdict(list)
    for entry in slices:
        begin = round(entry["ts"] * 1000)
        threads[entry["pid"], entry["tid"]].append((begin, begin + round(entry["dur"] * 1000)))
    return threads


def assert_nested(slices):
    for intervals in by_thread(slices).values():
        ends = []
        for begin, end in sorted(intervals, key=lambda item: (item[0], -item[1])):
            while ends and ends[-1] <= begin:
                ends.pop()
            assert not ends or end <= ends[-1]
            ends.append(end)


@given(trees())
def test_slices_of_a_thread_nest(records):
    slices = entries(records, "X")
    assert len(slices) == len(records.spans)
    assert_nested(slices)


def test_slices_of_overlapping_steps_nest():
    records = grpo_step(0, at=0)
    records.add(grpo_step(1, at=4))
    assert_nested(entries(records, "X"))


def test_consecutive_steps_share_threads():
    slices = entries(run_of(3), "X")
    assert {entry["tid"] for entry in slices} == {0}


def test_spans_that_overlap_without_nesting_are_on_two_threads():
    maker = TraceMaker()
    root = maker.span("grpo.step", DRIVER, 0, 10)
    maker.span("one", ROLLOUT, 0, 5, root)
    maker.span("two", ROLLOUT, 3, 8, root)
    tids = {record["name"]: record["tid"] for record in entries(maker.records, "X")}
    assert (tids["one"], tids["two"]) == (0, 1)
    threads = [record["args"]["name"] for record in entries(maker.records, "M") if record["tid"]]
    assert threads == ["overlapping spans 1"]


def test_processes_have_their_names_and_the_driver_comes_first():
    process_names = {
        entry["pid"]: entry["args"]["name"]
        for entry in entries(grpo_step(), "M")
        if entry["name"] == "process_name"
    }
    assert process_names[1] == "grpo.driver"
    assert set(process_names.values()) == {
        *("grpo.driver", "grpo.environment", "grpo.generation"),
        *("grpo.policy 0", "grpo.policy 1", "grpo.rollout"),
    }


def test_times_are_microseconds_since_the_first_span():
    maker = TraceMaker()
    root = maker.span("grpo.step", DRIVER, 0, 10)
    maker.span("refit", DRIVER, 1.000000001, 2.000000003, root)
    trace = chrome_trace(steps_of(maker.records))
    assert trace["otherData"] == {"begin_ns": str(BEGIN)}
    refit = next(item for item in trace["traceEvents"] if item["name"] == "refit")
    assert (refit["ts"], refit["dur"]) == (1_000_000.001, 1_000_000.002)


def arrows(records, kind):
    """Return the names of the two slices that each arrow of a kind connects."""
    slices = entries(records, "X")

    def slice_name_at(arrow):
        position = (arrow["pid"], arrow["tid"], arrow["ts"])
        return next(
            entry["name"]
            for entry in slices
            if (entry["pid"], entry["tid"], entry["ts"]) == position
        )

    begins, ends = (
        {
            record["id"]: slice_name_at(record)
            for record in entries(records, phase)
            if record["cat"] == kind
        }
        for phase in "sf"
    )
    assert begins.keys() == ends.keys()
    assert all(record["bp"] == "e" for record in entries(records, "f"))
    return [(begins[arrow_id], ends[arrow_id]) for arrow_id in begins]


def test_arrows_go_from_puts_to_reads():
    result = arrows(grpo_step(policies=2), "data")
    assert set(result) == {("send train", "get train")}
    assert len(result) == 2 * 1 + 2 * 4


def test_arrows_go_from_parents_to_children_in_other_processes():
    result = arrows(grpo_step(policies=2), "call")
    assert result.count(("train", "train")) == 2
    assert ("refit", "install_weights") in result
    assert ("turn", "flatten") not in result
    assert ("grpo.step", "rollout") not in result


def test_a_link_to_a_missing_span_has_no_arrow():
    records = grpo_step()
    records.spans = [span for span in records.spans if span.name != "send train"]
    assert arrows(records, "data") == []


def test_a_slice_has_its_attributes():
    attributes = next(entry for entry in entries(grpo_step(), "X") if entry["name"] == "get train")[
        "args"
    ]
    assert attributes["dataplane.bytes"] == 8_000
    assert attributes["dataplane.fields"] == ["input_ids"]
    assert len(attributes["span_id"]) == 16


@pytest.mark.parametrize("hostile", HOSTILE)
def test_the_file_is_json_for_any_name_or_value(hostile, tmp_path):
    maker = TraceMaker()
    attributes = {
        hostile: hostile,
        "nan": float("nan"),
        "bytes": b"\xff\x00",
        "deep": {"a": [1, None, True, {hostile: 0.5}]},
    }
    maker.span(hostile, POLICIES[0], 0, 1, attributes=attributes, outcome="error", message=hostile)
    write_perfetto(steps_of(maker.records), tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text("ascii"))
    (result,) = [item for item in trace["traceEvents"] if item["ph"] == "X"]
    assert result["name"].isprintable()
    assert (result["args"]["nan"], result["args"]["bytes"]) == ("nan", "ff00")


def test_no_steps_give_an_empty_trace():
    assert chrome_trace([])["traceEvents"] == []
