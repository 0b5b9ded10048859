"""The busy and idle time of each process during a step.

At each moment, a process counts for one bucket: that of its innermost span with a bucket. If spans
of several threads run at the same time, the first bucket in the order of `BUCKETS` counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from observability.records import Process, Span
from observability.views import attributes
from observability.views.intervals import Interval, clip, difference, total_ns, union
from observability.views.steps import Step

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
        bubble_seconds: the other seconds of the step; None if ``seconds`` is empty.
        step_seconds: duration of the step.
    """

    process: Process
    label: str
    busy: tuple[Interval, ...]
    seconds: Mapping[str, float]
    busy_seconds: float | None
    bubble_seconds: float | None
    step_seconds: float


def process_times(step: Step) -> list[ProcessTime]:
    """Return the time of each process of a step, the root's process first, then by name."""
    step_ns = step.end_ns - step.start_ns
    result = []
    for process in step.processes:
        intervals = _bucket_intervals(step, step.spans, process)
        busy = union(interval for bucket in BUSY_BUCKETS for interval in intervals.get(bucket, ()))
        total_busy_ns = total_ns(busy)
        result.append(
            ProcessTime(
                process=process,
                label=step.labels[process],
                busy=tuple(busy),
                seconds={bucket: total_ns(intervals[bucket]) / 1e9 for bucket in intervals},
                busy_seconds=total_busy_ns / 1e9 if intervals else None,
                bubble_seconds=(step_ns - total_busy_ns) / 1e9 if intervals else None,
                step_seconds=step_ns / 1e9,
            )
        )
    return result


def bucket_seconds(step: Step) -> dict[str, float]:
    """Return the process-seconds of a step per bucket; empty if no span has a bucket."""
    return summed_buckets(process_times(step))


def summed_buckets(times: Iterable[ProcessTime]) -> dict[str, float]:
    """Return the sum of `ProcessTime.seconds` over processes, per bucket; empty if all are."""
    seconds_of_processes = [time.seconds for time in times if time.seconds]
    if not seconds_of_processes:
        return {}
    return {bucket: sum(each[bucket] for each in seconds_of_processes) for bucket in BUCKETS}


def nanoseconds_in(
    buckets: Collection[str], step: Step, spans: Iterable[Span], process: Process
) -> int:
    """Return the nanoseconds that a process spent in ``buckets``, according to some spans."""
    intervals = _bucket_intervals(step, spans, process)
    return sum(total_ns(intervals[bucket]) for bucket in intervals if bucket in buckets)


def _bucket_intervals(
    step: Step, spans: Iterable[Span], process: Process
) -> dict[str, list[Interval]]:
    """Return the intervals of each bucket within the step.

    Intervals never overlap, even across buckets.

    Args:
        step: the step.
        spans: spans of the step to consider.
        process: the process.

    Returns:
        An empty mapping if none of the process's spans has a bucket.
    """
    bucket_spans = [
        span for span in spans if span.process == process and attributes.bucket(span) in BUCKETS
    ]
    if not bucket_spans:
        return {}
    # For each span, the intervals of its nearest descendants that have a bucket.
    inner: dict[str, list[Interval]] = {span.span_id: [] for span in bucket_spans}
    for span in bucket_spans:
        for ancestor in step.tree.ancestry(span.span_id)[1:]:
            if ancestor.span_id in inner:
                inner[ancestor.span_id].append((span.start_ns, span.end_ns))
                break
    # Intervals in which a span of the bucket is an innermost one; buckets may overlap.
    innermost: dict[str, list[Interval]] = {bucket: [] for bucket in BUCKETS}
    for span in bucket_spans:
        bucket = attributes.bucket(span)
        assert bucket is not None
        innermost[bucket] += difference([(span.start_ns, span.end_ns)], inner[span.span_id])
    by_bucket: dict[str, list[Interval]] = {}
    preceding: list[Interval] = []  # intervals of buckets with precedence
    for bucket in BUCKETS:
        intervals = clip(innermost[bucket], (step.start_ns, step.end_ns))
        by_bucket[bucket] = difference(intervals, preceding)
        preceding = union([*preceding, *intervals])
    return by_bucket
