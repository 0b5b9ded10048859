"""The life of one sample, and samples by the beginning of their id or by a tag."""

from __future__ import annotations

import json
from functools import partial

from dataplane_admin.answers import models, partitions
from dataplane_admin.answers.cursors import read_sample_cursor, sample_cursor
from dataplane_admin.answers.errors import AnswerError, Late, NotFound, Refused
from dataplane_admin.live import Live
from dataplane_admin.store import SampleRow, Store
from dataplane_core import DataPlaneInspector, PartitionSummary, SampleState
from observability.records import distinct_labels
from observability.views import Hop, SampleNotFound, life_of, printable

# How many partitions a question about a sample or a tag looks into.
_MOST_PARTITIONS = 50


def life(
    store: Store, live: Live | None, sample_id: str, partition: str | None
) -> models.SampleLife:
    """What happened to a sample, and how it is now. Raises NotFound."""
    records = store.sample_records(sample_id, partition)
    try:
        hops = life_of(sample_id, records)
    except SampleNotFound:
        hops = []
    labels = distinct_labels(hop.process for hop in hops)
    notes: list[str] = []
    now = _live_sample(live, sample_id, partition, notes)
    if not hops and now is None:
        raise NotFound(_unknown(store, sample_id, partition, notes))
    return models.SampleLife(
        sample_id=sample_id,
        partition=partition,
        hops=[_hop(one, labels[one.process]) for one in hops],
        live=now,
        notes=notes,
    )


def search(
    store: Store, live: Live | None, q: str, partition: str | None, cursor: str | None, limit: int
) -> models.SampleHits:
    """Samples whose id begins with ``q``, of the history; a whole id also of the live part."""
    after = read_sample_cursor(cursor)
    # One more than fits tells whether there is another page.
    rows = store.find_samples(q, limit + 1, after)
    hits = [_hit(row) for row in rows[:limit] if partition is None or row.partition == partition]
    notes: list[str] = []
    if after is None and q and not any(row.sample_id == q for row in rows):
        found = _live_sample(live, q, partition, notes)
        if found is not None:
            hits.insert(0, _live_hit(found.sample_id, found.partition))
    more = len(rows) > limit
    return models.SampleHits(
        samples=hits, next=sample_cursor(rows[limit - 1].cursor) if more else None, notes=notes
    )


def by_tag(
    live: Live | None, tag: str, value: str, partition: str | None, limit: int
) -> models.SampleHits:
    """Live samples whose tag equals ``value``, read as text and, if it is one, as JSON."""
    if live is None:
        raise Refused("tags are known live only, and no data plane is looked into")
    values: list[object] = [value]
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        read = None
    if isinstance(read, bool | int | float):
        values.append(read)
    hits: list[models.SampleHit] = []
    notes: list[str] = []
    looked_into = _looked_into(live, partition, notes)
    until_s = live.deadline_s()
    for place, summary in enumerate(looked_into):
        for wanted in values:
            room = limit - len(hits)
            if room <= 0:
                notes.append(f"only the first {limit} are shown")
                return models.SampleHits(samples=hits, next=None, notes=notes)
            try:
                states = _find(live, summary.partition_id, tag, wanted, room, until_s)
            except Late as error:
                if place == 0:
                    raise
                notes.append(_not_looked_up(len(looked_into) - place, error))
                return models.SampleHits(samples=hits, next=None, notes=notes)
            hits += [_live_hit(state.sample_id, summary.partition_id) for state in states]
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
    except NotFound:  # it was cleared meanwhile
        return []


def _not_looked_up(count: int, error: AnswerError) -> str:
    """Partitions that were not reached within the one deadline of an answer."""
    return f"not looked up in {count} live partition{'' if count == 1 else 's'}: {error}"


def _live_sample(
    live: Live | None, sample_id: str, partition: str | None, notes: list[str]
) -> models.Sample | None:
    if live is None:
        return None
    looked_into = _looked_into(live, partition, notes)
    until_s = live.deadline_s()
    for place, summary in enumerate(looked_into):
        read = partial(_read, partition=summary.partition_id, sample_id=sample_id)
        try:
            state = partitions.ask(live, read, until_s)
        except NotFound:
            continue
        except AnswerError as error:
            notes.append(_not_looked_up(len(looked_into) - place, error))
            return None
        if state is not None:
            return partitions.sample(state, summary.partition_id)
    return None


def _read(plane: DataPlaneInspector, partition: str, sample_id: str) -> SampleState | None:
    return plane.read_sample(partition, sample_id)


def _looked_into(live: Live, partition: str | None, notes: list[str]) -> list[PartitionSummary]:
    snapshot = live.snapshot
    if partition is not None:
        return [one for one in snapshot.partitions if one.partition_id == partition]
    rest = len(snapshot.partitions) - _MOST_PARTITIONS
    if rest > 0:
        notes.append(f"{rest} live partitions were not looked into; name one")
    return list(snapshot.partitions[:_MOST_PARTITIONS])


def _unknown(store: Store, sample_id: str, partition: str | None, notes: list[str]) -> str:
    shown = printable(sample_id if len(sample_id) <= 100 else f"{sample_id[:100]}…")
    place = "" if partition is None else f" in partition '{printable(partition[:100])}'"
    alike = store.find_samples(sample_id, 5)
    hint = ""
    if alike:
        named = ", ".join(printable(row.sample_id[:100]) for row in alike)
        hint = f"; ids that begin as it does: {named}"
    told = "".join(f"; {note}" for note in notes)
    return f"neither an event nor the data plane names the sample '{shown}'{place}{hint}{told}"


def _hit(row: SampleRow) -> models.SampleHit:
    return models.SampleHit(
        sample_id=row.sample_id,
        partition=row.partition,
        run_id=row.run_id,
        weight_version=row.weight_version,
        first_ns=row.first_ns,
        last_ns=row.last_ns,
        live=False,
    )


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


def _hop(hop: Hop, process: str) -> models.Hop:
    return models.Hop(
        time_ns=hop.time_ns,
        seconds=hop.seconds,
        name=hop.name,
        process=process,
        partition=hop.partition,
        task=hop.task,
        stage=hop.stage,
        fields=list(hop.fields),
        nbytes=hop.n_bytes,
        batch=hop.batch,
        weight_version=hop.weight_version,
        run_id=hop.run_id,
        step=hop.step,
        trace_id=hop.trace_id,
        span_id=hop.span_id,
        detail=hop.detail,
        whole_partition=hop.whole_partition,
    )
