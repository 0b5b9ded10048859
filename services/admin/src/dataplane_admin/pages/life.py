"""Lifecycle page of one sample, from put to clear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dataplane_admin import models
from dataplane_admin.pages import words
from dataplane_admin.pages.links import Link, to_sample

_CLEARED = "Cleared from the data plane."
_NOT_PUT = "Not in the data plane yet, or cleared before its put was reported."
_MAX_RUNS = 8
_KINDS = frozenset({"put", "claimed", "trained", "dropped", "cleared"})
# A shorter gap gets no warning, however short the lifetime is.
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
    """A hop and the time since the previous hop.

    Attributes:
        later: time since the previous hop; empty for the first.
        gap: space above the hop that stands for that time, 0 to 3.
        long: whether that time is a large part of the sample's lifetime.
    """

    hop: models.Hop
    name: str
    kind: str
    later: str
    gap: int
    long: bool


@dataclass(frozen=True)
class LifePage:
    """Content of the sample page."""

    life: models.SampleLife
    hops: Sequence[HopOnPage]
    other_runs: Sequence[tuple[str, Link]]
    """Other runs with the sample id, newest first, and the page of each."""
    runs_omitted: int
    partitions: Sequence[str]
    lifetime_s: float
    generation_version: int | None
    training_version: int | None
    presence: str
    """``yes`` if the sample is in the data plane, else ``no`` or ``unknown``."""
    absence: str
    """Reason that the current state is not shown; empty if it is."""


def life_page(
    life: models.SampleLife, plane: models.LiveStatus, generated_by: int | None = None
) -> LifePage:
    """Return the page of a sample.

    If ``generated_by``, the weight version that generated the sample, is None, the page shows that
    of the first put with a version.
    """
    hops = life.hops
    lifetime_s = hops[-1].seconds if hops else 0.0
    shown = []
    for place, hop in enumerate(hops):
        since_previous_s = hop.seconds - hops[place - 1].seconds if place else 0.0
        share = since_previous_s / lifetime_s if lifetime_s > 0 else 0.0
        shown.append(
            HopOnPage(
                hop=hop,
                name=_NAMES.get(hop.name, hop.name),
                kind=hop.name if hop.name in _KINDS else "other",
                later=f"+{words.duration(since_previous_s)}" if place else "",
                gap=3 if share > 0.3 else 2 if share > 0.1 else 1 if share > 0.02 else 0,
                long=share > 0.3 and since_previous_s >= _LONG_S,
            )
        )
    trained = [hop.weight_version for hop in hops if hop.name == "trained"]
    puts = [hop.weight_version for hop in hops if hop.name == "put"]
    if generated_by is None:
        generated_by = next((version for version in puts if version is not None), None)
    absence = _absence(life, plane)
    return LifePage(
        life=life,
        hops=shown,
        other_runs=[
            (run_id, to_sample(life.sample_id, run_id, partition=life.partition))
            for run_id in life.other_runs[:_MAX_RUNS]
        ],
        runs_omitted=max(0, len(life.other_runs) - _MAX_RUNS),
        partitions=list(dict.fromkeys(hop.partition for hop in hops)),
        lifetime_s=lifetime_s,
        generation_version=generated_by,
        training_version=trained[-1] if trained else None,
        presence=_presence(life, absence),
        absence=absence,
    )


def _presence(life: models.SampleLife, absence: str) -> str:
    if life.live:
        return "yes"
    is_absent = life.live_run_id is not None or absence in (_CLEARED, _NOT_PUT)
    return "no" if is_absent else "unknown"


def _absence(life: models.SampleLife, plane: models.LiveStatus) -> str:
    if life.live:
        return ""
    if life.live_run_id is not None:
        run = f"of run {life.live_run_id}" if life.live_run_id else "without a run"
        return f"In the data plane, this id belongs to a sample {run}."
    if not plane.configured:
        return (
            "Not connected to a data plane. Start the service with --ray-address to see the "
            "current state of samples."
        )
    if not plane.attached:
        return "The data plane is unreachable. The service retries."
    # The notes name partitions that were not searched.
    if life.notes:
        return "Not every partition was searched."
    return _CLEARED if any(hop.name == "put" for hop in life.hops) else _NOT_PUT
