"""File of results of all areas of the project: a JSON list with one entry per name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from integration.benchmarks.summary import Summary


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

    @classmethod
    def of(
        cls,
        name: str,
        summary: Summary,
        unit: str,
        *,
        baseline: str | None = None,
        factor: float = 1.0,
        value: float | None = None,
    ) -> Entry:
        """Return the entry of a summary.

        Args:
            name: name of the entry.
            summary: samples.
            unit: unit of the entry.
            baseline: the baseline of a ratio or difference.
            factor: units of the entry in one unit of the samples.
            value: value to report in place of the median, in the unit of the samples.
        """
        value = summary.value if value is None else value
        spread = summary.spread * factor
        return cls(name, value * factor, unit, baseline, spread, summary.count)

    @classmethod
    def ms(cls, name: str, seconds: Summary) -> Entry:
        """Return the entry of a duration's median, in milliseconds."""
        return cls.of(name, seconds, "ms", factor=1e3)

    @classmethod
    def p99_ms(cls, name: str, seconds: Summary) -> Entry:
        """Return the entry of a duration's 99th percentile, in milliseconds."""
        return cls.of(name, seconds, "ms", factor=1e3, value=seconds.p99)


def merge_entries(path: Path, entries: Sequence[Entry]) -> None:
    """Write ``entries``; replace those of the same names, and leave the others in the file."""
    existing: list[dict[str, object]] = json.loads(path.read_text()) if path.exists() else []
    merged = {entry["name"]: entry for entry in existing}
    merged |= {entry.name: asdict(entry) for entry in entries}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(merged.values()), indent=2) + "\n")
