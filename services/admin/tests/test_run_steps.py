"""Ranges of a run's steps hold every step once, and name steps that there are."""

from hypothesis import given
from hypothesis import strategies as st

from dataplane_admin.answers.run_steps import run_steps
from dataplane_admin.store import StepRow

LENGTHS = st.lists(st.floats(0, 1e6), max_size=60)


class Held:
    """What `run_steps` asks of a store."""

    def __init__(self, lengths):
        self.rows = [
            StepRow(number, f"{number:032x}", number * 10**9, seconds, number % 7 == 3)
            for number, seconds in enumerate(lengths)
        ]

    def run_steps(self, run_id, limit):
        return self.rows[-limit:], len(self.rows) > limit


@given(LENGTHS, st.integers(1, 80))
def test_every_step_is_in_one_range_and_ranges_are_alike_in_size(lengths, wanted):
    [found, whole] = run_steps(Held(lengths), "run", wanted, 1)
    assert (whole.steps, len(whole.ranges)) == (found.steps, min(1, len(lengths)))
    assert len(found.ranges) == min(wanted, len(lengths))
    sizes = [one.steps for one in found.ranges]
    assert sum(sizes) == found.steps == len(lengths)
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert [one.first_step for one in found.ranges[1:]] == [
        one.last_step + 1 for one in found.ranges[:-1]
    ]
    assert sum(one.failed for one in found.ranges) == sum(
        number % 7 == 3 for number in range(len(lengths))
    )


@given(LENGTHS.filter(bool), st.integers(1, 80))
def test_the_typical_and_the_slowest_step_took_what_is_said(lengths, wanted):
    held = Held(lengths)
    took = {row.trace_id: row.seconds for row in held.rows}
    for one in run_steps(held, "run", wanted)[0].ranges:
        inside = lengths[one.first_step : one.last_step + 1]
        assert took[one.slowest] == one.most_s == max(inside)
        assert took[one.typical] == one.median_s
        assert sum(seconds < one.median_s for seconds in inside) <= len(inside) // 2
        assert sum(seconds > one.median_s for seconds in inside) <= len(inside) // 2
