"""`Answers`: one method per question, composed of the store, the live data plane and the views.

All methods are synchronous and may be called from any thread. They raise `AnswerError`, of which
the text is one sentence for whoever asked.
"""

from __future__ import annotations

import time
from importlib.metadata import version

from dataplane_admin.answers import lineage, models, partitions, run_steps, traces, waits
from dataplane_admin.answers.actions import Actions
from dataplane_admin.answers.cursors import (
    audit_cursor,
    read_audit_cursor,
    read_trace_cursor,
    trace_cursor,
)
from dataplane_admin.answers.errors import Refused, Unavailable
from dataplane_admin.answers.health import Health
from dataplane_admin.answers.needs import Needs
from dataplane_admin.live import Live, Snapshot
from dataplane_admin.settings import Settings
from dataplane_admin.store import Store, TraceFilter

NAME = "dataplane-admin"

MOST_ID = 4_096
"""Characters of an id that is asked for."""
MOST_WINDOWS = 500
MOST_PAGE = 1_000
MOST_STEPS = 10_000
MOST_RANGES = 500


class Answers:
    """What the service can be asked.

    Args:
        store: what arrived.
        live: the data plane that is looked into; None shows history only.
        settings: what the service was told.
    """

    def __init__(self, store: Store, live: Live | None, settings: Settings) -> None:
        self._store = store
        self._live = live
        self._settings = settings
        self._needs = Needs(store)
        self._health = Health(store)
        self._actions = Actions(store, live, allowed=settings.allow_actions)
        self._started_ns = time.time_ns()
        self._subscribers = 0
        self.version = version(NAME)

    @property
    def revisions(self) -> models.Changed:
        """What grows when an answer may have changed; costs nothing."""
        live = 0 if self._live is None else self._live.snapshot.revision
        return models.Changed(store=self._store.revision, live=live)

    def subscribed(self, change: int) -> None:
        """Count connections that wait for live updates; ``change`` is 1 or -1."""
        self._subscribers += change

    def readiness(self) -> models.Readiness:
        """Whether what arrives can be kept; a data plane that is away is told, and no reason to
        send no telemetry."""
        error = self._health.trouble(at_most_s=_READY_PROBE_S)
        live = partitions.live_status(self._live, self._newest())
        return models.Readiness(
            ready=error is None,
            store="ok" if error is None else error,
            live="not asked for" if not live.asked else live.error or "attached",
        )

    def status(self) -> models.Status:
        """The service in one look."""
        totals = self._store.totals()
        error = self._health.trouble(at_most_s=_STATUS_PROBE_S)
        return models.Status(
            name=NAME,
            version=self.version,
            now_ns=time.time_ns(),
            started_ns=self._started_ns,
            live=partitions.live_status(self._live, self._newest()),
            store=models.StoreStatus(
                writable=error is None,
                error=error,
                revision=self._store.revision,
                traces=totals.traces,
                spans=totals.spans,
                events=totals.events,
                samples=totals.samples,
                nbytes=totals.bytes_on_disk,
                oldest_ns=totals.oldest_ns,
            ),
            telemetry=models.TelemetryStatus(
                ingested={"spans": totals.ingested_spans, "events": totals.ingested_events},
                repeated=totals.repeated,
                refused=totals.refused,
                ignored=totals.ignored,
            ),
            actions=self._settings.allow_actions,
            subscribers=self._subscribers,
        )

    def partitions(self) -> models.Partitions:
        """Every partition and storage unit of the newest snapshot; empty without one."""
        self._needs.refresh()
        snapshot = self._newest()
        return models.Partitions(
            partitions=[
                partitions.partition(
                    one, snapshot, snapshot.scans.get(one.partition_id), self._needs
                )
                for one in snapshot.partitions
            ],
            storage=[
                models.Unit(
                    name=one.name,
                    node=one.node,
                    capacity=one.capacity,
                    used=one.used,
                    free=one.free,
                )
                for one in snapshot.storage
            ],
            totals=dict(snapshot.totals),
            live=partitions.live_status(self._live, snapshot),
        )

    def partition(self, partition_id: str) -> models.Partition:
        """One partition of the newest snapshot. Raises NotFound, Unavailable."""
        _check_id("id", partition_id)
        self._needs.refresh()
        snapshot = self._snapshot(partition_id)
        summary = partitions.found(snapshot, partition_id)
        scan = snapshot.scans.get(partition_id)
        return partitions.partition(summary, snapshot, scan, self._needs)

    def partition_view(
        self, partition_id: str, *, start: int = 0, limit: int = 100, windows: int = 120
    ) -> models.PartitionView:
        """A partition, its matrix, some of its samples and its claims, as of one moment.

        Asks the data plane. Raises NotFound, Unavailable.
        """
        _check_id("id", partition_id)
        _check("start", start, 0, 2**31)
        _check("limit", limit, 1, MOST_PAGE)
        _check("windows", windows, 1, MOST_WINDOWS)
        self._needs.refresh()
        self._snapshot(partition_id)
        assert self._live is not None  # else there was no snapshot
        return partitions.view(
            self._live, partition_id, self._needs, start=start, limit=limit, windows=windows
        )

    def partition_matrix(self, partition_id: str, *, windows: int = 120) -> models.Matrix:
        """Samples by field and task, in at most ``windows`` (1 to 500). Raises NotFound, ..."""
        _check_id("id", partition_id)
        _check("windows", windows, 1, MOST_WINDOWS)
        snapshot = self._snapshot(partition_id)
        summary = partitions.found(snapshot, partition_id)
        return partitions.matrix(summary, snapshot.scans.get(partition_id), windows)

    def partition_samples(
        self, partition_id: str, *, start: int = 0, limit: int = 100
    ) -> models.SamplePage:
        """``limit`` (1 to 1,000) samples from place ``start``; asks the data plane."""
        _check_id("id", partition_id)
        _check("start", start, 0, 2**31)
        _check("limit", limit, 1, MOST_PAGE)
        summary = partitions.found(self._snapshot(partition_id), partition_id)
        states = partitions.ask(
            self._live, lambda plane: plane.list_samples(partition_id, start=start, limit=limit)
        )
        return models.SamplePage(
            partition=partition_id,
            start=start,
            total=max(summary.present, start + len(states) if states else 0),
            samples=[partitions.sample(state, partition_id) for state in states],
        )

    def partition_claims(self, partition_id: str) -> list[models.Claim]:
        """The claims that are held, the oldest first, at most 1,000; asks the data plane."""
        _check_id("id", partition_id)
        claims = partitions.ask(self._live, lambda plane: plane.list_claims(partition_id))
        return [partitions.claim(one) for one in claims]

    def samples(
        self,
        q: str = "",
        *,
        tag: str | None = None,
        value: str | None = None,
        partition: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> models.SampleHits:
        """By the beginning ``q`` of their id, or by ``tag`` equal to ``value`` (live only)."""
        for name, text in (("q", q), ("tag", tag), ("value", value)):
            if text and len(text) > MOST_ID:
                raise Refused(f"{name}: found {len(text)} characters; expected at most {MOST_ID}")
        if partition is not None:
            _check_id("partition", partition)
        _check("limit", limit, 1, MOST_PAGE)
        if not tag:
            return lineage.search(self._store, self._live, q, partition, cursor, limit)
        if q or cursor:
            raise Refused("found tag together with q or cursor; expected one way to search")
        return lineage.by_tag(self._live, tag, value or "", partition, limit)

    def sample(self, sample_id: str, *, partition: str | None = None) -> models.SampleLife:
        """The life of one sample. Raises NotFound if neither events nor data plane know it."""
        _check_id("id", sample_id)
        if partition is not None:
            _check_id("partition", partition)
        return lineage.life(self._store, self._live, sample_id, partition)

    def why(self, *, run: str | None = None) -> list[models.Wait]:
        """Why it is stuck: the longest wait first, those of processes that are gone last; empty if
        nothing waits. Of one ``run`` only what its processes told."""
        if run is not None:
            _check_id("run", run)
        return waits.waits(
            self._store, self._live, silent_after_s=self._settings.silent_after_s, run=run
        )

    def staleness(self, *, run: str | None = None, steps: int = 20) -> models.Staleness:
        """Of the last ``steps`` (1 to 10,000) of ``run``, or of the newest run."""
        _check("steps", steps, 1, MOST_STEPS)
        run = self._run_or_newest(run)
        row = self._store.staleness(run, steps)
        known = sum(row.counts.values())
        mean = sum(age * count for age, count in row.counts.items()) / known if known else None
        return models.Staleness(
            run_id=run,
            steps=steps,
            left_out=row.left_out,
            counts=dict(row.counts),
            mean=mean,
            unknown=row.unknown,
        )

    def run_steps(self, *, run: str | None = None, ranges: int = 10) -> models.RunSteps:
        """How long the steps took, in 1 to 500 ranges, of ``run`` or of the newest run of which one
        has ended."""
        return self.run_steps_cut(ranges, run=run)[0]

    def run_steps_cut(self, *ranges: int, run: str | None = None) -> list[models.RunSteps]:
        """As `run_steps`, the same steps cut in several ways."""
        for most in ranges:
            _check("ranges", most, 1, MOST_RANGES)
        if run is None:
            run = self._store.run_with_steps()
        return run_steps.run_steps(self._store, self._run_or_newest(run), *ranges)

    def runs(self) -> models.Runs:
        """Every run, the newest first."""
        return models.Runs(
            runs=[
                models.Run(
                    run_id=one.run_id, first_ns=one.first_ns, last_ns=one.last_ns, steps=one.steps
                )
                for one in self._store.runs()
            ]
        )

    def traces(
        self,
        *,
        run: str | None = None,
        step: int | None = None,
        min_s: float | None = None,
        max_s: float | None = None,
        error: bool | None = None,
        name: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> models.Traces:
        """A page of traces, the newest first. Raises Refused on a cursor that is none of ours."""
        _check("limit", limit, 1, MOST_PAGE)
        for what, text in (("run", run), ("name", name)):
            if text is not None and len(text) > MOST_ID:
                _check_id(what, text)
        for what, seconds in (("min_s", min_s), ("max_s", max_s)):
            if seconds is not None and not 0 <= seconds <= _LONGEST_S:
                raise Refused(f"{what}: found {seconds}; expected 0 to {_LONGEST_S:.0f} seconds")
        if step is not None:
            _check("step", step, 0, 2**63 - 1)
        rows, more = self._store.traces(
            TraceFilter(
                run_id=run, step=step, min_s=min_s, max_s=max_s, error=error, name=name or None
            ),
            read_trace_cursor(cursor),
            limit,
        )
        return models.Traces(
            traces=[models.TraceFacts(**traces.facts(row)) for row in rows],
            next=trace_cursor(more),
        )

    def steps(self, run: str, *, limit: int = 10) -> list[models.TraceFacts]:
        """The newest traces of a run that tell a step, the one that came last first."""
        return [models.TraceFacts(**traces.facts(row)) for row in self._store.steps(run, limit)]

    def trace(self, trace_id: str) -> models.Trace:
        """One trace, put together. Raises NotFound; Refused unless 32 hexadecimal digits."""
        return traces.trace(self._store, self._settings, trace_id)

    def trace_compare(self, a: str, b: str) -> models.TraceComparison:
        """Two traces side by side. Raises as `trace`."""
        return traces.compare(self._store, a, b)

    def audit(self, *, cursor: str | None = None, limit: int = 50) -> models.Audit:
        """A page of the audit record, the newest first."""
        _check("limit", limit, 1, MOST_PAGE)
        # One more than fits tells whether there is another page.
        entries = self._store.audit(read_audit_cursor(cursor), limit + 1)
        more = len(entries) > limit
        return models.Audit(
            entries=[
                models.AuditEntry(
                    id=one.id,
                    time_ns=one.time_ns,
                    actor=one.actor,
                    action=one.action,
                    target=one.target,
                    parameters=dict(one.parameters),
                    outcome=one.outcome,
                )
                for one in entries[:limit]
            ],
            next=audit_cursor(entries[limit - 1].id) if more else None,
        )

    def series(self, *, name: str | None = None) -> list[models.Series]:
        """What each metric series comes to, those of one ``name`` if given."""
        if name is not None:
            _check_id("name", name)
        return [
            models.Series(
                name=one.name,
                process=one.process,
                scope=one.scope,
                unit=one.unit,
                attributes=dict(one.attributes),
                value=one.value,
                histogram=None if one.histogram is None else dict(one.histogram),
                time_ns=one.time_ns or None,
                received_ns=one.received_ns,
            )
            for one in self._store.series(name)
        ]

    def clear(self, asked: models.ClearSamples, *, actor: str) -> models.ActionResult:
        """Drop samples or a partition. Raises NotAllowed, Refused, Conflict, Unavailable, ..."""
        return self._actions.clear(asked, actor)

    def reset_consumption(
        self, asked: models.ResetConsumption, *, actor: str
    ) -> models.ActionResult:
        """Let a task claim samples again. Raises as `clear`."""
        return self._actions.reset_consumption(asked, actor)

    def end_claim(self, asked: models.EndClaim, *, actor: str) -> models.ActionResult:
        """End a claim. Raises as `clear`."""
        return self._actions.end_claim(asked, actor)

    def _newest(self) -> Snapshot:
        return Snapshot() if self._live is None else self._live.snapshot

    def _snapshot(self, partition_id: str) -> Snapshot:
        if self._live is None:
            raise Unavailable("no data plane is looked into; start the service with --ray-address")
        self._live.want(partition_id)
        return self._live.snapshot

    def _run_or_newest(self, run: str | None) -> str:
        if run is None:
            runs = self._store.runs()
            return runs[0].run_id if runs else ""
        if len(run) > MOST_ID:
            _check_id("run", run)
        return run


_LONGEST_S = 1e9
_READY_PROBE_S = 5.0
# A page that is open asks for the status each time that something changed, a probe included.
_STATUS_PROBE_S = 60.0


def _check(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise Refused(f"{name}: found {value}; expected {least} to {most}")


def _check_id(name: str, value: str) -> None:
    if not 1 <= len(value) <= MOST_ID:
        raise Refused(f"{name}: found {len(value)} characters; expected 1 to {MOST_ID}")
