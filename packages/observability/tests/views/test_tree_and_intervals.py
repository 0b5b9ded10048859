"""The parts below the views: trees of whatever arrived, sets of moments, readable text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from told_runs import DRIVER, HOSTILE, Teller, trees

from observability.views.intervals import clipped, length, union, without
from observability.views.printable import listed, printable
from observability.views.quantities import duration, percent, size
from observability.views.tree import Tree

stretches = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12)


def moments(intervals):
    return {at for start, end in intervals for at in range(start, end)}


@given(stretches, stretches)
def test_intervals_hold_the_moments_of_the_sets_that_they_stand_for(some, others):
    assert moments(union(some)) == moments(some)
    assert moments(without(some, others)) == moments(some) - moments(others)
    assert moments(clipped(some, (5, 20))) == moments(some) & set(range(5, 20))
    assert length(union(some)) == len(moments(some))
    joined = [place for interval in without(some, others) for place in interval]
    assert joined == sorted(set(joined))


@given(trees())
def test_a_tree_has_every_span_below_one_top(records):
    tree = Tree(records.spans)
    assert {span.span_id for span in tree.tops} == {records.spans and tree.roots[0].span_id}
    reached = [tree.roots[0]]
    for span in reached:
        reached += tree.children(span.span_id)
    assert sorted(span.span_id for span in reached) == sorted(
        span.span_id for span in records.spans
    )


def test_a_tree_cuts_rings_of_parents_at_their_earliest_span():
    tell = Teller()
    first = tell.span("first", DRIVER, 1, 2, f"{3:08x}{0:08x}")
    tell.span("second", DRIVER, 2, 3, first)
    tell.span("third", DRIVER, 3, 4, f"{2:08x}{0:08x}")
    tail = tell.span("tail", DRIVER, 0, 1, first)
    alone = tell.span("its own parent", DRIVER, 9, 9, f"{5:08x}{0:08x}")
    tree = Tree(tell.records.spans)
    assert [span.name for span in tree.circular] == ["first", "its own parent"]
    assert [span.name for span in tree.line(tail.span_id)] == ["tail", "first"]
    assert tree.line(alone.span_id) == [alone]
    assert {span.name for span in tree.children(first.span_id)} == {"second", "tail"}


def test_a_span_that_arrived_twice_counts_once():
    tell = Teller()
    span = tell.span("grpo.step", DRIVER, 0, 1)
    assert Tree([span, span]).spans == (span,)


@pytest.mark.parametrize("text", HOSTILE)
def test_printable_text_has_only_visible_characters(text):
    assert printable(text).isprintable()
    assert printable(text).encode("utf-8")
    assert printable(printable(text)) == printable(text)


def test_printable_text_shows_what_was_hidden():
    assert printable("a\x1b[31m\n\x00\u202eb") == "a\\x1b[31m\\n\\x00\\u202eb"
    assert printable("grüße 東京 [ok]") == "grüße 東京 [ok]"
    assert listed(["a", "b\n"], more=True) == "a, b\\n, …"


@given(st.text())
def test_printable_text_never_controls_a_terminal(text):
    assert all(character.isprintable() for character in printable(text))


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0, "0 s"),
        (1.5e-8, "15 ns"),
        (85e-6, "85.0 µs"),
        (0.99999, "1.00 s"),
        (0.12, "120 ms"),
        (12.34, "12.3 s"),
        (-0.5, "-500 ms"),
        (125, "2 min 5 s"),
    ],
)
def test_durations_have_three_digits_and_a_unit(seconds, told):
    assert duration(seconds) == told


def test_sizes_and_shares_are_told_in_units_of_people():
    assert [size(n) for n in (0, 999, 12_300, 4.5e9)] == ["0 B", "999 B", "12.3 kB", "4.50 GB"]
    assert (percent(1, 8), percent(1, 0)) == ("12.5 %", "-")
