"""Which put wrote which field of a sample.

The samples of one put share one mapping, so that a put costs one, however many samples it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from dataplane_core.ledger.rows import NO_ORIGINS, Row


def note_origin(rows: Iterable[Row], fields: Sequence[str], origin: str | None) -> None:
    """``fields`` of ``rows`` were written by the put named ``origin``, or by one without a name."""
    if not fields:
        return
    own = {} if origin is None else dict.fromkeys(fields, origin)
    # By identity, with what is replaced kept alive so that no new mapping takes its identity.
    made: dict[int, tuple[Mapping[str, str], Mapping[str, str]]] = {}
    for row in rows:
        before = row.origins
        pair = made.get(id(before))
        if pair is None:
            others = {name: put for name, put in before.items() if name not in fields}
            pair = made[id(before)] = before, {**others, **own} or NO_ORIGINS
        row.origins = pair[1]


def count_origins(rows: Iterable[Row], fields: Sequence[str]) -> dict[str, int]:
    """Origin to the number of rows of which it wrote one of ``fields``, the most first."""
    mappings = [row.origins for row in rows]
    alike = dict(zip(map(id, mappings), mappings, strict=True))
    counts = Counter(map(id, mappings))
    found: Counter[str] = Counter()
    for identity, count in counts.items():
        mapping = alike[identity]
        for origin in {mapping[name] for name in fields if name in mapping}:
            found[origin] += count
    return dict(found.most_common())
