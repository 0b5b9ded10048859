"""`AdminService`: queries and actions, composed of the store, the live data plane and the views.

All methods are synchronous and thread-safe. They raise `ServiceError`, whose text is one sentence
for the user. Routes check sizes of pages and numbers of points; this class checks ids and times.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any  # Any: filters

from dataplane_admin import models
from dataplane_admin.alerts import Watch
from dataplane_admin.live import Live, Snapshot
from dataplane_admin.service import (
    alerts,
    cursors,
    limits,
    lineage,
    partitions,
    runs,
    samples,
    traces,
    waits,
)
from dataplane_admin.service.actions import Actions
from dataplane_admin.service.claims import Needs
from dataplane_admin.service.errors import Refused, Unavailable
from dataplane_admin.service.health import Health
from dataplane_admin.service.load import load
from dataplane_admin.service.pace import Pace, paces
from dataplane_admin.service.samples import THRESHOLD
from dataplane_admin.service.traces import Selection
from dataplane_admin.settings import Settings
from dataplane_admin.store import SampleFilter, Store, TraceFilter
from dataplane_admin.store.read_runs import MAX_RUNS
from dataplane_admin.store.rows import Downtime

NAME = "dataplane-admin"
_READY_PROBE_S = 5.0
# An open page reads the status after each change, so its probes are rarer.
_STATUS_PROBE_S = 60.0


class AdminService:
    """Queries and actions of the service.

    ``live`` is the inspected data plane; None for stored telemetry only. Pages and routes also read
    ``store``, and change the data plane through ``actions``.
    """

    def __init__(self, store: Store, live: Live | None, settings: Settings) -> None:
        self.store = store
        self._live = live
        self._settings = settings
        self._needs = Needs(store)
        self._health = Health(store)
        self.actions = Actions(store, live, allowed=settings.allow_actions)
        self._started_ns = time.time_ns()
        self._subscribers = 0
        self._downtime = Downtime(store.last_seen_ns() or self._started_ns, self._started_ns)
        facts = alerts.facts_of(store, live, settings, self._downtime)
        self.watch = Watch(
            store,
            settings.alerts,
            facts,
            every_s=settings.alerts_every_s,
            public_url=settings.public_url,
        )
        self.version = version(NAME)

    @property
    def revisions(self) -> models.Changed:
        """Revisions that grow when an answer may have changed. Reading them is cheap."""
        live = 0 if self._live is None else self._live.snapshot.revision
        return models.Changed(store=self.store.revision, live=live)

    def subscribed(self, change: int) -> None:
        """Add ``change`` to the number of subscribers of live updates."""
        self._subscribers += change

    def readiness(self) -> models.Readiness:
        """Return whether telemetry can be stored.

        An unreachable data plane is reported, but the service stays ready for telemetry.
        """
        error = self._health.trouble(max_age_s=_READY_PROBE_S)
        live = partitions.live_status(self._live, self._newest())
        return models.Readiness(
            ready=error is None,
            store="ok" if error is None else error,
            live="not configured" if not live.configured else live.error or "attached",
        )

    def status(self) -> models.Status:
        """Return the status of the service."""
        totals = self.store.totals()
        error = self._health.trouble(max_age_s=_STATUS_PROBE_S)
        return models.Status(
            name=NAME,
            version=self.version,
            now_ns=time.time_ns(),
            started_ns=self._started_ns,
            live=partitions.live_status(self._live, self._newest()),
            store=models.StoreStatus.of(
                totals, writable=error is None, error=error, revision=self.store.revision
            ),
            telemetry=models.TelemetryStatus.of(
                totals.counts,
                ingested={"spans": totals.counts.spans, "events": totals.counts.events},
            ),
            actions=self._settings.allow_actions,
            subscribers=self._subscribers,
        )

    def partitions(self) -> models.Partitions:
        """Return partitions and storage units of the newest snapshot; empty without a snapshot."""
        self._needs.refresh()
        snapshot = self._newest()
        return models.Partitions(
            partitions=[
                partitions.partition(
                    summary, snapshot, snapshot.scans.get(summary.partition_id), self._needs
                )
                for summary in snapshot.partitions
            ],
            storage=[models.Unit.of(unit) for unit in snapshot.storage],
            storage_error=snapshot.storage_error,
            totals=dict(snapshot.totals),
            live=partitions.live_status(self._live, snapshot),
        )

    def partition(self, partition_id: str) -> models.Partition:
        """Return one partition of the newest snapshot. Raises NotFound, Unavailable."""
        limits.check_id("id", partition_id)
        self._needs.refresh()
        snapshot = self._snapshot(partition_id)
        summary = partitions.partition_of(snapshot, partition_id)
        scan = snapshot.scans.get(partition_id)
        return partitions.partition(summary, snapshot, scan, self._needs)

    def partition_view(
        self, partition_id: str, *, start: int = 0, limit: int = 100, windows: int = 120
    ) -> models.PartitionView:
        """Return a partition, its matrix, some of its samples and its claims, as of one moment.

        Reads the data plane. Raises NotFound, Unavailable.
        """
        limits.check_id("id", partition_id)
        limits.check("start", start, 0, 2**31)
        self._needs.refresh()
        self._snapshot(partition_id)
        assert self._live is not None  # `_snapshot` raises otherwise
        return partitions.view(
            self._live,
            partition_id,
            self._needs,
            self.store.generator_events(partition_id),
            start=start,
            limit=limit,
            windows=windows,
        )

    def partition_history(self, partition_id: str) -> models.PartitionHistory:
        """Return a partition's numbers over the last hour. Raises as `partition`."""
        limits.check_id("id", partition_id)
        snapshot = self._snapshot(partition_id)
        partitions.partition_of(snapshot, partition_id)
        return partitions.history(partition_id, snapshot)

    def partition_matrix(self, partition_id: str, *, windows: int = 120) -> models.Matrix:
        """Return samples by field and task in up to ``windows`` windows. Raises as `partition`."""
        limits.check_id("id", partition_id)
        snapshot = self._snapshot(partition_id)
        summary = partitions.partition_of(snapshot, partition_id)
        return partitions.matrix(summary, snapshot.scans.get(partition_id), windows)

    def partition_samples(
        self, partition_id: str, *, start: int = 0, limit: int = 100
    ) -> models.SamplePage:
        """Return up to ``limit`` samples from index ``start``; reads the data plane."""
        limits.check_id("id", partition_id)
        summary = partitions.partition_of(self._snapshot(partition_id), partition_id)
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
        """Return at most 1,000 leased claims, oldest first; reads the data plane."""
        limits.check_id("id", partition_id)
        claims = partitions.ask(self._live, lambda plane: plane.list_claims(partition_id))
        return [models.Claim.of(claim) for claim in claims]

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
        """Search samples by id prefix ``q``, or live samples whose ``tag`` equals ``value``."""
        for name, text in (("q", q), ("tag", tag), ("value", value)):
            limits.check_id(name, text or None)
        limits.check_id("partition", partition)
        if not tag:
            return lineage.search(self.store, self._live, q, partition, cursor, limit)
        if q or cursor:
            raise Refused("found tag together with q or cursor; expected either tag or q")
        return lineage.by_tag(self._live, tag, value or "", partition, limit)

    def sample(
        self, sample_id: str, *, run: str | None = None, partition: str | None = None
    ) -> models.SampleLife:
        """Return the lifecycle of one sample in a run, see `lineage.life`. Raises NotFound."""
        limits.check_id("id", sample_id)
        limits.check_id("run", run or None)
        limits.check_id("partition", partition)
        return lineage.life(self.store, self._live, sample_id, run, partition)

    def sample_facts(
        self,
        *,
        sort: models.SampleSort = "newest",
        ascending: bool = False,
        cursor: str | None = None,
        limit: int = 50,
        **chosen: Any,
    ) -> models.SampleFactsPage:
        """Return a page of facts of samples; ``chosen`` are the attributes of `SampleFilter`."""
        page, after = self.store.sample_facts(
            SampleFilter(**chosen),
            sort=sort,
            ascending=ascending,
            after=cursors.FACTS.read(cursor),
            limit=limit,
        )
        return models.SampleFactsPage(samples=page, next=cursors.FACTS.write(after))

    def group(self, run: str, group: str, *, step: int | None = None) -> models.SampleGroup:
        """Return the samples of one prompt, by default in all steps. Raises NotFound."""
        return samples.group(self.store, run, group, step)

    def sample_content(
        self, sample_id: str, *, run: str | None = None, threshold: float = THRESHOLD
    ) -> models.SampleContent:
        """Return facts, conversation and tokens of a sample. Raises NotFound."""
        limits.check_id("id", sample_id)
        return samples.content(self.store, run, sample_id, threshold)

    def why(self, *, run: str | None = None) -> list[models.Wait]:
        """Return blocked tasks, longest first, those of silent processes last.

        With ``run``, only tasks that processes of this run reported.
        """
        limits.check_id("run", run)
        return waits.waits(
            self.store,
            self._newest(),
            silent_after_s=self._settings.silent_after_s,
            downtime=self._downtime,
            run=run,
        )

    def paces(self, runs: Iterable[str], now_ns: int, stuck_after_s: float) -> dict[str, Pace]:
        """Return the pace of each run; see `pace.paces`."""
        return paces(self.store, runs, now_ns, stuck_after_s)

    def alerts(self, *, limit: int = alerts.MAX_CLEARED) -> models.Alerts:
        """Return the raised alerts and the latest ``limit`` cleared ones."""
        return alerts.alerts(self.store, self.watch, limit)

    def staleness(self, *, run: str | None = None, steps: int = 20) -> models.Staleness:
        """Return the staleness of the last ``steps`` steps of a run, by default the newest."""
        return self.store.staleness(self._run_or_newest(run), steps)

    def run_steps(self, *, run: str | None = None, ranges: int = 10) -> models.RunSteps:
        """Return step durations in at most ``ranges`` ranges.

        Without ``run``, they are those of the newest run with a finished step.
        """
        return self.run_steps_by_ranges(ranges, run=run)[0]

    def run_steps_by_ranges(
        self, *max_ranges: int, run: str | None = None
    ) -> list[models.RunSteps]:
        """Return one `run_steps` for each maximum number of ranges, all from one read."""
        if run is None:
            run = self.store.run_with_steps()
        return runs.run_steps(self.store, self._run_or_newest(run), *max_ranges)

    def runs(
        self,
        *,
        q: str | None = None,
        state: models.RunState | None = None,
        tag: str | None = None,
        sort: models.RunSort = "seen",
        ascending: bool = False,
        limit: int = limits.MAX_PAGE,
    ) -> models.Runs:
        """Return the runs that match all filters, of the 1,000 with the newest records.

        Args:
            q: part of id, tag or error; case is ignored.
        """
        known = self.store.runs(silent_after_s=self._settings.silent_after_s)
        stored = len(known) if len(known) < MAX_RUNS else self.store.count_runs()
        return runs.choose(
            known, q, state, tag, sort, ascending=ascending, limit=limit, stored=stored
        )

    def run(self, run: str) -> models.RunDetail:
        """Return one run with its configuration. Raises NotFound."""
        limits.check_id("run", run)
        return runs.run(self.store, run, self._settings.silent_after_s)

    def newest_run(self) -> str | None:
        """Return the last seen run among those with a finished step or curves; None without one."""
        point = self.store.newest_point()
        ids = {self.store.run_with_steps(), None if point is None else point.run_id}
        known = [run for run in map(self.store.run, filter(None, ids)) if run is not None]
        newest = max(known, key=lambda run: (run.seen_ns, run.last_ns), default=None)
        return None if newest is None else newest.run_id

    def find_run(self, run: str) -> models.RunDetail | None:
        """Return one run with its configuration, None if it is not stored."""
        return self.store.run(run[: limits.MAX_ID], silent_after_s=self._settings.silent_after_s)

    def compare_runs(self, run_ids: Sequence[str]) -> models.RunComparison:
        """Return runs and the differences of their configurations. Raises NotFound, Refused."""
        return runs.compare(self._compared(run_ids))

    def compare_run_curves(
        self,
        run_ids: Sequence[str],
        *,
        axis: models.Axis = "step",
        names: Sequence[str] | None = None,
        first: float | None = None,
        last: float | None = None,
        max_points: int = 400,
    ) -> models.ComparedCurves:
        """Return curves of runs over an axis; see `runs.compare_curves`. Raises NotFound."""
        compared = self._compared(run_ids)
        return runs.compare_curves(self.store, compared, axis, names, first, last, max_points)

    def traces(
        self,
        *,
        run: str | None = None,
        step: int | None = None,
        min_s: float | None = None,
        max_s: float | None = None,
        error: bool | None = None,
        name: str | None = None,
        service: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> models.Traces:
        """Return a page of traces, newest first. Raises Refused for an invalid cursor."""
        for parameter, text in (("run", run), ("name", name), ("service", service)):
            limits.check_id(parameter, text or None)
        for parameter, seconds in (("min_s", min_s), ("max_s", max_s)):
            if seconds is not None:
                limits.check(parameter, seconds, 0, limits.MAX_S)
        if step is not None:
            limits.check("step", step, 0, 2**63 - 1)
        page, after = self.store.traces(
            TraceFilter(run, step, min_s, max_s, error, name or None, service or None),
            cursors.TRACES.read(cursor),
            limit,
        )
        return models.Traces(traces=page, next=cursors.TRACES.write(after))

    def trace(self, trace_id: str, chosen: Selection = Selection()) -> models.Trace:  # noqa: B008
        """Return one trace, see `traces.trace`."""
        return traces.trace(self.store, self._settings, trace_id, chosen)

    def trace_compare(self, a: str, b: str) -> models.TraceComparison:
        """Compare two traces. Raises as `trace`."""
        return traces.compare(self.store, a, b)

    def audit(self, *, cursor: str | None = None, limit: int = 50) -> models.Audit:
        """Return a page of the audit log, newest first."""
        entries, after = self.store.audit(cursors.AUDIT.read(cursor), limit)
        return models.Audit(entries=entries, next=cursors.AUDIT.write(after))

    def series(self, *, name: str | None = None) -> list[models.Series]:
        """Return the value of each metric series, filtered by ``name`` if given."""
        limits.check_id("name", name)
        return self.store.series(name)

    def load(
        self,
        start_ns: int,
        end_ns: int,
        *,
        run: str | None = None,
        max_points: int = limits.MAX_POINTS,
    ) -> models.Load:
        """Return the load of engines and nodes in a period.

        With ``run``, engines and nodes that report another run are omitted.
        """
        limits.check_id("run", run)
        return load(self.store, start_ns, end_ns, run=run, max_points=max_points)

    def _newest(self) -> Snapshot:
        return Snapshot() if self._live is None else self._live.snapshot

    def _snapshot(self, partition_id: str) -> Snapshot:
        if self._live is None:
            raise Unavailable("not connected to a data plane; start the service with --ray-address")
        self._live.prioritize(partition_id)
        return self._live.snapshot

    def _compared(self, run_ids: Sequence[str]) -> list[models.RunDetail]:
        distinct = list(dict.fromkeys(run_ids))
        limits.check("number of runs", len(distinct), 1, runs.MAX_COMPARED)
        return [self.run(run_id) for run_id in distinct]

    def _run_or_newest(self, run: str | None) -> str:
        limits.check_id("run", run or None)
        if run is not None:
            return run
        known = self.store.runs()
        return known[0].run_id if known else ""
