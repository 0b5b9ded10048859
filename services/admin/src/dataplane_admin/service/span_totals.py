"""Statistics of the spans of a trace: by name, by path from the root, and by service."""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from dataplane_admin import models
from observability.records import Span
from observability.views import Step
from observability.views.intervals import clip, total_ns

MAX_NAMES = 500
MAX_PATHS = 1_000
MAX_DEPTH = 48
MAX_SERVICES = 100


def self_times_ns(step: Step) -> dict[str, int]:
    """Return the self time of each span: its duration without the time of any of its children.

    Children that run concurrently count once; those that outlive the span count up to its end:

        span      |==============|
        children     |---|  |--------|
                       |--|
        self      |==|    ==
    """
    times = {}
    for span in step.spans:
        duration = max(0, span.end_ns - span.start_ns)
        if duration and (children := step.children(span.span_id)):
            own = (span.start_ns, span.end_ns)
            duration -= total_ns(clip([(each.start_ns, each.end_ns) for each in children], own))
        times[span.span_id] = duration
    return times


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """Return the smallest value with at least ``share`` of the values at or below it.

    None without values.
    """
    if not ordered:
        return None
    # Subtract a little: floats may make a product such as 0.95 * 20 slightly larger than 19.
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)]


def name_statistics(step: Step, self_ns: Mapping[str, int]) -> tuple[list[models.SpanGroup], int]:
    """Return the statistics by name, and the number of names that are omitted."""
    groups: defaultdict[tuple[str, str, str], list[Span]] = defaultdict(list)
    for span in step.spans:
        groups[span.process.service, span.name, span.kind].append(span)
    bounds = (step.start_ns, step.end_ns)
    rows = []
    for (service, name, kind), spans in groups.items():
        seconds = sorted(span.seconds for span in spans if span.is_timed)
        active = clip([(span.start_ns, span.end_ns) for span in spans], bounds)
        rows.append(
            models.SpanGroup(
                service=service,
                name=name,
                kind=kind,
                count=len(spans),
                errors=sum(span.outcome == "error" for span in spans),
                total_s=sum(seconds),
                self_s=sum(self_ns[span.span_id] for span in spans) / 1e9,
                p50_s=quantile(seconds, 0.5),
                p95_s=quantile(seconds, 0.95),
                max_s=max(seconds, default=None),
                active_s=total_ns(active) / 1e9,
            )
        )
    rows.sort(key=lambda row: -row.total_s)
    return rows[:MAX_NAMES], max(0, len(rows) - MAX_NAMES)


@dataclass
class _Path:
    """The spans of one path; children by service and name."""

    service: str
    name: str
    depth: int
    count: int = 0
    errors: int = 0
    total_ns: int = 0
    self_ns: int = 0
    children: dict[tuple[str, str], _Path] = field(default_factory=dict)

    def child(self, span: Span) -> _Path:
        """Return the path of a span below this one."""
        key = span.process.service, span.name
        if key not in self.children:
            self.children[key] = _Path(*key, self.depth + 1)
        return self.children[key]


def path_statistics(step: Step, self_ns: Mapping[str, int]) -> tuple[list[models.SpanPath], int]:
    """Return the statistics by path, siblings by total, and the number of omitted spans."""
    top = _Path("", "", -1)
    stack = [(span, top) for span in step.tree.tops]
    while stack:
        span, above = stack.pop()
        if above.depth + 1 >= MAX_DEPTH:
            continue
        path = above.child(span)
        path.count += 1
        path.errors += span.outcome == "error"
        path.total_ns += max(0, span.end_ns - span.start_ns)
        path.self_ns += self_ns[span.span_id]
        stack += [(child, path) for child in step.children(span.span_id)]
    included = _largest(top)
    rows: list[models.SpanPath] = []
    paths = [top]
    while paths:
        path = paths.pop()
        if path is not top:
            seconds = {"total_s": path.total_ns / 1e9, "self_s": path.self_ns / 1e9}
            rows.append(models.SpanPath.of(path, **seconds))
        children = [child for child in path.children.values() if id(child) in included]
        paths += sorted(children, key=lambda child: child.total_ns)
    return rows, len(step.spans) - sum(row.count for row in rows)


def _largest(top: _Path) -> set[int]:
    """Return the ids of the `MAX_PATHS` paths with the largest totals, each with its parents."""
    order = count()  # paths cannot be compared
    waiting = [(0, next(order), top)]
    included: set[int] = set()
    while waiting and len(included) <= MAX_PATHS:  # ``top`` is not a row
        _, _, path = heapq.heappop(waiting)
        included.add(id(path))
        for child in path.children.values():
            heapq.heappush(waiting, (-child.total_ns, next(order), child))
    return included


def services_of(step: Step) -> tuple[list[models.ServiceSpans], int]:
    """Return the services of a trace, those with the most spans first, and how many are omitted."""
    spans = Counter(span.process.service for span in step.spans)
    failed = Counter(span.process.service for span in step.spans if span.outcome == "error")
    rows = [
        models.ServiceSpans(service=service, spans=number, errors=failed[service])
        for service, number in spans.most_common(MAX_SERVICES)
    ]
    return rows, len(spans) - len(rows)
