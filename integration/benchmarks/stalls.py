"""Stalls of the directory: claim latency of one client during requests of another.

``python -m integration.benchmarks.stalls [ROWS...]`` starts a directory in a separate process and
puts ``ROWS`` samples of eight fields (by default 100,000, then 1,000,000). It times claims of one
client while another makes each kind of request: on the entire partition, and on 512 samples. The
server measures the CPU time of the longest turn of its event loop, and the longest pause for
garbage collection.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np

from dataplane_core import ClaimTimeoutError, StatePage, TaskCounts
from dataplane_core.declaration import PartitionDeclaration
from dataplane_core.ledger import ClaimRequest, TagFilter
from dataplane_tq.directory import protocol as p  # noqa: TID251  # times the directory itself
from dataplane_tq.directory.wire import Address, Link  # noqa: TID251
from dataplane_tq.packed.layout import FieldLayout  # noqa: TID251

ROWS = (100_000, 1_000_000)
FIELDS = tuple(f"f{i}" for i in range(8))
_PUT_ROWS = 512
_ROW_NBYTES = 64
_SERVER = """
import asyncio, gc, sys, time
from dataplane_tq.directory.server import Directory
from dataplane_tq.packed.unit_wire import UnitSpec
longest = {"turn": 0.0, "gc": 0.0}
run = asyncio.events.Handle._run
def timed(handle):
    started = time.thread_time()
    run(handle)
    longest["turn"] = max(longest["turn"], time.thread_time() - started)
asyncio.events.Handle._run = timed
began = [0.0]
def collected(phase, info):
    if phase == "start":
        began[0] = time.perf_counter()
    else:
        longest["gc"] = max(longest["gc"], time.perf_counter() - began[0])
gc.callbacks.append(collected)
units = [UnitSpec("u0", "node", int(sys.argv[2]))]
address = Directory(int(sys.argv[1]), units, "127.0.0.1").start()
print(address.port, address.token.hex(), flush=True)
for _ in sys.stdin:
    print(longest["turn"], longest["gc"], flush=True)
    longest.update(turn=0.0, gc=0.0)
"""
_TIMEOUT_S = 300.0


class Server:
    """Directory in a separate process, with capacity for ``rows`` in each of two partitions."""

    def __init__(self, rows: int) -> None:
        memory = 3 * rows * _ROW_NBYTES * len(FIELDS)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER, str(4 * rows), str(memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        port, token = self._line().split()
        self.address = Address("127.0.0.1", int(port), bytes.fromhex(token))

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def longest(self) -> tuple[float, float]:
        """Return seconds of the longest turn (CPU) and longest collection since the last call."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        turn, collection = map(float, self._line().split())
        return turn, collection

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()


def register(link: Link, partition_id: str, rows: int, tasks: tuple[str, ...]) -> None:
    """Declare a partition."""
    declaration = PartitionDeclaration.checked(partition_id, list(FIELDS), rows, list(tasks))
    link.ask("register", p.Register(declaration), type(None))


def put(link: Link, partition_id: str, ids: list[str]) -> None:
    """Put samples without writing their bytes, which the directory never sees."""
    layouts = [
        FieldLayout(name, "torch.uint8", False, (_ROW_NBYTES,), b"", _ROW_NBYTES, len(ids))
        for name in FIELDS
    ]
    kinds = dict.fromkeys(FIELDS, "torch.uint8")
    with link.session("put") as session:
        session.ask(p.BeginPut(partition_id, ids, kinds, layouts, "node", None, 60.0), p.PutAnswer)
        session.ask(p.CommitPut([{"v": 0}] * len(ids)), type(None))


def fill(link: Link, partition_id: str, rows: int) -> list[str]:
    """Register a partition and put its samples; return their ids."""
    register(link, partition_id, rows, ("train", "other"))
    ids = [f"{partition_id}-{i}" for i in range(rows)]
    for start in range(0, rows, _PUT_ROWS):
        put(link, partition_id, ids[start : start + _PUT_ROWS])
    return ids


def read(link: Link, ids: list[str]) -> None:
    """Find, pin and unpin samples."""
    with link.session("read") as session:
        session.ask(p.Read("large", ids, list(FIELDS)), p.ReadAnswer)
        session.send(p.Unpin())


class Claimer(threading.Thread):
    """Thread that claims one sample at a time from a small partition, and times each claim."""

    def __init__(self, address: Address) -> None:
        super().__init__(daemon=True)
        self._link = Link(address, timeout_s=_TIMEOUT_S)
        self._ended = threading.Event()
        self.seconds: list[float] = []
        fill(self._link, "small", 64)

    def run(self) -> None:
        wanted = ClaimRequest("train", FIELDS[:1], 1, lease_s=60.0)
        with self._link.session("claim") as session:
            while not self._ended.is_set():
                started = time.perf_counter()
                claim = session.ask(p.Claim("small", wanted, 0.0), p.ClaimAnswer)
                self.seconds.append(time.perf_counter() - started)
                session.ask(
                    p.UpdateLease("small", claim.token, claim.sample_ids, "release"), list[str]
                )

    def end(self) -> None:
        """Stop claiming."""
        self._ended.set()
        self.join()


def clear(link: Link, partition_id: str, ids: list[str] | None = None) -> int:
    """Clear a partition or samples of it, as a client without the mirror does."""
    with link.session("clear") as session:
        answer = cleared = session.ask(p.Clear(partition_id, ids, True, 60.0), p.ClearAnswer)
        while answer.more:
            answer = session.ask(p.NextOrphans(), p.ClearAnswer)
        session.ask(p.Dropped(), type(None))
    return cleared.dropped


def measure(rows: int) -> Iterator[tuple[str, float, float, float, np.ndarray]]:
    """Yield per request its name, duration, longest turn and collection, and claim durations."""
    server = Server(rows)
    try:
        yield from _measure(server, Link(server.address, timeout_s=_TIMEOUT_S), rows)
    finally:
        server.end()


def _measure(
    server: Server, link: Link, rows: int
) -> Iterator[tuple[str, float, float, float, np.ndarray]]:
    ids: list[str] = []
    held: list[p.ClaimAnswer] = []

    def claim(fields: tuple[str, ...], count: int = _PUT_ROWS, **how: object) -> p.ClaimAnswer:
        wanted = ClaimRequest("train", fields, count, **how)
        return link.ask("claim", p.Claim("large", wanted, 0.0), p.ClaimAnswer)

    def time_out(*fields: str) -> None:
        with suppress(ClaimTimeoutError):
            claim(fields, blocking=True, where=(TagFilter("v", "==", 0),))

    def update(action: p.LeaseAction) -> None:
        last = held[-1]
        link.ask(
            "update lease",
            p.UpdateLease("large", last.token or "", last.sample_ids, action),
            list[str],
        )

    def reset() -> int:
        request = p.ResetConsumption("large", "train", held[-1].sample_ids)
        return link.ask("reset", request, int)

    def count() -> TaskCounts:
        return link.ask("count", p.Count("large", "other", ["f3"]), TaskCounts)

    requests: dict[str, Callable[[], object]] = {
        "nothing": lambda: time.sleep(3.0),
        "puts of 512": lambda: ids.extend(fill(link, "large", rows)),
        "put of 512 again": lambda: put(link, "large", ids[:_PUT_ROWS]),
        "read of 512": lambda: read(link, ids[:_PUT_ROWS]),
        "first claim": lambda: claim(FIELDS),
        "first claim, seeded": lambda: claim(FIELDS[:2], seed=7),
        "claim that times out": lambda: time_out("not written"),
        "count": count,
        "claim of 512": lambda: held.append(claim(FIELDS[:1], lease_s=600.0)),
        "renew of 512": lambda: update("renew"),
        "acknowledge of 512": lambda: update("acknowledge"),
        "reset of 512": reset,
        "states of 10,000": lambda: link.ask(
            "scan", p.ScanStates("large", rows // 2, 10_000), StatePage
        ),
        "list partitions": lambda: link.ask("list", p.ListPartitions(), list),
        "register a task": lambda: register(link, "large", rows, ("train", "new")),
        "clear of 512": lambda: clear(link, "large", ids[:_PUT_ROWS]),
        "clear of the partition": lambda: clear(link, "large"),
    }
    for name, request in requests.items():
        claimer = Claimer(server.address)
        claimer.start()
        time.sleep(0.2)
        claimer.seconds.clear()
        server.longest()
        started = time.perf_counter()
        request()
        duration = time.perf_counter() - started
        # The turn that sent the answer is recorded when it ends, so before the next answer.
        link.ask("totals", p.ReadTotals(), dict)
        longest = server.longest()
        claimer.end()
        clear(link, "small")
        yield name, duration, *longest, np.array(claimer.seconds)


def main() -> None:
    """Print a table."""
    for rows in [int(argument) for argument in sys.argv[1:]] or ROWS:
        print(f"{rows:,} rows of {len(FIELDS)} fields; ms; p50 to max: claims of a second client")
        print(f"{'request':24}{'duration':>10}{'turn':>8}{'gc':>8}{'claims':>8}", end="")
        print(f"{'p50':>8}{'p99':>8}{'max':>8}")
        for name, duration, turn, collection, seconds in measure(rows):
            p50, p99, maximum = (
                np.percentile(seconds, [50, 99, 100]) * 1e3 if len(seconds) else [0] * 3
            )
            print(f"{name:24}{duration * 1e3:10.1f}{turn * 1e3:8.2f}", end="")
            print(f"{collection * 1e3:8.2f}", end="")
            print(f"{len(seconds):8}{p50:8.2f}{p99:8.2f}{maximum:8.2f}", flush=True)


if __name__ == "__main__":
    main()
