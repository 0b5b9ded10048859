"""Results of a session: entries for the file, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from integration.benchmarks.cases import FIELDS, SMALL_FIELD, WRITTEN_BACK, Batch, Case
from integration.benchmarks.claims import ClaimTimes, Growth, cold_ratio
from integration.benchmarks.harness import Samples
from integration.benchmarks.results_file import Entry
from integration.benchmarks.summary import Summary
from integration.benchmarks.systems import Operation
from rich.table import Table

DATA_PLANE = "data_plane"
RAW = "raw"
HEADLINES = (
    "tq.put_get_512.ratio_vs_usual",
    "tq.put_get_512.ratio_vs_ray_flat",
    "tq.slices8_512.ratio_vs_usual",
    "tq.claim32_100k.p50_ms",
    "tq.put_get_512_tcp.ratio_vs_usual",
    "refit.nixl_2to4.ratio_vs_raw_nixl",
    "refit.nixl_2to4.ratio_vs_gloo",
    "trace.step_overhead_pct",
    "admin.ingest_spans_per_s",
    "admin.page_p95_ms",
)
"""Names that a complete run of backend ``packed`` writes, and that the project's docs quote."""

_SLOWER = ("usual", RAW)  # ratio is the baseline's duration / the data plane's: higher is better
_FASTER = ("ray_flat", "ray_flat_padded")  # data plane's / baseline's: lower is better


@dataclass
class Session:
    """Measurements with one configuration of the data plane.

    Attributes:
        prefix: first part of its results' names.
        suffix: part of the names after the case's name.
        note: part of a table's title after the case's title.
        systems: systems that ran.
        cases: cases that ran.
        samples: seconds by case, system and operation.
        claims: partition size, with the claim durations by system.
        inspecting: operation of the inspector to its seconds at 100,000 rows.
    """

    prefix: str
    suffix: str
    note: str
    systems: list[str]
    cases: list[Case]
    samples: Samples = field(default_factory=Samples)
    claims: list[tuple[Growth, dict[str, ClaimTimes]]] = field(default_factory=list)
    inspecting: dict[str, Summary] = field(default_factory=dict)

    def entries(self) -> list[Entry]:
        """Return ratios and medians, with the names that README.md lists."""
        entries = [entry for case in self.cases for entry in self._case_entries(case)]
        for growth, times in self.claims:
            name = f"{self.prefix}.claim32_{growth.name}{self.suffix}"
            for system, claims in times.items():
                label = "" if system == DATA_PLANE else f"{system}_"
                for regime, summary in claims.regimes.items():
                    point = f"{name}.{label}{'warm_' if regime == 'warm' else ''}"
                    entries.append(Entry.ms(f"{point}p50_ms", summary))
                    entries.append(Entry.p99_ms(f"{point}p99_ms", summary))
                    tail = summary.p99 / summary.value
                    entries.append(
                        Entry(f"{point}p99_over_p50", tail, "x", "p50", 0, summary.count)
                    )
            if {DATA_PLANE, RAW} <= set(times):
                ratio = cold_ratio(times[RAW], times[DATA_PLANE])
                entries.append(Entry.of(f"{name}.ratio_vs_raw", ratio, "x", baseline=RAW))
        for operation, summary in self.inspecting.items():
            name = f"{self.prefix}.inspector_{operation}_100k{self.suffix}"
            entries.append(Entry.ms(f"{name}.p50_ms", summary))
            entries.append(Entry.p99_ms(f"{name}.p99_ms", summary))
        return entries

    def _case_entries(self, case: Case) -> list[Entry]:
        entries = []
        for operation in Operation:
            name = f"{self.prefix}.{operation}_{case.name}{self.suffix}"
            for system in self.systems:
                if self.samples.has(case.name, system, operation):
                    summary = self.samples.summary(case.name, system, operation)
                    entries.append(Entry.ms(f"{name}.{system}_ms", summary))
            if not self.samples.has(case.name, DATA_PLANE, operation):
                continue
            for system in (*_SLOWER, *_FASTER):
                if self.samples.has(case.name, system, operation):
                    ratio = (
                        self.samples.ratio(case.name, operation, over=system, under=DATA_PLANE)
                        if system in _SLOWER
                        else self.samples.ratio(case.name, operation, over=DATA_PLANE, under=system)
                    )
                    entries.append(
                        Entry.of(f"{name}.ratio_vs_{system}", ratio, "x", baseline=system)
                    )
        return entries

    def case_rows(self, case: Case) -> list[list[str]]:
        """Return one row per operation and system, for `CASE_HEADINGS`."""
        batch = Batch(case)
        copy_rate = None
        if self.samples.has(case.name, "memcpy", Operation.PUT):
            copied = self.samples.summary(case.name, "memcpy", Operation.PUT).value
            copy_rate = batch.stored_bytes(FIELDS) / copied
        rows = []
        for operation in Operation:
            for system in self.systems:
                if not self.samples.has(case.name, system, operation):
                    continue
                summary = self.samples.summary(case.name, system, operation)
                rows.append(
                    [
                        operation.value,
                        system,
                        _short(summary.value * 1e3),
                        _short(summary.spread * 1e3),
                        _short(summary.p99 * 1e3),
                        *_bounds(batch, operation, summary.value, copy_rate),
                        _short(median(self.samples.faults[case.name, system, operation]) / 1e3),
                        self._against_usual(case, system, operation),
                    ]
                )
        return rows

    def _against_usual(self, case: Case, system: str, operation: Operation) -> str:
        if system == "usual" or not self.samples.has(case.name, "usual", operation):
            return ""
        ratio = self.samples.ratio(case.name, operation, over="usual", under=system)
        return f"{_short(ratio.value)} ({_short(ratio.spread)})"

    def claim_rows(self) -> list[list[str]]:
        """Return one row per size, system and regime, for `CLAIM_HEADINGS`."""
        return [
            [
                f"{growth.rows:,}",
                system,
                regime,
                _short(summary.value * 1e3),
                _short(summary.p99 * 1e3),
                _short(summary.p99 / summary.value),
                str(summary.count),
            ]
            for growth, times in self.claims
            for system, claims in times.items()
            for regime, summary in claims.regimes.items()
        ]

    def inspecting_rows(self) -> list[list[str]]:
        """Return one row per operation, for `INSPECTING_HEADINGS`."""
        return [
            [
                operation,
                _short(summary.value * 1e3),
                _short(summary.p99 * 1e3),
                str(summary.count),
            ]
            for operation, summary in self.inspecting.items()
        ]


CASE_HEADINGS = [
    "operation",
    "system",
    "p50 ms",
    "IQR",
    "p99 ms",
    "MB",
    "memcpy ms",
    "GB/s",
    "x memcpy",
    "k faults",
    "usual/this (IQR)",
]
CLAIM_HEADINGS = ["rows in partition", "system", "claims", "p50 ms", "p99 ms", "p99/p50", "times"]
INSPECTING_HEADINGS = ["at 100,000 rows", "p50 ms", "p99 ms", "times"]
_FEW_BYTES = 64 << 10


def _bounds(
    batch: Batch, operation: Operation, seconds: float, copy_rate: float | None
) -> list[str]:
    """Return megabytes moved, time of one copy, rate, and duration in copies.

    All are empty for an operation that moves few bytes, which requests and Python bound.
    """
    names: Sequence[str]
    match operation:
        case Operation.PUT | Operation.GET | Operation.SLICES8 | Operation.PUT_GET:
            names = FIELDS
        case Operation.ONE_FIELD:
            names = [SMALL_FIELD]
        case Operation.WRITE_BACK:
            names = [WRITTEN_BACK]
        case _:
            names = []
    moved = batch.stored_bytes(names)
    if moved < _FEW_BYTES:
        return ["", "", "", ""]
    copy_ms = "" if copy_rate is None else _short(moved / copy_rate * 1e3)
    factor = "" if copy_rate is None else _short(seconds * copy_rate / moved)
    return [_short(moved / 1e6), copy_ms, _short(moved / seconds / 1e9), factor]


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2g}" if value < 1 else f"{value:.3g}"


def terminal_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table for a terminal, with a line between groups of the first column."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < 2 else "right", no_wrap=True)
    for place, row in enumerate(rows):
        last = place + 1 == len(rows) or rows[place + 1][0] != row[0]
        table.add_row(*row, end_section=last)
    return table


def markdown_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [f"### {title}", "", " | ".join(headings), " | ".join("---" for _ in headings)]
    lines += [" | ".join(cell or "-" for cell in row) for row in rows]
    return "\n".join(line if not line or line[0] == "#" else f"| {line} |" for line in lines) + "\n"
