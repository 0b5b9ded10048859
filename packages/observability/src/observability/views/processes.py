"""What each process did over a step, and for how long it stood still.

At every moment a process counts for one bucket: that of the innermost span that has one. Where
spans of several threads overlap, work counts before waiting.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from observability.records import Process, Span
from observability.views import attributes
from observability.views.intervals import Interval, clipped, length, union, without
from observability.views.steps import Step

BUCKETS = ("productive", "overhead", "wasted", "idle")
"""``rl.bucket``, in the order in which overlapping spans of a process count."""

BUSY = frozenset({"productive", "overhead", "wasted"})
"""The buckets in which a process works."""


@dataclass(frozen=True)
class ProcessTime:
    """How a process spent a step.

    Attributes:
        process: which.
        label: its printable name.
        busy: when it worked, in nanoseconds since 1970, in order, within the step.
        seconds: bucket to seconds; each moment of the process counts once. Empty if no span of the
            process has a bucket: of such a process nobody knows when it worked.
        busy_seconds: seconds of work; None without a bucket.
        bubble_seconds: the rest of the step; None without a bucket.
        step_seconds: the step; busy and bubble together.
    """

    process: Process
    label: str
    busy: tuple[Interval, ...]
    seconds: Mapping[str, float]
    busy_seconds: float | None
    bubble_seconds: float | None
    step_seconds: float


def process_times(step: Step) -> list[ProcessTime]:
    """How every process of a step spent it, that of the root first, then by name."""
    duration = step.end_ns - step.start_ns
    found = []
    for process in step.processes:
        times = _times(step, step.spans, process)
        busy = union(one for bucket in BUSY for one in times.get(bucket, ()))
        worked = length(busy)
        found.append(
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
    return found


def bucket_seconds(step: Step) -> dict[str, float]:
    """Process-seconds of the step per bucket, summed over its processes; empty without a bucket."""
    return summed_buckets(process_times(step))


def summed_buckets(times: Iterable[ProcessTime]) -> dict[str, float]:
    """Seconds of all processes per bucket; empty if none of them has a bucket."""
    known = [one.seconds for one in times if one.seconds]
    return {bucket: sum(one[bucket] for one in known) for bucket in BUCKETS} if known else {}


def busy_ns(
    step: Step, spans: Iterable[Span], process: Process, *, buckets: Collection[str] = BUSY
) -> int:
    """Nanoseconds that a process spent in the buckets, looking at some spans of a step only."""
    times = _times(step, spans, process)
    return sum(length(times[bucket]) for bucket in times if bucket in buckets)


def _times(step: Step, spans: Iterable[Span], process: Process) -> dict[str, list[Interval]]:
    """Bucket to when, none at the same time as another, within the step; empty without a bucket."""
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
    found: dict[str, list[Interval]] = {}
    taken: list[Interval] = []
    for bucket in BUCKETS:
        times = clipped(raw[bucket], (step.start_ns, step.end_ns))
        found[bucket] = without(times, taken)
        taken = union([*taken, *times])
    return found
