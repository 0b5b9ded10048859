"""Lives of samples whose ids are reused: the first put starts a life, a clear ends it.

Lives are read backwards from the events of a partition, only as far as requested: the cost does not
depend on the age of the partition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from dataplane_admin.store.packed import unpack_keys
from dataplane_admin.store.tables import EventModel
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
    """Return the lives of samples, from the newest back to the one at a given time.

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
