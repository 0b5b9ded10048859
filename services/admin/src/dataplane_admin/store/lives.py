"""Lives of samples whose ids are reused: the first put starts a life, a clear ends it.

The stored state of a sample is that of its newest life, whatever the order of arrival of its
events. Earlier lives are read backwards from the events of a partition, only as far as requested:
the cost does not depend on the age of the partition.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from dataplane_admin.store.batch import LifecycleEvent
from dataplane_admin.store.packed import unpack_keys
from dataplane_admin.store.tables import EventModel
from dataplane_admin.store.work import Work
from observability.views.steps import generation_version

EVENT_NAME = func.coalesce(EventModel.name, "")
"""Name column for queries by time and name. With the bare column, a database would use the index by
name and read events of all times."""


@dataclass(frozen=True, slots=True)
class Life:
    """One life of a sample.

    Attributes:
        began_ns: time of its first put, in nanoseconds since 1970.
        weight_version: version of the weights that generated the sample; None if unknown.
    """

    began_ns: int
    weight_version: int | None


def read_lives(
    connection: Connection, place_id: int, wanted: Mapping[int, tuple[int, int]], *, until_ns: int
) -> dict[int, list[Life]]:
    """Return the lives of samples, from the newest back to the life at a given time.

    Args:
        place_id: the samples' partition, a `PlaceModel`.
        wanted: by sample key, the time of its first event and the time to read back to, in
            nanoseconds since 1970.
        until_ns: time after which events are ignored.

    Returns:
        Sample key to lives, newest first; all lives if none began by the given time.
    """
    lives: dict[int, list[Life]] = {key: [] for key in wanted}
    if not wanted:
        return lives
    remaining = {key: moment for key, (_, moment) in wanted.items()}
    begun: dict[int, Life] = {}
    first_ns = min(first for first, _ in wanted.values())
    events = (
        select(EventModel.name, EventModel.time_ns, EventModel.weight_version, EventModel.keys)
        .where(
            EventModel.place_id == place_id,
            EventModel.time_ns.between(first_ns, until_ns),
            EVENT_NAME.in_(("put", "cleared")),
        )
        # A clear ends a put of the same time, so in reverse order it comes first.
        .order_by(EventModel.time_ns.desc(), EventModel.name, EventModel.id.desc())
        .execution_options(yield_per=100)
    )
    with connection.execute(events) as rows:
        for row in rows:
            if row.name == "put":
                for key in unpack_keys(row.keys):
                    if key in remaining:
                        later = begun[key].weight_version if key in begun else None
                        version = generation_version(row.weight_version, later)
                        begun[key] = Life(row.time_ns, version)
                continue
            # Without ids, the entire partition was cleared.
            for key in unpack_keys(row.keys) if row.keys else list(begun):
                ended = begun.pop(key, None)
                if ended is not None:
                    lives[key].append(ended)
                    if ended.began_ns <= remaining[key]:
                        del remaining[key]
            if not remaining:
                break
    for key, life in begun.items():
        lives[key].append(life)
    return lives


def life_at(lives: Sequence[Life], time_ns: int) -> Life | None:
    """Return the newest life that began by a time, from lives newest first; None if none did."""
    return next((life for life in lives if life.began_ns <= time_ns), None)


@dataclass(slots=True)
class SampleLife:
    """A sample's row while events are applied to it. Times are nanoseconds since 1970.

    Attributes:
        weight_version: version of the weights that generated its newest life; None if unknown.
        put_ns: time of the first put of that life, 0 without any.
        live_ns: time of its latest put, 0 if a clear by id came later.
        gone_ns: time of its latest clear by id, 0 without any.
        is_new: whether it has no row yet.
        needs_lookup: whether `look_up_lives` must look up which put began the newest life.
    """

    key: int
    place_id: int
    stem_id: int
    weight_version: int | None
    put_ns: int
    live_ns: int
    gone_ns: int
    first_ns: int
    last_ns: int
    is_new: bool = False
    needs_lookup: bool = False

    def apply(self, event: LifecycleEvent, cleared_ns: int) -> None:
        """Apply an event of the sample.

        Args:
            event: a put, a clear, or any other event.
            cleared_ns: last committed clear of the entire partition; `clear_partition` applies
                clears that are not committed yet.
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
        continues = self.put_ns > ended_ns
        if time_ns > ended_ns and continues:
            self.put_ns = min(self.put_ns, time_ns)
            self.weight_version = generation_version(self.weight_version, event.weight_version)
        elif time_ns > ended_ns or not self.put_ns:
            self.put_ns = time_ns
            self.weight_version = event.weight_version
        elif not continues:
            # An earlier clear may be between the two puts; the row has only the last clear.
            self.needs_lookup = True

    def _clear(self, time_ns: int) -> None:
        # Without a later put, the clear ends the newest life and does not split it.
        latest_put_ns = self.live_ns or self.gone_ns
        self.needs_lookup |= 0 < self.put_ns <= time_ns < latest_put_ns
        self.gone_ns = max(self.gone_ns, time_ns)
        if self.live_ns <= self.gone_ns:
            self.live_ns = 0

    def clear_partition(self, cleared_ns: int) -> None:
        """Apply new clears of the entire partition, the last at ``cleared_ns``, to a sample."""
        self.needs_lookup |= 0 < self.put_ns <= cleared_ns


def look_up_lives(work: Work, samples: Iterable[SampleLife]) -> None:
    """Look up the put that began the newest life of each ambiguous sample in the stored events."""
    ambiguous: dict[int, dict[int, SampleLife]] = defaultdict(dict)
    for sample in samples:
        if sample.needs_lookup:
            ambiguous[sample.place_id][sample.key] = sample
    for place_id, samples_of_place in ambiguous.items():
        wanted = {
            key: (sample.first_ns, sample.last_ns) for key, sample in samples_of_place.items()
        }
        until_ns = max(last_ns for _, last_ns in wanted.values())
        lives = read_lives(work.connection, place_id, wanted, until_ns=until_ns)
        for key, sample in samples_of_place.items():
            sample.needs_lookup = False
            if lives[key]:
                newest = lives[key][0]
                sample.put_ns, sample.weight_version = newest.began_ns, newest.weight_version
