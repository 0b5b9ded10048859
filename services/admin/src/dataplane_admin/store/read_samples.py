"""Queries for facts and text of samples."""

from __future__ import annotations

import json
import time
import zlib
from dataclasses import dataclass
from typing import Any  # Any: rows

from sqlalchemy import Select, and_, exists, or_, select

from dataplane_admin.models import SampleFacts
from dataplane_admin.store.apply_samples import digest_of_sample
from dataplane_admin.store.reader import Reader
from dataplane_admin.store.tables import (
    RunModel,
    SampleFactModel,
    SampleGroupModel,
    SampleTextModel,
)
from dataplane_admin.store.texts import (
    bytes_of_id,
    id_of_bytes,
    lengthened,
    one_line,
    storable,
    texts_in,
)
from dataplane_admin.store.work import in_groups

_MAX_GROUP = 1000
_FACTS_AFTER_S = 15.0
_IN_GROUP = SampleGroupModel.id == SampleFactModel.group_key
_HAS_TEXT = (
    exists()
    .where(SampleTextModel.id == SampleFactModel.id)
    .correlate(SampleFactModel)
    .label("has_text")
)
_FACTS = select(
    *SampleFactModel.__table__.columns,
    SampleGroupModel.run_id,
    SampleGroupModel.group_id,
    _HAS_TEXT,
).join(SampleGroupModel, _IN_GROUP)


@dataclass(frozen=True)
class SampleFilter:
    """Conditions on facts; None matches all. Bounds are included.

    A ``tag`` is ``name=value``, or the name of a tag with any value; case is ignored.
    """

    run: str | None = None
    step: int | None = None
    group: str | None = None
    state: str | None = None
    truncated: bool | None = None
    text: bool | None = None
    tag: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_length: int | None = None
    max_length: int | None = None


def read_sample_facts(
    reader: Reader,
    chosen: SampleFilter,
    *,
    sort: str = "newest",
    ascending: bool = False,
    after: tuple[float, int] | None = None,
    limit: int = 50,
) -> tuple[list[SampleFacts], tuple[float, int] | None]:
    """Return a page of facts, and the place of the next page.

    Args:
        sort: ``newest`` or a numeric column; samples without the number are omitted. Among the
            newest, those without facts are omitted for 15 s.
        ascending: whether the smallest comes first.
        after: number and id of the last row of the previous page.
    """
    key = SampleFactModel.id
    column: Any = key if sort == "newest" else getattr(SampleFactModel, sort)
    ids = select(key).join(SampleGroupModel, _IN_GROUP).where(*_conditions(chosen))
    if sort != "newest":
        ids = ids.where(column.is_not(None))
    else:
        # The event ``trained`` of a sample may arrive before its facts; list the sample with them.
        old_ns = time.time_ns() - int(_FACTS_AFTER_S * 1e9)
        ids = ids.where(or_(SampleFactModel.time_ns > 0, SampleFactModel.received_ns <= old_ns))
    if after is not None:
        value, last = after
        number = last if sort == "newest" else value
        beyond = column > number if ascending else column < number
        further = key > last if ascending else key < last
        ids = ids.where(or_(beyond, and_(column == number, further)))
    order = [each.asc() if ascending else each.desc() for each in dict.fromkeys((column, key))]
    # Only the ids are sorted: of all matching samples, SQLite would sort all columns.
    ids = ids.order_by(*order).limit(limit + 1).correlate(None)
    query = _FACTS.where(key.in_(ids)).order_by(*order)
    rows, bottom = reader.page(
        query, limit, lambda row: (float(0 if sort == "newest" else getattr(row, sort)), row.id)
    )
    return [_facts(row) for row in rows], bottom


def read_group(reader: Reader, run_id: str, group: str, step: int | None) -> list[SampleFacts]:
    """Return the samples of a group, at most 1,000, in the order of their ids as stored.

    See `texts.shortened`. A group that is named by its prompt has samples of several steps, of
    which only those of ``step`` are returned unless it is None.
    """
    query = _FACTS.where(*_conditions(SampleFilter(run=run_id, group=group, step=step)))
    rows = reader.rows(query.order_by(SampleFactModel.sample).limit(_MAX_GROUP))
    return [_facts(row) for row in rows]


def read_runs_with_facts(reader: Reader, sample_id: str) -> dict[str, int]:
    """Return the time of a sample's newest facts by run id, which is empty without a run."""
    query = select(SampleGroupModel.run_id, SampleFactModel.time_ns).join(
        SampleGroupModel, _IN_GROUP
    )
    return {row.run_id: row.time_ns for row in _rows_of_id(reader, query, None, sample_id)}


def read_sample_text(
    reader: Reader, run_id: str | None, sample_id: str
) -> tuple[SampleFacts | None, dict[str, Any] | None]:
    """Return facts and text of a sample.

    If ``run_id`` is None, return the newest sample with this id, with or without a run.
    """
    query = _FACTS.add_columns(SampleTextModel.blob).outerjoin(
        SampleTextModel, SampleTextModel.id == SampleFactModel.id
    )
    rows = _rows_of_id(reader, query, run_id, sample_id)
    if not rows:
        return None, None
    newest = max(rows, key=lambda row: row.id)
    blob = newest.blob
    return _facts(newest), None if blob is None else json.loads(zlib.decompress(blob))


def read_turns(reader: Reader, run_id: str, sample_id: str) -> tuple[list[dict[str, Any]], int]:
    """Return the messages of a sample, and the bytes of its decompressed text; 0 without text."""
    query = select(SampleTextModel.blob).join(
        SampleFactModel, SampleFactModel.id == SampleTextModel.id
    )
    rows = _rows_of_id(reader, query, run_id, sample_id)
    if not rows:
        return [], 0
    text = zlib.decompress(rows[0].blob)
    return json.loads(text).get("turns", []), len(text)


def _rows_of_id(
    reader: Reader, query: Select[*tuple[Any, ...]], run_id: str | None, sample_id: str
) -> list[Any]:
    """Return the rows of a query for the facts of a sample in one run, or in all if None."""
    sample = bytes_of_id(sample_id)
    if run_id is None:
        runs = ["", *(row.run_id for row in reader.rows(select(RunModel.run_id)))]
    else:
        runs = [run_id]
    return [
        row
        for digests in in_groups(digest_of_sample(run, sample) for run in runs)
        for row in reader.rows(query.where(SampleFactModel.digest.in_(digests)))
    ]


def _conditions(chosen: SampleFilter) -> list[Any]:
    table = SampleFactModel
    texts = (
        (SampleGroupModel.run_id, chosen.run),
        (SampleGroupModel.group_id, chosen.group),
        (table.state, chosen.state),
    )
    conditions: list[Any] = [column == storable(text) for column, text in texts if text is not None]
    if chosen.step is not None:
        conditions.append(table.step == chosen.step)
    if chosen.truncated is not None:
        conditions.append(table.truncated.is_(chosen.truncated))
    if chosen.text is not None:
        with_text = table.id.in_(select(SampleTextModel.id))
        conditions.append(with_text if chosen.text else ~with_text)
    if chosen.tag is not None:
        line = f"\n{one_line(chosen.tag)}" + ("\n" if "=" in chosen.tag else "=")
        conditions.append(table.tags.icontains(line, autoescape=True))
    for column, low, high in (
        (table.reward, chosen.min_reward, chosen.max_reward),
        (table.length, chosen.min_length, chosen.max_length),
    ):
        conditions += [column >= low] if low is not None else []
        conditions += [column <= high] if high is not None else []
    return conditions


def _facts(row: Any) -> SampleFacts:
    tags = (line.partition("=") for line in texts_in(row.tags))
    return SampleFacts.of(
        row,
        sample_id=id_of_bytes(lengthened(row.sample, row.group_id)),
        group=row.group_id,
        tags={name: value for name, _, value in tags},
    )
