"""Why it is stuck: waits without an answer, and what the live data plane shows standing still."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping

from dataplane_admin.answers import models
from dataplane_admin.live import Live, Stuck
from dataplane_admin.store import Store
from dataplane_admin.store.texts import storable
from observability.views import Wait, printable, why

_MOST = 100


def waits(
    store: Store, live: Live | None, *, silent_after_s: float, run: str | None = None
) -> list[models.Wait]:
    """The longest first, and behind all others those of processes that are not heard of any more.

    Args:
        store: what was told.
        live: the data plane, None if none is looked into.
        silent_after_s: for how long nothing was heard of a process that counts as silent.
        run: only what this run told; what stands still in the data plane tells no run.
    """
    now_ns = time.time_ns()
    snapshot = None if live is None or not live.snapshot.attached else live.snapshot
    records = store.wait_records(run_id=run, silent_after_s=silent_after_s)
    partitions = snapshot.partitions if snapshot else None
    # The store knows when it received what was told, and metrics as well.
    told = why(records.with_receipts(), now_ns, partitions, silent_after_s=math.inf)
    found = [_wait(one, records.silent, now_ns) for one in told]
    known = {(one.partition, one.task) for one in found if one.silent_s is None}
    for stuck in snapshot.stuck if snapshot and run is None else ():
        # A task that says itself that it waits has said it better.
        if stuck.claim is not None or (stuck.partition_id, stuck.task) not in known:
            found.append(_standing(stuck, now_ns))
    return sorted(found, key=lambda one: (one.silent_s is not None, -one.seconds))[:_MOST]


def _wait(wait: Wait, silent: Mapping[tuple[str, str], int], now_ns: int) -> models.Wait:
    examples = dict.fromkeys(one for lack in wait.lacks.values() for one in lack.examples)
    sentence, silent_s = str(wait), None
    heard_ns = silent.get((wait.process.identity, storable(wait.run_id)))
    if heard_ns is not None:
        silent_s = max(0, now_ns - heard_ns) / 1e9
        sentence = f"{wait}; nothing has been heard of it for {_about(silent_s)}"
    return models.Wait(
        kind="wait",
        sentence=sentence,
        task=wait.task,
        process=wait.label,
        partition=wait.partition,
        run_id=wait.run_id,
        step=wait.step,
        since_ns=wait.since_ns,
        seconds=wait.seconds,
        silent_s=silent_s,
        asked=wait.asked,
        ready=wait.ready,
        there=wait.there,
        lacks={
            name: models.Lack(count=lack.count, examples=list(lack.examples))
            for name, lack in wait.lacks.items()
        },
        blocking=list(examples),
        claim="",
    )


def _standing(stuck: Stuck, now_ns: int) -> models.Wait:
    return models.Wait(
        kind="backlog" if stuck.claim is None else "claim",
        sentence=_backlog(stuck) if stuck.claim is None else _claim(stuck),
        task=stuck.task,
        process="" if stuck.claim is None else stuck.claim.owner,
        partition=stuck.partition_id,
        run_id="",
        step=None,
        since_ns=now_ns - int(stuck.seconds * 1e9),
        seconds=stuck.seconds,
        silent_s=None,
        asked=0,
        ready=0,
        there=stuck.there,
        lacks={name: models.Lack(count=count, examples=[]) for name, count in stuck.lacks.items()},
        blocking=list(stuck.examples),
        claim="" if stuck.claim is None else stuck.claim.claim,
    )


def _backlog(stuck: Stuck) -> str:
    lacks = "".join(
        f"; {count} of them lack {printable(name)}" for name, count in stuck.lacks.items()
    )
    return (
        f"task '{printable(stuck.task)}' has claimed nothing for {_about(stuck.idle_s)}: "
        f"{stuck.samples} of {stuck.there} samples of partition '{printable(stuck.partition_id)}' "
        f"are unclaimed, the oldest for {_about(stuck.seconds)}{_ids(stuck)}{lacks}"
    )


def _claim(stuck: Stuck) -> str:
    claim = stuck.claim
    assert claim is not None
    owner = printable(claim.owner) if claim.owner else "a process that did not tell its name"
    return (
        f"claim {printable(claim.claim)} of task '{printable(stuck.task)}' is held by {owner} for "
        f"{_about(stuck.seconds)}: {stuck.samples} samples of partition "
        f"'{printable(stuck.partition_id)}' are not acknowledged{_ids(stuck)}; "
        f"{_lease(claim.expires_in_s)}"
    )


def _lease(expires_in_s: float | None) -> str:
    if expires_in_s is None:
        return "its lease never expires"
    if expires_in_s <= 0:
        return f"its lease expired {_about(-expires_in_s)} ago"
    return f"its lease expires in {_about(expires_in_s)}"


def _ids(stuck: Stuck) -> str:
    if not stuck.examples:
        return ""
    more = ["…"] if stuck.samples > len(stuck.examples) else []
    return f" ({', '.join([*_printable(stuck.examples), *more])})"


def _printable(ids: Iterable[str]) -> list[str]:
    return [printable(one) for one in ids]


def _about(seconds: float) -> str:
    """Whole units: what is told here is not known to the millisecond."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"
