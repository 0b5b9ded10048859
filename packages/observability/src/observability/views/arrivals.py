"""Order of events whose senders' clocks disagree, by the receiver's clock.

An event arrives some seconds after its time: processes export at intervals, and retry. A clock is
wrong if its events arrive before their time, or much later than those of other clocks. If any clock
is wrong, the times of all clocks are shifted: in each group of clocks that agree, the least delayed
event is placed at its time of arrival. Events of one clock keep their order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

MAX_DELAY_NS = 30_000_000_000
"""Maximum difference of delays between correct clocks: export intervals and retries."""

_MAX_AHEAD_NS = 5_000_000_000
"""Maximum time by which events of a correct clock may arrive before their time."""


def clock_shifts(times: Iterable[tuple[Hashable, int, int]]) -> dict[Hashable, int]:
    """Return the offset to add to the times of each clock so that they are comparable.

    Args:
        times: clock, time by that clock, and time of receipt (0 if unknown) of each event.

    Returns:
        Clock to nanoseconds. Clocks whose events arrive with similar delays agree and have the same
        offset.
    """
    delays: dict[Hashable, int] = {}
    for clock, time_ns, received_ns in times:
        if received_ns:
            delay = received_ns - time_ns
            delays[clock] = min(delay, delays.get(clock, delay))
    shifts: dict[Hashable, int] = {}
    base: int | None = None
    # Clocks with similar delays form a group, and all of them get its least delay. A new group
    # begins after clocks that are ahead, and where a delay is too large for the group.
    for clock, delay in sorted(delays.items(), key=lambda each: each[1]):
        is_ahead = base is not None and base < -_MAX_AHEAD_NS <= delay
        if base is None or is_ahead or delay - base > MAX_DELAY_NS:
            base = delay
        shifts[clock] = base
    if len(set(shifts.values())) < 2:
        return {}
    return shifts
