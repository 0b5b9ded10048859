"""Sessions of a run: the systems, their cases and their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any  # Any: the client checks a configuration

from integration.benchmarks import cluster
from integration.benchmarks.cases import FULL_CASES, QUICK_CASES
from integration.benchmarks.claims import FULL_GROWTH, QUICK_GROWTH, measure_claims
from integration.benchmarks.harness import Pair, measure_case
from integration.benchmarks.inspecting import measure_inspecting
from integration.benchmarks.parts import Parts
from integration.benchmarks.report import DATA_PLANE, RAW, Session
from integration.benchmarks.systems import System
from integration.benchmarks.systems.data_plane import DataPlane, config
from integration.benchmarks.systems.memcpy import Memcpy
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
    """Measure all sessions, and announce in ``parts`` what is measured and what is skipped.

    A session has one data plane, since a Ray cluster holds one at a time. The baselines run again
    in each session, so that every ratio is of one session. Producer and consumer keep running.
    """
    prefix = "tq" if backend == _DEFAULT_BACKEND else f"tq_{backend}"
    cases = FULL_CASES if full else QUICK_CASES
    parts.begin("starting both TransferQueues, a producer and a consumer")
    with cluster.two_workers() as workers, cluster.plain_transfer_queue() as queue:
        main_session = Session(prefix, "", "", list(_BASELINES), list(cases))
        _run(parts, main_session, config(backend), workers, queue, full=full, with_claims=True)
        sessions = [main_session]
        if backend == _DEFAULT_BACKEND:
            parts.begin("starting the data plane over TCP")
            note = ", data plane over TCP"
            over_tcp = Session(prefix, "_tcp", note, ["usual", "memcpy"], list(cases))
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
    """Fill ``session``; return False if the data plane is not available.

    Without the data plane, only a session with claims runs.
    """
    connect: Connect = {}
    with ExitStack() as stack:
        try:
            stack.enter_context(cluster.data_plane(cfg))
        except ConfigError as error:
            parts.console.print(
                f"SKIPPED, not available: data plane{session.note}: {error}", style="bold red"
            )
            if not with_claims:
                return False
        else:
            connect[DATA_PLANE] = partial(DataPlane, cfg)
        connect |= {name: _BASELINES[name](queue) for name in session.systems}
        session.systems[:] = connect
        pair = stack.enter_context(cluster.connected(workers, connect))
        _measure(parts, session, pair, full=full, with_claims=with_claims)
    return DATA_PLANE in connect


def _measure(parts: Parts, session: Session, pair: Pair, *, full: bool, with_claims: bool) -> None:
    if "ray_flat" in session.systems:
        parts.begin("touching the memory of Ray's object store")
        cluster.warm_object_store(pair, full=full)
    # A round of `raw` takes as long as one of `usual`, and only the full table needs it.
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
            freeze_stores=cluster.freeze_stores,
        )
    if not with_claims:
        return
    claiming = [name for name in (DATA_PLANE, RAW) if name in session.systems]
    for growth in FULL_GROWTH if full else QUICK_GROWTH:
        parts.begin(f"claims of {growth.rows:,} rows")
        warm = claiming if full else claiming[:1]
        session.claims.append((growth, measure_claims(pair, growth, claiming, warm)))
    if full and DATA_PLANE in session.systems:
        parts.begin("the inspector")
        session.inspecting = measure_inspecting(pair, DATA_PLANE)
