"""Alerts: the facts that their rules compare, and the lists that pages and API show."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from dataplane_admin import models
from dataplane_admin.alerts import TELEMETRY, Facts, RunFacts, Watch, metrics_of
from dataplane_admin.live import Live, Snapshot
from dataplane_admin.service.pace import paces
from dataplane_admin.service.waits import waits
from dataplane_admin.settings import Settings
from dataplane_admin.store import Store
from dataplane_admin.store.read_alerts import MAX_RUNS, UnfinishedRun
from dataplane_admin.store.read_runs import REWARD
from dataplane_admin.store.rows import Downtime

MAX_CLEARED = 100
_FORGET_S = 86_400.0
"""Seconds after its last record, or its failure, after which a run raises nothing."""
_GONE_S = 600.0
"""Seconds after which the tasks and units of an unreachable data plane count as gone."""
_MAX_REWARDS = 20_000
"""Maximum number of last steps whose rewards are compared."""


def facts_of(
    store: Store, live: Live | None, settings: Settings, downtime: Downtime
) -> Callable[[], Facts]:
    """Return a function that reads the facts of the service, which started after ``downtime``."""
    started_ns = downtime.until_ns
    silent_ns = int(settings.silent_after_s * 1e9)
    cache: dict[str, tuple[tuple[int, int], list[float]]] = {}
    names = (REWARD, *metrics_of(settings.alerts.rules))

    def rewards(run: UnfinishedRun) -> list[float]:
        changed = run.curves.get(REWARD, (0, 0))
        if run.run_id not in cache or cache[run.run_id][0] != changed:
            cache[run.run_id] = changed, _rewards(store, run.run_id, changed[0])
        return cache[run.run_id][1]

    def read() -> Facts:
        now_ns = time.time_ns()

        def is_gone(read_ns: int | None) -> bool:
            return now_ns - max(read_ns or 0, started_ns) > _GONE_S * 1e9

        plane = None if live is None else live.snapshot
        # Before the unfinished runs: a run that is resumed in between is in both, not in neither.
        failed = store.failed_runs(since_ns=now_ns - int(_FORGET_S * 1e9))
        seen = store.unfinished_runs(since_ns=now_ns - int(_FORGET_S * 1e9), names=names)
        unfinished = [
            run
            for run in seen
            # Skip silent runs that report no end: they may be finished.
            if run.reports_end or downtime.silence_ns(run.seen_ns, now_ns) <= silent_ns
        ]
        for gone in set(cache).difference(run.run_id for run in unfinished):
            del cache[gone]
        limits = paces(store, [run.run_id for run in unfinished], now_ns, settings.stuck_after_s)
        dropped = store.dropped_items()
        blocked = waits(
            store,
            plane or Snapshot(),
            silent_after_s=settings.silent_after_s,
            downtime=downtime,
        )
        return Facts(
            now_ns=now_ns,
            uptime_s=(now_ns - started_ns) / 1e9,
            runs=[
                RunFacts(
                    run_id=run.run_id,
                    seen_s=max(0, now_ns - run.seen_ns) / 1e9,
                    step_s=max(0, now_ns - max(run.start_ns, run.step_ns)) / 1e9,
                    late_after_s=limits[run.run_id].late_after_s,
                    reports_end=run.reports_end,
                    last=run.last,
                    rewards=rewards(run),
                    dropped=dropped.get(run.run_id, {}),
                )
                for run in unfinished
            ],
            waits=blocked,
            failed=failed,
            absences=_absences(store, now_ns, seen, unfinished),
            used_shares=_used_shares(store, plane, settings.retention.max_bytes),
            knows_plane=plane is None or plane.attached or is_gone(plane.at_ns),
            knows_units=plane is None
            or (plane.attached and plane.storage_error is None)
            or is_gone(plane.storage_ns),
        )

    return read


def alerts(store: Store, watch: Watch, limit: int) -> models.Alerts:
    """Return the raised alerts and the latest ``limit`` cleared ones."""
    pending = store.pending_notifications()
    webhooks = []
    for sender in watch.senders:
        number, error, _ = pending.get(sender.webhook.name, (0, "", 0))
        webhooks.append(
            models.WebhookStatus(
                name=sender.webhook.name, pending=number, error=error, **vars(sender.sent)
            )
        )
    return models.Alerts(
        raised=store.raised_alerts(),
        cleared=store.cleared_alerts(limit),
        rules=len(watch.rules.rules),
        idle_rules=list(watch.idle_rules),
        evaluated_ns=watch.evaluated_ns,
        failed_evaluations=watch.failures,
        webhooks=webhooks,
    )


def _absences(
    store: Store, now_ns: int, seen: Sequence[UnfinishedRun], measured: Sequence[UnfinishedRun]
) -> dict[str, str]:
    """Return why each run with a raised alert is not measured any more."""
    known = {"", *(run.run_id for run in measured)}
    absences = {}
    for run_id in {alert.run_id for alert in store.raised_alerts()} - known:
        run = store.run(run_id)
        if run is None:
            absences[run_id] = "the run is no longer stored"
        elif run.state == "failed" and now_ns - run.seen_ns > _FORGET_S * 1e9:
            absences[run_id] = "the run failed a day ago"
        elif run.state not in ("running", "silent"):
            absences[run_id] = f"the run {run.state}"
        elif now_ns - run.seen_ns > _FORGET_S * 1e9:
            absences[run_id] = "the run was silent for a day"
        elif any(run_id == each.run_id for each in seen):
            absences[run_id] = "the run is silent and reported no start"
        elif len(seen) == MAX_RUNS:
            absences[run_id] = f"{MAX_RUNS} other unfinished runs reported later"
    return absences


def _rewards(store: Store, run_id: str, last_step: int) -> list[float]:
    # A range of at most `max_points` steps is not down-sampled.
    curves = store.curves(
        run_id,
        names=[REWARD],
        first_step=max(0, last_step - _MAX_REWARDS + 1),
        last_step=last_step,
        max_points=_MAX_REWARDS,
        limit=1,
    )
    of_run = next((curve for curve in curves if not curve.attributes), None)
    values: Sequence[float | None] = () if of_run is None else of_run.values
    return [value for value in values if value is not None]


def _used_shares(store: Store, plane: Snapshot | None, max_bytes: int | None) -> dict[str, float]:
    """Return the used share of each storage unit, and of the disk of this service's database."""
    shares = {}
    for unit in plane.storage if plane is not None and plane.attached else ():
        subject = f"storage unit {unit.name}"  # a unit may have the name `TELEMETRY`
        if unit.capacity:
            shares[subject] = unit.used / unit.capacity
        elif unit.max_samples and unit.samples is not None:
            shares[subject] = unit.samples / unit.max_samples
    free = store.free_bytes()
    if free is not None:
        used = store.totals().nbytes
        # Retention keeps the database below `max_bytes`. If the disk can hold that, it does not
        # fill.
        fits = max_bytes is not None and used + free >= max_bytes
        shares[TELEMETRY] = 0.0 if fits else used / max(1, used + free)
    return shares
