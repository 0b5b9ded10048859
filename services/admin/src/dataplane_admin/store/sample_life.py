"""What is kept of a sample, worked out from the times of its events in whatever order they come.

An id may be used again: a clear ends a life of the sample, the next put begins another one. What
counts is the newest life that a put has begun.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import select

from dataplane_admin.store.batch import LifecycleEvent
from dataplane_admin.store.models import EventModel, EventSampleModel
from dataplane_admin.store.work import Work, in_groups


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
        """One more event; ``cleared_ns`` is when the whole partition was cleared last."""
        time_ns = event.time_ns
        if event.name == "put":
            self._put(event, max(self.gone_ns, cleared_ns))
        elif event.name == "cleared":
            # Without a put between, both are of one life.
            self.torn |= 0 < self.put_ns <= time_ns < self.last_ns
            self.gone_ns = max(self.gone_ns, time_ns)
            if self.live_ns <= self.gone_ns:
                self.live_ns = 0
        self.first_ns = min(self.first_ns, time_ns)
        self.last_ns = max(self.last_ns, time_ns)

    def _put(self, event: LifecycleEvent, ended_ns: int) -> None:
        time_ns = event.time_ns
        if time_ns > self.gone_ns:
            self.live_ns = max(self.live_ns, time_ns)
        of_last_life = self.put_ns <= ended_ns
        if not self.put_ns or (time_ns > ended_ns and (of_last_life or time_ns < self.put_ns)):
            self.put_ns = time_ns
            self.weight_version = event.weight_version
        elif time_ns <= ended_ns and of_last_life:
            self.torn = True

    def clear_whole(self, cleared_ns: int) -> None:
        """The whole partition was cleared, and perhaps it was put again by then."""
        self.torn |= 0 < self.put_ns <= cleared_ns < self.live_ns


def mend(work: Work, samples: Iterable[SampleLife]) -> None:
    """Look up, among the events that are stored, which put began the newest life."""
    torn = {sample.key: sample for sample in samples if sample.torn}
    if not torn:
        return
    puts: dict[int, list[tuple[int, int | None]]] = {}
    clears: dict[int, list[int]] = {}
    named = (
        select(
            EventSampleModel.sample_key,
            EventModel.name,
            EventModel.time_ns,
            EventModel.weight_version,
        )
        .join(EventModel, EventModel.id == EventSampleModel.event_id)
        .where(EventModel.name.in_(("put", "cleared")))
        .order_by(EventModel.id)
    )
    for some in in_groups(torn):
        for row in work.connection.execute(named.where(EventSampleModel.sample_key.in_(some))):
            if row.name == "put":
                puts.setdefault(row.sample_key, []).append((row.time_ns, row.weight_version))
            else:
                clears.setdefault(row.sample_key, []).append(row.time_ns)
    wholes: dict[int, list[int]] = {}
    for place_ids in in_groups({sample.place_id for sample in torn.values()}):
        whole = select(EventModel.place_id, EventModel.time_ns).where(
            EventModel.place_id.in_(place_ids),
            EventModel.name == "cleared",
            EventModel.keys == b"",
        )
        for place_id, time_ns in work.connection.execute(whole):
            wholes.setdefault(place_id, []).append(time_ns)
    for key, sample in torn.items():
        sample.torn = False
        told = puts.get(key)
        if told:
            newest_ns = max(time_ns for time_ns, _ in told)
            ends = [*clears.get(key, ()), *wholes.get(sample.place_id, ())]
            ended_ns = max((one for one in ends if one < newest_ns), default=-1)
            sample.put_ns, sample.weight_version = min(
                (one for one in told if one[0] > ended_ns), key=lambda one: one[0]
            )
