"""Measure how long one request holds the directory, by another client's claim latency.

``python -m integration.benchmarks.stalls [ROWS]`` starts a directory in a process of its own, puts
``ROWS`` samples of eight fields, and times claims of one client while another makes the requests
that look at every sample: the first claim on new terms, a claim that times out, a count, a clear.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np

from dataplane_core import ClaimTimeoutError, TaskCounts
from dataplane_core.declaration import PartitionDeclaration
from dataplane_core.ledger import ClaimRequest
from dataplane_tq import protocol as p
from dataplane_tq.packed.layout import FieldLayout
from dataplane_tq.wire import Address, Link

ROWS = 1_000_000
FIELDS = tuple(f"f{i}" for i in range(8))
_PUT_ROWS = 2_000
_ROW_NBYTES = 64
_SERVER = """
import sys, threading
from dataplane_tq.directory import Directory
from dataplane_tq.packed.catalogue import UnitSpec
units = [UnitSpec("u0", "node", int(sys.argv[2]))]
address = Directory(int(sys.argv[1]), units, "127.0.0.1").start()
print(address.port, address.token.hex(), flush=True)
threading.Event().wait()
"""
_TIMEOUT_S = 300.0


@contextmanager
def directory(rows: int) -> Iterator[Address]:
    """A directory in a process of its own, with room for ``rows`` in each of two partitions."""
    memory = 2 * rows * _ROW_NBYTES * len(FIELDS)
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(4 * rows), str(memory)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port, token = process.stdout.readline().split()
        yield Address("127.0.0.1", int(port), bytes.fromhex(token))
    finally:
        process.kill()
        process.wait()


def fill(link: Link, partition_id: str, rows: int) -> None:
    """Register a partition and put its samples; no bytes are written, which the directory does not
    see."""
    declaration = PartitionDeclaration.checked(partition_id, list(FIELDS), rows, ["train", "other"])
    link.ask("register", p.Register(declaration), type(None))
    kinds = dict.fromkeys(FIELDS, "torch.uint8")
    for start in range(0, rows, _PUT_ROWS):
        ids = [f"{partition_id}-{i}" for i in range(start, min(start + _PUT_ROWS, rows))]
        layouts = [
            FieldLayout(name, "torch.uint8", False, (_ROW_NBYTES,), b"", _ROW_NBYTES, len(ids))
            for name in FIELDS
        ]
        with link.session("put") as session:
            session.ask(
                p.BeginPut(partition_id, ids, kinds, layouts, "node", None, 60.0), p.PutAnswer
            )
            session.ask(p.CommitPut(None), type(None))


class Claimer(threading.Thread):
    """Claims one sample at a time from a small partition, and keeps how long each claim took."""

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
                session.ask(p.Settle("small", claim.token, claim.sample_ids, "release"), list[str])

    def end(self) -> None:
        """Stop claiming."""
        self._ended.set()
        self.join()


def clear(link: Link, partition_id: str) -> int:
    """Clear a partition as a client does, but for TransferQueue."""
    with link.session("clear") as session:
        answer = cleared = session.ask(p.Clear(partition_id, None, False, 60.0), p.ClearAnswer)
        while answer.more:
            answer = session.ask(p.NextLeftovers(), p.ClearAnswer)
        session.ask(p.Dropped(), type(None))
    return cleared.dropped


def measure(rows: int) -> dict[str, tuple[float, np.ndarray]]:
    """Name of a request to the seconds that it took, and those of the other client's claims."""
    with directory(rows) as address:
        link = Link(address, timeout_s=_TIMEOUT_S)
        fill(link, "large", rows)

        def claim(fields: tuple[str, ...], count: int = 32, **how: object) -> p.ClaimAnswer:
            wanted = ClaimRequest("train", fields, count, **how)
            return link.ask("claim", p.Claim("large", wanted, 0.0), p.ClaimAnswer)

        def time_out() -> None:
            with suppress(ClaimTimeoutError):
                claim(("not written",), whole=True)

        requests: dict[str, Callable[[], object]] = {
            "nothing": lambda: time.sleep(3.0),
            "first claim": lambda: claim(FIELDS),
            "first claim, seeded": lambda: claim(FIELDS[:2], seed=7),
            "claim that times out": time_out,
            "count": lambda: link.ask("count", p.Count("large", "other", ["f3"]), TaskCounts),
            "list partitions": lambda: link.ask("list", p.ListPartitions(), list),
            "clear": lambda: clear(link, "large"),
        }
        found = {}
        for name, request in requests.items():
            claimer = Claimer(address)
            claimer.start()
            time.sleep(0.2)
            claimer.seconds.clear()
            started = time.perf_counter()
            request()
            took = time.perf_counter() - started
            claimer.end()
            found[name] = took, np.array(claimer.seconds)
            clear(link, "small")
        return found


def main() -> None:
    """Print a table."""
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else ROWS
    print(f"{rows:,} rows of {len(FIELDS)} fields; claims of a second client meanwhile, ms")
    print(f"{'request':24}{'took':>10}{'claims':>8}{'p50':>8}{'p99':>8}{'max':>8}")
    for name, (took, seconds) in measure(rows).items():
        p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
        print(
            f"{name:24}{took * 1e3:10.1f}{len(seconds):8}{p50:8.2f}{p99:8.2f}"
            f"{seconds.max() * 1e3:8.2f}"
        )


if __name__ == "__main__":
    main()
