"""Which systems meet on which cases, in which order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any  # Any: a configuration goes to the client, which checks it

from integration.benchmarks import cluster
from integration.benchmarks.cases import FULL_CASES, QUICK_CASES
from integration.benchmarks.claims import FULL_GROWTH, QUICK_GROWTH, measure_claims
from integration.benchmarks.harness import measure_case
from integration.benchmarks.inspecting import measure_inspecting
from integration.benchmarks.report import OURS, Session
from integration.benchmarks.systems import System
from integration.benchmarks.systems.memcpy import Memcpy
from integration.benchmarks.systems.ours import Ours, config
from integration.benchmarks.systems.plain_queue import PlainQueue
from integration.benchmarks.systems.raw import Raw
from integration.benchmarks.systems.ray_flat import RayFlat, RayFlatPadded
from integration.benchmarks.systems.usual import Usual
from rich.console import Console

from dataplane_core import ConfigError

Connect = dict[str, Callable[[], System]]

_WARM_UPS = 3
_QUICK_REPETITIONS = 4
_FULL_REPETITIONS = 15
_DEFAULT_BACKEND = "packed"


def run_sessions(console: Console, *, backend: str, full: bool) -> list[Session]:
    """Measure everything, and say on ``console`` what is being measured and what is left out.

    A session has one TransferQueue of ours, since a Ray cluster holds one at a time; the baselines
    run again in each, so that no ratio reaches over two sessions.
    """
    prefix = "tq" if backend == _DEFAULT_BACKEND else f"tq_{backend}"
    cases = FULL_CASES if full else QUICK_CASES
    with cluster.ray_cluster(), cluster.plain_transfer_queue() as queue:
        everything = Session(prefix, "", "", [*_baselines(queue)], list(cases))
        _run(console, everything, config(backend), queue, full=full, with_claims=True)
        sessions = [everything]
        if backend == _DEFAULT_BACKEND:
            over_tcp = Session(prefix, "_tcp", ", ours over TCP", ["usual", "memcpy"], list(cases))
            cfg = config(backend, packed_transport="tcp")
            if _run(console, over_tcp, cfg, queue, full=full, with_claims=False):
                sessions.append(over_tcp)
    return sessions


def _baselines(queue: PlainQueue) -> Connect:
    return {
        "usual": partial(Usual, queue.config),
        "raw": partial(Raw, queue.config),
        "ray_flat_padded": RayFlatPadded,
        "ray_flat": RayFlat,
        "memcpy": Memcpy,
    }


def _run(
    console: Console,
    session: Session,
    cfg: Mapping[str, Any],
    queue: PlainQueue,
    *,
    full: bool,
    with_claims: bool,
) -> bool:
    """Fill ``session``; whether ours took part. Without ours, only a session with claims runs."""
    connect: Connect = {name: _baselines(queue)[name] for name in session.systems}
    with ExitStack() as stack:
        try:
            stack.enter_context(cluster.our_transfer_queue(cfg))
        except ConfigError as error:
            console.print(f"SKIPPED, not available: ours{session.note}: {error}", style="bold red")
            if not with_claims:
                return False
        else:
            connect = {OURS: partial(Ours, cfg), **connect}
            session.systems.insert(0, OURS)
        _measure(console, session, connect, full=full, with_claims=with_claims)
    return OURS in connect


def _measure(
    console: Console, session: Session, connect: Connect, *, full: bool, with_claims: bool
) -> None:
    console.log(f"systems{session.note}: {', '.join(session.systems)}")
    with cluster.worker_pair(connect) as pair:
        if "ray_flat" in connect:
            cluster.warm_object_store(pair)
        for case in session.cases:
            console.log(f"measuring {case.title}", style="dim")
            measure_case(
                pair,
                case,
                session.systems,
                session.samples,
                repetitions=_FULL_REPETITIONS if full else _QUICK_REPETITIONS,
                warm_ups=_WARM_UPS,
                settle_stores=cluster.settle_stores,
            )
        if with_claims:
            claiming = [name for name in (OURS, "raw") if name in connect]
            for growth in FULL_GROWTH if full else QUICK_GROWTH:
                console.log(f"measuring claims of {growth.rows:,} rows", style="dim")
                session.claims.append((growth, measure_claims(pair, growth, claiming)))
            if full and OURS in connect:
                console.log("measuring the inspector", style="dim")
                session.inspecting = measure_inspecting(pair, OURS)
