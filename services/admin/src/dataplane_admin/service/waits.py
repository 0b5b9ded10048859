"""Blocked tasks: reported waits, and idle tasks and old claims of the live data plane."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from dataplane_admin import models
from dataplane_admin.live import Snapshot, Stuck
from dataplane_admin.store import Store
from dataplane_admin.store.rows import Downtime
from dataplane_admin.store.texts import storable
from observability.views import OpenWait, printable, why
from observability.views.quantities import duration

_MAX_WAITS = 100
_UNREACHABLE_S = 10.0
"""Seconds without an answer after which a data plane counts as unreachable."""
_GONE_S = 600.0
"""Seconds after which an unreachable data plane counts as gone, if no run is known."""


def waits(
    store: Store,
    plane: Snapshot,
    *,
    silent_after_s: float,
    downtime: Downtime,
    run: str | None = None,
) -> list[models.Wait]:
    """Return blocked tasks, longest first, those of silent processes last.

    A fault comes before them: the data plane no longer answers its clients or this service.

    Args:
        store: stored telemetry.
        plane: newest snapshot of the data plane; an empty one without a data plane.
        silent_after_s: seconds without telemetry after which a process counts as silent.
        downtime: time in which silence does not count.
        run: run to filter by. What the data plane itself shows belongs to no run.
    """
    now_ns = time.time_ns()
    snapshot = plane if plane.attached else None
    records = store.wait_records(run_id=run, silent_after_s=silent_after_s, downtime=downtime)
    partitions = snapshot.partitions if snapshot else None
    # `why` does not know when processes sent metrics; the store does, and sets `records.silent`.
    waits = why(records, now_ns, partitions, silent_after_s=math.inf)
    blocked = [_wait(wait, records.silent, now_ns) for wait in waits]
    known = {(wait.partition, wait.task) for wait in blocked if wait.silent_s is None}
    for stuck in snapshot.stuck if snapshot and run is None else ():
        # A wait that the task itself reports is more precise.
        if stuck.claim is not None or (stuck.partition_id, stuck.task) not in known:
            blocked.append(_idle(stuck, now_ns))
    blocked.sort(key=lambda wait: (wait.silent_s is not None, -wait.seconds))
    if snapshot and snapshot.fault_ns is not None and run is None:
        blocked.insert(0, _fault(snapshot.error or "", snapshot.fault_ns, now_ns))
    if run is None:
        lost_ns = _lost_ns(plane, store, now_ns, silent_after_s)
        if lost_ns is not None:
            sentence = f"cannot read the data plane: {plane.error}"
            blocked.insert(0, _fault(sentence, lost_ns, now_ns))
    return blocked[:_MAX_WAITS]


def _lost_ns(plane: Snapshot, store: Store, now_ns: int, silent_after_s: float) -> int | None:
    """Return the time of the last answer of a data plane that is lost although its job runs.

    None if it answers or never did, or if all known runs ended or are silent.
    """
    at_ns = plane.at_ns
    if plane.attached or at_ns is None or now_ns - at_ns < _UNREACHABLE_S * 1e9:
        return None
    if store.unfinished_runs(since_ns=now_ns - int(silent_after_s * 1e9), names=()):
        return at_ns
    # A job without telemetry does not report its end.
    is_recent = now_ns - at_ns < _GONE_S * 1e9
    return at_ns if is_recent and not store.count_runs() else None


def _wait(wait: OpenWait, silent: Mapping[tuple[str, str], int], now_ns: int) -> models.Wait:
    examples = dict.fromkeys(
        sample_id for lack in wait.lacks.values() for sample_id in lack.examples
    )
    sentence, silent_s = str(wait), None
    last_seen_ns = silent.get((wait.process.identity, storable(wait.run_id)))
    if last_seen_ns is not None:
        silent_s = max(0, now_ns - last_seen_ns) / 1e9
        wait = replace(wait, seconds=max(0.0, wait.seconds - silent_s))
        sentence = f"{wait}; last seen {_rounded(silent_s)} ago"
    return models.Wait.of(
        wait,
        kind="wait",
        sentence=sentence,
        process=wait.label,
        silent_s=silent_s,
        lacks={name: models.MissingField.of(lack) for name, lack in wait.lacks.items()},
        blocking=list(examples),
        claim="",
    )


def _idle(stuck: Stuck, now_ns: int) -> models.Wait:
    return models.Wait.of(
        stuck,
        kind="backlog" if stuck.claim is None else "claim",
        sentence=_backlog(stuck) if stuck.claim is None else _claim(stuck),
        process="" if stuck.claim is None else stuck.claim.owner,
        partition=stuck.partition_id,
        run_id="",
        step=None,
        since_ns=now_ns - int(stuck.seconds * 1e9),
        silent_s=None,
        requested=0,
        ready=0,
        lacks={
            name: models.MissingField(count=count, examples=[])
            for name, count in stuck.lacks.items()
        },
        blocking=list(stuck.examples),
        claim="" if stuck.claim is None else stuck.claim.claim,
    )


def _fault(sentence: str, since_ns: int, now_ns: int) -> models.Wait:
    return models.Wait(
        kind="fault",
        sentence=sentence,
        task="",
        process="",
        partition="",
        run_id="",
        step=None,
        since_ns=since_ns,
        seconds=max(0, now_ns - since_ns) / 1e9,
        silent_s=None,
        requested=0,
        ready=0,
        present=0,
        lacks={},
        blocking=[],
        claim="",
    )


def _backlog(stuck: Stuck) -> str:
    lacks = "".join(
        f"; {count} unclaimed samples lack {printable(name)}" for name, count in stuck.lacks.items()
    )
    required = ""
    if stuck.blocked_claim_fields is not None:
        required = (
            f"; its blocked claim requires {', '.join(_printable(stuck.blocked_claim_fields))}"
        )
    return (
        f"task '{printable(stuck.task)}' has claimed nothing for {_rounded(stuck.idle_s)}: "
        f"{stuck.samples} of {stuck.present} samples of partition "
        f"'{printable(stuck.partition_id)}' are unclaimed, the oldest for "
        f"{_rounded(stuck.seconds)}{_ids(stuck)}{required}{lacks}"
    )


def _claim(stuck: Stuck) -> str:
    claim = stuck.claim
    assert claim is not None
    owner = printable(claim.owner) if claim.owner else "an unnamed process"
    return (
        f"claim {printable(claim.claim)} of task '{printable(stuck.task)}' has been held by "
        f"{owner} for {_rounded(stuck.seconds)}: {stuck.samples} samples of partition "
        f"'{printable(stuck.partition_id)}' are not acknowledged{_ids(stuck)}; "
        f"{_lease(claim.expires_in_s)}"
    )


def _lease(expires_in_s: float | None) -> str:
    if expires_in_s is None:
        return "its lease never expires"
    if expires_in_s <= 0:
        return f"its lease expired {_rounded(-expires_in_s)} ago"
    return f"its lease expires in {_rounded(expires_in_s)}"


def _ids(stuck: Stuck) -> str:
    if not stuck.examples:
        return ""
    more = ["…"] if stuck.samples > len(stuck.examples) else []
    return f" ({', '.join([*_printable(stuck.examples), *more])})"


def _printable(ids: Iterable[str]) -> list[str]:
    return [printable(sample_id) for sample_id in ids]


def _rounded(seconds: float) -> str:
    """Return a duration in seconds or larger units: it is not exact to the millisecond."""
    total_s = max(0, round(seconds))
    return f"{total_s} s" if total_s < 120 else duration(total_s)
