"""Bulk inspection of samples: the matrix of fields and states, and a search by tag.

The matrix is computed column by column; for fields, only by builtins implemented in C. A row takes
well below a microsecond, so that a page does not delay puts and claims.
"""

from __future__ import annotations

import operator
from itertools import repeat

from dataplane_core.errors import InvalidRequestError
from dataplane_core.ledger.inspect import SampleState, StatePage, check_page, field_names, state_of
from dataplane_core.ledger.partition import Partition
from dataplane_core.tags import primitive

SEARCH_WINDOW = 20_000
"""Number of samples that one step of a search reads."""

_ABSENT = object()


def scan(partition: Partition, start: int, limit: int) -> StatePage:
    """Return a page of fields and states; see `DataPlaneInspector.scan_states`."""
    start, limit = check_page("scan_states", start, limit)
    rows = partition.rows.page(start, limit)
    fields, tasks = field_names(partition), tuple(partition.tasks)
    written = bytearray(len(rows) * len(fields))
    states = bytearray(len(rows) * len(tasks))
    if rows:
        cells = [row.cells for row in rows]
        # Row-major matrices: column i is every len(fields)-th byte from byte i on.
        for column, name in enumerate(fields):
            count = partition.samples.field_counts.get(name, 0)
            if count == len(partition.rows):
                written[column :: len(fields)] = b"\1" * len(rows)
            elif count:
                has_field = bytes(map(operator.contains, cells, repeat(name)))
                written[column :: len(fields)] = has_field
        for column, task in enumerate(partition.tasks.values()):
            states[column :: len(tasks)] = bytes(map(task.code, rows))
    return StatePage(
        total=len(partition.rows),
        start=start,
        fields=fields,
        tasks=tasks,
        written=bytes(written),
        states=bytes(states),
    )


def check_search(tag: str, value: object, limit: object) -> tuple[str | int | float | None, int]:
    """Return ``value`` as a primitive, and ``limit`` as a plain int.

    Raises:
        InvalidRequestError: (a ValueError) as `DataPlaneInspector.find_samples`.
    """
    _, maximum = check_page("find_samples", 0, limit)
    try:
        return primitive(value), maximum
    except InvalidRequestError as error:
        raise type(error)(f"find_samples: tag {tag!r}: {error}") from None


def search(
    partition: Partition, tag: str, value: object, start: int, limit: int, now: float
) -> tuple[list[SampleState], int | None]:
    """Run one step of `DataPlaneInspector.find_samples`.

    Returns:
        Up to ``limit`` matching samples, and the position of the next step; None at the end.
    """
    window = partition.rows.page(start, SEARCH_WINDOW)
    matches = [row for row in window if row.tags.get(tag, _ABSENT) == value][:limit]
    after = start + len(window)
    more = len(matches) < limit and after < len(partition.rows)
    return [state_of(partition, row, now) for row in matches], after if more else None
