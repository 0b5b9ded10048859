"""The file of results that several areas of the project write to: a JSON list, one entry a name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Entry:
    """One figure.

    Attributes:
        name: dotted, unique in the file.
        value: the figure.
        unit: "x" for a ratio, "ms", "GB/s".
        baseline: what it is compared with; None for a figure that stands alone.
        spread: interquartile range of what it is the median of.
        n: how many samples that were.
    """

    name: str
    value: float
    unit: str
    baseline: str | None
    spread: float
    n: int


def merge_entries(path: Path, entries: Sequence[Entry]) -> None:
    """Write ``entries``, in place of those of the same names; others in the file stay."""
    kept: list[dict[str, object]] = json.loads(path.read_text()) if path.exists() else []
    merged = {entry["name"]: entry for entry in kept}
    merged |= {entry.name: asdict(entry) for entry in entries}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(merged.values()), indent=2) + "\n")
