"""Which systems meet on which cases, in which order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any  # Any: a configuration goes to the client, which checks it

from integration.benchmarks import cluster
from integration.benchmarks.cases import FULL_CASES, QUICK_CASES
from integration.benchmarks.claims import FULL_GROWTH, QUICK_GROWTH, measure_claims
from integration.benchmarks.harness import Pair, measure_case
from integration.benchmarks.inspecting import measure_inspecting
from integration.benchmarks.parts import Parts
from integration.benchmarks.report import OURS, RAW, Session
from integration.benchmarks.systems import System
from integration.benchmarks.systems.memcpy import Memcpy
from integration.benchmarks.systems.ours import Ours, config
from integration.benchmarks.systems.plain_queue import PlainQueue
from integration.benchmarks.systems.raw import Raw
from integration.benchmarks.systems.ray_flat import RayFlat, RayFlatPadded
from integration.benchmarks.systems.usual import Usual

from dataplane_core import ConfigError

Connect = dict[str, Callable[[], System]]

_BASELINES: dict[str, Callable[[PlainQueue], Callable[[], System]]] = {
    "usual": lambda queue: partial(Usual, queue.config),
    RAW: lambda queue: partial(Raw, queue.config),
    "ray_flat_padded": lambda _: RayFlatPadded,
    "ray_flat": lambda _: RayFlat,
    "memcpy": lambda _: Memcpy,
}
_QUICK_WARM_UPS, _FULL_WARM_UPS = 2, 3
_QUICK_REPETITIONS, _FULL_REPETITIONS = 8, 15
_DEFAULT_BACKEND = "packed"


def run_sessions(parts: Parts, *, backend: str, full: bool) -> list[Session]:
    """Measure everything, and say in ``parts`` what is being measured and what is left out.

    A session has one TransferQueue of ours, since a Ray cluster holds one at a time; the baselines
    run again in each, so that no ratio reaches over two sessions. The processes stay.
    """
    prefix = "tq" if backend == _DEFAULT_BACKEND else f"tq_{backend}"
    cases = FULL_CASES if full else QUICK_CASES
    parts.begin("starting both TransferQueues, a producer and a consumer")
    with cluster.two_workers() as workers, cluster.plain_transfer_queue() as queue:
        everything = Session(prefix, "", "", list(_BASELINES), list(cases))
        _run(parts, everything, config(backend), workers, queue, full=full, with_claims=True)
        sessions = [everything]
        if backend == _DEFAULT_BACKEND:
            parts.begin("starting ours over TCP")
            over_tcp = Session(prefix, "_tcp", ", ours over TCP", ["usual", "memcpy"], list(cases))
            cfg = config(backend, packed_transport="tcp")
            if _run(parts, over_tcp, cfg, workers, queue, full=full, with_claims=False):
                sessions.append(over_tcp)
    return sessions


def _run(
    parts: Parts,
    session: Session,
    cfg: Mapping[str, Any],
    workers: cluster.Workers,
    queue: PlainQueue,
    *,
    full: bool,
    with_claims: bool,
) -> bool:
    """Fill ``session``; whether ours took part. Without ours, only a session with claims runs."""
    connect: Connect = {}
    with ExitStack() as stack:
        try:
            stack.enter_context(cluster.our_transfer_queue(cfg))
        except ConfigError as error:
            parts.console.print(
                f"SKIPPED, not available: ours{session.note}: {error}", style="bold red"
            )
            if not with_claims:
                return False
        else:
            connect[OURS] = partial(Ours, cfg)
        connect |= {name: _BASELINES[name](queue) for name in session.systems}
        session.systems[:] = connect
        pair = stack.enter_context(cluster.connected(workers, connect))
        _measure(parts, session, pair, full=full, with_claims=with_claims)
    return OURS in connect


def _measure(parts: Parts, session: Session, pair: Pair, *, full: bool, with_claims: bool) -> None:
    if "ray_flat" in session.systems:
        parts.begin("touching the memory of Ray's object store")
        cluster.warm_object_store(pair, full=full)
    # A round of `raw` takes as long as one of `usual`, and feeds the full table alone.
    systems = [name for name in session.systems if full or name != RAW]
    for case in session.cases:
        parts.begin(f"{case.title}{session.note}")
        measure_case(
            pair,
            case,
            systems,
            session.samples,
            repetitions=_FULL_REPETITIONS if full else _QUICK_REPETITIONS,
            warm_ups=_FULL_WARM_UPS if full else _QUICK_WARM_UPS,
            settle_stores=cluster.settle_stores,
        )
    if not with_claims:
        return
    claiming = [name for name in (OURS, RAW) if name in session.systems]
    for growth in FULL_GROWTH if full else QUICK_GROWTH:
        parts.begin(f"claims of {growth.rows:,} rows")
        steady = claiming if full else claiming[:1]
        session.claims.append((growth, measure_claims(pair, growth, claiming, steady)))
    if full and OURS in session.systems:
        parts.begin("the inspector")
        session.inspecting = measure_inspecting(pair, OURS)
