"""What is kept of a sample, worked out from the times of its events in whatever order they come.

An id may be used again: a clear ends a life of the sample, the next put begins another one. What
counts is the newest life that a put has begun.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from dataplane_admin.store.batch import LifecycleEvent
from dataplane_admin.store.lives import read_lives
from dataplane_admin.store.work import Work


@dataclass(slots=True)
class SampleLife:
    """A row of the samples while events are applied to it.

    Attributes:
        key: of the row.
        place_id: its partition.
        weight_version: of the first put of its newest life; as ``put_ns``, 0 without any.
        put_ns: nanoseconds since 1970, as all times.
        live_ns: its latest put unless a clear by name came later; then 0.
        gone_ns: its latest clear by name, 0 without any.
        first_ns: its first event.
        last_ns: its last event.
        is_new: whether there is no row yet.
        torn: whether `mend` has to look up which put began the newest life.
    """

    key: int
    place_id: int
    weight_version: int | None
    put_ns: int
    live_ns: int
    gone_ns: int
    first_ns: int
    last_ns: int
    is_new: bool = False
    torn: bool = False

    def apply(self, event: LifecycleEvent, cleared_ns: int) -> None:
        """One more event that names it.

        Args:
            event: a put, a clear, or any other.
            cleared_ns: when the whole partition was cleared last, of what was committed before:
                `clear_whole` says what else came.
        """
        time_ns = event.time_ns
        if event.name == "put":
            self._put(event, max(self.gone_ns, cleared_ns))
        elif event.name == "cleared":
            self._clear(time_ns)
        self.first_ns = min(self.first_ns, time_ns)
        self.last_ns = max(self.last_ns, time_ns)

    def _put(self, event: LifecycleEvent, ended_ns: int) -> None:
        time_ns = event.time_ns
        if time_ns > self.gone_ns:
            self.live_ns = max(self.live_ns, time_ns)
        goes_on = self.put_ns > ended_ns
        if not self.put_ns or (time_ns > ended_ns and (not goes_on or time_ns < self.put_ns)):
            self.put_ns = time_ns
            self.weight_version = event.weight_version
        elif time_ns <= ended_ns and not goes_on:
            # Which of the ends before the last one came between is not in the row.
            self.torn = True

    def _clear(self, time_ns: int) -> None:
        # Without a put after it, it ends the newest life and does not part it.
        latest_put_ns = self.live_ns or self.gone_ns
        self.torn |= 0 < self.put_ns <= time_ns < latest_put_ns
        self.gone_ns = max(self.gone_ns, time_ns)
        if self.live_ns <= self.gone_ns:
            self.live_ns = 0

    def clear_whole(self, cleared_ns: int) -> None:
        """The whole partition was cleared up to then, and this was put again after a clear."""
        self.torn |= 0 < self.put_ns <= cleared_ns


def mend(work: Work, samples: Iterable[SampleLife]) -> None:
    """Look up, among the events that are stored, which put began the newest life."""
    torn: dict[int, dict[int, SampleLife]] = defaultdict(dict)
    for sample in samples:
        if sample.torn:
            torn[sample.place_id][sample.key] = sample
    for place_id, those in torn.items():
        wanted = {key: (sample.first_ns, sample.last_ns) for key, sample in those.items()}
        until_ns = max(last_ns for _, last_ns in wanted.values())
        lives = read_lives(work.connection, place_id, wanted, until_ns=until_ns)
        for key, sample in those.items():
            sample.torn = False
            if lives[key]:
                newest = lives[key][0]
                sample.put_ns, sample.weight_version = newest.began_ns, newest.weight_version
