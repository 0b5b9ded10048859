"""`why`: the open waits of a run, and what each is blocked on.

The state of each partition is derived from the lifecycle events: the fields of each sample, and the
claims of each task. This works for a running program and for one that was killed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dataplane_core import PartitionSummary
from observability.records import Event, Process, Records, distinct_labels
from observability.views import attributes
from observability.views.distinct import distinct_events, timed_events
from observability.views.printable import join_printable, printable
from observability.views.quantities import duration

_END_EVENTS = frozenset({"claimed", "claim_failed", "answered"})
"""Events that end the wait that they name."""

_MAX_EXAMPLES = 10
_MAX_EXAMPLES_IN_SENTENCE = 2
_MAX_HOLDERS_IN_SENTENCE = 10
_SILENT_AFTER_S = 300.0
"""Default of ``silent_after_s``: ten times the interval at which a wait is reported.

The admin service has the same default.
"""


@dataclass(frozen=True)
class MissingField:
    """Samples that are missing one required field.

    Attributes:
        count: number of these samples.
        examples: up to ten of their ids, in the order in which they were put.
    """

    count: int
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class OpenWait:
    """One open wait: a claim or a call that has not returned.

    ``str(wait)`` is a printable sentence that explains it.

    Attributes:
        process: the blocked process.
        label: its printable label.
        task: the claiming task; empty for a call.
        call: the pending call; empty for a claim.
        since_ns: start of the wait, in nanoseconds since 1970 by the clock of its process.
        seconds: duration of the wait so far; up to its last report if its process is silent.
        silent_s: seconds since its last report, if its process should have reported it again by
            now; else 0.
        run_id: ``rl.run_id``; empty if not reported.
        step: ``rl.step``; None if not reported.
        partition: partition of the samples; empty if the wait concerns none.
        fields: fields that the claim requires, or that the call will write.
        requested: number of requested samples; 0 if not reported.
        partition_exists: whether the partition exists. If not, the counts below are all 0.
        present: number of samples in the partition. If a call names samples and no ``live``
            partitions are given, only those samples are counted, here and below. ``not_put``
            always covers the entire partition.
        ready: number of present samples that lack no field and that the task has not claimed.
        lacks: present samples that lack a field, by field. Fields that no sample lacks are omitted.
        not_put: number of samples that were declared and not put.
        claimed: number of present samples that the task has claimed.
        holders: number of leased samples by lease holder, for this task. A holder is ``host:pid``
            if ``live`` partitions were given to `why`, else the label of its process.
        assigned: number of samples assigned to data-parallel ranks that have not claimed them; 0
            if no ``live`` partitions were given.
    """

    process: Process
    label: str
    task: str
    call: str
    since_ns: int
    seconds: float
    run_id: str = ""
    step: int | None = None
    partition: str = ""
    fields: tuple[str, ...] = ()
    requested: int = 0
    partition_exists: bool = False
    present: int = 0
    ready: int = 0
    lacks: Mapping[str, MissingField] = field(default_factory=dict)
    not_put: int = 0
    claimed: int = 0
    assigned: int = 0
    holders: Mapping[str, int] = field(default_factory=dict)
    silent_s: float = 0.0

    def __str__(self) -> str:
        blocked = f"{self._subject()} has been blocked for {duration(self.seconds)}"
        return f"{blocked}{self._object()}{self._counts()}{self._silence()}"

    def _silence(self) -> str:
        if not self.silent_s:
            return ""
        return f" (process silent for {duration(self.silent_s)})"

    def _subject(self) -> str:
        """Return who is blocked."""
        return f"task '{printable(self.task)}' in {self.label}" if self.task else self.label

    def _object(self) -> str:
        """Return what the process or task is blocked on."""
        field_names = join_printable(self.fields)
        samples = f"{self.requested} samples" if self.requested else "samples"
        if self.requested == 1:
            samples = "1 sample"
        samples += f" of partition '{printable(self.partition)}'"
        if self.call:
            writes_fields = self.partition and field_names
            to_write = f", to write {field_names} of {samples}" if writes_fields else ""
            return f" on {printable(self.call)}{to_write}"
        return f" on {samples}" + (f" with {field_names}" if field_names else "")

    def _counts(self) -> str:
        """Return the number of the partition's samples in each state."""
        if not self.partition:
            return ""
        if not self.partition_exists:
            return ": the partition does not exist"
        # Fields with the same count and examples share a part of the sentence.
        # Without examples, equal counts may be of different samples, unless all samples count.
        names_by_lack: dict[tuple[MissingField, str], list[str]] = {}
        for name, lack in self.lacks.items():
            are_same = lack.examples or lack.count == self.present
            names_by_lack.setdefault((lack, "" if are_same else name), []).append(name)
        parts = [
            f"{lack.count} of {self.present} lack {join_printable(names)}{_examples(lack)}"
            for (lack, _), names in names_by_lack.items()
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
            leased, holders = sum(self.holders.values()), self._holders_by_leases()
            # Only leases that expire or are released can end this wait.
            is_blocked_on_leases = not (self.lacks or self.ready or self.not_put)
            parts.append(
                f"it is blocked on {leased} leased samples: {holders}"
                if is_blocked_on_leases
                else f"{leased} of them leased: {holders}"
            )
        if self.assigned:
            parts.append(f"{self.assigned} assigned to ranks")
        parts.append(f"{self.not_put} not put yet")
        return ": " + "; ".join(parts)

    def _holders_by_leases(self) -> str:
        """Return the holders of leases as text, those with the largest numbers first."""
        holders = sorted(self.holders.items(), key=lambda item: (-item[1], item[0]))
        texts = [
            f"{samples} held by {printable(process) or 'an unnamed process'}"
            for process, samples in holders[:_MAX_HOLDERS_IN_SENTENCE]
        ]
        suffix = ", and more" if len(holders) > _MAX_HOLDERS_IN_SENTENCE else ""
        return ", ".join(texts) + suffix


def why(
    records: Records,
    now_ns: int,
    live: Iterable[PartitionSummary] | None = None,
    *,
    silent_after_s: float = _SILENT_AFTER_S,
) -> list[OpenWait]:
    """Return the open waits, longest first; waits of silent processes last.

    Args:
        records: the records of the run so far.
        now_ns: end time used for the duration of open waits, in nanoseconds since 1970. For a
            running program it is the present, for a finished one the time of its last event.
        live: the current partitions of the store. For the run that reported last, their counts
            replace those derived from events; examples still come from events. The number of ready
            samples is exact if at most one of the required fields is missing. Otherwise it is the
            number derived from events, limited to the range that the live counts allow.
        silent_after_s: seconds without a repeated report after which a process counts as silent.
            Infinity if the caller determines silence in another way.

    Durations and silence are computed from times of receipt if these are known, because clocks of
    hosts may be wrong. Events are ordered by their reported times.
    """
    events = sorted(distinct_events(timed_events(records.events)), key=lambda event: event.time_ns)
    partitions: dict[tuple[str, str], _Partition] = {}
    # First report and last report by wait, and the waits that an event ended.
    first_reports: dict[tuple[object, ...], Event] = {}
    last_reports: dict[tuple[object, ...], Event] = {}
    ended: set[tuple[object, ...]] = set()
    for event in events:
        wait_id = attributes.text(event.attributes, "dataplane.wait")
        if event.name == "waiting":
            # The key has the process, since other libraries may repeat a wait's id in each process.
            key = (
                (event.process, wait_id)
                if wait_id
                else (event.process, event.time_ns, event.span_id)
            )
            first_reports.setdefault(key, event)
            last_reports[key] = event
        elif wait_id and event.name in _END_EVENTS:
            ended.add((event.process, wait_id))
        run_and_partition = attributes.run_and_partition(event.attributes)
        if event.name == "cleared" and not event.sample_ids:
            # The store removes the partition together with its samples.
            partitions.pop(run_and_partition, None)
        else:
            partitions.setdefault(run_and_partition, _Partition()).apply(event)
    last_run = next((run_id for event in reversed(events) if (run_id := _run_id(event))), "")
    summaries = {summary.partition_id: summary for summary in live or ()}
    waits = []
    open_waits = {key: event for key, event in first_reports.items() if key not in ended}
    labels = distinct_labels(event.process for event in open_waits.values())
    for wait_key, event in open_waits.items():
        silent_s = _silent_s(event, last_reports[wait_key], now_ns, silent_after_s)
        label = printable(labels[event.process])
        wait = _wait_of(event, now_ns)
        seconds = max(0.0, wait.seconds - silent_s)
        wait = replace(wait, label=label, seconds=seconds, silent_s=silent_s)
        partition = partitions.get((wait.run_id, wait.partition))
        if partition is not None:
            wait = partition.with_counts(wait, event.sample_ids)
        if wait.run_id == last_run and wait.partition in summaries:
            wait = _with_live_counts(wait, summaries[wait.partition])
        waits.append(wait)
    return sorted(waits, key=lambda wait: (wait.silent_s > 0, -wait.seconds, wait.since_ns))


def _silent_s(first: Event, last: Event, now_ns: int, after_s: float) -> float:
    """Return `OpenWait.silent_s` of a wait from its first and last reports."""
    # A wait whose process does not repeat its reports is never silent.
    repeats = "dataplane.report_every_s" in first.attributes or last.time_ns > first.time_ns
    seconds = (now_ns - (last.received_ns or last.time_ns)) / 1e9
    return seconds if repeats and seconds > after_s else 0.0


class _Partition:
    """The state of one partition according to its events."""

    def __init__(self) -> None:
        self.registered = False
        self.declared = 0
        """Declared number of samples."""
        self.put_total = 0
        """Number of declared samples that were put, also if they were cleared since."""
        self.rows: dict[str, set[str]] = {}
        """Fields of each present sample."""
        self.claimed: dict[str, set[str]] = {}
        """Claimed samples by task."""
        self.leased: dict[str, dict[str, str]] = {}
        """Leased samples by task, each with the label of the process that holds the lease."""

    def apply(self, event: Event) -> None:
        """Change the state as an event reports."""
        task = attributes.text(event.attributes, "dataplane.task")
        match event.name:
            case "registered":
                # As in the store, samples stay and count as put. A task's claims survive only if
                # the task is declared again.
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

    def with_counts(self, wait: OpenWait, only: Sequence[str]) -> OpenWait:
        """Return the wait with counts of samples.

        Args:
            wait: the wait.
            only: ids of the samples to count; empty counts all.
        """
        rows = self.rows
        if only:
            rows = {sample_id: rows[sample_id] for sample_id in only if sample_id in rows}
        claimed = self.claimed.get(wait.task, set()) if wait.task else set()
        unclaimed = {
            sample_id: fields for sample_id, fields in rows.items() if sample_id not in claimed
        }
        lacks = {}
        for name in wait.fields:
            ids = [sample_id for sample_id, fields in rows.items() if name not in fields]
            if ids:
                lacks[name] = MissingField(len(ids), tuple(ids[:_MAX_EXAMPLES]))
        required = set(wait.fields)
        return replace(
            wait,
            partition_exists=self.registered or bool(self.rows),
            present=len(rows),
            ready=sum(required <= fields for fields in unclaimed.values()),
            lacks=lacks,
            not_put=max(0, self.declared - self.put_total),
            claimed=len(rows) - len(unclaimed),
            holders=Counter(
                holder
                for sample_id, holder in self.leased.get(wait.task, {}).items()
                if wait.task and sample_id in rows
            ),
        )


def _wait_of(event: Event, now_ns: int) -> OpenWait:
    """Return a wait without counts from its first report."""
    values = event.attributes
    since_ns = attributes.count(values, "dataplane.since_ns") or event.time_ns
    # ``now_ns`` is by the receiver's clock, ``since_ns`` by the sender's. `ahead_ns` estimates how
    # far the sender's clock is ahead; it is too small by the export delay.
    ahead_ns = event.time_ns - event.received_ns if event.received_ns else 0
    return OpenWait(
        process=event.process,
        label=printable(event.process.label),
        task=attributes.text(values, "dataplane.task"),
        call=attributes.text(values, "dataplane.on"),
        since_ns=since_ns,
        seconds=max(0, now_ns + ahead_ns - since_ns) / 1e9 if since_ns else 0.0,
        run_id=_run_id(event),
        step=attributes.integer(values, "rl.step"),
        partition=attributes.text(values, "dataplane.partition"),
        fields=attributes.names(values, "dataplane.fields"),
        requested=attributes.count(values, "dataplane.samples"),
    )


def _with_live_counts(wait: OpenWait, summary: PartitionSummary) -> OpenWait:
    """Return the wait with the counts of the live partition in place of those from events."""
    written = {field_summary.name: field_summary.written for field_summary in summary.fields}
    lacks = {}
    for name in wait.fields:
        count = summary.present - written.get(name, 0)
        if count > 0:
            examples = wait.lacks[name].examples if name in wait.lacks else ()
            lacks[name] = MissingField(count, examples[:count])
    unclaimed, assigned, claimed = summary.present, 0, 0
    holders: Mapping[str, int] = {}
    for task in summary.tasks:
        if task.name == wait.task:
            unclaimed, assigned = task.unclaimed, task.assigned
            claimed = task.leased + task.acknowledged
            holders = task.holders
    # Counts per field do not show which samples lack several fields. They only bound the number of
    # ready samples. Lower bound: no sample lacks two fields. Upper bound: every sample that lacks a
    # field lacks the most frequently missing one.
    counts = [lack.count for lack in lacks.values()]
    minimum = max(0, unclaimed - sum(counts))
    maximum = max(0, unclaimed - max(counts, default=0))
    return replace(
        wait,
        partition_exists=True,
        present=summary.present,
        ready=min(max(wait.ready, minimum), maximum),
        lacks=lacks,
        not_put=max(0, summary.declared - summary.put),
        claimed=claimed,
        assigned=assigned,
        holders=holders,
    )


def _run_id(event: Event) -> str:
    return attributes.text(event.attributes, "rl.run_id")


def _examples(lack: MissingField) -> str:
    if not lack.examples:
        return ""
    examples = lack.examples[:_MAX_EXAMPLES_IN_SENTENCE]
    return f" ({join_printable(examples, ellipsis=lack.count > len(examples))})"
