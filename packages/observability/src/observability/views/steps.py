"""Training steps, assembled from the spans and events received so far.

A step is shown as soon as one of its spans arrived. `Step.incomplete` lists what is missing, so
that a reader never mistakes a partial step for a complete one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from observability.records import Event, Process, Records, Span, distinct_labels
from observability.rl_insight import SCOPE as RL_INSIGHT
from observability.views import attributes
from observability.views.clocks import clocks_ahead, on_one_clock
from observability.views.distinct import distinct_events, distinct_spans, timed_events
from observability.views.printable import printable
from observability.views.quantities import duration
from observability.views.tree import Tree

DRIVER = "grpo.driver"
ROOT = "grpo.step"

# Maximum number of spans that a reason names; it counts the rest.
_MAX_NAMED = 5


@dataclass(frozen=True)
class Staleness:
    """The number of weight versions between the generation of samples and their training.

    Attributes:
        minimum: staleness of the freshest sample.
        mean: mean staleness.
        maximum: staleness of the stalest sample.
        samples: number of trained samples with both versions known.
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
        staleness: staleness of the trained samples; None if no version is known.
        clocks: host to the minimum number of nanoseconds by which its clock is ahead of the root's;
            negative if behind. Only hosts that disagree. The times of the host's spans and events
            are corrected by that number.
    """

    run_id: str
    number: int
    trace_id: str
    tree: Tree
    events: tuple[Event, ...] = ()
    staleness: Staleness | None = None
    clocks: Mapping[str, int] = field(default_factory=dict)

    @property
    def spans(self) -> tuple[Span, ...]:
        """All spans by start, each once."""
        return self.tree.spans

    @cached_property
    def root(self) -> Span | None:
        """The root span: of the spans without a parent, the first ``grpo.step``, else the first."""
        return root_of(self.tree)

    @cached_property
    def start_ns(self) -> int:
        """The start of the root in nanoseconds since 1970; if unknown, that of the first span."""
        if self.root is not None and self.root.has_start:
            return self.root.start_ns
        return min(span.start_ns for span in self.spans)

    @cached_property
    def end_ns(self) -> int:
        """The end of the root, never before `start_ns`; if unknown, that of the last span."""
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
        return tuple(
            sorted({span.process for span in self.spans}, key=lambda each: (each != first, each))
        )

    @cached_property
    def labels(self) -> Mapping[Process, str]:
        """Unique printable names of the processes."""
        labels = distinct_labels(self.processes)
        return {process: printable(label) for process, label in labels.items()}

    def children(self, span_id: str) -> tuple[Span, ...]:
        """Return the child spans of a span, by start; empty for an unknown id."""
        return self.tree.children(span_id)

    def stage(self, span_id: str) -> Span | None:
        """Return the stage of a span: the span itself or its ancestor directly below the root.

        Returns:
            None for the root, for an unknown id, and for a span whose ancestors do not reach the
            root. If the root did not arrive, the topmost ancestor that did.
        """
        return stage_of(self.tree, self.root, span_id)

    @cached_property
    def incomplete(self) -> list[str]:
        """Reasons why the step is incomplete, one printable sentence each; empty if complete."""
        return [
            *self._about_roots(),
            *self._about_times(),
            *self._about_orphans(),
            *self._about_failures(),
        ]

    @cached_property
    def clock_notes(self) -> list[str]:
        """Clocks that disagree, one printable sentence each."""
        return [
            f"the clock of host {printable(host)} is {duration(abs(ahead) / 1e9)} or more "
            f"{'ahead' if ahead > 0 else 'behind'}; its times are shifted "
            f"{'earlier' if ahead > 0 else 'later'}"
            for host, ahead in sorted(self.clocks.items())
        ]

    def _about_roots(self) -> Iterable[str]:
        if not self.tree.roots:
            yield "no root: the span of the step was not received"
        if len(self.tree.roots) > 1:
            yield f"{len(self.tree.roots)} spans have no parent: {self._named(self.tree.roots)}"
        if self.tree.circular:
            yield f"spans that are their own ancestors: {self._named(self.tree.circular)}"

    def _about_times(self) -> Iterable[str]:
        for edge, spans in (
            ("start", [span for span in self.spans if not span.has_start]),
            ("end", [span for span in self.spans if not span.has_end]),
        ):
            if spans:
                yield f"no {edge} was reported for {self._named(spans)}"

    def _about_orphans(self) -> Iterable[str]:
        by_parent: dict[str, list[Span]] = defaultdict(list)
        for span in self.tree.orphans:
            assert span.parent_id is not None
            by_parent[span.parent_id].append(span)
        for parent_id, orphans in by_parent.items():
            yield f"the parent {printable(parent_id)} of {self._named(orphans)} was not received"

    def _about_failures(self) -> Iterable[str]:
        for span in self.spans:
            is_driver = span.process.service == DRIVER or span is self.root
            if is_driver and span.outcome == "error":
                message = span.message or attributes.text(span.attributes, "error.type")
                reason = f": {printable(message)}" if message else ""
                yield f"{self._named([span])} failed{reason}"

    def _named(self, spans: Iterable[Span]) -> str:
        names = [f"'{printable(span.name)}' of {self.labels[span.process]}" for span in spans]
        rest = len(names) - _MAX_NAMED
        return ", ".join(names[:_MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def steps_of(records: Records) -> list[Step]:
    """Return the steps in the records, by run (earliest first), then by ``rl.step``.

    A trace is a step if any of its spans has ``rl.step``; other traces are omitted. A step that ran
    twice is returned twice, the earlier trace first.
    """
    spans: dict[str, list[Span]] = defaultdict(list)
    for span in distinct_spans(records.spans):
        spans[span.trace_id].append(span)
    numbered = {
        trace_id: number
        for trace_id, trace_spans in spans.items()
        if (number := _number(trace_spans)) is not None
    }
    runs = {trace_id: _run(spans[trace_id]) for trace_id in numbered}
    for trace_id in numbered:
        if all(span.scope == RL_INSIGHT for span in spans[trace_id]):
            spans[trace_id] = _below_root(spans[trace_id])
    everything = sorted(
        distinct_events(timed_events(records.events)), key=lambda event: event.time_ns
    )
    by_step: dict[tuple[str, int | None], str] = {
        (runs[trace_id], number): trace_id for trace_id, number in numbered.items()
    }
    events: dict[str, list[Event]] = defaultdict(list)
    for event in everything:
        number = attributes.integer(event.attributes, "rl.step")
        events[event.trace_id or by_step.get((_run_of(event), number), "")].append(event)
    by_trace = {
        trace_id: step_of_trace(
            Tree(spans[trace_id]),
            events[trace_id],
            run_id=runs[trace_id],
            number=number,
            trace_id=trace_id,
        )
        for trace_id, number in numbered.items()
    }
    # Use the corrected times of steps, so that a put precedes the training of its samples.
    staleness = _staleness(
        (trace_id, event)
        for trace_id, reported in events.items()
        for event in (by_trace[trace_id].events if trace_id in by_trace else reported)
    )
    steps = [
        replace(step, staleness=staleness.get(trace_id)) for trace_id, step in by_trace.items()
    ]
    began: dict[str, int] = {}
    for step in steps:
        began[step.run_id] = min(step.start_ns, began.get(step.run_id, step.start_ns))
    return sorted(
        steps, key=lambda step: (began[step.run_id], step.run_id, step.number, step.start_ns)
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
    """Return any trace as a `Step`, with all times on one clock."""
    ahead = clocks_ahead(tree, root_of(tree))
    tree, events = on_one_clock(tree, events, ahead)
    return Step(run_id, number, trace_id, tree, events, staleness, ahead)


def root_of(tree: Tree) -> Span | None:
    """Return the root of any trace, as `Step.root`."""
    return min(tree.roots, key=lambda span: span.name != ROOT, default=None)


def stage_of(tree: Tree, root: Span | None, span_id: str) -> Span | None:
    """Return the stage of a span of any trace, as `Step.stage`."""
    line = tree.line(span_id)
    if root is None:
        return line[-1] if line else None
    return line[-2] if len(line) > 1 and line[-1] is root else None


def _below_root(spans: list[Span]) -> list[Span]:
    """Return spans without parents below an artificial root that covers all of them."""
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


def _number(spans: Iterable[Span]) -> int | None:
    counts = Counter(
        number
        for span in spans
        if (number := attributes.integer(span.attributes, "rl.step")) is not None
    )
    return max(counts, key=lambda number: counts[number], default=None)


def _run(spans: Iterable[Span]) -> str:
    counts = Counter(
        run for span in spans if (run := attributes.text(span.attributes, "rl.run_id"))
    )
    return max(counts, key=lambda run: counts[run], default="")


def _run_of(event: Event) -> str:
    return attributes.text(event.attributes, "rl.run_id")


def generation_version(*of_puts: int | None) -> int | None:
    """Return the generation version of a sample from the versions of its puts; None is unknown.

    A put of a prompt has no version. The lowest one is that of the generation, since later puts
    have the same or a newer version.
    """
    return min((version for version in of_puts if version is not None), default=None)


_Place = tuple[str, str]
"""A run and a partition."""

# Order of events with the same time.
_ORDER = {"put": 0, "trained": 1, "cleared": 2}


def _staleness(reported: Iterable[tuple[str, Event]]) -> dict[str, Staleness]:
    """Return the staleness of each trace that trained samples of known versions.

    The puts of a sample since its last clear give its `generation_version`. An event ``trained``
    after a clear is about the cleared sample. ``trained`` before any put with a version is about
    the next such put: a put is reported when it returns, and a fast consumer may train before that.
    """
    events = sorted(
        ((trace_id, event) for trace_id, event in reported if event.name in _ORDER),
        key=lambda item: (item[1].time_ns, _ORDER[item[1].name]),
    )
    versions: dict[_Place, dict[str, int | None]] = defaultdict(dict)
    present: dict[_Place, set[str]] = defaultdict(set)
    ages: dict[str, list[int | None]] = defaultdict(list)
    # Ages to fill in at the put: the list, the index in it, and the trained version.
    pending: dict[tuple[_Place, str], list[tuple[list[int | None], int, int | None]]]
    pending = defaultdict(list)
    # Every worker of a sharded model may report the same sample; it counts once per version.
    seen: set[tuple[str, _Place, str, int | None]] = set()
    for trace_id, event in events:
        # Keyed by run: another run may use the same names, and not every run clears its samples.
        place = _run_of(event), attributes.text(event.attributes, "dataplane.partition")
        version = attributes.integer(event.attributes, "rl.weight_version")
        samples, generated = present[place], versions[place]
        if event.name == "put":
            for sample_id in event.sample_ids:
                earlier = generated[sample_id] if sample_id in samples else None
                samples.add(sample_id)
                generated[sample_id] = generation_version(earlier, version)
                if version is not None:
                    for trace_ages, at, trained in pending.pop((place, sample_id), ()):
                        trace_ages[at] = _age(trained, version)
        elif event.name == "cleared":
            cleared = samples & set(event.sample_ids) if event.sample_ids else set(samples)
            samples -= cleared
            for sample_id in cleared:
                pending.pop((place, sample_id), None)
        else:
            for sample_id in event.sample_ids:
                if (trace_id, place, sample_id, version) in seen:
                    continue
                seen.add((trace_id, place, sample_id, version))
                if generated.get(sample_id) is None and (
                    sample_id in samples or sample_id not in generated
                ):
                    trace_ages = ages[trace_id]
                    pending[place, sample_id].append((trace_ages, len(trace_ages), version))
                ages[trace_id].append(_age(version, generated.get(sample_id)))
    return {
        trace_id: summary
        for trace_id, trace_ages in ages.items()
        if (summary := _summary(trace_ages)) is not None
    }


def _age(trained: int | None, generated: int | None) -> int | None:
    return None if trained is None or generated is None else trained - generated


def _summary(ages: list[int | None]) -> Staleness | None:
    known = [age for age in ages if age is not None]
    if not known:
        return None
    unknown = len(ages) - len(known)
    return Staleness(min(known), sum(known) / len(known), max(known), len(known), unknown)
