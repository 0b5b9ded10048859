"""Why is it stuck: every wait that has not ended, and what it waits for.

A fold over the lifecycle events keeps, per partition, the fields of each sample and what each task
has claimed. It works on a run that goes on as on one that was killed.
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
# Several times as long as a wait that lasts goes without being told again.
_SILENT_S = 120.0
# How many example ids a sentence names.
_IN_SENTENCE = 2


@dataclass(frozen=True)
class Lack:
    """Samples that a wait could use if a field of them were written.

    Attributes:
        count: how many.
        examples: up to ten of their ids, in the order in which they were put.
    """

    count: int
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wait:
    """One claim or call that has not been answered.

    Its ``str`` is the whole of it as one printable sentence.

    Attributes:
        process: who waits.
        label: its printable name.
        task: that claims; empty for a call.
        on: the call that is waited for; empty for a claim.
        since_ns: when it began, in nanoseconds since 1970, by the clock of its process.
        seconds: how long it has waited.
        silent_s: how long nothing has been heard of it, where it would be told again by a process
            that is alive; 0 if that is no longer than `why` was to bear.
        run_id: ``rl.run_id``, empty if not told.
        step: ``rl.step``, None if not told.
        partition: where the samples are; empty if the wait is about none.
        fields: a claim needs them; a call is to write them.
        asked: samples asked for, 0 if not told.
        known: whether the partition is there, so that the numbers below mean something.
        there: samples in the partition now.
        ready: of those, neither claimed by the task nor lacking a field.
        lacks: field to the samples that lack it; fields that none lacks are left out.
        unput: declared samples that are still to be put.
        claimed: samples in the partition that the task has claimed.
        holders: process to the samples that it holds for the task under leases; of live numbers
            "host:pid", of events its label.
        assigned: those drawn for its data-parallel ranks that have not asked for them, of live
            numbers; events do not tell.
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
    asked: int = 0
    known: bool = False
    there: int = 0
    ready: int = 0
    lacks: Mapping[str, Lack] = field(default_factory=dict)
    unput: int = 0
    claimed: int = 0
    assigned: int = 0
    holders: Mapping[str, int] = field(default_factory=dict)
    silent_s: float = 0.0

    def __str__(self) -> str:
        waited = f"{self._who()} has waited {duration(self.seconds)}"
        return f"{waited}{self._what()}{self._state()}{self._silence()}"

    def _silence(self) -> str:
        if not self.silent_s:
            return ""
        return f" (not heard of for {duration(self.silent_s)}: its process is probably gone)"

    def _who(self) -> str:
        return f"task '{printable(self.task)}' in {self.label}" if self.task else self.label

    def _what(self) -> str:
        named = listed(self.fields)
        samples = f"{self.asked} samples" if self.asked else "samples"
        if self.asked == 1:
            samples = "1 sample"
        place = f"{samples} of partition '{printable(self.partition)}'"
        if self.on:
            to_write = f", to write {named} of {place}" if self.partition and named else ""
            return f" for {printable(self.on)}{to_write}"
        return f" for {place}" + (f" with {named}" if named else "")

    def _state(self) -> str:
        if not self.partition:
            return ""
        if not self.known:
            return ": the partition is not there"
        parts = [
            f"{lack.count} of {self.there} lack {printable(name)}{_examples(lack)}"
            for name, lack in self.lacks.items()
        ]
        if not parts:
            parts.append(
                f"{self.there} are there and none lacks a field"
                if self.there
                else "no sample is there"
            )
        if self.task and self.ready:
            parts.append(f"{self.ready} are ready")
        if self.claimed:
            parts.append(f"{self.claimed} are claimed by it already")
        if self.holders:
            blocked = not (self.lacks or self.ready or self.unput)
            leased, named = sum(self.holders.values()), self._named_holders()
            parts.append(
                f"it is blocked on {leased} leased samples: {named}"
                if blocked
                else f"{leased} of them are leased: {named}"
            )
        if self.assigned:
            parts.append(f"{self.assigned} wait for the ranks that they were drawn for")
        parts.append(f"{self.unput} are still to be put")
        return ": " + "; ".join(parts)

    def _named_holders(self) -> str:
        most = sorted(self.holders.items(), key=lambda each: (-each[1], each[0]))
        named = [
            f"{samples} held by {printable(process) or 'a process without a name'}"
            for process, samples in most[:_EXAMPLES]
        ]
        return ", ".join(named) + (", and more" if len(most) > _EXAMPLES else "")


def why(
    records: Records,
    now_ns: int,
    live: Iterable[PartitionSummary] | None = None,
    *,
    silent_after_s: float = _SILENT_S,
) -> list[Wait]:
    """The waits that have not ended, the longest first, those whose process is probably gone last.

    Args:
        records: what the run told so far.
        now_ns: up to when waits are measured, in nanoseconds since 1970: the present of a run that
            goes on, the last event of one that ended.
        live: partitions as the store has them now. Their numbers replace the folded ones of the
            run that told something last; examples stay the folded ones. How many samples are
            ready is exact unless several fields are lacking; then it is the folded number, kept
            within what the live numbers allow.
        silent_after_s: for how long a wait that would be told again was not told when its process
            counts as gone. Infinity for who knows better when something was heard.

    Where it is known when an event was received, that moment counts instead of the time reported:
    clocks of hosts may be wrong.
    """
    events = sorted(distinct_events(timed_events(records.events)), key=lambda event: event.time_ns)
    folds: dict[tuple[str, str], _Partition] = {}
    waiting: dict[tuple[object, ...], Event] = {}
    heard: dict[tuple[object, ...], Event] = {}
    ended: set[tuple[object, ...]] = set()
    for event in events:
        name = attributes.text(event.attributes, "dataplane.wait")
        if event.name == "waiting":
            # Other tellers' names may be unique in their process only.
            named = (event.process, name) if name else (event.process, event.time_ns, event.span_id)
            waiting.setdefault(named, event)
            heard[named] = event
        elif name and event.name in _ENDS:
            ended.add((event.process, name))
        place = _run(event), attributes.text(event.attributes, "dataplane.partition")
        if event.name == "cleared" and not event.sample_ids:
            # The store forgets the partition with its samples.
            folds.pop(place, None)
        else:
            folds.setdefault(place, _Partition()).apply(event)
    last_run = next((run for event in reversed(events) if (run := _run(event))), "")
    summaries = {summary.partition_id: summary for summary in live or ()}
    found = []
    open_waits = {key: event for key, event in waiting.items() if key not in ended}
    labels = distinct_labels(event.process for event in open_waits.values())
    for key, event in open_waits.items():
        silent_s = _silent_s(event, heard[key], now_ns, silent_after_s)
        label = printable(labels[event.process])
        wait = replace(_told(event, now_ns), label=label, silent_s=silent_s)
        fold = folds.get((wait.run_id, wait.partition))
        if fold is not None:
            wait = fold.about(wait, event.sample_ids)
        if wait.run_id == last_run and wait.partition in summaries:
            wait = _with_live(wait, summaries[wait.partition])
        found.append(wait)
    return sorted(found, key=lambda wait: (wait.silent_s > 0, -wait.seconds, wait.since_ns))


def _silent_s(first: Event, last: Event, now_ns: int, after_s: float) -> float:
    """`Wait.silent_s` of a wait that was told by these first and last."""
    again = "dataplane.again_s" in first.attributes or last.time_ns > first.time_ns
    seconds = (now_ns - (last.received_ns or last.time_ns)) / 1e9
    return seconds if again and seconds > after_s else 0.0


class _Partition:
    """What the events of one partition come to."""

    def __init__(self) -> None:
        self.registered = False
        self.declared = 0
        self.put_total = 0
        self.rows: dict[str, set[str]] = {}
        self.claimed: dict[str, set[str]] = {}
        self.leased: dict[str, dict[str, str]] = {}
        """Task to the samples that are held for it under leases, each with who holds it."""

    def apply(self, event: Event) -> None:
        task = attributes.text(event.attributes, "dataplane.task")
        match event.name:
            case "registered":
                # A new declaration keeps the samples, counts them as put, and keeps the claims of
                # the tasks that it names again.
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
                self._settled(event.sample_ids, [task])
            case "acknowledged":
                self._settled(event.sample_ids, [task])
            case "cleared":
                withdrawn = event.attributes.get("dataplane.withdrawn") is True
                for sample_id in event.sample_ids:
                    if self.rows.pop(sample_id, None) is not None and withdrawn:
                        self.put_total -= 1
                for ids in self.claimed.values():
                    ids.difference_update(event.sample_ids)
                self._settled(event.sample_ids, list(self.leased))
            case _:
                pass

    def _settled(self, sample_ids: Iterable[str], tasks: Iterable[str]) -> None:
        """These samples are no longer held under leases of the tasks."""
        for task in tasks:
            leased = self.leased.get(task, {})
            for sample_id in sample_ids:
                leased.pop(sample_id, None)

    def about(self, wait: Wait, only: Sequence[str]) -> Wait:
        """The wait with its numbers; ``only`` these samples if there are any."""
        rows = self.rows
        if only:
            rows = {sample_id: rows[sample_id] for sample_id in only if sample_id in rows}
        claimed = self.claimed.get(wait.task, set()) if wait.task else set()
        open_rows = {one: fields for one, fields in rows.items() if one not in claimed}
        lacks = {}
        for name in wait.fields:
            ids = [one for one, fields in open_rows.items() if name not in fields]
            if ids:
                lacks[name] = Lack(len(ids), tuple(ids[:_EXAMPLES]))
        needed = set(wait.fields)
        return replace(
            wait,
            known=self.registered or bool(self.rows),
            there=len(rows),
            ready=sum(needed <= fields for fields in open_rows.values()),
            lacks=lacks,
            unput=max(0, self.declared - self.put_total),
            claimed=len(rows) - len(open_rows),
            holders=Counter(
                holder
                for one, holder in self.leased.get(wait.task, {}).items()
                if wait.task and one in rows
            ),
        )


def _told(event: Event, now_ns: int) -> Wait:
    told = event.attributes
    since_ns = attributes.count(told, "dataplane.since_ns") or event.time_ns
    ahead_ns = event.time_ns - event.received_ns if event.received_ns else 0
    return Wait(
        process=event.process,
        label=printable(event.process.label),
        task=attributes.text(told, "dataplane.task"),
        on=attributes.text(told, "dataplane.on"),
        since_ns=since_ns,
        seconds=max(0, now_ns + ahead_ns - since_ns) / 1e9 if since_ns else 0.0,
        run_id=_run(event),
        step=attributes.integer(told, "rl.step"),
        partition=attributes.text(told, "dataplane.partition"),
        fields=attributes.names(told, "dataplane.fields"),
        asked=attributes.count(told, "dataplane.samples"),
    )


def _with_live(wait: Wait, summary: PartitionSummary) -> Wait:
    written = {one.name: one.written for one in summary.fields}
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
            claimed = task.leased + task.settled
            holders = task.holders
    # Counts per field do not tell which samples lack several; they bound how many are ready.
    counts = [lack.count for lack in lacks.values()]
    fewest = max(0, unclaimed - sum(counts))
    most = max(0, unclaimed - max(counts, default=0))
    return replace(
        wait,
        known=True,
        there=summary.present,
        ready=min(max(wait.ready, fewest), most),
        lacks=lacks,
        unput=max(0, summary.declared - summary.put),
        claimed=claimed,
        assigned=assigned,
        holders=holders,
    )


def _run(event: Event) -> str:
    return attributes.text(event.attributes, "rl.run_id")


def _examples(lack: Lack) -> str:
    if not lack.examples:
        return ""
    shown = lack.examples[:_IN_SENTENCE]
    return f" ({listed(shown, more=lack.count > len(shown))})"
