"""Partitions, matrices, samples and claims of the live data plane."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from dataplane_admin import models
from dataplane_admin.live import (
    PAGE,
    Live,
    Moment,
    NotAttached,
    QueryTimeout,
    Scan,
    Snapshot,
    TooManyQueries,
    Trend,
    read_moment,
)
from dataplane_admin.service.claims import Needs
from dataplane_admin.service.errors import Conflict, NotFound, Refused, TimedOut, Unavailable
from dataplane_admin.service.generators import generators
from dataplane_core import (
    DataPlaneError,
    DeadlineExceededError,
    InvalidRequestError,
    PartitionNotFoundError,
    PartitionSummary,
    SamplesLeasedError,
    SampleState,
    StoreInspector,
    TaskSummary,
    UnavailableError,
    UnknownTaskError,
    UnsupportedError,
)
from observability.records import Event
from observability.views import printable

T = TypeVar("T")

NOT_CONFIGURED = models.LiveStatus(
    configured=False, attached=False, source="", error=None, at_ns=None, age_s=None, revision=0
)


def live_status(live: Live | None, snapshot: Snapshot) -> models.LiveStatus:
    """Return the state of the connection to the data plane, as of a snapshot."""
    if live is None:
        return NOT_CONFIGURED
    return models.LiveStatus(
        configured=True,
        attached=snapshot.attached,
        source=live.source,
        error=snapshot.error,
        at_ns=snapshot.at_ns,
        age_s=None if snapshot.at_ns is None else max(0.0, time.monotonic() - snapshot.read_s),
        revision=snapshot.revision,
    )


def ask(
    live: Live | None,
    query: Callable[[StoreInspector], T],
    until_s: float | None = None,
) -> T:
    """Return the data plane's answer within the deadline, see `Live.ask`. Raises ServiceError."""
    if live is None:
        raise Unavailable("not connected to a data plane; start the service with --ray-address")
    try:
        return live.ask(query, until_s)
    except (NotAttached, TooManyQueries, UnavailableError) as error:
        raise Unavailable(str(error)) from None
    except (QueryTimeout, DeadlineExceededError) as error:
        raise TimedOut(str(error)) from None
    except (PartitionNotFoundError, UnknownTaskError) as error:
        raise NotFound(str(error)) from None
    except SamplesLeasedError as error:
        raise Conflict(str(error)) from None
    except (UnsupportedError, InvalidRequestError) as error:
        raise Refused(str(error)) from None
    except DataPlaneError as error:
        raise Unavailable(str(error)) from None


def partition_of(snapshot: Snapshot, partition_id: str) -> PartitionSummary:
    """Return one partition of a snapshot. Raises NotFound; Unavailable before the first poll."""
    summary = snapshot.partition(partition_id)
    if summary is None:
        if snapshot.at_ns is None:
            raise Unavailable(snapshot.error or "the data plane has not been read yet")
        raise NotFound(
            f"partition '{_short(partition_id)}' does not exist; there are "
            f"{len(snapshot.partitions)} others"
        )
    return summary


def partition(
    summary: PartitionSummary, snapshot: Snapshot, scan: Scan | None, needs: Needs
) -> models.Partition:
    """Return one partition with its trends, and the ready samples of its scan."""
    trend = snapshot.trends.get(summary.partition_id, Trend())
    return models.Partition.of(
        summary,
        id=summary.partition_id,
        not_put=max(0, summary.declared - summary.put),
        cleared=max(0, summary.put - summary.present),
        fields=[models.PartitionField.of(field) for field in summary.fields],
        tasks=[_task(task, summary.partition_id, scan, trend, needs) for task in summary.tasks],
        enums={name: list(values) for name, values in summary.enums.items()},
        put_per_s=trend.gained_per_s(trend.put),
        polled_ns=trend.times_ns,
        put_trend=trend.put,
    )


def _task(
    task: TaskSummary, partition_id: str, scan: Scan | None, trend: Trend, known: Needs
) -> models.PartitionTask:
    needs = (
        known.of(partition_id, task.name)
        if task.blocked_claim_fields is None
        else task.blocked_claim_fields
    )
    numbers = trend.tasks.get(task.name)
    ready = None
    if needs is not None and scan is not None:
        # The scan may be older than `unclaimed`.
        ready = min(task.unclaimed, scan.ready(task.name, needs))
    return models.PartitionTask.of(
        task,
        acknowledged=task.acknowledged,
        needs=needs,
        ready=ready,
        oldest_claim=None if task.oldest_claim is None else models.Claim.of(task.oldest_claim),
        claimed_per_s=None if numbers is None else trend.gained_per_s(numbers.claimed),
        acknowledged_per_s=None if numbers is None else trend.gained_per_s(numbers.acknowledged),
        backlog_per_s=None if numbers is None else trend.slope_per_s(numbers.unclaimed),
        backlog=[] if numbers is None else numbers.unclaimed,
    )


def history(partition_id: str, snapshot: Snapshot) -> models.PartitionHistory:
    """Return one partition's numbers over the last hour."""
    trend = snapshot.history.get(partition_id, Trend())
    tasks = [models.TaskHistory.of(numbers, name=name) for name, numbers in trend.tasks.items()]
    return models.PartitionHistory.of(trend, partition=partition_id, tasks=tasks)


def matrix(summary: PartitionSummary, scan: Scan | None, windows: int) -> models.Matrix:
    """Return a partition's scan in windows; no windows without a scan."""
    if scan is None:
        return models.Matrix(
            partition=summary.partition_id,
            total=summary.present,
            scanned=0,
            at_ns=None,
            fields=[field.name for field in summary.fields],
            tasks=[task.name for task in summary.tasks],
            windows=[],
        )
    return models.Matrix.of(
        scan,
        partition=summary.partition_id,
        scanned=scan.rows,
        windows=scan.windows(windows),
    )


def view(
    live: Live,
    partition_id: str,
    needs: Needs,
    generator_events: Sequence[Event],
    *,
    start: int,
    limit: int,
    windows: int,
) -> models.PartitionView:
    """Return a partition and its contents as of one moment, read from the data plane.

    If the data plane is unreachable, return the newest snapshot without samples and claims. Up to
    `PAGE` samples, its scan is included only if the scan has the partition's revision. Raises
    NotFound, Unavailable.
    """
    snapshot = live.snapshot
    try:
        moment = ask(live, lambda plane: read_moment(plane, partition_id, start=start, limit=limit))
    except (TimedOut, Unavailable, Refused) as error:
        summary = partition_of(snapshot, partition_id)
        scan = snapshot.scans.get(partition_id)
        if scan is not None and scan.revision != summary.revision:
            scan = None
        assert snapshot.at_ns is not None  # `partition_of` raises otherwise
        moment = Moment(snapshot.at_ns, 0.0, summary, scan, [], [])
        problem = str(error)
    else:
        problem = ""
    # Only the poller scans a large partition, page by page, so its matrix has another time.
    scan = moment.scan
    if scan is None and moment.summary.present > PAGE:
        scan = snapshot.scans.get(partition_id)
    claims = [models.Claim.of(claim) for claim in moment.claims]
    return models.PartitionView.of(
        moment,
        partition=partition(moment.summary, snapshot, scan, needs),
        matrix=matrix(moment.summary, scan, windows),
        samples=models.SamplePage(
            partition=partition_id,
            start=start,
            total=moment.summary.present,
            samples=[sample(state, partition_id) for state in moment.samples],
        ),
        claims=claims,
        generators=generators(generator_events, claims),
        problem=problem,
    )


def sample(state: SampleState, partition_id: str) -> models.Sample:
    """Return one sample."""
    return models.Sample.of(state, partition=partition_id, tasks=dict(state.tasks))


def _short(text: str) -> str:
    return printable(text if len(text) <= 100 else f"{text[:100]}…")
