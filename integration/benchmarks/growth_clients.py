"""Throughput as clients are added, and as storage units are added.

Clients are `LightClient` processes. A round runs some of the clients, which are all connected, for
a moment; each round takes the numbers of clients in shuffled order. A cycle is a claim of 32 rows
under a lease, its acknowledgment, their clear, and a put of 32 new rows with eight fields, all in
one partition. So the number of rows does not change.

Two clients put, get and clear large batches, alternating between shared memory and TCP. Each number
of units is a separate store, and the stores are started in shuffled order, each several times.
"""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from integration.benchmarks import cluster
from integration.benchmarks.growth_client import (
    Bulk,
    Cycles,
    Done,
    LightClient,
    light_clients,
    small_layouts,
)
from integration.benchmarks.growth_sample import BULK_BYTES, ROWS, TASK
from integration.benchmarks.growth_store import GrowingStore, growing_store
from integration.benchmarks.results_file import Entry
from integration.benchmarks.spawned import Spawned, spawned
from integration.benchmarks.summary import Summary

SEED = 20_263
CLIENTS_HEADINGS = [
    "clients",
    "operations/s",
    "IQR",
    "x 8 clients",
    "cycle p50 ms",
    "p99 ms",
    "cores: directory",
    "cores: units",
    "cores: clients",
    "cores: machine",
    "bound by",
]
UNITS_HEADINGS = ["units", "transport", "put GB/s", "IQR", "get GB/s", "IQR", "n"]

_QUICK_CLIENTS, _FULL_CLIENTS = (1, 8, 64), (1, 2, 4, 8, 16, 32, 64)
_QUICK_ROUNDS, _FULL_ROUNDS = 2, 10
_LEAD_S, _ROUND_S = 0.2, 1.5
_REFERENCE = 8
_PARTITION = "growth"
_UNIT_BYTES = 256 << 20

_QUICK_UNITS, _FULL_UNITS = (1, 4), (1, 2, 4, 8, 16)
_QUICK_STARTS, _FULL_STARTS = 1, 2
_BULK_CLIENTS, _BULK_TIMES, _BULK_ROUNDS = 2, 4, 4
_TRANSPORTS: tuple[Literal["shm"], Literal["tcp"]] = ("shm", "tcp")
_BUSY = 0.85
"""Fraction of its cores from which on a process or the machine counts as saturated."""


@dataclass(frozen=True)
class Round:
    """A round of cycles.

    Attributes:
        rate: operations per second of all clients.
        cycle_s: durations of all cycles.
        cores: CPU seconds per second of the directory, all units, all clients, and the machine.
    """

    rate: float
    cycle_s: list[float]
    cores: Mapping[str, float]


def bottleneck(cores: Mapping[str, float], machine_cores: int) -> str:
    """Return what bounds the throughput.

    Args:
        cores: CPU seconds per second of the directory, the units, the clients, and the machine.
        machine_cores: cores of the machine.
    """
    if cores["directory"] >= _BUSY:
        return "directory"  # one thread
    if cores["machine"] < _BUSY * machine_cores:
        return "round trips"
    used = sum(cores[name] for name in ("directory", "units", "clients"))
    return "all cores" if used >= _BUSY * cores["machine"] else "other load"


def round_of(done: list[Done], cpu_s: Mapping[str, float], seconds: float, wall_s: float) -> Round:
    """Return the round of clients whose operations counted for ``seconds``.

    Args:
        done: answers of the clients.
        cpu_s: CPU time of other processes, by name, during ``wall_s``.
        seconds: time in which operations counted.
        wall_s: time that the clients ran, which is longer.
    """
    cores = {name: used / wall_s for name, used in cpu_s.items()}
    cores["clients"] = sum(each.cpu_s for each in done) / wall_s
    cycles = [cycle for each in done for cycle in each.seconds["cycle"]]
    return Round(sum(each.operations for each in done) / seconds, cycles, cores)


@dataclass
class ClientsResult:
    """Rounds by number of clients; the n-th of each are of the n-th shuffled order."""

    rounds: dict[int, list[Round]] = field(default_factory=dict)

    def ratio(self, clients: int) -> Summary:
        """Return the throughput, divided by that of eight clients."""
        rates = {count: [each.rate for each in self.rounds[count]] for count in self.rounds}
        return Summary.of_ratio(rates[clients], rates[_REFERENCE])

    def rows(self) -> list[list[str]]:
        """Return rows for a table with `CLIENTS_HEADINGS`."""
        rows = []
        for clients, rounds in self.rounds.items():
            rate, ratio = Summary.of([each.rate for each in rounds]), self.ratio(clients)
            cycle = _cycle(rounds)
            cores = {
                name: float(np.median([each.cores[name] for each in rounds]))
                for name in rounds[0].cores
            }
            rows.append(
                [
                    str(clients),
                    f"{rate.value:,.0f}",
                    f"{rate.spread:,.0f}",
                    f"{ratio.value:.2f} ({ratio.spread:.2f})",
                    f"{cycle.value * 1e3:.3g}",
                    f"{cycle.p99 * 1e3:.3g}",
                    *(
                        f"{cores[name]:.2f}"
                        for name in ("directory", "units", "clients", "machine")
                    ),
                    bottleneck(cores, os.cpu_count() or 1),
                ]
            )
        return rows

    def entries(self) -> list[Entry]:
        """Return entries for the file of results."""
        entries = []
        for clients, rounds in self.rounds.items():
            name = f"growth.clients_{clients}"
            rate, ratio = Summary.of([each.rate for each in rounds]), self.ratio(clients)
            used = Summary.of([each.cores["directory"] for each in rounds])
            entries += [
                Entry.of(f"{name}.ops_per_s", rate, "1/s"),
                Entry.of(f"{name}.ratio_vs_8", ratio, "x", baseline="8"),
                Entry.ms(f"{name}.cycle_p50_ms", _cycle(rounds)),
                Entry.p99_ms(f"{name}.cycle_p99_ms", _cycle(rounds)),
                Entry.of(f"{name}.directory_cores", used, "cores"),
            ]
        return entries


def _cycle(rounds: list[Round]) -> Summary:
    return Summary.of([cycle for each in rounds for cycle in each.cycle_s])


@dataclass
class UnitsResult:
    """Bytes per second of both clients together, by number of units, transport and operation."""

    rates: dict[tuple[int, str], dict[str, list[float]]] = field(default_factory=dict)

    def rows(self) -> list[list[str]]:
        """Return rows for a table with `UNITS_HEADINGS`."""
        rows = []
        for (units, transport), rates in sorted(self.rates.items()):
            put, get = Summary.of(rates["put"]), Summary.of(rates["get"])
            numbers = (put.value, put.spread, get.value, get.spread)
            cells = [f"{value / 1e9:.2f}" for value in numbers]
            rows.append([str(units), transport, *cells, str(put.count)])
        return rows

    def entries(self) -> list[Entry]:
        """Return entries for the file of results."""
        entries = []
        for (units, transport), rates in sorted(self.rates.items()):
            for operation, values in rates.items():
                name = f"growth.units_{units}_{transport}.{operation}_gb_per_s"
                entries.append(Entry.of(name, Summary.of(values), "GB/s", factor=1e-9))
        return entries


def measure_clients(announce: Callable[[str], None], *, full: bool) -> ClientsResult:
    """Run all numbers of clients in shuffled rounds.

    Args:
        announce: called with the title of each part.
        full: whether to measure all numbers of clients.
    """
    counts = _FULL_CLIENTS if full else _QUICK_CLIENTS
    rounds = _FULL_ROUNDS if full else _QUICK_ROUNDS
    announce(f"growth: up to {max(counts)} clients")
    result = ClientsResult({count: [] for count in counts})
    # Between its clear and its put, each client has taken ROWS rows out of the partition. If all
    # are there at once, half of the rows remain.
    rows = 2 * max(counts) * ROWS
    order = random.Random(SEED)
    with (
        growing_store(units=2, unit_bytes=_UNIT_BYTES, capacity=4 * rows) as store,
        spawned("the light clients", light_clients, store.address, max(counts)) as clients,
    ):
        store.client.register_partition(_PARTITION, [], 0, [TASK])
        layouts = small_layouts(rows)
        values = {layout.name: np.zeros(layout.nbytes, np.uint8) for layout in layouts}
        LightClient(store.address, max(counts)).put(_PARTITION, layouts, values)
        _ = clients.ready
        _run_cycles(store, clients, max(counts))  # connects all
        cluster.freeze_stores()
        for _ in range(rounds):
            for count in order.sample(counts, len(counts)):
                result.rounds[count].append(_run_cycles(store, clients, count))
        clients.stop()
    return result


def _run_cycles(store: GrowingStore, clients: Spawned, count: int) -> Round:
    before, began = store.cpu_s(), time.monotonic()
    begin = began + _LEAD_S
    done = clients.ask(Cycles(count, _PARTITION, begin, begin + _ROUND_S))
    after, wall_s = store.cpu_s(), time.monotonic() - began
    used = {name: after[name] - before[name] for name in before}
    return round_of(done, used, _ROUND_S, wall_s)


def measure_units(announce: Callable[[str], None], *, full: bool) -> UnitsResult:
    """Move large batches with every number of units.

    Args:
        announce: called with the title of each part.
        full: whether to measure all numbers of units.
    """
    counts = _FULL_UNITS if full else _QUICK_UNITS
    starts = _FULL_STARTS if full else _QUICK_STARTS
    order = random.Random(SEED)
    result = UnitsResult()
    for start in range(starts):
        for units in order.sample(counts, len(counts)):
            announce(f"growth: {units} units ({start + 1} of {starts})")
            _measure_units(units, result)
    return result


def _measure_units(units: int, result: UnitsResult) -> None:
    with (
        growing_store(units=units, unit_bytes=_UNIT_BYTES, capacity=10_000) as store,
        spawned("the light clients", light_clients, store.address, _BULK_CLIENTS) as clients,
    ):
        store.client.register_partition(_PARTITION, [], 0, [TASK])
        _ = clients.ready
        for transport in _TRANSPORTS:  # connects, and touches the memory of all units
            clients.ask(Bulk(_BULK_CLIENTS, _PARTITION, transport, 2 * units))
        cluster.freeze_stores()
        for _ in range(_BULK_ROUNDS):
            for transport in _TRANSPORTS:
                done = clients.ask(Bulk(_BULK_CLIENTS, _PARTITION, transport, _BULK_TIMES))
                rates = result.rates.setdefault((units, transport), defaultdict(list))
                for operation in ("put", "get"):
                    rates[operation].append(
                        sum(BULK_BYTES / np.median(each.seconds[operation]) for each in done)
                    )
        clients.stop()
