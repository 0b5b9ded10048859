"""File of results of all areas of the project: a JSON list with one entry per name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Entry:
    """One result.

    Attributes:
        name: dotted name, unique in the file.
        value: value of the result.
        unit: unit, such as "x" for a ratio, "ms" or "GB/s".
        baseline: the baseline of a ratio or difference; None for an absolute value.
        spread: interquartile range of the samples.
        n: number of samples.
    """

    name: str
    value: float
    unit: str
    baseline: str | None
    spread: float
    n: int


def merge_entries(path: Path, entries: Sequence[Entry]) -> None:
    """Write ``entries``; replace those of the same names, and leave the others in the file."""
    existing: list[dict[str, object]] = json.loads(path.read_text()) if path.exists() else []
    merged = {entry["name"]: entry for entry in existing}
    merged |= {entry.name: asdict(entry) for entry in entries}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(merged.values()), indent=2) + "\n")
