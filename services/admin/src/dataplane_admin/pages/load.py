"""Lanes of the load of engines and nodes, below a waterfall or on a separate page.

Horizontal positions are percent of the period, as in `observability.views.drawing`; vertical ones
are pixels. A lane has its name, and a strip per metric:

    engine-3:8000  mean 4.2 running     _NAME
    requests, max 12   ▂▄▄▇▇▄▂          _STRIP
    KV cache, max 61 % ▂▂▄▄▄▂▁          _STRIP
    GPU 0, max 97.0 %  ▁▁▂▁▁▁▁          _LOW_STRIP
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median

from dataplane_admin import models
from dataplane_admin.load_metrics import METRICS
from dataplane_admin.pages.words import ago, count, duration, plural
from observability.views.drawing import Drawing, Tick, draw
from observability.views.quantities import percent

MAX_LANES = 16
"""Maximum number of lanes of engines, and of nodes."""
MAX_GPUS = 16
"""Maximum number of GPUs of a node with separate strips."""
COLUMNS = 60
"""Number of columns of a lane, each with a text of all values."""

LOAD_POINTS = 4 * COLUMNS
"""Maximum number of points of a series that the lanes need."""

_NAME = 24
_STRIP = 20
_LOW_STRIP = 14
_GAP = 4
_PLOT = 16
_FOOT = 6
_MIN_REACH_S = 1.0
_SILENT_S = 120.0
# Strips of a lane: title and metrics, stacked from the base up.
_STRIPS: Mapping[str, Sequence[tuple[str, Sequence[str]]]] = {
    "engine": (
        ("requests", ("running", "waiting")),
        ("KV cache", ("kv_cache",)),
        ("tokens/s", ("generation_tokens",)),
        ("prefix cache hits", ("prefix_hits",)),
        ("preempted", ("preemptions",)),
    ),
    "node": (
        ("CPU", ("cpu",)),
        ("memory", ("memory",)),
        ("GPU", ("gpu",)),
        ("GPU memory", ("gpu_memory",)),
    ),
}

_LOW = ("prefix_hits", "preemptions")
"""Metrics with a low strip. The GPUs of a node have one each."""

_Values = Sequence[float | None]
"""A value for each column; None where it is unknown."""
_ByMetric = Mapping[tuple[str, str], _Values]
"""Columns by metric and device."""


@dataclass(frozen=True)
class Area:
    """The filled area below a line, as an SVG path in a box of 100 by `_PLOT`."""

    kind: str
    path: str


@dataclass(frozen=True)
class Strip:
    """A metric of a lane over time, or two that are stacked."""

    title: str
    y: int
    height: int
    areas: Sequence[Area]


@dataclass(frozen=True)
class Column:
    """A column of a lane with its values as text."""

    x: float
    width: float
    words: str


@dataclass(frozen=True)
class LoadLane:
    """The lane of an engine or node."""

    kind: str
    name: str
    summary: str
    top: int
    height: int
    strips: Sequence[Strip]
    columns: Sequence[Column]


@dataclass(frozen=True)
class LoadDrawing:
    """All lanes, from ``top`` down."""

    top: int
    height: int
    lanes: Sequence[LoadLane]
    omitted: Mapping[str, int]
    """Number of engines and nodes without a lane, by kind."""


@dataclass(frozen=True)
class EnginesPage:
    """Content of the page of engines and nodes: a ruler, and the lanes below it."""

    ruler: Drawing
    load: LoadDrawing | None


def engines_page(load: models.Load) -> EnginesPage:
    """Return the page of the last hour, whose lanes show the newest values as text."""
    seconds = (load.end_ns - load.start_ns) / 1e9
    ruler = draw(seconds, (), (), ())
    ticks = [
        Tick(
            round(100 * (1 - ago_s / seconds), 4),
            f"\N{MINUS SIGN}{ago_s // 60} min" if ago_s else "now",
        )
        # Every 15 minutes, so that the labels also fit a phone.
        for ago_s in range(int(seconds), -1, -900)
    ]
    lanes = draw_load(load, ruler.height, newest=True)
    height = ruler.height + (0 if lanes is None else lanes.height)
    return EnginesPage(replace(ruler, ticks=ticks, height=height), lanes)


def draw_load(load: models.Load, top: int, *, newest: bool = False) -> LoadDrawing | None:
    """Draw the lanes of a period; None without any.

    Args:
        load: the period, which is the full width.
        top: pixels above the first lane.
        newest: whether the text of a lane has the newest values; else it has means.
    """
    seconds = (load.end_ns - load.start_ns) / 1e9
    shown = []
    for subject in load.subjects:
        values = _columns_of(subject, seconds)
        if any(value is not None for held in values.values() for value in held):
            shown.append((subject, values))
    # Strips of the same title share a scale, so that engines can be compared.
    scales: dict[str, float] = {}
    for subject, values in shown:
        for title, metrics in _STRIPS[subject.kind]:
            lines = [held for _, held in _stacked(values, metrics)]
            largest = max((value for held in lines for value in held if value), default=0.0)
            is_share = METRICS[metrics[0]].is_ratio
            scales[title] = 1.0 if is_share else max(largest, scales.get(title, 0.0))
    lanes: list[LoadLane] = []
    omitted = dict(load.omitted)
    y = top
    for kind in _STRIPS:
        of_kind = [each for each in shown if each[0].kind == kind]
        omitted[kind] = omitted.get(kind, 0) + len(of_kind[MAX_LANES:])
        for subject, values in of_kind[:MAX_LANES]:
            lane = _lane(subject, values, scales, y, seconds, newest=newest)
            lanes.append(lane)
            y += lane.height
    if not lanes:
        return None
    return LoadDrawing(top, y - top, lanes, omitted)


def _lane(
    subject: models.LoadSubject,
    values: _ByMetric,
    scales: Mapping[str, float],
    top: int,
    seconds: float,
    *,
    newest: bool,
) -> LoadLane:
    strips: list[Strip] = []
    y = top + _NAME
    for title, metrics in _STRIPS[subject.kind]:
        for name, part in _parts(title, metrics, values):
            stacked = _stacked(part, metrics)
            known = [value for _, held in stacked for value in held if value is not None]
            if not known:
                continue
            areas = [
                Area("waiting" if metric == "waiting" else "busy", _path(held, scales[title]))
                for metric, held in reversed(stacked)
            ]
            # A column is a mean, so a single line also considers the reported values.
            peak = max(known if len(stacked) > 1 else known + _values_of(subject, metrics, part))
            devices = sum(metric in metrics for metric, _ in part)
            label = "max" if devices <= len(stacked) else "max of any"  # the line is their mean
            maximum = _figure(metrics[0], peak).removesuffix(" running").removesuffix(" tokens/s")
            pitch = _LOW_STRIP if name != title or metrics[0] in _LOW else _STRIP
            strips.append(Strip(f"{name}, {label} {maximum}", y, pitch - _GAP, areas))
            y += pitch
    width = 100 / COLUMNS
    place = f"{subject.kind} {subject.name}"
    return LoadLane(
        kind=subject.kind,
        name=subject.name,
        summary=_newest(subject, seconds) if newest else _means(values),
        top=top,
        height=y - top + _FOOT,
        strips=strips,
        columns=[
            Column(
                round(width * number, 4),
                round(width, 4),
                f"{place}, {_moment(seconds, number, newest=newest)}: {text}",
            )
            for number in range(COLUMNS)
            if (text := _words(values, number))
        ],
    )


def _parts(
    title: str, metrics: Sequence[str], values: _ByMetric
) -> Iterator[tuple[str, _ByMetric]]:
    """Yield name and values of each strip: one for each of several GPUs, else one."""
    gpus = {
        device: {(metric, device): values[metric, device]}
        for metric, device in values
        if metric == "gpu"
    }
    if metrics != ("gpu",) or len(gpus) < 2:
        yield title, values
        return
    for device in [*gpus][:MAX_GPUS]:
        yield f"GPU {device}", gpus.pop(device)
    if gpus:
        rest = {key: held for part in gpus.values() for key, held in part.items()}
        yield f"mean of {plural(len(rest), 'more GPU')}", rest


def _values_of(subject: models.LoadSubject, metrics: Sequence[str], part: _ByMetric) -> list[float]:
    """Return the reported values of these metrics in a part of a lane."""
    return [
        value
        for series in subject.series
        if series.metric in metrics and (series.metric, series.device) in part
        for value in series.values
        if value is not None
    ]


def _moment(seconds: float, number: int, *, newest: bool) -> str:
    """Return the middle of a column: how long ago, or how long after the start."""
    at_s = seconds * (number + 0.5) / COLUMNS
    return f"{ago(seconds - at_s)} ago" if newest else f"at {duration(at_s)}"


def _newest(subject: models.LoadSubject, seconds: float) -> str:
    """Return the newest values as text, or for how long the subject has been silent."""
    texts, ages = [], []
    for series in subject.series:
        known = [
            (time_s, value)
            for time_s, value in zip(series.times_s, series.values, strict=True)
            if value is not None
        ]
        if known:
            ages.append(seconds - known[-1][0])
            if ages[-1] <= _SILENT_S:
                texts.append(_labelled(series.metric, series.device, known[-1][1]))
    return ", ".join(texts) if texts else f"silent for {ago(min(ages))}"


def _means(values: _ByMetric) -> str:
    """Return the means of a lane, and how long an engine was idle."""
    parts = []
    for metric in ("running", "waiting", "cpu", "gpu"):
        known = [value for value in _mean(values, metric) if value is not None]
        if known:
            label = "" if METRICS[metric].kind == "engine" else f"{METRICS[metric].label} "
            parts.append(f"{label}{_figure(metric, fmean(known))}")
    running = [value for value in _mean(values, "running") if value is not None]
    if idle := sum(not value for value in running):
        parts.append(f"idle {percent(idle, len(running))}")
    return f"mean {', '.join(parts)}" if parts else ""


def _columns_of(subject: models.LoadSubject, seconds: float) -> _ByMetric:
    """Return the value of each metric and device in each column."""
    return {
        (series.metric, series.device): _resampled(series.times_s, series.values, seconds)
        for series in subject.series
    }


def _resampled(times: Sequence[float], values: _Values, seconds: float) -> _Values:
    """Return the mean of each column; a column without points has the value of a near point."""
    distances = [after - before for before, after in pairwise(times)]
    reach = max(_MIN_REACH_S, 1.5 * median(distances)) if distances else 10.0
    width = seconds / COLUMNS
    columns: list[float | None] = []
    for number in range(COLUMNS):
        start, end = number * width, (number + 1) * width
        inside = slice(bisect_left(times, start), bisect_right(times, end))
        known = [value for value in values[inside] if value is not None]
        if known:
            columns.append(fmean(known))
            continue
        middle = (start + end) / 2
        near = range(max(0, inside.start - 1), min(len(times), inside.stop + 1))
        nearest = min(near, key=lambda place: abs(times[place] - middle), default=None)
        is_near = nearest is not None and abs(times[nearest] - middle) <= reach
        columns.append(values[nearest] if is_near and nearest is not None else None)
    return columns


def _mean(values: _ByMetric, metric: str) -> _Values:
    """Return the mean of a metric over its devices."""
    held = [columns for (name, _), columns in values.items() if name == metric]
    means: list[float | None] = []
    for number in range(COLUMNS if held else 0):
        known = [value for columns in held if (value := columns[number]) is not None]
        means.append(fmean(known) if known else None)
    return means


def _stacked(values: _ByMetric, metrics: Sequence[str]) -> Sequence[tuple[str, _Values]]:
    """Return the upper edge of each reported metric's area; areas are stacked in this order."""
    lines: list[tuple[str, _Values]] = []
    top: _Values = [0.0] * COLUMNS
    for metric in metrics:
        if own := _mean(values, metric):
            top = [
                None if base is None or value is None else base + value
                for base, value in zip(top, own, strict=True)
            ]
            lines.append((metric, top))
    return lines


def _path(values: _Values, scale: float) -> str:
    """Return the area below a line with a step at each column; unknown columns are left out."""
    width = 100 / COLUMNS
    parts = []
    is_open = False
    for number, value in enumerate([*values, None]):
        if value is not None:
            if not is_open:
                parts.append(f"M{number * width:.2f},{_PLOT}")
            height = _PLOT * min(1.0, value / scale) if scale > 0 else 0.0
            parts.append(f"V{_PLOT - height:.1f}H{(number + 1) * width:.2f}")
        elif is_open:
            parts.append(f"V{_PLOT}Z")
        is_open = value is not None
    return "".join(parts)


def _words(values: _ByMetric, number: int) -> str:
    """Return all values of a column as text."""
    return ", ".join(
        _labelled(metric, device, value)
        for (metric, device), columns in values.items()
        if (value := columns[number]) is not None
    )


def _labelled(metric: str, device: str, value: float) -> str:
    """Return ``3 running`` or ``GPU 0 97.0 %``."""
    label = " ".join(filter(None, (METRICS[metric].label, device)))
    figure = _figure(metric, value)
    return figure if METRICS[metric].unit == "{request}" else f"{label} {figure}"


def _figure(metric: str, value: float) -> str:
    unit = METRICS[metric].unit
    if unit == "1":
        return percent(value, 1.0)
    number = f"{value:.1f}".removesuffix(".0") if value < 100 else count(value)
    if unit == "{request}":
        return f"{number} {METRICS[metric].label}"
    return f"{number} {unit[1:-3]}s/s"
