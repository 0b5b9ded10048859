"""Pictures for the docs, one per area, drawn from the results of one run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from integration.benchmarks.admin_ingest import IngestResult
from integration.benchmarks.admin_pages import PagesResult
from integration.benchmarks.refit import RefitResult
from integration.benchmarks.report import DATA_PLANE, RAW, Session
from integration.benchmarks.summary import Summary
from integration.benchmarks.systems import Operation
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

_BLUE, _LIGHT_BLUE, _ORANGE, _LIGHT_ORANGE = "#2f6fde", "#8db1f0", "#d9730d", "#e5a869"
_DARK, _GREY, _LIGHT = "#6b7280", "#9ca3af", "#d1d5db"
_SYSTEM_COLORS = {
    DATA_PLANE: _BLUE,
    "usual": _ORANGE,
    RAW: _LIGHT_ORANGE,
    "ray_flat_padded": _DARK,
    "ray_flat": _GREY,
    "memcpy": _LIGHT,
}
_REFIT_COLORS = {
    "nixl": _BLUE,
    "shm": "#5e90e7",
    "tcp": _LIGHT_BLUE,
    "raw_nixl": _ORANGE,
    "raw_nixl_long": _LIGHT_ORANGE,
    "gloo": "#4b5563",
    "ray": _DARK,
    "file": _GREY,
    "memcpy": _LIGHT,
}


def save_pictures(
    folder: Path,
    session: Session,
    refits: Sequence[RefitResult],
    ingest: IngestResult,
    pages: PagesResult,
) -> list[Path]:
    """Draw speed.png, refit-speed.png and admin-speed.png; return the paths."""
    figures = {
        "speed": _data_plane(session),
        "refit-speed": _refit(refits),
        "admin-speed": _admin(ingest, pages),
    }
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures.items():
        for axes in figure.axes:
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1])
    return paths


def _figure(ratios: Sequence[float], height: float = 4.2) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(10, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(ratios), width_ratios=list(ratios), squeeze=False)
    return figure, list(axes[0])


def _titled(axes: Axes, title: str, grid: str = "y") -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(axis=grid, color="#e5e7eb")


def _grouped(
    axes: Axes, groups: Sequence[str], bars: dict[str, dict[int, Summary]], colors: dict[str, str]
) -> None:
    """Draw grouped bars with their interquartile ranges: name to group number to value."""
    width = 0.8 / max(1, len(bars))
    for place, (name, values) in enumerate(bars.items()):
        axes.bar(
            [number + (place + 0.5) * width - 0.4 for number in values],
            [summary.value for summary in values.values()],
            width,
            yerr=[summary.spread / 2 for summary in values.values()],
            error_kw={"elinewidth": 0.8, "ecolor": "#374151"},
            color=colors[name],
            label=name.replace("_", " "),
        )
    axes.set_xticks(range(len(groups)), list(groups), fontsize=8)


def _logarithmic(axis: Axis) -> None:
    """Make an axis logarithmic, with labels at 1, 2, 5, 10, 20."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _legend(axes: Axes) -> None:
    axes.legend(
        frameon=False,
        fontsize=8,
        ncols=9,
        columnspacing=1,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.14),
    )


def _scaled(summary: Summary, factor: float) -> Summary:
    return Summary(
        summary.value * factor, summary.p99 * factor, summary.spread * factor, summary.count
    )


def _data_plane(session: Session) -> Figure:
    """Draw put + get for every case and system, and claims by partition size."""
    figure, (bars, lines) = _figure([3, 2])
    durations: dict[str, dict[int, Summary]] = {}
    for system in _SYSTEM_COLORS:
        operation = Operation.PUT if system == "memcpy" else Operation.PUT_GET
        values = {
            number: _scaled(session.samples.summary(case.name, system, operation), 1e3)
            for number, case in enumerate(session.cases)
            if session.samples.has(case.name, system, operation)
        }
        if values:
            durations[system] = values
    titles = [case.title.replace(" of ", "\n") for case in session.cases]
    _grouped(bars, titles, durations, _SYSTEM_COLORS)
    _logarithmic(bars.yaxis)
    _titled(bars, "put + get, ms (less is better)")
    _legend(bars)
    for system in (DATA_PLANE, RAW):
        sizes = [
            (growth.rows, by_system[system].regimes["cold"])
            for growth, by_system in session.claims
            if system in by_system
        ]
        for style, percentile in (("o-", "p50"), ("o:", "p99")):
            lines.plot(
                [rows for rows, _ in sizes],
                [(each.value if percentile == "p50" else each.p99) * 1e3 for _, each in sizes],
                style,
                color=_SYSTEM_COLORS[system],
                label=f"{system.replace('_', ' ')}, {percentile}",
            )
    lines.set_xscale("log")
    _logarithmic(lines.yaxis)
    lines.set_xlabel("rows in the partition")
    _titled(lines, "cold claim of 32, ms")
    lines.legend(frameon=False, fontsize=8)
    return figure


def _refit(refits: Sequence[RefitResult]) -> Figure:
    """Draw the generators' fetch rates, and the ratios of the durations."""
    figure, (rates, ratios) = _figure([3, 2])
    cases = [
        f"{refit.case.nbytes / 2**30:.3g} GiB\n{refit.case.sources} to {refit.case.targets_count}"
        for refit in refits
    ]
    fetched: dict[str, dict[int, Summary]] = {}
    both: dict[str, dict[int, Summary]] = {}
    for way in _REFIT_COLORS:
        for number, refit in enumerate(refits):
            if way not in refit.fetch:
                continue
            rounds = [refit.case.nbytes / seconds / 1e9 for seconds in refit.fetch[way]]
            fetched.setdefault(way, {})[number] = Summary.of(rounds)
            ratio = refit.ratio(way, both_steps=way != "raw_nixl")
            if way in ("raw_nixl", "gloo", "ray", "file") and ratio is not None:
                both.setdefault(way, {})[number] = ratio
    _grouped(rates, cases, fetched, _REFIT_COLORS)
    _logarithmic(rates.yaxis)
    _titled(rates, "fetch rate of the generators, GB/s (more is better)")
    _legend(rates)
    _grouped(ratios, cases, both, _REFIT_COLORS)
    ratios.axhline(1, color="#111827", linewidth=1)
    _titled(ratios, "duration / refit-mx over NIXL")
    ratios.set_xlabel("publish and fetch; raw NIXL: fetch only", fontsize=8)
    return figure


def _admin(ingest: IngestResult, pages: PagesResult) -> Figure:
    """Draw the ingest rates, and the durations of pages."""
    figure, (rates, times) = _figure([1, 3])
    for place, measured in enumerate(ingest.rates.values()):
        rate = Summary.of(measured)
        rates.bar(
            place,
            rate.value,
            0.6,
            yerr=rate.spread / 2,
            error_kw={"elinewidth": 0.8, "ecolor": "#374151"},
            color=(_BLUE, _GREY)[place % 2],
        )
    names = [server.replace(" ", "\n") for server in ingest.rates]
    rates.set_xticks(range(len(names)), names, fontsize=7)
    _titled(rates, "ingested spans, 1/s")
    paths = sorted(pages.seconds, key=pages.p95)
    for place, path in enumerate(paths):
        median = Summary.of(pages.seconds[path]).value * 1e3
        times.plot([median, pages.p95(path) * 1e3], [place] * 2, color=_LIGHT_BLUE, linewidth=4)
        times.plot(median, place, "o", color=_BLUE, markersize=4)
    labels = map(pages.label, paths)
    shown = [label if len(label) <= 40 else f"{label[:39]}…" for label in labels]
    times.set_yticks(range(len(paths)), shown, fontsize=7)
    times.set_xlim(left=0)
    _titled(times, "pages and answers, ms: median to p95", grid="x")
    return figure
