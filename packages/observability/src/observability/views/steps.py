"""Training steps, assembled from the spans and events received so far.

A step exists as soon as one of its spans was received. `Step.incomplete` lists what is missing, so
that a partial step is never mistaken for a complete one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from observability.records import Event, Process, Records, Span, distinct_labels
from observability.rl_insight import SCOPE as RL_INSIGHT
from observability.views import attributes
from observability.views.clocks import align_clocks, clock_offsets
from observability.views.concurrent import TracesByTime
from observability.views.distinct import distinct_events, distinct_spans, timed_events
from observability.views.printable import printable
from observability.views.quantities import duration
from observability.views.tree import Tree

DRIVER = "grpo.driver"
"""Service name of the driver."""

ROOT = "grpo.step"
"""Name of the root span of a step."""

_MAX_NAMED_SPANS = 5
"""Maximum number of spans that a reason in `Step.incomplete` names. It counts the others."""


@dataclass(frozen=True)
class Staleness:
    """The staleness of trained samples: weight versions between their generation and training.

    Attributes:
        minimum: staleness of the freshest sample.
        mean: mean staleness.
        maximum: staleness of the stalest sample.
        samples: number of trained samples whose two versions are known.
        unknown: number of trained samples with an unknown version.
    """

    minimum: int
    mean: float
    maximum: int
    samples: int
    unknown: int


@dataclass(frozen=True, eq=False)
class Step:
    """One training step: the received part of one trace.

    Attributes:
        run_id: ``rl.run_id``; empty if not reported.
        number: ``rl.step``.
        trace_id: id of the trace.
        tree: its spans by parent.
        events: its lifecycle events by time, each once.
        staleness: staleness of the trained samples; None if it is unknown for all of them.
        clock_offsets: minimum number of nanoseconds by which a clock is ahead of the clock of the
            root's host, by host; negative if it is behind. It has only hosts whose clocks disagree.
            The times of ``tree`` and ``events`` are already corrected.
        others: traces that overlap with the step in time and share a process with it. Their times
            are as reported.
    """

    run_id: str
    number: int
    trace_id: str
    tree: Tree
    events: tuple[Event, ...] = ()
    staleness: Staleness | None = None
    clock_offsets: Mapping[str, int] = field(default_factory=dict)
    others: tuple[Tree, ...] = ()

    @property
    def spans(self) -> tuple[Span, ...]:
        """All spans by start, each once."""
        return self.tree.spans

    @cached_property
    def root(self) -> Span | None:
        """The root span: the first span without a parent, preferably one named ``grpo.step``."""
        return root_of(self.tree)

    @cached_property
    def start_ns(self) -> int:
        """The start of the root, or of the first span if unknown, in nanoseconds since 1970."""
        if self.root is not None and self.root.has_start:
            return self.root.start_ns
        return min(span.start_ns for span in self.spans)

    @cached_property
    def end_ns(self) -> int:
        """The end of the root, or of the last span if unknown; never before `start_ns`."""
        if self.root is not None and self.root.has_end:
            return max(self.root.end_ns, self.start_ns)
        return max(self.start_ns, *(span.end_ns for span in self.spans))

    @property
    def seconds(self) -> float:
        """The duration in seconds."""
        return (self.end_ns - self.start_ns) / 1e9

    @cached_property
    def processes(self) -> tuple[Process, ...]:
        """All processes of the step: the root's process, then the others by name."""
        first = self.root.process if self.root else None
        processes = {span.process for span in self.spans}
        return tuple(sorted(processes, key=lambda process: (process != first, process)))

    @cached_property
    def labels(self) -> Mapping[Process, str]:
        """Distinct printable label of each process."""
        labels = distinct_labels(self.processes)
        return {process: printable(label) for process, label in labels.items()}

    def children(self, span_id: str) -> tuple[Span, ...]:
        """Return the child spans of a span, by start; empty for an unknown id."""
        return self.tree.children(span_id)

    def stage(self, span_id: str) -> Span | None:
        """Return the stage of a span: the span or its ancestor that is a child of the root.

        Returns:
            None for the root, for an unknown id, and for a span that is not below the root. In a
            step without a root, the topmost ancestor of the span, or the span itself.
        """
        return self._stages.get(span_id)

    @cached_property
    def _stages(self) -> Mapping[str, Span]:
        return stages_of(self.tree, self.root)

    @cached_property
    def incomplete(self) -> list[str]:
        """Reasons why the step is incomplete, one printable sentence each; empty if complete."""
        return [
            *self._root_reasons(),
            *self._time_reasons(),
            *self._orphan_reasons(),
            *self._failure_reasons(),
        ]

    @cached_property
    def clock_notes(self) -> list[str]:
        """Corrections of clocks, one printable sentence each."""
        return [
            f"the clock of host {printable(host)} is {duration(abs(offset) / 1e9)} or more "
            f"{'ahead' if offset > 0 else 'behind'}; its times are shifted "
            f"{'earlier' if offset > 0 else 'later'}"
            for host, offset in sorted(self.clock_offsets.items())
        ]

    def _root_reasons(self) -> Iterable[str]:
        if not self.tree.roots:
            yield "no root: the span of the step was not received"
        if len(self.tree.roots) > 1:
            yield f"{len(self.tree.roots)} spans have no parent: {self._names_of(self.tree.roots)}"
        if self.tree.circular:
            yield f"spans that are their own ancestors: {self._names_of(self.tree.circular)}"

    def _time_reasons(self) -> Iterable[str]:
        for time, spans in (
            ("start", [span for span in self.spans if not span.has_start]),
            ("end", [span for span in self.spans if not span.has_end]),
        ):
            if spans:
                yield f"no {time} was reported for {self._names_of(spans)}"

    def _orphan_reasons(self) -> Iterable[str]:
        by_parent: dict[str, list[Span]] = defaultdict(list)
        for span in self.tree.orphans:
            assert span.parent_id is not None
            by_parent[span.parent_id].append(span)
        for parent_id, orphans in by_parent.items():
            yield f"the parent {printable(parent_id)} of {self._names_of(orphans)} was not received"

    def _failure_reasons(self) -> Iterable[str]:
        for span in self.spans:
            is_driver = span.process.service == DRIVER or span is self.root
            if is_driver and span.outcome == "error":
                message = span.message or attributes.text(span.attributes, "error.type")
                reason = f": {printable(message)}" if message else ""
                yield f"{self._names_of([span])} failed{reason}"

    def _names_of(self, spans: Iterable[Span]) -> str:
        names = [f"'{printable(span.name)}' of {self.labels[span.process]}" for span in spans]
        omitted = len(names) - _MAX_NAMED_SPANS
        suffix = f" and {omitted} more" if omitted > 0 else ""
        return ", ".join(names[:_MAX_NAMED_SPANS]) + suffix


def steps_of(records: Records) -> list[Step]:
    """Return the steps in the records, by run (earliest first), then by ``rl.step``.

    Each trace in which a span has ``rl.step`` is a step. If a step ran twice, both traces are
    returned, the earlier first.
    """
    spans: dict[str, list[Span]] = defaultdict(list)
    for span in distinct_spans(records.spans):
        spans[span.trace_id].append(span)
    numbers = {
        trace_id: number
        for trace_id, trace_spans in spans.items()
        if (number := _step_number(trace_spans)) is not None
    }
    run_ids = {trace_id: _run_id(spans[trace_id]) for trace_id in numbers}
    for trace_id in numbers:
        # RL-Insight has no span of the step.
        if all(span.scope == RL_INSIGHT for span in spans[trace_id]):
            spans[trace_id] = _with_artificial_root(spans[trace_id])
    events_by_time = sorted(
        distinct_events(timed_events(records.events)), key=lambda event: event.time_ns
    )
    trace_of_step: dict[tuple[str, int | None], str] = {
        (run_ids[trace_id], number): trace_id for trace_id, number in numbers.items()
    }
    # Events without a trace belong to the trace of their run and step; without such a trace, to "".
    events: dict[str, list[Event]] = defaultdict(list)
    for event in events_by_time:
        run_id = attributes.text(event.attributes, "rl.run_id")
        run_and_step = run_id, attributes.integer(event.attributes, "rl.step")
        events[event.trace_id or trace_of_step.get(run_and_step, "")].append(event)
    trees = {trace_id: Tree(trace_spans) for trace_id, trace_spans in spans.items()}
    traces = TracesByTime(trees)
    by_trace = {
        trace_id: step_of_trace(
            trees[trace_id],
            events[trace_id],
            run_id=run_ids[trace_id],
            number=number,
            trace_id=trace_id,
        )
        for trace_id, number in numbers.items()
    }
    # Events of steps have corrected times, so that a put precedes the training of its samples.
    staleness = _staleness(
        (trace_id, event)
        for trace_id, trace_events in events.items()
        for event in (by_trace[trace_id].events if trace_id in by_trace else trace_events)
    )
    steps = [
        replace(
            step,
            staleness=staleness.get(trace_id),
            others=tuple(
                traces.sharing(step.processes, step.start_ns, step.end_ns, without=trace_id)
            ),
        )
        for trace_id, step in by_trace.items()
    ]
    run_starts_ns: dict[str, int] = {}
    for step in steps:
        run_starts_ns[step.run_id] = min(
            step.start_ns, run_starts_ns.get(step.run_id, step.start_ns)
        )
    return sorted(
        steps,
        key=lambda step: (run_starts_ns[step.run_id], step.run_id, step.number, step.start_ns),
    )


def step_of_trace(
    tree: Tree,
    events: Iterable[Event],
    *,
    run_id: str,
    number: int,
    trace_id: str,
    staleness: Staleness | None = None,
) -> Step:
    """Return any trace as a `Step`, with all times converted to the clock of the root's host.

    The arguments are attributes of `Step`.
    """
    offsets = clock_offsets(tree, root_of(tree))
    tree, events = align_clocks(tree, events, offsets)
    return Step(run_id, number, trace_id, tree, events, staleness, offsets)


def root_of(tree: Tree) -> Span | None:
    """Return the root of any trace; see `Step.root`."""
    return min(tree.roots, key=lambda span: span.name != ROOT, default=None)


def stages_of(tree: Tree, root: Span | None) -> dict[str, Span]:
    """Return the stages of any trace by span id; see `Step.stage`."""
    stages: dict[str, Span] = {}
    for span, is_before in tree.walk():
        if is_before:
            # The parent of a span that tops its ring comes later, so it has no stage yet.
            stage = stages.get(span.parent_id or "")
            if stage is None and (root is None or span.parent_id == root.span_id):
                stage = span
            if stage is not None:
                stages[span.span_id] = stage
    return stages


def _with_artificial_root(spans: list[Span]) -> list[Span]:
    """Return a new root span that covers the given spans, and the spans as its children."""
    root = replace(
        spans[0],
        span_id=spans[0].trace_id[:16],
        name=ROOT,
        start_ns=min(span.start_ns for span in spans),
        end_ns=max(span.end_ns for span in spans),
        attributes={name: spans[0].attributes.get(name) for name in ("rl.run_id", "rl.step")},
        outcome="unset",
    )
    return [root, *(replace(span, parent_id=root.span_id) for span in spans)]


def _step_number(spans: Iterable[Span]) -> int | None:
    """Return the most frequent ``rl.step`` of spans; None if no span has it."""
    counts = Counter(
        number
        for span in spans
        if (number := attributes.integer(span.attributes, "rl.step")) is not None
    )
    return max(counts, key=lambda number: counts[number], default=None)


def _run_id(spans: Iterable[Span]) -> str:
    """Return the most frequent ``rl.run_id`` of spans; empty if no span has it."""
    counts = Counter(
        run_id for span in spans if (run_id := attributes.text(span.attributes, "rl.run_id"))
    )
    return max(counts, key=lambda run_id: counts[run_id], default="")


def generation_version(*put_versions: int | None) -> int | None:
    """Return the weight version that generated a sample; None if unknown.

    It is the lowest version of the sample's puts. Puts before the generation are of prompts and
    have no version; later puts have the same or a newer version.

    Args:
        put_versions: weight version of each put; None for a put without a version.
    """
    return min((version for version in put_versions if version is not None), default=None)


_PartitionKey = tuple[str, str]
"""Run id and partition."""

_EVENT_ORDER = {"put": 0, "trained": 1, "cleared": 2}
"""Order of events with the same time; the staleness depends on these events only."""


def _staleness(reported: Iterable[tuple[str, Event]]) -> dict[str, Staleness]:
    """Return the staleness of each trace that trained samples of known versions.

    The puts of a sample since its last clear give its `generation_version`. An event ``trained``
    that is reported after a clear is about the cleared sample. An event ``trained`` that is
    reported before any put with a version is about the next such put. A put is reported when it
    returns, and a fast consumer may train on its samples before that.

    Args:
        reported: events, each with the id of its trace.
    """
    events = sorted(
        ((trace_id, event) for trace_id, event in reported if event.name in _EVENT_ORDER),
        key=lambda item: (item[1].time_ns, _EVENT_ORDER[item[1].name]),
    )
    # Generation version by sample id, also of samples that were cleared.
    versions_by_partition: dict[_PartitionKey, dict[str, int | None]] = defaultdict(dict)
    # Ids of samples that were put and not cleared.
    present_by_partition: dict[_PartitionKey, set[str]] = defaultdict(set)
    # Staleness of each trained sample, by trace id.
    values: dict[str, list[int | None]] = defaultdict(list)
    # Unknown staleness values that the sample's next put with a version resolves: (list, index,
    # trained version).
    pending: dict[tuple[_PartitionKey, str], list[tuple[list[int | None], int, int | None]]]
    pending = defaultdict(list)
    # Every worker of a sharded model may report the same sample. It counts once per version.
    counted: set[tuple[str, _PartitionKey, str, int | None]] = set()
    for trace_id, event in events:
        partition = attributes.run_and_partition(event.attributes)
        version = attributes.integer(event.attributes, "rl.weight_version")
        present, versions = present_by_partition[partition], versions_by_partition[partition]
        if event.name == "put":
            for sample_id in event.sample_ids:
                earlier = versions[sample_id] if sample_id in present else None
                present.add(sample_id)
                versions[sample_id] = generation_version(earlier, version)
                if version is not None:
                    for trace_values, index, trained in pending.pop((partition, sample_id), ()):
                        trace_values[index] = _staleness_of_sample(trained, version)
        elif event.name == "cleared":
            # An event without ids clears the partition.
            cleared = present & set(event.sample_ids) if event.sample_ids else set(present)
            present -= cleared
            for sample_id in cleared:
                pending.pop((partition, sample_id), None)
        else:
            for sample_id in event.sample_ids:
                if (trace_id, partition, sample_id, version) in counted:
                    continue
                counted.add((trace_id, partition, sample_id, version))
                # The version may still be reported by a put, unless the sample was cleared.
                if versions.get(sample_id) is None and (
                    sample_id in present or sample_id not in versions
                ):
                    trace_values = values[trace_id]
                    pending[partition, sample_id].append((trace_values, len(trace_values), version))
                values[trace_id].append(_staleness_of_sample(version, versions.get(sample_id)))
    return {
        trace_id: summary
        for trace_id, trace_values in values.items()
        if (summary := _summary(trace_values)) is not None
    }


def _staleness_of_sample(trained: int | None, generated: int | None) -> int | None:
    return None if trained is None or generated is None else trained - generated


def _summary(values: list[int | None]) -> Staleness | None:
    """Return the summary of the staleness of samples; None if it is unknown for all of them."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    unknown = len(values) - len(known)
    return Staleness(min(known), sum(known) / len(known), max(known), len(known), unknown)
