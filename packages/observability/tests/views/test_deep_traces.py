"""Views of 10,000 nested spans, and of as many overlapping siblings, take linear time."""

import io
import time

import pytest
from made_up_runs import BEGIN, DRIVER, GENERATION, TraceMaker, step_of
from rich.console import Console

from observability.views import (
    bytes_by_stage,
    chrome_trace,
    critical_path,
    lineage_of,
    page_of,
    print_view,
    process_times,
    step_view,
    waste,
)

_SPANS = 10_000
_MAX_CPU_S = 3.0
"""Each view takes well below 1 s. In quadratic time, it would take 6 s or more."""


def _trace(*, is_chain):
    maker = TraceMaker()
    root = parent = maker.span("grpo.step", DRIVER, 0, 20)
    for number in range(_SPANS):
        start = 0 if is_chain else number * 1e-3
        span = maker.span(
            "send train",
            GENERATION if number % 2 else DRIVER,
            start,
            start + 10,
            parent if is_chain else root,
            "overhead",
            attributes={"messaging.operation.name": "put", "dataplane.bytes": 1},
        )
        maker.event("put", DRIVER, 10, ["a"] if number % 10 == 0 else ["b"], span)
        parent = span
    return maker.records


RECORDS = {shape: _trace(is_chain=shape == "chain") for shape in ("chain", "siblings")}


def _printed(step):
    console = Console(file=io.StringIO(), width=120)
    print_view(step_view(step), console)
    return console.file.getvalue()


@pytest.mark.parametrize("shape", RECORDS)
@pytest.mark.parametrize(
    "view",
    [
        bytes_by_stage,
        critical_path,
        process_times,
        waste,
        _printed,
        lambda step: page_of([step]),
        lambda step: chrome_trace([step]),
    ],
    ids=["bytes", "path", "times", "waste", "text", "page", "perfetto"],
)
def test_view_of_10000_spans_takes_linear_time(shape, view):
    step = step_of(RECORDS[shape])
    start_s = time.process_time()
    assert view(step)
    assert time.process_time() - start_s < _MAX_CPU_S


@pytest.mark.parametrize("shape", RECORDS)
def test_lineage_in_a_trace_of_10000_spans_takes_linear_time(shape):
    start_s = time.process_time()
    events = lineage_of("a", RECORDS[shape])
    assert len(events) == _SPANS // 10
    assert {event.stage for event in events} == {"send train"}
    assert events[0].time_ns == BEGIN + 10 * 10**9
    assert time.process_time() - start_s < _MAX_CPU_S


def test_deep_chain_has_the_figures_of_its_spans():
    step = step_of(RECORDS["chain"])
    assert [(stage.stage, stage.put) for stage in bytes_by_stage(step)] == [("send train", _SPANS)]
    assert critical_path(step)[0].span == step.spans[-1]
