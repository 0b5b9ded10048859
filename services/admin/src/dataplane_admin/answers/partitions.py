"""Partitions, matrices, pages of samples and claims as the live data plane has them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from dataplane_admin.answers import models
from dataplane_admin.answers.errors import Conflict, Late, NotFound, Refused, Unavailable
from dataplane_admin.answers.needs import Needs
from dataplane_admin.live import (
    PAGE,
    AskedTooLong,
    Live,
    Moment,
    NotAttached,
    Scan,
    Snapshot,
    TooManyAsk,
    Trend,
    read_moment,
)
from dataplane_core import (
    ClaimSummary,
    DataPlaneError,
    DataPlaneInspector,
    DeadlineExceededError,
    InvalidRequestError,
    PartitionNotFoundError,
    PartitionSummary,
    SamplesLeasedError,
    SampleState,
    TaskSummary,
    UnavailableError,
    UnknownTaskError,
    UnsupportedError,
)
from observability.views import printable

T = TypeVar("T")

NOT_ASKED = models.LiveStatus(
    asked=False, attached=False, source="", error=None, at_ns=None, age_s=None, revision=0
)


def live_status(live: Live | None, snapshot: Snapshot) -> models.LiveStatus:
    """How the service stands with the data plane, as of a snapshot."""
    if live is None:
        return NOT_ASKED
    return models.LiveStatus(
        asked=True,
        attached=snapshot.attached,
        source=live.source,
        error=snapshot.error,
        at_ns=snapshot.at_ns,
        age_s=None if snapshot.at_ns is None else max(0.0, time.monotonic() - snapshot.read_s),
        revision=snapshot.revision,
    )


def ask(
    live: Live | None,
    question: Callable[[DataPlaneInspector], T],
    until_s: float | None = None,
) -> T:
    """What the data plane answers within the deadline, see `Live.ask`. Raises AnswerError."""
    if live is None:
        raise Unavailable("no data plane is looked into; start the service with --ray-address")
    try:
        return live.ask(question, until_s)
    except (NotAttached, TooManyAsk, UnavailableError) as error:
        raise Unavailable(str(error)) from None
    except (AskedTooLong, DeadlineExceededError) as error:
        raise Late(str(error)) from None
    except (PartitionNotFoundError, UnknownTaskError) as error:
        raise NotFound(str(error)) from None
    except SamplesLeasedError as error:
        raise Conflict(str(error)) from None
    except (UnsupportedError, InvalidRequestError) as error:
        raise Refused(str(error)) from None
    except DataPlaneError as error:
        raise Unavailable(str(error)) from None


def found(snapshot: Snapshot, partition_id: str) -> PartitionSummary:
    """One partition of a snapshot. Raises NotFound, or Unavailable while nothing was read."""
    summary = snapshot.partition(partition_id)
    if summary is None:
        if snapshot.at_ns is None:
            raise Unavailable(snapshot.error or "the data plane has not been read yet")
        raise NotFound(
            f"partition '{_short(partition_id)}' is not there; there are "
            f"{len(snapshot.partitions)} others"
        )
    return summary


def partition(
    summary: PartitionSummary, snapshot: Snapshot, scan: Scan | None, needs: Needs
) -> models.Partition:
    """One partition with its trends, and what is ready in a scan of it."""
    trend = snapshot.trends.get(summary.partition_id, Trend())
    return models.Partition(
        id=summary.partition_id,
        declared=summary.declared,
        put=summary.put,
        present=summary.present,
        outstanding=max(0, summary.declared - summary.put),
        reserved=summary.reserved,
        cleared=max(0, summary.put - summary.present),
        group_size=summary.group_size,
        nbytes=summary.nbytes,
        revision=summary.revision,
        fields=[
            models.PartitionField(
                name=held.name,
                kind=held.kind,
                declared=held.declared,
                written=held.written,
                nbytes=held.nbytes,
            )
            for held in summary.fields
        ],
        tasks=[_task(task, summary.partition_id, scan, trend, needs) for task in summary.tasks],
        enums={name: list(values) for name, values in summary.enums.items()},
        put_per_s=trend.gained_per_s(trend.put),
        polled_ns=list(trend.times_ns),
        put_trend=list(trend.put),
    )


def _task(
    task: TaskSummary, partition_id: str, scan: Scan | None, trend: Trend, known: Needs
) -> models.PartitionTask:
    needs = known.of(partition_id, task.name)
    numbers = trend.tasks.get(task.name)
    ready = None
    if needs is not None and scan is not None:
        # The scan may be older than the count.
        ready = min(task.unclaimed, scan.ready(task.name, needs))
    return models.PartitionTask(
        name=task.name,
        unclaimed=task.unclaimed,
        assigned=task.assigned,
        leased=task.leased,
        settled=task.settled,
        leases=task.leases,
        needs=None if needs is None else list(needs),
        ready=ready,
        oldest_unclaimed_s=task.oldest_unclaimed_s,
        oldest_claim=None if task.oldest_claim is None else claim(task.oldest_claim),
        claimed_per_s=None if numbers is None else trend.gained_per_s(numbers.taken),
        settled_per_s=None if numbers is None else trend.gained_per_s(numbers.settled),
        backlog_per_s=None if numbers is None else trend.slope_per_s(numbers.unclaimed),
        backlog=[] if numbers is None else list(numbers.unclaimed),
    )


def claim(summary: ClaimSummary) -> models.Claim:
    """One claim."""
    return models.Claim(
        claim=summary.claim,
        task=summary.task,
        owner=summary.owner,
        samples=summary.samples,
        age_s=summary.age_s,
        expires_in_s=summary.expires_in_s,
    )


def matrix(summary: PartitionSummary, scan: Scan | None, windows: int) -> models.Matrix:
    """A scan of a partition in windows; none without a scan."""
    if scan is None:
        return models.Matrix(
            partition=summary.partition_id,
            total=summary.present,
            scanned=0,
            at_ns=None,
            fields=[held.name for held in summary.fields],
            tasks=[task.name for task in summary.tasks],
            windows=[],
        )
    return models.Matrix(
        partition=summary.partition_id,
        total=scan.total,
        scanned=scan.rows,
        at_ns=scan.at_ns,
        fields=list(scan.fields),
        tasks=list(scan.tasks),
        windows=[
            models.Window(start=one.start, count=one.count, written=one.written, tasks=one.tasks)
            for one in scan.windows(windows)
        ],
    )


def view(
    live: Live, partition_id: str, needs: Needs, *, start: int, limit: int, windows: int
) -> models.PartitionView:
    """A partition and what is in it as of one moment; asks the data plane.

    Where it cannot be asked, the newest snapshot stands in, without samples and claims, and without
    a scan of another moment. Raises NotFound, Unavailable.
    """
    snapshot = live.snapshot
    try:
        moment = ask(live, lambda plane: read_moment(plane, partition_id, start=start, limit=limit))
    except (Late, Unavailable, Refused) as error:
        summary = found(snapshot, partition_id)
        scan = snapshot.scans.get(partition_id)
        if scan is not None and scan.revision != summary.revision:
            scan = None
        assert snapshot.at_ns is not None  # else nothing was found
        moment = Moment(snapshot.at_ns, 0.0, summary, scan, [], [])
        problem = str(error)
    else:
        problem = ""
    # A large partition is scanned page by page between polls; its matrix has a moment of its own.
    scan = moment.scan
    if scan is None and moment.summary.present > PAGE:
        scan = snapshot.scans.get(partition_id)
    return models.PartitionView(
        at_ns=moment.at_ns,
        spread_s=moment.spread_s,
        partition=partition(moment.summary, snapshot, scan, needs),
        matrix=matrix(moment.summary, scan, windows),
        samples=models.SamplePage(
            partition=partition_id,
            start=start,
            total=moment.summary.present,
            samples=[sample(state, partition_id) for state in moment.samples],
        ),
        claims=[claim(one) for one in moment.claims],
        problem=problem,
    )


def sample(state: SampleState, partition_id: str) -> models.Sample:
    """One sample."""
    return models.Sample(
        sample_id=state.sample_id,
        partition=partition_id,
        fields=list(state.fields),
        tags=state.tags,
        tasks=state.tasks,
        claims=state.claims,
        origins=state.origins,
        age_s=state.age_s,
    )


def _short(text: str) -> str:
    return printable(text if len(text) <= 100 else f"{text[:100]}…")
