"""A directory, a unit and their clients in processes that tests step, stop and kill. No Ray.

Imports internals: a client executes its protocol step by step.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import forked
import msgspec
import numpy as np
from directory_calls import TIMEOUT_S, Calls, stop, until

from dataplane_core import PartitionSummary
from dataplane_tq.directory import protocol as p
from dataplane_tq.directory.wire import Address, Link
from dataplane_tq.packed.layout import FieldLayout
from dataplane_tq.packed.slices import Slices
from dataplane_tq.packed.unit_client import UnitClient
from dataplane_tq.packed.unit_wire import UnitAddress

_SOON_S = 5.0
_TOKEN = b"secret"
_ROW = 64 << 10
_UNIT = 16 * _ROW

SERVERS = """
import sys, threading
import msgspec
kind, number, *sizes = sys.argv[1], *map(int, sys.argv[2:])
if kind == "unit":
    from dataplane_tq.packed.arena import Arena
    from dataplane_tq.packed.unit import UnitServer
    address = UnitServer(Arena.create("u0", number), b"secret", "127.0.0.1").address
else:
    from dataplane_tq.directory.server import Directory
    from dataplane_tq.packed.unit_wire import UnitSpec
    units = [UnitSpec(f"u{i}", "node", size) for i, size in enumerate(sizes)]
    address = Directory(number, units, "127.0.0.1").start()
sys.stdout.buffer.write(msgspec.json.encode(address) + b"\\n")
sys.stdout.flush()
threading.Event().wait()
"""

CLIENT = """
import sys
import msgspec, numpy as np
from dataplane_core import DataPlaneError
from dataplane_core.ledger import ClaimRequest
from dataplane_tq.packed.slices import Slices
from dataplane_tq.directory import protocol as p
from dataplane_tq.packed.layout import FieldLayout
from dataplane_tq.packed.unit_client import UnitClient
from dataplane_tq.packed.unit_wire import UnitAddress
from dataplane_tq.directory.wire import Address, Link

link = Link(msgspec.json.decode(sys.argv[1], type=Address), timeout_s=1.0)
unit = UnitClient(msgspec.json.decode(sys.argv[2], type=UnitAddress | None), b"secret",
                  transport=sys.argv[3])
layout = FieldLayout("x", "torch.uint8", False, (65536,), b"", 65536, 2)


def step(name):
    print(name, flush=True)
    sys.stdin.readline()


def pieces(at, rows):
    values = np.full(65536 * rows, 1, np.uint8)
    return [(at, Slices(values, [0], [values.size]))]


def put(token=None):
    with link.session("put") as session:
        begin = p.BeginPut("p", ["a", "b"], {"x": "torch.uint8"}, [layout], "node", token, 1.0)
        (block,) = session.ask(begin, p.PutAnswer).blocks
        step("begun")
        unit.write(pieces(block.offset, 1), 1.0)
        step("half written")
        unit.write(pieces(block.offset + 65536, 1), 1.0)
        step("written")
        session.ask(p.CommitPut(None), type(None))
        step("committed")


def claim(timeout_s, lease_s=None):
    wanted = ClaimRequest("train", ("x",), 2, blocking=timeout_s > 0, lease_s=lease_s)
    link.ask("warm up", p.ListPartitions(), list)
    print("waiting", flush=True)
    return link.ask("claim", p.Claim("p", wanted, timeout_s), p.ClaimAnswer)


def get():
    with link.session("get") as session:
        (part,) = session.ask(p.Read("p", ["a", "b"], ["x"]), p.ReadAnswer).parts
        (block,) = part.blocks
        step("pinned")
        first = unit.read([(block.offset, block.offset + 65536)], 2.0).copy()
        step("half read")
        second = unit.read([(block.offset + 65536, block.offset + 131072)], 2.0).copy()
        session.send(p.Unpin())
    step("values " + str(sorted(set(first.tolist() + second.tolist()))))


def clear(sample_ids):
    with link.session("clear") as session:
        print("waiting", flush=True)
        session.ask(p.Clear("p", sample_ids, False, 2.0), p.ClearAnswer)
        step("cleared")
        session.ask(p.Dropped(), type(None))


try:
    {action}
except DataPlaneError as error:
    print(type(error).__name__, flush=True)
else:
    print("done", flush=True)
sys.stdin.read()
"""


class Child:
    """Process that is killed at the end of the test, stopped or not."""

    def __init__(self, code, *arguments):
        self.process, self.stdin, self.stdout = forked.start(code, *arguments)
        self.pid = self.process.pid

    def read_line(self):
        return self.stdout.readline().strip()

    def advance(self):
        self.stdin.write("\n")
        self.stdin.flush()

    def run_to(self, step):
        """Let the process run to a step, where it waits."""
        while (line := self.read_line()) != step:
            assert line not in ("done", "")
            assert not is_error(line)
            self.advance()

    def stop_at(self, step):
        self.run_to(step)
        self.stop()

    def proceed(self):
        """Resume the process, and let it leave its step."""
        self.resume()
        self.advance()

    def finish(self):
        """Let the process run to its end; return "done" or the name of an error."""
        while not ((line := self.read_line()) == "done" or is_error(line)):
            assert line, "the process died"
            self.advance()
        return line

    def wait_until_blocked(self):
        """Wait until the process's only thread has sent a request and sleeps."""
        until(lambda: state_of(self.pid) == "S")

    def stop(self):
        stop(self.pid)

    def resume(self):
        os.kill(self.pid, signal.SIGCONT)

    def kill(self):
        self.process.kill()
        self.process.join(TIMEOUT_S)

    def close(self):
        self.kill()
        self.process.close()
        self.stdin.close()
        self.stdout.close()


def is_error(line):
    return line.endswith(("Error", "Exceeded"))


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def filled(value, rows):
    values = np.full(_ROW * rows, value, np.uint8)
    return Slices(values, [0], [values.size])


class SteppedStore(Calls):
    """Directory and unit in one process each, and a client of both in this process. No Ray.

    Other clients advance one step at a time, so a test can send a signal at any step.
    """

    row_nbytes = _ROW
    rows = _UNIT // _ROW
    until = staticmethod(until)

    def __init__(self):
        self.children = []
        self.unit_process = self._child(SERVERS, "unit", _UNIT)
        self.directory = self._child(SERVERS, "directory", 100, _UNIT)
        self.unit_address = self.unit_process.read_line()
        self.address = self.directory.read_line()
        super().__init__(Link(msgspec.json.decode(self.address, type=Address), timeout_s=_SOON_S))
        address = msgspec.json.decode(self.unit_address, type=UnitAddress)
        self.unit = UnitClient(address, _TOKEN, transport="shm")
        self.unit.connect(TIMEOUT_S)
        self.over_tcp = UnitClient(address, _TOKEN, transport="tcp")
        self.register("p")

    def _child(self, code, *arguments):
        self.children.append(Child(code, *arguments))
        return self.children[-1]

    def client(self, action, transport="shm"):
        code = CLIENT.replace("{action}", action)
        return self._child(code, self.address, self.unit_address, transport)

    def close(self):
        self.link.close()
        self.unit.close()
        self.over_tcp.close()
        for child in reversed(self.children):
            child.close()

    def put(self, ids, value=2, *, partition="p", timeout_s=_SOON_S, unit=None):
        layout = FieldLayout("x", "torch.uint8", False, (_ROW,), b"", _ROW, len(ids))
        kinds = {"x": "torch.uint8"}
        with self.link.session("put") as session:
            begin = p.BeginPut(partition, ids, kinds, [layout], "node", None, timeout_s)
            blocks = session.ask(begin, p.PutAnswer).blocks
            for block in blocks:
                row = filled(value, block.layout.rows)
                (unit or self.unit).write([(block.offset, row)], timeout_s)
            session.ask(p.CommitPut(None), type(None))

    def get(self, sample_id, partition="p"):
        """Return the distinct bytes of a sample's row."""
        with self.link.session("get") as session:
            (part,) = session.ask(p.Read(partition, [sample_id], ["x"]), p.ReadAnswer).parts
            (block,) = part.blocks
            start = block.offset + int(part.locate()[1][0]) * _ROW
            values = set(self.unit.read([(start, start + _ROW)], _SOON_S).tolist())
            session.send(p.Unpin())
        return values

    def clear(self, ids, *, partition="p", timeout_s=_SOON_S):
        with self.link.session("clear") as session:
            request = p.Clear(partition, ids, False, timeout_s)
            dropped = session.ask(request, p.ClearAnswer).dropped
            session.ask(p.Dropped(), type(None))
        return dropped

    def check_other_samples(self):
        """Put, get, claim and clear other samples, each within its deadline."""
        started = time.monotonic()
        self.put(["c", "d"], 3)
        assert self.get("d") == {3}
        assert self.claim(2).sample_ids == ["c", "d"]
        assert self.clear(["c", "d"]) == 2
        assert self.ask(p.ListPartitions(), list[PartitionSummary])
        assert time.monotonic() - started < _SOON_S
