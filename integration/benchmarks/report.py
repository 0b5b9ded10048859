"""What a run amounts to: entries for the file, tables for people, a picture for the docs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from integration.benchmarks.cases import FIELDS, SMALL_FIELD, WRITTEN_BACK, Batch, Case
from integration.benchmarks.claims import ClaimTimes, Growth
from integration.benchmarks.harness import Samples, Summary
from integration.benchmarks.results_file import Entry
from integration.benchmarks.systems import Operation
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

OURS = "ours"
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
"""Names that a complete run of backend ``packed`` writes; others in the project read them."""

_OVER_OURS = ("usual", "raw")  # baseline's time / ours: higher is better
_UNDER_OURS = ("ray_flat", "ray_flat_padded")  # ours / baseline's: lower is better
_COLORS = {
    OURS: "#2f6fde",
    "usual": "#d9730d",
    "raw": "#e5a869",
    "ray_flat_padded": "#6b7280",
    "ray_flat": "#9ca3af",
    "memcpy": "#d1d5db",
}


@dataclass
class Session:
    """What was measured with one configuration of ours.

    Attributes:
        prefix: first part of its results' names.
        suffix: what follows a case's name there.
        note: the same for people, after a title.
        systems: those that ran.
        cases: those that ran.
        samples: seconds by case, system and operation.
        claims: by partition size and system, what claims of 32 took.
        inspecting: by what was timed at 100,000 rows, its seconds; ours only.
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
        """Ratios and medians, in the names that README.md lists."""
        found = [entry for case in self.cases for entry in self._case_entries(case)]
        for growth, times in self.claims:
            name = f"{self.prefix}.claim32_{growth.name}{self.suffix}"
            for system, took in times.items():
                label = "" if system == OURS else f"{system}_"
                for turn, summary in (("", took.turns), ("steady_", took.steady)):
                    for point, value in (("p50", summary.value), ("p99", summary.p99)):
                        found.append(_ms(f"{name}.{label}{turn}{point}_ms", value, summary))
            if {OURS, "raw"} <= set(times):
                ours, raw = times[OURS].turns, times["raw"].turns
                ratio = raw.value / ours.value
                found.append(
                    Entry(
                        f"{name}.ratio_vs_raw",
                        ratio,
                        "x",
                        "raw",
                        # Turns of several claims each: there are no pairs to take ratios of.
                        ratio * (raw.spread / raw.value + ours.spread / ours.value),
                        ours.count,
                    )
                )
        for timed, summary in self.inspecting.items():
            name = f"{self.prefix}.inspector_{timed}_100k{self.suffix}"
            found.append(_ms(f"{name}.p50_ms", summary.value, summary))
            found.append(_ms(f"{name}.p99_ms", summary.p99, summary))
        return found

    def _case_entries(self, case: Case) -> list[Entry]:
        found = []
        for operation in Operation:
            name = f"{self.prefix}.{operation}_{case.name}{self.suffix}"
            for system in self.systems:
                if self.samples.has(case.name, system, operation):
                    summary = self.samples.summary(case.name, system, operation)
                    found.append(_ms(f"{name}.{system}_ms", summary.value, summary))
            if not self.samples.has(case.name, OURS, operation):
                continue
            for system in (*_OVER_OURS, *_UNDER_OURS):
                if self.samples.has(case.name, system, operation):
                    ratio = (
                        self.samples.ratio(case.name, operation, over=system, under=OURS)
                        if system in _OVER_OURS
                        else self.samples.ratio(case.name, operation, over=OURS, under=system)
                    )
                    found.append(
                        Entry(
                            f"{name}.ratio_vs_{system}",
                            ratio.value,
                            "x",
                            system,
                            ratio.spread,
                            ratio.count,
                        )
                    )
        return found

    def case_rows(self, case: Case) -> list[list[str]]:
        """One line for each operation and system, see `CASE_HEADINGS`."""
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
        """One line for each size and system, see `CLAIM_HEADINGS`."""
        return [
            [
                f"{growth.rows:,}",
                system,
                _short(took.turns.value * 1e3),
                _short(took.turns.p99 * 1e3),
                _short(took.steady.value * 1e3),
                _short(took.steady.p99 * 1e3),
                str(took.turns.count + took.steady.count),
            ]
            for growth, times in self.claims
            for system, took in times.items()
        ]

    def inspecting_rows(self) -> list[list[str]]:
        """One line for each thing that was timed, see `INSPECTING_HEADINGS`."""
        return [
            [
                timed,
                OURS,
                _short(summary.value * 1e3),
                _short(summary.p99 * 1e3),
                str(summary.count),
            ]
            for timed, summary in self.inspecting.items()
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
CLAIM_HEADINGS = [
    "rows in partition",
    "system",
    "p50 ms",
    "p99 ms",
    "p50 ms, steady",
    "p99 ms, steady",
    "claims",
]
INSPECTING_HEADINGS = ["at 100,000 rows", "system", "p50 ms", "p99 ms", "times"]
_FEW_BYTES = 64 << 10


def _bounds(
    batch: Batch, operation: Operation, seconds: float, copy_rate: float | None
) -> list[str]:
    """What bounds an operation that moves bytes; nothing where requests and Python bound it.

    Megabytes moved, the time to copy them, the rate reached, and how often that time it took.
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


def _ms(name: str, seconds: float, summary: Summary) -> Entry:
    return Entry(name, seconds * 1e3, "ms", None, summary.spread * 1e3, summary.count)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2g}" if value < 1 else f"{value:.3g}"


def terminal_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """For a terminal; a line between groups of the first column."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < 2 else "right", no_wrap=True)
    for place, row in enumerate(rows):
        last = place + 1 == len(rows) or rows[place + 1][0] != row[0]
        table.add_row(*row, end_section=last)
    return table


def markdown_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """For a page of docs."""
    lines = [f"### {title}", "", " | ".join(headings), " | ".join("---" for _ in headings)]
    lines += [" | ".join(cell or "-" for cell in row) for row in rows]
    return "\n".join(line if not line or line[0] == "#" else f"| {line} |" for line in lines) + "\n"


def save_picture(session: Session, path: Path) -> None:
    """Draw put + get for every case and system, and how claims grow."""
    figure = Figure(figsize=(10, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    bars, lines = figure.subplots(1, 2, width_ratios=[3, 2])
    systems = [name for name in _COLORS if name in session.systems]
    width = 0.8 / len(systems)
    for place, system in enumerate(systems):
        operation = Operation.PUT if system == "memcpy" else Operation.PUT_GET
        present = [
            (number, session.samples.summary(case.name, system, operation).value * 1e3)
            for number, case in enumerate(session.cases)
        ]
        bars.bar(
            [number + (place + 0.5) * width - 0.4 for number, _ in present],
            [value for _, value in present],
            width,
            color=_COLORS[system],
            label=system,
        )
    bars.set_xticks(
        range(len(session.cases)),
        [case.title.replace(" of ", "\n") for case in session.cases],
        fontsize=8,
    )
    bars.set_yscale("log")
    bars.set_title("put + get, ms", loc="left", fontsize=11)
    bars.legend(
        frameon=False,
        fontsize=8,
        ncols=6,
        columnspacing=1,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.14),
    )
    for system in (OURS, "raw"):
        sizes = [
            (growth.rows, found[system].turns)
            for growth, found in session.claims
            if system in found
        ]
        for style, points in (
            ("o-", [(rows, summary.value) for rows, summary in sizes]),
            ("o:", [(rows, summary.p99) for rows, summary in sizes]),
        ):
            lines.plot(
                [rows for rows, _ in points],
                [seconds * 1e3 for _, seconds in points],
                style,
                color=_COLORS[system],
                label=f"{system}, {'p50' if style == 'o-' else 'p99'}",
            )
    lines.set_xscale("log")
    lines.set_yscale("log")
    lines.set_xlabel("rows in the partition")
    lines.set_title("claim of 32, ms", loc="left", fontsize=11)
    lines.legend(frameon=False, fontsize=8)
    for axes in (bars, lines):
        axes.grid(axis="y", color="#e5e7eb")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
