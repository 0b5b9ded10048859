"""The picture for the docs: put and get of every case and system, and how claims grow."""

from __future__ import annotations

from pathlib import Path

from integration.benchmarks.report import OURS, RAW, Session
from integration.benchmarks.systems import Operation
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_COLORS = {
    OURS: "#2f6fde",
    "usual": "#d9730d",
    RAW: "#e5a869",
    "ray_flat_padded": "#6b7280",
    "ray_flat": "#9ca3af",
    "memcpy": "#d1d5db",
}


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
    for system in (OURS, RAW):
        sizes = [
            (growth.rows, found[system].regimes["in turns"])
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
