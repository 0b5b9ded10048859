"""The critical path covers the step, and follows the spans that ended last."""

from itertools import pairwise

import pytest
from hypothesis import given
from made_up_runs import DRIVER, ROLLOUT, TraceMaker, ns, step_of, trees

from observability.views import critical_path


def segments(records):
    return [
        (segment.span.name, (segment.start_ns - ns(0)) / 1e9, (segment.end_ns - ns(0)) / 1e9)
        for segment in critical_path(step_of(records))
    ]


@given(trees())
def test_segments_tile_the_root_in_any_order_of_arrival(records):
    step = step_of(records)
    path = critical_path(step)
    assert sum(segment.end_ns - segment.start_ns for segment in path) == step.end_ns - step.start_ns
    if path:
        assert (path[0].start_ns, path[-1].end_ns) == (step.start_ns, step.end_ns)
    assert all(first.end_ns == second.start_ns for first, second in pairwise(path))
    for segment in path:
        ancestry = step.tree.ancestry(segment.span.span_id)
        assert ancestry[-1] is step.root
        for span in ancestry:
            assert span.start_ns <= segment.start_ns < segment.end_ns <= span.end_ns
    reversed_records = type(records)(spans=records.spans[::-1])
    assert segments(records) == segments(reversed_records)


@pytest.mark.parametrize(
    ("children", "path"),
    [
        (  # gaps between children belong to the parent
            [("a", 1, 4), ("b", 6, 9)],
            [("root", 0, 1), ("a", 1, 4), ("root", 4, 6), ("b", 6, 9), ("root", 9, 10)],
        ),
        ([("fast", 0, 6), ("slow", 0, 10)], [("slow", 0, 10)]),
        (  # a child still running when "last" starts is skipped
            [("early", 0, 3), ("overlapping", 2, 7), ("last", 5, 10)],
            [("early", 0, 3), ("root", 3, 5), ("last", 5, 10)],
        ),
        ([("before and after", -2, 12), ("wholly after", 11, 12)], [("before and after", 0, 10)]),
    ],
)
def test_path_follows_the_child_that_ended_last(children, path):
    maker = TraceMaker()
    root = maker.span("root", DRIVER, 0, 10)
    for name, start, end in children:
        maker.span(name, ROLLOUT, start, end, root)
    assert segments(maker.records) == path


def test_a_step_without_a_root_has_no_path():
    maker = TraceMaker()
    maker.span("refit", DRIVER, 0, 1, "f" * 16)
    assert critical_path(step_of(maker.records)) == []
