"""Many samples at once, in bytes: the matrix of a partition, and a search by tag.

Work is done column by column with what Python runs at its own speed in C, so that a row costs well
below a microsecond and a page of them does not hold up puts and claims.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import islice, repeat

from dataplane_core.errors import InvalidRequestError
from dataplane_core.ledger.inspect import SampleState, StatePage, check_page, field_names, state_of
from dataplane_core.ledger.partition import PartitionBook
from dataplane_core.ledger.tasks import Task
from dataplane_core.tags import primitive

SEARCH_WINDOW = 50_000
"""Samples that one step of a search looks at."""

_ABSENT = object()
_SETTLED = bytes([0, 3]) + bytes(254)
_LEASED = bytes([0, 2]) + bytes(254)


def scan(partition: PartitionBook, start: int, limit: int) -> StatePage:
    """As `DataPlaneInspector.scan_states`."""
    start, limit = check_page("scan_states", start, limit)
    rows = list(islice(partition.rows.values(), start, start + limit))
    fields, tasks = field_names(partition), tuple(partition.tasks)
    written = bytearray(len(rows) * len(fields))
    states = bytearray(len(rows) * len(tasks))
    if rows:
        cells = [row.cells for row in rows]
        for place, name in enumerate(fields):
            count = partition.field_counts.get(name, 0)
            if count == len(partition.rows):
                written[place :: len(fields)] = b"\1" * len(rows)
            elif count:
                column = bytes(map(operator.contains, cells, repeat(name)))
                written[place :: len(fields)] = column
        ids = [row.sample_id for row in rows]
        for place, task in enumerate(partition.tasks.values()):
            states[place :: len(tasks)] = _states(task, ids)
    return StatePage(
        total=len(partition.rows),
        start=start,
        fields=fields,
        tasks=tasks,
        written=bytes(written),
        states=bytes(states),
    )


def _states(task: Task, ids: Sequence[str]) -> bytes:
    """A task's state of each sample; one that is there is in exactly one of the four places."""
    column = bytes(len(ids))
    if task.settled:
        column = bytes(map(task.settled.__contains__, ids)).translate(_SETTLED)
    if task.leased:
        leased = bytes(map(task.leased.__contains__, ids)).translate(_LEASED)
        column = bytes(map(operator.or_, column, leased))
    if task.assigned:
        assigned = bytes(map(task.assigned.__contains__, ids))
        column = bytes(map(operator.or_, column, assigned))
    return column


def check_search(tag: str, value: object, limit: object) -> tuple[str | int | float | None, int]:
    """Return ``value`` as a tag holds it, and ``limit`` as a plain int.

    Raises:
        InvalidRequestError: (a ValueError) as `DataPlaneInspector.find_samples`.
    """
    _, most = check_page("find_samples", 0, limit)
    try:
        return primitive(value), most
    except InvalidRequestError as error:
        raise type(error)(f"find_samples: tag {tag!r}: {error}") from None


def search(
    partition: PartitionBook, tag: str, value: object, start: int, limit: int, now: float
) -> tuple[list[SampleState], int | None]:
    """One step of `DataPlaneInspector.find_samples`.

    Returns:
        Up to ``limit`` samples found, and the place where to go on; None at the end.
    """
    window = list(islice(partition.rows.values(), start, start + SEARCH_WINDOW))
    found = [row for row in window if row.tags.get(tag, _ABSENT) == value][:limit]
    after = start + len(window)
    more = len(found) < limit and after < len(partition.rows)
    return [state_of(partition, row, now) for row in found], after if more else None
