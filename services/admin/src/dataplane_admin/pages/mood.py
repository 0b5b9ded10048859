"""The headline of the first page: does it move.

In every step somebody waits for somebody, so how long is too long depends on how long the steps of
a run take.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dataplane_admin.answers import Answers, models
from dataplane_admin.pages import words

_STEPS = 10
_RUNS = 5
_LATE = 3
"""Times the longest of the last steps: a run that ended none for longer, or in which something
waits for longer, does not move; but in no less than `_PATIENCE_S`."""
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class Pace:
    """How the last steps of a run followed each other.

    Attributes:
        newest: that ended last, or told something last if none has ended; None without any.
        usual_s: seconds up to which nothing is late.
        since_s: seconds since the end of the newest one; 0 without any.
    """

    newest: models.TraceFacts | None
    usual_s: float
    since_s: float

    @property
    def moves(self) -> bool:
        """Whether a step has ended not long ago."""
        return self.since_s <= self.usual_s


def paces(
    answers: Answers, runs: Iterable[str], now_ns: int, stuck_after_s: float
) -> dict[str, Pace]:
    """Of each run.

    Args:
        answers: asked for the runs' steps.
        runs: their ids, empty for what tells none.
        now_ns: nanoseconds since 1970.
        stuck_after_s: nothing is late sooner, however short the steps are.
    """
    least_s = max(_PATIENCE_S, stuck_after_s)
    found = {}
    for run in dict.fromkeys(runs):
        # Beside its steps a run may tell short traces of single calls; one without steps does so
        # only.
        steps = answers.steps(run, limit=_STEPS) or answers.traces(run=run, limit=_STEPS).traces
        # How long one takes that goes on is not known.
        ended = [one for one in steps if one.has_root] or steps
        # By the clock of this service: those of senders may be a day ahead.
        newest = max(ended, key=lambda one: one.received_ns, default=None)
        longest_s = max((one.seconds for one in ended), default=0.0)
        since_s = 0.0 if newest is None else (now_ns - newest.received_ns) / 1e9
        found[run] = Pace(newest, max(least_s, _LATE * longest_s), since_s)
    return found


def runs_to_judge(
    answers: Answers,
    run: str | None,
    waits: Sequence[models.Wait],
    facts: Sequence[models.TraceFacts],
) -> list[str]:
    """Of which runs `paces` is needed: those that are shown, and the newest ones."""
    told = [one.run_id for one in waits if one.kind == "wait"]
    if run is not None:
        return [run, *told]
    newest = [one.run_id for one in answers.runs().runs[:_RUNS]]
    return [*told, *(one.run_id for one in facts), *newest]


def newest_pace(paces: Mapping[str, Pace]) -> Pace | None:
    """Of the run that moves in which a step ended last, or of any if none moves; None without
    steps."""
    told = [one for one in paces.values() if one.newest]
    # A run of quick steps that is over may have ended one after a run of slow steps that moves.
    moving = [one for one in told if one.moves]
    return min(moving or told, key=lambda one: one.since_s, default=None)


def headline(
    status: models.Status,
    waits: Sequence[models.Wait],
    silent: Sequence[models.Wait],
    partitions: Sequence[models.Partition],
    paces: Mapping[str, Pace],
) -> tuple[str, str]:
    """The mood, see `Overview`, and the sentence.

    Args:
        status: of the service.
        waits: of what goes on.
        silent: waits of processes that are not heard of any more.
        partitions: of the data plane.
        paces: of the runs of `runs_to_judge`.
    """
    newest = newest_pace(paces)
    if waits:
        longest = words.ago(max(wait.seconds for wait in waits))
        things = "One thing waits" if len(waits) == 1 else f"{len(waits)} things wait, the longest"
        if any(_is_late(one, paces) for one in waits):
            return "stuck", f"{things} for {longest}"
        if newest is None or not newest.moves:
            return "moving", f"{things} for {longest}"
    if newest is not None and newest.newest is not None:
        step = newest.newest
        what = f"Step {step.step}" if step.step is not None else "The newest trace"
        if not newest.moves:
            waits_not = "What waited is not heard of any more" if silent else "Nothing waits"
            return "quiet", f"{waits_not}; {what.lower()} ended {words.ago(newest.since_s)} ago"
        return "moving", f"Moving: {what.lower()} took {words.duration(step.seconds)}"
    if silent:
        return "quiet", "What waited is not heard of any more"
    if partitions:
        return "moving", "Nothing waits"
    if status.live.attached:
        return "quiet", "The data plane is empty and nothing waits"
    return "empty", "Nothing has arrived yet"


def _is_late(wait: models.Wait, paces: Mapping[str, Pace]) -> bool:
    """Whether it waits for longer than steps of its run take, or no step ended for as long."""
    if wait.kind == "wait":
        pace = paces[wait.run_id]
        return wait.seconds > pace.usual_s or not pace.moves
    # The data plane tells no run: it is that of any that moves.
    moving = [one.usual_s for one in paces.values() if one.moves]
    return wait.seconds > max(moving, default=0.0)
