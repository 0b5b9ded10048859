"""Calls of a client to a directory, each one request or one session.

Imports internals: tests stop, kill or hold a client between two requests.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from dataplane_core import StorageSummary, TaskCounts
from dataplane_core.declaration import PartitionDeclaration
from dataplane_core.ledger import ClaimRequest
from dataplane_tq.directory import protocol as p

TIMEOUT_S = 20.0


class Calls:
    """Calls of a client over one link; their default partition is "p"."""

    def __init__(self, link):
        self.link = link

    def ask(self, request, answer=object, timeout_s=None):
        return self.link.ask("test", request, answer, timeout_s)

    def register(self, name="p", *, num_samples=100, fields=("x",), tasks=("train",)):
        declared = PartitionDeclaration.checked(name, list(fields), num_samples, list(tasks))
        self.ask(p.Register(declared))

    def put(
        self, ids, *, partition="p", fields=("x",), kind="torch.int64", layouts=(), tags=None,
        timeout_s=TIMEOUT_S,
    ):  # fmt: skip
        """Put without bytes, unless there are layouts; return the answer to `BeginPut`."""
        kinds = dict.fromkeys(fields, kind)
        with self.link.session("put") as session:
            begin = p.BeginPut(partition, ids, kinds, list(layouts), "node", None, timeout_s)
            answer = session.ask(begin, p.PutAnswer)
            session.ask(p.CommitPut(tags), type(None))
        return answer

    def claim(self, size, *, task="train", fields=("x",), timeout_s=0.0, **more):
        wanted = ClaimRequest(task, fields, size, blocking=timeout_s > 0, **more)
        return self.ask(p.Claim("p", wanted, timeout_s), p.ClaimAnswer, timeout_s + TIMEOUT_S)

    def clear(self, ids, *, partition="p", timeout_s=TIMEOUT_S):
        """Clear, and drop the orphans; return their ids, sorted."""
        with self.link.session("clear") as session:
            answer = session.ask(p.Clear(partition, ids, False, timeout_s), p.ClearAnswer)
            groups = list(answer.orphans)
            while answer.more:
                answer = session.ask(p.NextOrphans(), p.ClearAnswer)
                groups += answer.orphans
            session.ask(p.Dropped(), type(None))
        return sorted(sample_id for group in groups for sample_id in group.sample_ids)

    def counts(self):
        return self.ask(p.Count("p", "train", ["x"]), TaskCounts)

    def used(self):
        """Return the used bytes of all units."""
        return sum(unit.used for unit in self.ask(p.ListStorage(), list[StorageSummary]))


def until(condition, timeout_s=TIMEOUT_S):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        threading.Event().wait(0.005)


def stop(pid):
    """Stop a process, and wait until all its threads have stopped."""

    def is_stopped():
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    os.kill(pid, signal.SIGSTOP)
    until(is_stopped)
