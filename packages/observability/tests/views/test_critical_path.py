"""The critical path fills the time of the step, and follows what ended last."""

from itertools import pairwise

from hypothesis import given
from told_runs import DRIVER, POLICIES, ROLLOUT, Teller, grpo_step, ns, trees

from observability.views import critical_path, steps_of
from observability.views.figures import condensed


def path_of(records):
    (step,) = steps_of(records)
    return critical_path(step)


def told(records):
    return [
        (one.span.name, (one.start_ns - ns(0)) / 1e9, (one.end_ns - ns(0)) / 1e9)
        for one in path_of(records)
    ]


@given(trees())
def test_segments_tile_the_root_without_gap_or_overlap(records):
    (step,) = steps_of(records)
    path = critical_path(step)
    assert sum(one.end_ns - one.start_ns for one in path) == step.end_ns - step.start_ns
    assert all(one.start_ns < one.end_ns for one in path)
    if path:
        assert (path[0].start_ns, path[-1].end_ns) == (step.start_ns, step.end_ns)
    assert all(one.end_ns == two.start_ns for one, two in pairwise(path))


@given(trees())
def test_segments_lie_within_their_span_and_all_above_it(records):
    (step,) = steps_of(records)
    for one in critical_path(step):
        line = step.tree.line(one.span.span_id)
        assert line[-1] is step.root
        assert all(above.start_ns <= one.start_ns < one.end_ns <= above.end_ns for above in line)


@given(trees())
def test_the_path_does_not_depend_on_the_order_of_arrival(records):
    backwards = type(records)(spans=records.spans[::-1])
    assert [(one.start_ns, one.end_ns) for one in path_of(records)] == [
        (one.start_ns, one.end_ns) for one in path_of(backwards)
    ]


def test_of_twins_the_path_takes_the_same_whatever_order_they_came_in():
    tell = Teller()
    root = tell.span("root", DRIVER, 0, 2)
    tell.span("twin", ROLLOUT, 0, 2, root)
    parted = tell.span("twin", ROLLOUT, 0, 2, root)
    tell.span("part", ROLLOUT, 1, 2, parted)
    backwards = type(tell.records)(spans=tell.records.spans[::-1])
    assert told(tell.records) == told(backwards)


def test_gaps_between_children_belong_to_the_parent():
    tell = Teller()
    root = tell.span("root", DRIVER, 0, 10)
    tell.span("a", ROLLOUT, 1, 4, root)
    tell.span("b", ROLLOUT, 6, 9, root)
    assert told(tell.records) == [
        ("root", 0, 1),
        ("a", 1, 4),
        ("root", 4, 6),
        ("b", 6, 9),
        ("root", 9, 10),
    ]


def test_of_parallel_children_the_last_to_end_is_followed():
    tell = Teller()
    root = tell.span("root", DRIVER, 0, 10)
    tell.span("fast", POLICIES[0], 0, 6, root)
    slow = tell.span("slow", POLICIES[1], 0, 10, root)
    tell.span("forward", POLICIES[1], 2, 9, slow)
    assert told(tell.records) == [("slow", 0, 2), ("forward", 2, 9), ("slow", 9, 10)]


def test_a_child_still_running_at_that_moment_is_passed_over():
    tell = Teller()
    root = tell.span("root", DRIVER, 0, 10)
    tell.span("early", ROLLOUT, 0, 3, root)
    tell.span("overlapping", ROLLOUT, 2, 7, root)
    tell.span("last", ROLLOUT, 5, 10, root)
    assert told(tell.records) == [("early", 0, 3), ("root", 3, 5), ("last", 5, 10)]


def test_clocks_that_disagree_are_cut_to_the_parent():
    tell = Teller()
    root = tell.span("root", DRIVER, 0, 10)
    tell.span("before and after", ROLLOUT, -2, 12, root)
    tell.span("wholly after", ROLLOUT, 11, 12, root)
    assert told(tell.records) == [("before and after", 0, 10)]


def test_a_step_without_a_root_has_no_path():
    tell = Teller()
    tell.span("refit", DRIVER, 0, 1, "f" * 16)
    assert path_of(tell.records) == []


def test_the_path_of_a_whole_step_goes_through_what_held_it_up():
    names = {segment.span.name for segment in path_of(grpo_step())}
    assert {"publish_weights", "generate", "step", "forward", "optimizer_step"} <= names


def test_a_deep_tree_is_walked():
    tell = Teller()
    span = tell.span("root", DRIVER, 0, 10)
    for _ in range(3_000):
        span = tell.span("deeper", DRIVER, 0, 10, span)
    assert [one.span for one in path_of(tell.records)] == [span]


def test_a_condensed_path_keeps_the_longest_segments_and_loses_none():
    path = path_of(grpo_step())
    shown, rest = condensed(path, 5)
    assert len(shown) == 5
    assert {id(one.span) for one in shown + rest} == {id(one.span) for one in path}
    assert min(one.seconds for one in shown) >= max(one.seconds for one in rest)
    assert [one.start_ns for one in shown] == sorted(one.start_ns for one in shown)
