"""Ticks of a time axis are round, and their labels have one unit.

Imports internals: pages show few of the ranges that an axis can have.
"""

import pytest

from observability.views.quantities import ticks


@pytest.mark.parametrize(
    ("seconds", "labels"),
    [
        (5e-4, ["0 µs", "100 µs", "200 µs", "300 µs", "400 µs", "500 µs"]),
        (0.9, ["0 ms", "200 ms", "400 ms", "600 ms", "800 ms"]),
        (1.98, ["0 s", "0.5 s", "1.0 s", "1.5 s"]),
        (12.3, ["0 s", "5 s", "10 s"]),
        (100, ["0 s", "20 s", "40 s", "1 min", "1 min 20 s", "1 min 40 s"]),
        (620, ["0 s", "2 min", "4 min", "6 min", "8 min", "10 min"]),
        (5_400, ["0 s", "20 min", "40 min", "1 h", "1 h 20 min"]),
        (200_000, ["0 s", "12 h", "1 d", "1 d 12 h", "2 d"]),
    ],
)
def test_ticks_are_round_and_have_one_unit(seconds, labels):
    assert [label for _, label in ticks(seconds, 6)] == labels


@pytest.mark.parametrize("power", range(-7, 8))
@pytest.mark.parametrize("factor", [1, 1.9999999, 2, 3, 5, 6, 9.99])
def test_ticks_are_equidistant_and_within_the_maximum(power, factor):
    seconds = factor * 10.0**power
    times = [time_s for time_s, _ in ticks(seconds, 9)]
    assert 2 <= len(times) <= 10
    assert times[0] == 0
    assert times[-1] <= seconds * (1 + 1e-9) < times[-1] + times[1]
    assert times[-1] == pytest.approx(times[1] * (len(times) - 1))


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_an_invalid_duration_has_no_ticks(seconds):
    assert ticks(seconds, 9) == []
