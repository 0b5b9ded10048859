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
from dataplane_admin.store.texts import storable
from dataplane_core import DataPlaneInspector, PartitionSummary, SampleState
from observability.records import distinct_labels
from observability.views import SampleNotFound, lineage_of, printable

# Maximum number of live partitions that one query searches.
_MAX_PARTITIONS = 50
_MAX_RUNS = 100


def life(
    store: Store, live: Live | None, sample_id: str, run: str | None, partition: str | None
) -> models.SampleLife:
    """Return the lifecycle and the current state of a sample in one run.

    If ``run`` is None, it is the run of the live sample, else the newest with this sample id.

    Raises NotFound if the run has no such sample. Facts name no partition, so they count only if
    ``partition`` is None.
    """
    notes: list[str] = []
    now = _live_sample(live, sample_id, partition, notes)
    runs = _runs_of(store, sample_id, partition)
    live_run = None
    if now is not None:
        live_run = store.run_of_partition(now.partition)
        if live_run is None:
            live_run = next(iter(runs), None)
    if live_run is not None:
        runs = list(dict.fromkeys((live_run, *runs)))
    shown = next(iter(runs), "") if run is None else storable(run)
    if shown not in runs and (runs or now is None):
        raise NotFound(_unknown(store, sample_id, run, partition, [*_note_on_runs(runs), *notes]))
    try:
        hops = lineage_of(sample_id, store.sample_records(sample_id, shown, partition))
    except SampleNotFound:
        hops = []
    labels = distinct_labels(hop.process for hop in hops)
    return models.SampleLife(
        sample_id=sample_id,
        run_id=shown,
        other_runs=[other for other in runs if other != shown][:_MAX_RUNS],
        partition=partition,
        hops=[models.Hop.of(hop, process=labels[hop.process], nbytes=hop.n_bytes) for hop in hops],
        live=now if live_run in (None, shown) else None,
        live_run_id=live_run,
        notes=notes,
    )


def _runs_of(store: Store, sample_id: str, partition: str | None) -> list[str]:
    """Return the runs with events or facts of a sample, newest first."""
    last_ns = store.runs_of_sample(sample_id, partition)
    if partition is None:
        for run_id, time_ns in store.runs_with_facts(sample_id).items():
            last_ns[run_id] = max(time_ns, last_ns.get(run_id, time_ns))
    return sorted(last_ns, key=lambda run_id: -last_ns[run_id])


def _note_on_runs(runs: list[str]) -> list[str]:
    """Return a note that names the runs with a sample; none without runs."""
    named = ", ".join(f"'{printable(run_id[:100])}'" for run_id in runs[:5])
    return [f"runs with this id: {named}"] if runs else []


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


def _unknown(
    store: Store, sample_id: str, run: str | None, partition: str | None, notes: list[str]
) -> str:
    shown = printable(sample_id if len(sample_id) <= 100 else f"{sample_id[:100]}…")
    place = "" if partition is None else f" in partition '{printable(partition[:100])}'"
    place += "" if run is None else f" of run '{printable(run[:100])}'"
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
