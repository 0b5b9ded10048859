"""Lifecycle of one sample, and search for samples by id prefix or by tag."""

from __future__ import annotations

import json
from functools import partial

from dataplane_admin import models
from dataplane_admin.live import Live
from dataplane_admin.service import partitions
from dataplane_admin.service.cursors import SAMPLES
from dataplane_admin.service.errors import NotFound, Refused, ServiceError, TimedOut
from dataplane_admin.store import Store
from dataplane_core import DataPlaneInspector, PartitionSummary, SampleState
from observability.records import distinct_labels
from observability.views import SampleNotFound, lineage_of, printable

# Maximum number of live partitions that one query searches.
_MAX_PARTITIONS = 50


def life(
    store: Store, live: Live | None, sample_id: str, partition: str | None
) -> models.SampleLife:
    """Return the lifecycle and the current state of a sample.

    Raises NotFound if the sample is unknown. Facts name no partition, so they count only if
    ``partition`` is None.
    """
    records = store.sample_records(sample_id, partition)
    try:
        hops = lineage_of(sample_id, records)
    except SampleNotFound:
        hops = []
    labels = distinct_labels(hop.process for hop in hops)
    notes: list[str] = []
    now = _live_sample(live, sample_id, partition, notes)
    has_facts = partition is None and store.sample_text(None, sample_id)[0] is not None
    if not hops and now is None and not has_facts:
        raise NotFound(_unknown(store, sample_id, partition, notes))
    return models.SampleLife(
        sample_id=sample_id,
        partition=partition,
        hops=[models.Hop.of(hop, process=labels[hop.process], nbytes=hop.n_bytes) for hop in hops],
        live=now,
        notes=notes,
    )


def search(
    store: Store, live: Live | None, q: str, partition: str | None, cursor: str | None, limit: int
) -> models.SampleHits:
    """Search stored events by id prefix ``q``, and live samples by the complete id."""
    after = SAMPLES.read(cursor)
    hits, following = store.find_samples(q, limit, after, partition)
    notes: list[str] = []
    shown = models.encodable_text(q)
    if after is None and q and not any(hit.sample_id == shown for hit in hits):
        sample = _live_sample(live, q, partition, notes)
        if sample is not None:
            hits.insert(0, _live_hit(sample.sample_id, sample.partition))
    return models.SampleHits(samples=hits, next=SAMPLES.write(following), notes=notes)


def by_tag(
    live: Live | None, tag: str, value: str, partition: str | None, limit: int
) -> models.SampleHits:
    """Search live samples whose tag equals ``value``, as text or as a JSON number or boolean."""
    if live is None:
        raise Refused("tags are searched in a live data plane only, and none is connected")
    values: list[object] = [value]
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, bool | int | float):
        values.append(parsed)
    hits: list[models.SampleHit] = []
    notes: list[str] = []
    searched = _searched(live, partition, notes)
    until_s = live.deadline_s()
    for place, summary in enumerate(searched):
        for wanted in values:
            # Search for one more than is shown, to know whether there are more.
            remaining = limit + 1 - len(hits)
            try:
                states = _find(live, summary.partition_id, tag, wanted, remaining, until_s)
            except TimedOut as error:
                if place == 0:
                    raise
                notes.append(_not_searched(len(searched) - place, error))
                return models.SampleHits(samples=hits, next=None, notes=notes)
            hits += [_live_hit(state.sample_id, summary.partition_id) for state in states]
            if len(hits) > limit:
                notes.append(f"only the first {limit} are shown")
                return models.SampleHits(samples=hits[:limit], next=None, notes=notes)
    return models.SampleHits(samples=hits, next=None, notes=notes)


def _find(
    live: Live, partition: str, tag: str, value: object, limit: int, until_s: float
) -> list[SampleState]:
    try:
        return partitions.ask(
            live,
            lambda plane: plane.find_samples(partition, tag=tag, value=value, limit=limit),
            until_s,
        )
    except NotFound:  # the partition was cleared meanwhile
        return []


def _not_searched(count: int, error: ServiceError) -> str:
    """Return a note about partitions that were not searched before the deadline."""
    return f"not searched in {count} live partition{'' if count == 1 else 's'}: {error}"


def _live_sample(
    live: Live | None, sample_id: str, partition: str | None, notes: list[str]
) -> models.Sample | None:
    if live is None:
        return None
    searched = _searched(live, partition, notes)
    until_s = live.deadline_s()
    for place, summary in enumerate(searched):
        read = partial(_read, partition=summary.partition_id, sample_id=sample_id)
        try:
            state = partitions.ask(live, read, until_s)
        except NotFound:
            continue
        except ServiceError as error:
            notes.append(_not_searched(len(searched) - place, error))
            return None
        if state is not None:
            return partitions.sample(state, summary.partition_id)
    return None


def _read(plane: DataPlaneInspector, partition: str, sample_id: str) -> SampleState | None:
    return plane.read_sample(partition, sample_id)


def _searched(live: Live, partition: str | None, notes: list[str]) -> list[PartitionSummary]:
    snapshot = live.snapshot
    if partition is not None:
        return [summary for summary in snapshot.partitions if summary.partition_id == partition]
    rest = len(snapshot.partitions) - _MAX_PARTITIONS
    if rest > 0:
        notes.append(f"{rest} live partitions were not searched; name a partition")
    return list(snapshot.partitions[:_MAX_PARTITIONS])


def _unknown(store: Store, sample_id: str, partition: str | None, notes: list[str]) -> str:
    shown = printable(sample_id if len(sample_id) <= 100 else f"{sample_id[:100]}…")
    place = "" if partition is None else f" in partition '{printable(partition[:100])}'"
    alike, _ = store.find_samples(sample_id, 5)
    hint = ""
    if alike:
        named = ", ".join(printable(row.sample_id[:100]) for row in alike)
        hint = f"; ids with this prefix: {named}"
    texts = "".join(f"; {note}" for note in notes)
    return f"no event or live partition has sample '{shown}'{place}{hint}{texts}"


def _live_hit(sample_id: str, partition: str) -> models.SampleHit:
    return models.SampleHit(
        sample_id=sample_id,
        partition=partition,
        run_id="",
        weight_version=None,
        first_ns=None,
        last_ns=None,
        live=True,
    )
