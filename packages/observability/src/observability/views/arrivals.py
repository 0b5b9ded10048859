"""Correction of event times by their times of receipt, if the clocks of senders disagree.

The delay of an event is its time of receipt minus its own time. With a correct clock, it is some
seconds: processes export at intervals, and retry. A clock is wrong if its events are received long
before their own time, or with a much larger delay than events of other clocks.

If any clock is wrong, the times of all clocks are shifted. Clocks with similar delays form a group
and get the same shift. The shift equals the group's smallest delay, so the event with this delay
lands on its time of receipt. Events of one clock keep their order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

MAX_DELAY_NS = 30_000_000_000
"""Maximum difference between the smallest delays of correct clocks.

Export intervals and retries cause such differences.
"""

_MAX_AHEAD_NS = 5_000_000_000
"""Maximum time by which events of a correct clock may be received before their own time."""


def clock_shifts(times: Iterable[tuple[Hashable, int, int]]) -> dict[Hashable, int]:
    """Return the nanoseconds to add to the times of each clock so that they are comparable.

    Args:
        times: clock, time by that clock, and time of receipt (0 if unknown) of each event.

    Returns:
        Shift by clock; empty if all clocks agree.
    """
    delays: dict[Hashable, int] = {}
    for clock, time_ns, received_ns in times:
        if received_ns:
            delay = received_ns - time_ns
            delays[clock] = min(delay, delays.get(clock, delay))
    shifts: dict[Hashable, int] = {}
    group_delay: int | None = None  # the smallest delay of the current group
    for clock, delay in sorted(delays.items(), key=lambda item: item[1]):
        # A clock starts a new group if its delay is too large for the current group. So does the
        # first correct clock, if the clocks of the current group are ahead.
        is_first_correct = group_delay is not None and group_delay < -_MAX_AHEAD_NS <= delay
        if group_delay is None or is_first_correct or delay - group_delay > MAX_DELAY_NS:
            group_delay = delay
        shifts[clock] = group_delay
    if len(set(shifts.values())) < 2:
        return {}
    return shifts
