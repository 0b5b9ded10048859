"""Storage of facts and text of samples; later facts replace earlier ones."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any  # Any: rows

from sqlalchemy import delete, exists, func, select

from dataplane_admin.store.apply_runs import apply_runs
from dataplane_admin.store.batch import Batch, SampleFacts, SampleText
from dataplane_admin.store.tables import SampleFactModel, SampleGroupModel, SampleTextModel
from dataplane_admin.store.texts import lengthened, shortened, storable
from dataplane_admin.store.work import WANTED, Work, in_groups

FACT_BYTES = 180
"""Approximate bytes of the facts of a sample with its share of the group, without its tags."""

_STATES = ("trained", "dropped")
"""Lifecycle events that set the state of their samples."""
_MERGED = (
    "step",
    "reward",
    "advantage",
    "length",
    "truncated",
    "first_version",
    "last_version",
)
_STORED = (
    select(SampleFactModel.__table__, SampleGroupModel.run_id, SampleGroupModel.group_id)
    .join(SampleGroupModel, SampleGroupModel.id == SampleFactModel.group_key)
    .where(SampleFactModel.digest.in_(WANTED))
)
_GROUPS = select(SampleGroupModel.__table__).where(SampleGroupModel.group_id.in_(WANTED))
_GROUPS_OF = select(SampleFactModel.group_key).where(SampleFactModel.id.in_(WANTED)).distinct()
_TAGS = select(SampleFactModel.tags).where(SampleFactModel.id.in_(WANTED))
_TEXTS = select(func.length(SampleTextModel.blob).label("nbytes")).where(
    SampleTextModel.id.in_(WANTED)
)


def digest_of_sample(run_id: str, sample: bytes) -> int:
    """Return the digest of a sample of a run, as a signed integer of 64 bits."""
    digest = hashlib.blake2b(storable(run_id).encode() + b"\0" + sample, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def apply_samples(work: Work, batches: Sequence[Batch]) -> None:
    """Store facts and text of samples, also the facts that lifecycle events report."""
    facts: dict[int, list[SampleFacts]] = {}
    texts: dict[int, SampleText] = {}
    for each in _reported(batches):
        digest = digest_of_sample(each.run_id, each.sample)
        if isinstance(each, SampleText):
            texts[digest] = each
            each = SampleFacts(
                each.run_id, each.sample, each.time_ns, step=each.step, is_record=False
            )
        facts.setdefault(digest, []).append(each)
    if not facts:
        return
    stored = {row.digest: _with_names(row) for row in work.rows(_STORED, facts)}
    rows = {
        digest: _merged(work, digest, of_sample, stored.get(digest))
        for digest, of_sample in facts.items()
    }
    new = [row for digest, row in rows.items() if digest not in stored]
    changed = [row for digest, row in rows.items() if row != stored.get(digest, row)]
    groups = _group_keys(work, [*new, *changed])
    work.add(SampleFactModel, [_with_key(row, groups) for row in new])
    work.change(SampleFactModel, "id", [_with_key(row, groups) for row in changed])
    work.state.nbytes += FACT_BYTES * len(new)
    work.state.nbytes += sum(_tag_bytes(row) for row in rows.values())
    work.state.nbytes -= sum(_tag_bytes(row) for row in stored.values())
    _apply_texts(work, {rows[digest]["id"]: text for digest, text in texts.items()})
    given = [each for batch in batches for each in batch.samples]
    apply_runs(work, ((storable(each.run_id), each.time_ns, each.time_ns) for each in given))


def drop_samples(work: Work, ids: Sequence[int]) -> None:
    """Delete facts with their text, and the groups that have no facts any more."""
    drop_texts(work, ids)
    groups = {row.group_key for row in work.rows(_GROUPS_OF, ids)}
    work.state.nbytes -= sum(_tag_bytes(row._mapping) for row in work.rows(_TAGS, ids))
    work.state.nbytes -= FACT_BYTES * work.drop(SampleFactModel.id, ids)
    is_used = exists().where(SampleFactModel.group_key == SampleGroupModel.id)
    for keys in in_groups(groups):
        work.connection.execute(
            delete(SampleGroupModel).where(SampleGroupModel.id.in_(keys), ~is_used)
        )


def drop_texts(work: Work, ids: Collection[int]) -> None:
    """Delete the text of samples."""
    work.state.nbytes -= sum(row.nbytes for row in work.rows(_TEXTS, ids))
    work.drop(SampleTextModel.id, ids)


def _group_keys(work: Work, rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], int]:
    """Return the key of each row's group, by names of group and run; add new groups."""
    wanted = dict.fromkeys((row["group_id"], row["run_id"]) for row in rows)
    named = dict.fromkeys(group for group, _ in wanted)
    keys = {(row.group_id, row.run_id): row.id for row in work.rows(_GROUPS, named)}
    new = [each for each in wanted if each not in keys]
    keys |= {each: work.state.next_id() for each in new}
    work.add(
        SampleGroupModel,
        [{"id": keys[each], "group_id": each[0], "run_id": each[1]} for each in new],
    )
    return keys


def _with_names(row: Any) -> dict[str, Any]:
    """Return a row of `_STORED` with the full sample id, and without the group's key."""
    named = dict(row._mapping)
    del named["group_key"]
    return named | {"sample": lengthened(row.sample, row.group_id)}


def _with_key(row: Mapping[str, Any], keys: Mapping[tuple[str, str], int]) -> dict[str, Any]:
    """Return the columns of a row: the reverse of `_with_names`."""
    columns = dict(row)
    group, run_id = columns.pop("group_id"), columns.pop("run_id")
    sample = shortened(row["sample"], group)
    return columns | {"group_key": keys[group, run_id], "sample": sample}


def _tag_bytes(row: Mapping[str, Any]) -> int:
    return len(row["tags"].encode())


def _reported(batches: Sequence[Batch]) -> Iterator[SampleFacts | SampleText]:
    for batch in batches:
        yield from batch.samples
        for event in batch.events:
            if event.name in _STATES:
                for sample in event.sample_ids:
                    yield SampleFacts(
                        event.run_id,
                        sample,
                        event.time_ns,
                        step=event.step,
                        state=event.name,
                        is_record=False,
                    )


def _merged(
    work: Work, digest: int, facts: Sequence[SampleFacts], before: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the row of a sample: stored facts, then the new facts in the order of their times.

    The state has a separate time, since another process may report it.
    """
    first = facts[0]
    row = before or {
        "id": work.state.next_id(),
        "digest": digest,
        "run_id": storable(first.run_id),
        "sample": first.sample,
        "group_id": "",
        "tags": "",
        **dict.fromkeys(_MERGED),
        "state": "",
        "state_ns": 0,
        "time_ns": 0,
        "received_ns": work.now_ns,
    }
    row = dict(row)
    for each in sorted(facts, key=lambda each: each.time_ns):
        is_later = each.time_ns >= row["time_ns"]
        given = {name: getattr(each, name) for name in _MERGED}
        given |= {"group_id": each.group, "tags": each.tags}
        for name, value in given.items():
            if value not in (None, "") and (is_later or row[name] in (None, "")):
                row[name] = value
        if any(given[name] not in (None, "") for name in given if name != "step"):
            row["time_ns"] = max(row["time_ns"], each.time_ns)
        elif each.is_record:
            row["time_ns"] = max(row["time_ns"], 1)  # its facts arrived, all unknown
        if each.state and each.time_ns >= row["state_ns"]:
            row["state"], row["state_ns"] = each.state, each.time_ns
    return row


def _apply_texts(work: Work, texts: dict[int, SampleText]) -> None:
    if not texts:
        return
    drop_texts(work, texts)
    blobs = {key: zlib.compress(text.text.encode(), 6) for key, text in texts.items()}
    work.add(
        SampleTextModel,
        [{"id": key, "received_ns": work.now_ns, "blob": blob} for key, blob in blobs.items()],
    )
    work.state.nbytes += sum(map(len, blobs.values()))
