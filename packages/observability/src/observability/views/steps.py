"""Steps of training, put together from whatever arrived of their traces.

A step is shown as soon as one span of it is there. What is missing is said in words, so that a
reader never takes half a step for a whole one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from observability.records import Event, Process, Records, Span, distinct_labels
from observability.views import attributes
from observability.views.clocks import clocks_ahead, on_one_clock
from observability.views.distinct import distinct_events, distinct_spans, timed_events
from observability.views.printable import printable
from observability.views.quantities import duration
from observability.views.tree import Tree

DRIVER = "grpo.driver"
ROOT = "grpo.step"

# How many spans a reason names before it counts the rest.
_NAMED = 5


@dataclass(frozen=True)
class Staleness:
    """How many versions of the weights lay between a sample's generation and its training.

    Attributes:
        least: versions, of the freshest sample.
        mean: versions.
        most: versions, of the stalest sample.
        samples: trained samples of which both versions are known.
        unknown: trained samples of which one is not.
    """

    least: int
    mean: float
    most: int
    samples: int
    unknown: int


@dataclass(frozen=True, eq=False)
class Step:
    """One step of training: one trace, as far as it arrived.

    Attributes:
        run_id: ``rl.run_id``, empty if no span tells it.
        number: ``rl.step``.
        trace_id: of the trace.
        tree: its spans by parent.
        events: its lifecycle events by time, each once.
        staleness: of the samples it trained on; None if no version is known.
        clocks: of the hosts that disagree with the root's, nanoseconds that the clock is at least
            ahead, negative if it is behind. Times of their spans and events are put right by that.
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
        """Every span once, by start."""
        return self.tree.spans

    @cached_property
    def root(self) -> Span | None:
        """The span of the whole step: the first without a parent, one named as a step before."""
        return root_of(self.tree)

    @cached_property
    def start_ns(self) -> int:
        """Where the step begins, in nanoseconds since 1970; that of its first span where that of
        the root is not known."""
        if self.root is not None and self.root.has_start:
            return self.root.start_ns
        return min(span.start_ns for span in self.spans)

    @cached_property
    def end_ns(self) -> int:
        """Where the step ends, never before `start_ns`; the end of its last span where that of the
        root is not known."""
        if self.root is not None and self.root.has_end:
            return max(self.root.end_ns, self.start_ns)
        return max(self.start_ns, *(span.end_ns for span in self.spans))

    @property
    def seconds(self) -> float:
        """How long the step took."""
        return (self.end_ns - self.start_ns) / 1e9

    @cached_property
    def processes(self) -> tuple[Process, ...]:
        """Who took part: the process of the root, then the others by name."""
        first = self.root.process if self.root else None
        return tuple(
            sorted({span.process for span in self.spans}, key=lambda one: (one != first, one))
        )

    @cached_property
    def labels(self) -> Mapping[Process, str]:
        """A printable name of each process, different for different ones."""
        labels = distinct_labels(self.processes)
        return {process: printable(label) for process, label in labels.items()}

    def children(self, span_id: str) -> tuple[Span, ...]:
        """The spans directly below one, by start; empty for an unknown id."""
        return self.tree.children(span_id)

    def stage(self, span_id: str) -> Span | None:
        """The stage that a span belongs to: itself or its ancestor directly below the root.

        Returns:
            None for the root, for an unknown id, and for a span whose line upwards does not reach
            the root. Where the root did not arrive, the topmost ancestor that did.
        """
        return stage_of(self.tree, self.root, span_id)

    @cached_property
    def incomplete(self) -> list[str]:
        """Why the step is not whole, one printable sentence each; empty if nothing is amiss."""
        return [
            *self._about_roots(),
            *self._about_times(),
            *self._about_orphans(),
            *self._about_failures(),
        ]

    @cached_property
    def clock_notes(self) -> list[str]:
        """Which clocks disagree, one printable sentence each."""
        return [
            f"the clock of host {printable(host)} is {duration(abs(ahead) / 1e9)} or more "
            f"{'ahead' if ahead > 0 else 'behind'}; what it told is shown "
            f"{'earlier' if ahead > 0 else 'later'} by that"
            for host, ahead in sorted(self.clocks.items())
        ]

    def _about_roots(self) -> Iterable[str]:
        if not self.tree.roots:
            yield "no root: the span of the whole step has not arrived"
        if len(self.tree.roots) > 1:
            yield f"{len(self.tree.roots)} spans have no parent: {self._named(self.tree.roots)}"
        if self.tree.circular:
            yield f"spans that are their own ancestors: {self._named(self.tree.circular)}"

    def _about_times(self) -> Iterable[str]:
        for what, spans in (
            ("start", [span for span in self.spans if not span.has_start]),
            ("end", [span for span in self.spans if not span.has_end]),
        ):
            if spans:
                yield f"no {what} was reported of {self._named(spans)}"

    def _about_orphans(self) -> Iterable[str]:
        by_parent: dict[str, list[Span]] = defaultdict(list)
        for span in self.tree.orphans:
            assert span.parent_id is not None
            by_parent[span.parent_id].append(span)
        for parent_id, orphans in by_parent.items():
            yield f"the parent {printable(parent_id)} of {self._named(orphans)} never arrived"

    def _about_failures(self) -> Iterable[str]:
        for span in self.spans:
            driven = span.process.service == DRIVER or span is self.root
            if driven and span.outcome == "error":
                why = span.message or attributes.text(span.attributes, "error.type")
                told = f": {printable(why)}" if why else ""
                yield f"{self._named([span])} failed{told}"

    def _named(self, spans: Iterable[Span]) -> str:
        told = [f"'{printable(span.name)}' of {self.labels[span.process]}" for span in spans]
        rest = len(told) - _NAMED
        return ", ".join(told[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def steps_of(records: Records) -> list[Step]:
    """The steps of what arrived, by run (earliest first), then by ``rl.step``.

    A trace is a step if a span of it tells ``rl.step``; other traces are left out. A step that was
    tried twice is there twice, the earlier trace first.
    """
    spans: dict[str, list[Span]] = defaultdict(list)
    for span in distinct_spans(records.spans):
        spans[span.trace_id].append(span)
    numbered = {
        trace_id: number
        for trace_id, those in spans.items()
        if (number := _number(those)) is not None
    }
    runs = {trace_id: _run(spans[trace_id]) for trace_id in numbered}
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
    found = {
        trace_id: step_of_trace(
            Tree(spans[trace_id]),
            events[trace_id],
            run_id=runs[trace_id],
            number=number,
            trace_id=trace_id,
        )
        for trace_id, number in numbered.items()
    }
    # Of steps, as they are on one clock: what was put before it was trained is told so.
    staleness = _staleness(
        (trace_id, event)
        for trace_id, told in events.items()
        for event in (found[trace_id].events if trace_id in found else told)
    )
    steps = [replace(step, staleness=staleness.get(trace_id)) for trace_id, step in found.items()]
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
    """One trace as a `Step`, whether it tells of one or not; times of one clock."""
    ahead = clocks_ahead(tree, root_of(tree))
    tree, events = on_one_clock(tree, events, ahead)
    return Step(run_id, number, trace_id, tree, events, staleness, ahead)


def root_of(tree: Tree) -> Span | None:
    """`Step.root`, of any trace."""
    return min(tree.roots, key=lambda span: span.name != ROOT, default=None)


def stage_of(tree: Tree, root: Span | None, span_id: str) -> Span | None:
    """`Step.stage`, of any trace."""
    line = tree.line(span_id)
    if root is None:
        return line[-1] if line else None
    return line[-2] if len(line) > 1 and line[-1] is root else None


def _number(spans: Iterable[Span]) -> int | None:
    told = Counter(
        number
        for span in spans
        if (number := attributes.integer(span.attributes, "rl.step")) is not None
    )
    return max(told, key=lambda number: told[number], default=None)


def _run(spans: Iterable[Span]) -> str:
    told = Counter(run for span in spans if (run := attributes.text(span.attributes, "rl.run_id")))
    return max(told, key=lambda run: told[run], default="")


def _run_of(event: Event) -> str:
    return attributes.text(event.attributes, "rl.run_id")


_Place = tuple[str, str]
"""A run and a partition."""

# What comes first of events that tell the same moment.
_ORDER = {"put": 0, "trained": 1, "cleared": 2}


def _staleness(told: Iterable[tuple[str, Event]]) -> dict[str, Staleness]:
    """Of each trace that trained samples of known versions, their staleness.

    A sample was generated with the version that its first put after a clear tells. One that was
    cleared before it is told as trained is the one that was cleared. One that was never put before
    is the next one: a put is told when it returns, and who is quick has claimed it by then.
    """
    events = sorted(
        ((trace_id, event) for trace_id, event in told if event.name in _ORDER),
        key=lambda item: (item[1].time_ns, _ORDER[item[1].name]),
    )
    born: dict[_Place, dict[str, int | None]] = defaultdict(dict)
    there: dict[_Place, set[str]] = defaultdict(set)
    ages: dict[str, list[int | None]] = defaultdict(list)
    early: dict[tuple[_Place, str], list[tuple[list[int | None], int, int | None]]]
    early = defaultdict(list)
    # Every policy worker of a sharded model may tell of the same sample; it counts once a version.
    seen: set[tuple[str, _Place, str, int | None]] = set()
    for trace_id, event in events:
        # Another run may use the same names, and not every run clears what it put.
        place = _run_of(event), attributes.text(event.attributes, "dataplane.partition")
        version = attributes.integer(event.attributes, "rl.weight_version")
        samples, generated = there[place], born[place]
        if event.name == "put":
            for sample_id in event.sample_ids:
                if sample_id not in samples:
                    samples.add(sample_id)
                    generated[sample_id] = version
                    for those, at, trained in early.pop((place, sample_id), ()):
                        those[at] = _age(trained, version)
        elif event.name == "cleared":
            if event.sample_ids:
                samples.difference_update(event.sample_ids)
            else:
                samples.clear()
        else:
            for sample_id in event.sample_ids:
                if (trace_id, place, sample_id, version) in seen:
                    continue
                seen.add((trace_id, place, sample_id, version))
                if sample_id not in generated:
                    those = ages[trace_id]
                    early[place, sample_id].append((those, len(those), version))
                ages[trace_id].append(_age(version, generated.get(sample_id)))
    return {
        trace_id: found
        for trace_id, those in ages.items()
        if (found := _summary([age for age in those if age is not None], len(those))) is not None
    }


def _age(trained: int | None, generated: int | None) -> int | None:
    return None if trained is None or generated is None else trained - generated


def _summary(ages: list[int], samples: int) -> Staleness | None:
    if not ages:
        return None
    unknown = samples - len(ages)
    return Staleness(min(ages), sum(ages) / len(ages), max(ages), len(ages), unknown)
