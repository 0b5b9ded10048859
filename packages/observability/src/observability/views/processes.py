"""The busy and idle time of each process during a step.

At every moment a process counts for one bucket: that of its innermost span with a bucket. If spans
of several threads overlap, work takes precedence over waiting.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from observability.records import Process, Span
from observability.views import attributes
from observability.views.intervals import Interval, clipped, length, union, without
from observability.views.steps import Step

BUCKETS = ("productive", "overhead", "wasted", "idle")
"""Values of ``rl.bucket``, by precedence for overlapping spans of a process."""

BUSY = frozenset({"productive", "overhead", "wasted"})
"""The buckets in which a process works."""


@dataclass(frozen=True)
class ProcessTime:
    """The time of a process during a step.

    Attributes:
        process: the process.
        label: its printable name.
        busy: busy intervals in nanoseconds since 1970, in order, within the step.
        seconds: bucket to seconds; each moment of the process counts once. Empty if no span of the
            process has a bucket, so that its work is unknown.
        busy_seconds: seconds of work; None without a bucket.
        bubble_seconds: the rest of the step; None without a bucket.
        step_seconds: duration of the step: busy plus bubble.
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
    duration = step.end_ns - step.start_ns
    result = []
    for process in step.processes:
        times = _times(step, step.spans, process)
        busy = union(interval for bucket in BUSY for interval in times.get(bucket, ()))
        worked = length(busy)
        result.append(
            ProcessTime(
                process=process,
                label=step.labels[process],
                busy=tuple(busy),
                seconds={bucket: length(times[bucket]) / 1e9 for bucket in times},
                busy_seconds=worked / 1e9 if times else None,
                bubble_seconds=(duration - worked) / 1e9 if times else None,
                step_seconds=duration / 1e9,
            )
        )
    return result


def bucket_seconds(step: Step) -> dict[str, float]:
    """Return the process-seconds of the step per bucket; empty if no process has a bucket."""
    return summed_buckets(process_times(step))


def summed_buckets(times: Iterable[ProcessTime]) -> dict[str, float]:
    """Return the seconds of all processes per bucket; empty if none of them has a bucket."""
    known = [time.seconds for time in times if time.seconds]
    if not known:
        return {}
    return {bucket: sum(seconds[bucket] for seconds in known) for bucket in BUCKETS}


def busy_ns(
    step: Step, spans: Iterable[Span], process: Process, *, buckets: Collection[str] = BUSY
) -> int:
    """Return the nanoseconds of a process in the buckets, from the given spans of a step."""
    times = _times(step, spans, process)
    return sum(length(times[bucket]) for bucket in times if bucket in buckets)


def _times(step: Step, spans: Iterable[Span], process: Process) -> dict[str, list[Interval]]:
    """Return bucket to disjoint intervals within the step; empty without a bucket."""
    own = [span for span in spans if span.process == process and attributes.bucket(span) in BUCKETS]
    if not own:
        return {}
    inner: dict[str, list[Interval]] = {span.span_id: [] for span in own}
    for span in own:
        for above in step.tree.line(span.span_id)[1:]:
            if above.span_id in inner:
                inner[above.span_id].append((span.start_ns, span.end_ns))
                break
    raw: dict[str, list[Interval]] = {bucket: [] for bucket in BUCKETS}
    for span in own:
        bucket = attributes.bucket(span)
        assert bucket is not None
        raw[bucket] += without([(span.start_ns, span.end_ns)], inner[span.span_id])
    by_bucket: dict[str, list[Interval]] = {}
    taken: list[Interval] = []
    for bucket in BUCKETS:
        times = clipped(raw[bucket], (step.start_ns, step.end_ns))
        by_bucket[bucket] = without(times, taken)
        taken = union([*taken, *times])
    return by_bucket
