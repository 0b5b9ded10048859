"""The benchmark of crashes: what it counts as lost."""

from __future__ import annotations

from integration.benchmarks.crash import Loss, losses, rollouts_of


def events(*rollouts):
    """Return the events of rollouts: position, begin and end, None for one that was killed."""
    for number, (position, begin, end) in enumerate(rollouts):
        facts = {"id": str(number), "positions": [position]}
        yield {"event": "begin", "time": begin, **facts}
        if end is not None:
            yield {"event": "end", "time": end, **facts}


def test_lost_rollout_counts_for_the_next_crash():
    rollouts = rollouts_of(
        events(
            (1, 0.0, 2.0),  # finished, and generated again after the second crash
            (2, 5.0, None),  # killed, and generated again
            (3, 8.0, None),  # killed, and not reached before the run ended
            (2, 11.0, None),  # killed again
            (1, 21.0, 22.0),
            (2, 23.0, 26.0),
            (4, 25.0, None),  # in progress when the run ended
        )
    )
    assert losses(rollouts, [10.0, 20.0]) == [Loss(1, 2.0, 2, 7.0), Loss(0, 0.0, 1, 9.0)]


def test_a_run_that_repeats_no_rollout_loses_nothing():
    rollouts = rollouts_of(events((1, 0.0, 2.0), (2, 1.0, 3.0), (3, 11.0, 12.0)))
    assert losses(rollouts, [10.0]) == [Loss(0, 0.0, 0, 0.0)]


def test_recorded_part_of_an_interrupted_rollout_is_not_lost():
    recorded = [{"event": "recorded", "time": time, "positions": [1]} for time in (3.0, 8.5, 11.5)]
    rollouts = rollouts_of([*events((1, 0.0, None), (2, 9.5, None), (1, 11.0, 12.0)), *recorded])
    assert losses(rollouts, [10.0]) == [Loss(0, 0.0, 2, 2.0)]
