"""The busy and idle time of each process during a step.

At each moment, a process counts for one bucket: that of its innermost span with a bucket. If spans
of several threads run at the same time, the first bucket in the order of `BUCKETS` counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from observability.records import Process, Span
from observability.views import attributes
from observability.views.intervals import Interval, clip, difference, total_ns, union
from observability.views.steps import Step
from observability.views.tree import Tree

BUCKETS = ("productive", "overhead", "wasted", "idle")
"""Values of ``rl.bucket``, in order of precedence."""

BUSY_BUCKETS = frozenset({"productive", "overhead", "wasted"})
"""The buckets in which a process works."""


@dataclass(frozen=True)
class ProcessTime:
    """The time of a process during a step.

    Attributes:
        process: the process.
        label: its printable name.
        busy: intervals of the step in which the process was busy, in nanoseconds since 1970.
        seconds: seconds by bucket. Empty if no span of the process has a bucket, since its work is
            unknown then.
        busy_seconds: total of ``busy`` in seconds; None if ``seconds`` is empty.
        busy_elsewhere: further intervals of the step in which the process was busy in other traces.
        elsewhere_seconds: total of ``busy_elsewhere`` in seconds.
        bubble_seconds: seconds of the step that are in neither ``busy`` nor ``busy_elsewhere``;
            None if ``seconds`` is empty.
        step_seconds: duration of the step.
    """

    process: Process
    label: str
    busy: tuple[Interval, ...]
    seconds: Mapping[str, float]
    busy_seconds: float | None
    busy_elsewhere: tuple[Interval, ...]
    elsewhere_seconds: float
    bubble_seconds: float | None
    step_seconds: float


def process_times(step: Step) -> list[ProcessTime]:
    """Return the time of each process of a step, the root's process first, then by name."""
    step_ns = step.end_ns - step.start_ns
    result = []
    intervals_of = _bucket_intervals(step.tree, step.spans, (step.start_ns, step.end_ns))
    in_others = _busy_in_others(step)
    for process in step.processes:
        intervals = intervals_of.get(process, {})
        busy = _busy(intervals)
        elsewhere = difference(in_others.get(process, ()), busy)
        total_busy_ns, elsewhere_ns = total_ns(busy), total_ns(elsewhere)
        result.append(
            ProcessTime(
                process=process,
                label=step.labels[process],
                busy=tuple(busy),
                seconds={bucket: total_ns(intervals[bucket]) / 1e9 for bucket in intervals},
                busy_seconds=total_busy_ns / 1e9 if intervals else None,
                busy_elsewhere=tuple(elsewhere),
                elsewhere_seconds=elsewhere_ns / 1e9,
                bubble_seconds=(step_ns - total_busy_ns - elsewhere_ns) / 1e9
                if intervals
                else None,
                step_seconds=step_ns / 1e9,
            )
        )
    return result


def bucket_seconds(step: Step) -> dict[str, float]:
    """Return the process-seconds of a step per bucket; empty if no span has a bucket."""
    return summed_buckets(process_times(step))


def summed_buckets(times: Iterable[ProcessTime]) -> dict[str, float]:
    """Return the seconds of all processes per bucket; empty if no process has a bucket."""
    seconds_of_processes = [time.seconds for time in times if time.seconds]
    if not seconds_of_processes:
        return {}
    return {bucket: sum(each[bucket] for each in seconds_of_processes) for bucket in BUCKETS}


def nanoseconds_in(bucket: str, step: Step, spans: Iterable[Span]) -> int:
    """Return the process-nanoseconds of a step in a bucket, counting only the given spans."""
    intervals_of = _bucket_intervals(step.tree, spans, (step.start_ns, step.end_ns))
    return sum(total_ns(intervals[bucket]) for intervals in intervals_of.values())


def _busy(intervals: Mapping[str, Sequence[Interval]]) -> list[Interval]:
    """Return the busy intervals of a process, given those of each bucket."""
    return union(interval for bucket in BUSY_BUCKETS for interval in intervals.get(bucket, ()))


def _busy_in_others(step: Step) -> dict[Process, list[Interval]]:
    """Return when processes of a step were busy in its other traces, within the step."""
    busy: defaultdict[Process, list[Interval]] = defaultdict(list)
    for tree in step.others:
        bounds = (tree.spans[0].start_ns, max(span.end_ns for span in tree.spans))
        for process, intervals in _bucket_intervals(tree, tree.spans, bounds).items():
            offset_ns = step.clock_offsets.get(process.host, 0)  # to the clock of the step
            busy[process] += [
                (start_ns - offset_ns, end_ns - offset_ns) for start_ns, end_ns in _busy(intervals)
            ]
    return {
        process: clip(intervals, (step.start_ns, step.end_ns))
        for process, intervals in busy.items()
    }


def _bucket_intervals(
    tree: Tree, spans: Iterable[Span], bounds: Interval
) -> dict[Process, dict[str, list[Interval]]]:
    """Return the intervals of each bucket within ``bounds``, by process.

    Intervals of a process never overlap, even across buckets. Processes without a bucket are
    missing.

    Args:
        tree: all spans of a trace.
        spans: spans of the trace to consider.
        bounds: start and end, nanoseconds since 1970.
    """
    bucket_of = {
        span.span_id: bucket for span in spans if (bucket := attributes.bucket(span)) in BUCKETS
    }
    # By process and bucket, the intervals in which a span of the bucket is an innermost one;
    # buckets may overlap.
    innermost: dict[Process, dict[str, list[Interval]]] = {}
    for span, inner in _with_inner(tree, bucket_of):
        if span.process not in innermost:
            innermost[span.process] = {bucket: [] for bucket in BUCKETS}
        own = [(span.start_ns, span.end_ns)]
        innermost[span.process][bucket_of[span.span_id]] += difference(own, inner) if inner else own
    result: dict[Process, dict[str, list[Interval]]] = {}
    for process, intervals_of in innermost.items():
        by_bucket = result[process] = {}
        preceding: list[Interval] = []  # intervals of buckets with precedence
        for bucket in BUCKETS:
            intervals = clip(intervals_of[bucket], bounds)
            by_bucket[bucket] = difference(intervals, preceding)
            preceding = union([*preceding, *intervals])
    return result


def _with_inner(tree: Tree, span_ids: Container[str]) -> Iterator[tuple[Span, list[Interval]]]:
    """Yield spans of a trace, each with the intervals of its nearest yielded descendants.

    Only descendants in the same process count.
    """
    # By process, the chosen spans on the path from the top to the current span.
    open_spans: defaultdict[Process, list[tuple[Span, list[Interval]]]] = defaultdict(list)
    for span, is_before in tree.walk():
        if span.span_id not in span_ids:
            continue
        above = open_spans[span.process]
        if not is_before:
            yield above.pop()
            continue
        if above:
            above[-1][1].append((span.start_ns, span.end_ns))
        above.append((span, []))
