"""Lives of samples whose ids are used again: a put begins one unless one goes on, a clear ends it.

They are read from the events of a place backwards, no further than to the lives that are asked for:
how long the place has been in use does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from dataplane_admin.store.models import EventModel
from dataplane_admin.store.packed import unpack_keys

EVENT_NAME = func.coalesce(EventModel.name, "")
"""To choose events of some time by name as well: by the bare column a database would read all of
these names instead, of whatever time."""


@dataclass(frozen=True, slots=True)
class Life:
    """When the first put of a life was, in nanoseconds since 1970, and the version it told."""

    began_ns: int
    weight_version: int | None


def read_lives(
    connection: Connection, place_id: int, wanted: Mapping[int, tuple[int, int]], *, until_ns: int
) -> dict[int, list[Life]]:
    """The lives of samples from their newest one back to one that went on at a moment.

    Args:
        connection: to read by.
        place_id: of the samples.
        wanted: sample key to when its first event was and the moment, in nanoseconds since 1970.
        until_ns: events after this are not looked at.

    Returns:
        Sample key to lives, the newest first. If none began by the moment they are all there are.
    """
    lives: dict[int, list[Life]] = {key: [] for key in wanted}
    if not wanted:
        return lives
    left = {key: moment for key, (_, moment) in wanted.items()}
    begun: dict[int, Life] = {}
    first_ns = min(first for first, _ in wanted.values())
    told = (
        select(EventModel.name, EventModel.time_ns, EventModel.weight_version, EventModel.keys)
        .where(
            EventModel.place_id == place_id,
            EventModel.time_ns.between(first_ns, until_ns),
            EVENT_NAME.in_(("put", "cleared")),
        )
        # A clear ends what was put at the same time, so backwards it comes before the put.
        .order_by(EventModel.time_ns.desc(), EventModel.name, EventModel.id.desc())
        .execution_options(yield_per=100)
    )
    with connection.execute(told) as rows:
        for row in rows:
            if row.name == "put":
                life = Life(row.time_ns, row.weight_version)
                begun.update((key, life) for key in unpack_keys(row.keys) if key in left)
                continue
            # Without ids the whole partition was cleared.
            for key in unpack_keys(row.keys) if row.keys else list(begun):
                ended = begun.pop(key, None)
                if ended is not None:
                    lives[key].append(ended)
                    if ended.began_ns <= left[key]:
                        del left[key]
            if not left:
                break
    for key, life in begun.items():
        lives[key].append(life)
    return lives


def life_at(lives: Sequence[Life], time_ns: int) -> Life | None:
    """Of lives, the newest first, the one that had begun last by then; None if none had."""
    return next((one for one in lives if one.began_ns <= time_ns), None)
