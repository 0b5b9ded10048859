"""Origins: the put that wrote each field of a sample.

The samples of one put share one mapping, so its memory does not grow with the samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from dataplane_core.ledger.rows import NO_ORIGINS, Row


def note_origin(rows: Iterable[Row], fields: Sequence[str], origin: str | None) -> None:
    """Record that the put ``origin`` wrote ``fields`` of ``rows``; None is a put without a name."""
    if not fields:
        return
    own = {} if origin is None else dict.fromkeys(fields, origin)
    # Keyed by the id() of the old mapping. The value keeps that mapping alive, so that no new one
    # gets the same id().
    replacements: dict[int, tuple[Mapping[str, str], Mapping[str, str]]] = {}
    for row in rows:
        before = row.origins
        pair = replacements.get(id(before))
        if pair is None:
            others = {name: put for name, put in before.items() if name not in fields}
            pair = replacements[id(before)] = before, {**others, **own} or NO_ORIGINS
        row.origins = pair[1]


def count_origins(rows: Iterable[Row], fields: Sequence[str]) -> dict[str, int]:
    """Return the number of rows in which each origin wrote one of ``fields``, largest first."""
    mappings = [row.origins for row in rows]
    # Rows share mappings: each distinct one is read once.
    distinct = dict(zip(map(id, mappings), mappings, strict=True))
    rows_of: Counter[str] = Counter()
    for identity, count in Counter(map(id, mappings)).items():
        mapping = distinct[identity]
        for origin in {mapping[name] for name in fields if name in mapping}:
            rows_of[origin] += count
    return dict(rows_of.most_common())
