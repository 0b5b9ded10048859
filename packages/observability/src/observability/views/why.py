"""`why`: the open waits of a run, and what each is blocked on.

A fold over the lifecycle events tracks, per partition, the fields of each sample and the claims of
each task. It works for a running program and for one that was killed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dataplane_core import PartitionSummary
from observability.records import Event, Process, Records, distinct_labels
from observability.views import attributes
from observability.views.distinct import distinct_events, timed_events
from observability.views.printable import listed, printable
from observability.views.quantities import duration

_ENDS = frozenset({"claimed", "claim_failed", "answered"})
_EXAMPLES = 10
# Same as the admin service's default; several times the interval between reports of a wait.
_SILENT_S = 300.0
# Maximum number of example ids in a sentence.
_MAX_IN_SENTENCE = 2


@dataclass(frozen=True)
class Lack:
    """The samples that lack a field that a wait needs.

    Attributes:
        count: number of samples.
        examples: up to ten of their ids, in the order in which they were put.
    """

    count: int
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wait:
    """One open wait: a claim or call that has not been answered.

    Its ``str`` is one printable sentence that explains it.

    Attributes:
        process: the blocked process.
        label: its printable name.
        task: the claiming task; empty for a call.
        on: the pending call; empty for a claim.
        since_ns: start of the wait, in nanoseconds since 1970 by the clock of its process.
        seconds: duration of the wait so far.
        silent_s: seconds since its last report, if its process should have repeated the report by
            now; else 0.
        run_id: ``rl.run_id``; empty if not reported.
        step: ``rl.step``; None if not reported.
        partition: partition of the samples; empty if the wait concerns none.
        fields: fields that a claim needs, or that a call will write.
        requested: number of requested samples; 0 if not reported.
        known: whether the partition exists; if not, the numbers below mean nothing.
        present: number of samples in the partition now.
        ready: number of those that the task has not claimed and that lack no field.
        lacks: field to the samples that lack it; fields that no sample lacks are omitted.
        not_put: number of declared samples that were not put yet.
        claimed: number of samples in the partition that the task has claimed.
        holders: process to the number of samples that it leases for the task; the process is
            "host:pid" in live numbers, its label in events.
        assigned: number of samples assigned to data-parallel ranks that have not claimed them;
            known only from live numbers.
    """

    process: Process
    label: str
    task: str
    on: str
    since_ns: int
    seconds: float
    run_id: str = ""
    step: int | None = None
    partition: str = ""
    fields: tuple[str, ...] = ()
    requested: int = 0
    known: bool = False
    present: int = 0
    ready: int = 0
    lacks: Mapping[str, Lack] = field(default_factory=dict)
    not_put: int = 0
    claimed: int = 0
    assigned: int = 0
    holders: Mapping[str, int] = field(default_factory=dict)
    silent_s: float = 0.0

    def __str__(self) -> str:
        blocked = f"{self._who()} has been blocked for {duration(self.seconds)}"
        return f"{blocked}{self._what()}{self._state()}{self._silence()}"

    def _silence(self) -> str:
        if not self.silent_s:
            return ""
        return f" (process silent for {duration(self.silent_s)})"

    def _who(self) -> str:
        return f"task '{printable(self.task)}' in {self.label}" if self.task else self.label

    def _what(self) -> str:
        named = listed(self.fields)
        samples = f"{self.requested} samples" if self.requested else "samples"
        if self.requested == 1:
            samples = "1 sample"
        place = f"{samples} of partition '{printable(self.partition)}'"
        if self.on:
            to_write = f", to write {named} of {place}" if self.partition and named else ""
            return f" on {printable(self.on)}{to_write}"
        return f" on {place}" + (f" with {named}" if named else "")

    def _state(self) -> str:
        if not self.partition:
            return ""
        if not self.known:
            return ": the partition does not exist"
        fields: dict[Lack, list[str]] = {}
        for name, lack in self.lacks.items():
            fields.setdefault(lack, []).append(name)
        parts = [
            f"{lack.count} of {self.present} lack {listed(names)}{_examples(lack)}"
            for lack, names in fields.items()
        ]
        if not parts:
            parts.append(
                f"{self.present} present and none lacks a field"
                if self.present
                else "no samples present"
            )
        if self.task and self.ready:
            parts.append(f"{self.ready} ready")
        if self.claimed:
            parts.append(f"{self.claimed} already claimed by it")
        if self.holders:
            blocked = not (self.lacks or self.ready or self.not_put)
            leased, named = sum(self.holders.values()), self._named_holders()
            parts.append(
                f"it is blocked on {leased} leased samples: {named}"
                if blocked
                else f"{leased} of them leased: {named}"
            )
        if self.assigned:
            parts.append(f"{self.assigned} assigned to ranks")
        parts.append(f"{self.not_put} not put yet")
        return ": " + "; ".join(parts)

    def _named_holders(self) -> str:
        largest = sorted(self.holders.items(), key=lambda each: (-each[1], each[0]))
        named = [
            f"{samples} held by {printable(process) or 'an unnamed process'}"
            for process, samples in largest[:_EXAMPLES]
        ]
        return ", ".join(named) + (", and more" if len(largest) > _EXAMPLES else "")


def why(
    records: Records,
    now_ns: int,
    live: Iterable[PartitionSummary] | None = None,
    *,
    silent_after_s: float = _SILENT_S,
) -> list[Wait]:
    """Return the open waits, longest first, those of silent processes last.

    Args:
        records: the records of the run so far.
        now_ns: time up to which open waits last, in nanoseconds since 1970: the present for a
            running program, the last event for a finished one.
        live: partitions as the store has them now. For the run that reported last, their numbers
            replace those derived from events; examples still come from events. The number of ready
            samples is exact unless several fields are lacking. Then it is the number derived from
            events, clamped to the bounds that the live numbers allow.
        silent_after_s: seconds without a repeated report after which a process counts as silent.
            Infinity for callers that determine silence in another way.

    Durations and silence are computed with times of receipt where these are known, since clocks of
    hosts may be wrong. Events are ordered by their reported times.
    """
    events = sorted(distinct_events(timed_events(records.events)), key=lambda event: event.time_ns)
    folds: dict[tuple[str, str], _Partition] = {}
    waiting: dict[tuple[object, ...], Event] = {}
    last_reports: dict[tuple[object, ...], Event] = {}
    ended: set[tuple[object, ...]] = set()
    for event in events:
        name = attributes.text(event.attributes, "dataplane.wait")
        if event.name == "waiting":
            # Other libraries may give waits names that are unique only within a process.
            named = (event.process, name) if name else (event.process, event.time_ns, event.span_id)
            waiting.setdefault(named, event)
            last_reports[named] = event
        elif name and event.name in _ENDS:
            ended.add((event.process, name))
        place = _run(event), attributes.text(event.attributes, "dataplane.partition")
        if event.name == "cleared" and not event.sample_ids:
            # The store drops the partition together with its samples.
            folds.pop(place, None)
        else:
            folds.setdefault(place, _Partition()).apply(event)
    last_run = next((run for event in reversed(events) if (run := _run(event))), "")
    summaries = {summary.partition_id: summary for summary in live or ()}
    waits = []
    open_waits = {key: event for key, event in waiting.items() if key not in ended}
    labels = distinct_labels(event.process for event in open_waits.values())
    for key, event in open_waits.items():
        silent_s = _silent_s(event, last_reports[key], now_ns, silent_after_s)
        label = printable(labels[event.process])
        wait = replace(_wait_of(event, now_ns), label=label, silent_s=silent_s)
        fold = folds.get((wait.run_id, wait.partition))
        if fold is not None:
            wait = fold.about(wait, event.sample_ids)
        if wait.run_id == last_run and wait.partition in summaries:
            wait = _with_live(wait, summaries[wait.partition])
        waits.append(wait)
    return sorted(waits, key=lambda wait: (wait.silent_s > 0, -wait.seconds, wait.since_ns))


def _silent_s(first: Event, last: Event, now_ns: int, after_s: float) -> float:
    """Return `Wait.silent_s` of a wait with these first and last reports."""
    repeats = "dataplane.report_every_s" in first.attributes or last.time_ns > first.time_ns
    seconds = (now_ns - (last.received_ns or last.time_ns)) / 1e9
    return seconds if repeats and seconds > after_s else 0.0


class _Partition:
    """The state of one partition according to its events."""

    def __init__(self) -> None:
        self.registered = False
        self.declared = 0
        self.put_total = 0
        self.rows: dict[str, set[str]] = {}
        self.claimed: dict[str, set[str]] = {}
        self.leased: dict[str, dict[str, str]] = {}
        """Task to its leased samples, each with the label of the holding process."""

    def apply(self, event: Event) -> None:
        task = attributes.text(event.attributes, "dataplane.task")
        match event.name:
            case "registered":
                # A new declaration keeps the samples, counts them as put, and keeps the claims of
                # tasks that it declares again.
                self.registered = True
                tasks = attributes.names(event.attributes, "dataplane.tasks")
                self.claimed = {name: self.claimed.get(name, set()) for name in tasks}
                self.leased = {name: self.leased.get(name, {}) for name in tasks}
                self.declared = attributes.count(event.attributes, "dataplane.samples")
                self.put_total = len(self.rows)
            case "put":
                fields = attributes.names(event.attributes, "dataplane.fields")
                for sample_id in event.sample_ids:
                    if sample_id not in self.rows:
                        self.rows[sample_id] = set()
                        self.put_total += 1
                    self.rows[sample_id].update(fields)
            case "claimed":
                self.claimed.setdefault(task, set()).update(event.sample_ids)
                if event.attributes.get("dataplane.leased") is True:
                    holder = dict.fromkeys(event.sample_ids, event.process.label)
                    self.leased.setdefault(task, {}).update(holder)
            case "released":
                self.claimed.setdefault(task, set()).difference_update(event.sample_ids)
                self._end_leases(event.sample_ids, [task])
            case "acknowledged":
                self._end_leases(event.sample_ids, [task])
            case "cleared":
                withdrawn = event.attributes.get("dataplane.withdrawn") is True
                for sample_id in event.sample_ids:
                    if self.rows.pop(sample_id, None) is not None and withdrawn:
                        self.put_total -= 1
                for ids in self.claimed.values():
                    ids.difference_update(event.sample_ids)
                self._end_leases(event.sample_ids, list(self.leased))
            case _:
                pass

    def _end_leases(self, sample_ids: Iterable[str], tasks: Iterable[str]) -> None:
        """Remove samples from the leases of tasks."""
        for task in tasks:
            leased = self.leased.get(task, {})
            for sample_id in sample_ids:
                leased.pop(sample_id, None)

    def about(self, wait: Wait, only: Sequence[str]) -> Wait:
        """Return the wait with the counts of the samples in ``only``; if empty, of all samples."""
        rows = self.rows
        if only:
            rows = {sample_id: rows[sample_id] for sample_id in only if sample_id in rows}
        claimed = self.claimed.get(wait.task, set()) if wait.task else set()
        open_rows = {
            sample_id: fields for sample_id, fields in rows.items() if sample_id not in claimed
        }
        lacks = {}
        for name in wait.fields:
            ids = [sample_id for sample_id, fields in open_rows.items() if name not in fields]
            if ids:
                lacks[name] = Lack(len(ids), tuple(ids[:_EXAMPLES]))
        needed = set(wait.fields)
        return replace(
            wait,
            known=self.registered or bool(self.rows),
            present=len(rows),
            ready=sum(needed <= fields for fields in open_rows.values()),
            lacks=lacks,
            not_put=max(0, self.declared - self.put_total),
            claimed=len(rows) - len(open_rows),
            holders=Counter(
                holder
                for sample_id, holder in self.leased.get(wait.task, {}).items()
                if wait.task and sample_id in rows
            ),
        )


def _wait_of(event: Event, now_ns: int) -> Wait:
    facts = event.attributes
    since_ns = attributes.count(facts, "dataplane.since_ns") or event.time_ns
    # ``now_ns`` is by the receiver's clock, ``since_ns`` by the sender's; this is their difference,
    # including the export delay.
    ahead_ns = event.time_ns - event.received_ns if event.received_ns else 0
    return Wait(
        process=event.process,
        label=printable(event.process.label),
        task=attributes.text(facts, "dataplane.task"),
        on=attributes.text(facts, "dataplane.on"),
        since_ns=since_ns,
        seconds=max(0, now_ns + ahead_ns - since_ns) / 1e9 if since_ns else 0.0,
        run_id=_run(event),
        step=attributes.integer(facts, "rl.step"),
        partition=attributes.text(facts, "dataplane.partition"),
        fields=attributes.names(facts, "dataplane.fields"),
        requested=attributes.count(facts, "dataplane.samples"),
    )


def _with_live(wait: Wait, summary: PartitionSummary) -> Wait:
    written = {each.name: each.written for each in summary.fields}
    lacks = {}
    for name in wait.fields:
        count = summary.present - written.get(name, 0)
        if count > 0:
            examples = wait.lacks[name].examples if name in wait.lacks else ()
            lacks[name] = Lack(count, examples[:count])
    unclaimed, assigned, claimed = summary.present, 0, 0
    holders: Mapping[str, int] = {}
    for task in summary.tasks:
        if task.name == wait.task:
            unclaimed, assigned = task.unclaimed, task.assigned
            claimed = task.leased + task.acknowledged
            holders = task.holders
    # Counts per field do not show which samples lack several; they only bound the ready ones.
    counts = [lack.count for lack in lacks.values()]
    minimum = max(0, unclaimed - sum(counts))
    maximum = max(0, unclaimed - max(counts, default=0))
    return replace(
        wait,
        known=True,
        present=summary.present,
        ready=min(max(wait.ready, minimum), maximum),
        lacks=lacks,
        not_put=max(0, summary.declared - summary.put),
        claimed=claimed,
        assigned=assigned,
        holders=holders,
    )


def _run(event: Event) -> str:
    return attributes.text(event.attributes, "rl.run_id")


def _examples(lack: Lack) -> str:
    if not lack.examples:
        return ""
    shown = lack.examples[:_MAX_IN_SENTENCE]
    return f" ({listed(shown, more=lack.count > len(shown))})"
