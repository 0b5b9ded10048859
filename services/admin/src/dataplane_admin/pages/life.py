"""One sample's way from its put to its clear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dataplane_admin.answers import models
from dataplane_admin.pages import words
from dataplane_admin.pages.links import to

_KINDS = frozenset({"put", "claimed", "trained", "dropped", "cleared"})
# Less is not worth a warning, however short the life was.
_LONG_S = 1.0
_NAMES = {
    "put": "put",
    "claimed": "claimed",
    "read": "read",
    "trained": "trained on",
    "acknowledged": "acknowledged",
    "released": "released",
    "dropped": "dropped",
    "cleared": "cleared",
}


@dataclass(frozen=True)
class HopOnPage:
    """A hop with the time that went by before it.

    Attributes:
        later: since the hop before; empty of the first.
        gap: 0 to 3, how much room is left for that time.
        long: a large part of the sample's life went by before this hop.
    """

    hop: models.Hop
    name: str
    kind: str
    when: str
    later: str
    gap: int
    long: bool
    url: str


@dataclass(frozen=True)
class LifePage:
    """Everything on the page of a sample."""

    life: models.SampleLife
    hops: Sequence[HopOnPage]
    partitions: Sequence[str]
    began: str
    took: float
    born_with: int | None
    trained_with: int | None


def life_page(life: models.SampleLife, now_ns: int) -> LifePage:
    """The page of a sample."""
    hops = life.hops
    whole = hops[-1].seconds if hops else 0.0
    shown = []
    for place, hop in enumerate(hops):
        waited = hop.seconds - hops[place - 1].seconds if place else 0.0
        share = waited / whole if whole > 0 else 0.0
        shown.append(
            HopOnPage(
                hop=hop,
                name=_NAMES.get(hop.name, hop.name),
                kind=hop.name if hop.name in _KINDS else "other",
                when=words.clock(hop.time_ns, hop.time_ns),
                later=f"+{words.duration(waited)}" if place else "",
                gap=3 if share > 0.3 else 2 if share > 0.1 else 1 if share > 0.02 else 0,
                long=share > 0.3 and waited >= _LONG_S,
                url=to("/trace", id=hop.trace_id, span=hop.span_id) if hop.trace_id else "",
            )
        )
    trained = [hop.weight_version for hop in hops if hop.name == "trained"]
    put = [hop.weight_version for hop in hops if hop.name == "put"]
    return LifePage(
        life=life,
        hops=shown,
        partitions=list(dict.fromkeys(hop.partition for hop in hops)),
        began=words.clock(hops[0].time_ns, now_ns) if hops else "",
        took=whole,
        born_with=put[0] if put else None,
        trained_with=trained[-1] if trained else None,
    )
