"""Per module a real Ray with a real TransferQueue, and a client in another process.

Not per session: the tests of other packages, run in the same process, start a Ray of their own.
Tests that stop processes half-way have a directory and a unit without Ray.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import ray
from hypothesis import settings

from dataplane_core import PartitionSummary, StorageSummary, TaskCounts
from dataplane_core.declaration import PartitionDeclaration
from dataplane_core.ledger import ClaimRequest
from dataplane_core.slices import Slices
from dataplane_tq import TQDataPlaneClient, start_local_ray
from dataplane_tq import protocol as p
from dataplane_tq.packed.layout import FieldLayout
from dataplane_tq.packed.unit_client import UnitClient
from dataplane_tq.packed.unit_wire import UnitAddress
from dataplane_tq.wire import Address, Link

CONFIG = {
    "enabled": True,
    "impl": "transfer_queue",
    "backend": "packed",
    "storage_capacity": 100_000,
    "num_storage_units": 2,
    "claim_meta_poll_interval_s": 5.0,
    "global_segment_size": 64 << 20,
    "local_buffer_size": 16 << 20,
    "ack_timeout_ms": 20_000,
}


@pytest.fixture(scope="module")
def cluster():
    with tempfile.TemporaryDirectory(prefix="tq-") as folder:
        start_local_ray(
            num_cpus=4,
            include_dashboard=False,
            _temp_dir=folder,
            namespace="dataplane-tq-tests",
            logging_level="ERROR",
            log_to_driver=False,
        )
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def backend():
    """The storage backend of a module's tests; a module parametrises it."""
    return "packed"


@pytest.fixture(scope="session")
def stop_process():
    """Stops a process that is not a child, and returns when all of it has stopped."""

    def stopped(pid):
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    def stop(pid):
        os.kill(pid, signal.SIGSTOP)
        deadline = time.monotonic() + 20
        while not stopped(pid):
            assert time.monotonic() < deadline, f"process {pid} goes on"

    return stop


@pytest.fixture(scope="module")
def require_backend():
    """Skips what needs a backend whose extra is not installed."""

    def require(name):
        if name == "mooncake_cpu":
            pytest.importorskip(
                "mooncake.store",
                reason="needs the packages mooncake-transfer-engine-non-cuda, libibverbs1 (Debian)",
                exc_type=ImportError,
            )
        if name == "yuanrong":
            pytest.importorskip("yr", reason="needs the package openyuanrong-datasystem")
        return name

    return require


@pytest.fixture
def config(backend):
    return {**CONFIG, "backend": backend}


class Host:
    """Runs an attached client in a process of its own."""

    def __init__(self, config):
        self.client = TQDataPlaneClient(config, bootstrap=False)

    def call(self, method, args, kwargs):
        return getattr(self.client, method)(*args, **kwargs)


class Peer:
    """A client whose every call runs in another process."""

    capabilities = TQDataPlaneClient.capabilities

    def __init__(self, config):
        self._host = ray.remote(Host).options(num_cpus=0.1, max_concurrency=8).remote(config)

    def __getattr__(self, method):
        def call(*args, **kwargs):
            try:
                return ray.get(self._host.call.remote(method, args, kwargs), timeout=60)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None

        return call


@pytest.fixture(scope="module")
def owner(cluster, backend):
    with TQDataPlaneClient({**CONFIG, "backend": backend}) as client:
        yield client


@pytest.fixture(scope="module")
def attach(owner, backend):
    """Builds an attached client."""

    def attach(**changes):
        return TQDataPlaneClient({**CONFIG, "backend": backend, **changes}, bootstrap=False)

    return attach


@pytest.fixture(scope="module")
def other_process(owner, backend):
    return Peer({**CONFIG, "backend": backend})


_PATIENCE_S = 20.0
_SOON_S = 5.0
_TOKEN = b"secret"
_ROW = 64 << 10
_UNIT = 16 * _ROW

_SERVERS = """
import sys, threading
import msgspec
kind, size = sys.argv[1], int(sys.argv[2])
if kind == "unit":
    from dataplane_tq.packed.arena import Arena
    from dataplane_tq.packed.unit import UnitServer
    address = UnitServer(Arena.create("u0", size), b"secret", "127.0.0.1").address
else:
    from dataplane_tq.directory import Directory
    from dataplane_tq.packed.catalogue import UnitSpec
    address = Directory(100, [UnitSpec("u0", "node", size)], "127.0.0.1").start()
sys.stdout.buffer.write(msgspec.json.encode(address) + b"\\n")
sys.stdout.flush()
threading.Event().wait()
"""

_CLIENT = """
import sys
import msgspec, numpy as np
from dataplane_core import DataPlaneError
from dataplane_core.ledger import ClaimRequest
from dataplane_core.slices import Slices
from dataplane_tq import protocol as p
from dataplane_tq.packed.layout import FieldLayout
from dataplane_tq.packed.unit_client import UnitClient
from dataplane_tq.packed.unit_wire import UnitAddress
from dataplane_tq.wire import Address, Link

link = Link(msgspec.json.decode(sys.argv[1], type=Address), timeout_s=1.0)
unit = UnitClient(msgspec.json.decode(sys.argv[2], type=UnitAddress), b"secret",
                  transport=sys.argv[3])
layout = FieldLayout("x", "torch.uint8", False, (65536,), b"", 65536, 2)


def step(name):
    print(name, flush=True)
    sys.stdin.readline()


def pieces(at, rows):
    values = np.full(65536 * rows, 1, np.uint8)
    return [(at, Slices(values, [0], [values.size]))]


def put(token=None, entering=False):
    with link.session("put") as session:
        begin = p.BeginPut("p", ["a", "b"], {"x": "torch.uint8"}, [layout], "node", token, 1.0)
        (block,) = session.ask(begin, p.PutAnswer).blocks
        step("begun")
        unit.write(pieces(block.offset, 1), 1.0)
        step("half written")
        unit.write(pieces(block.offset + 65536, 1), 1.0)
        step("written")
        session.ask(p.CommitPut(None, entering), type(None))
        step("committed")
        if entering:  # TransferQueue is told here
            session.ask(p.Entered(), list)


def claim(timeout_s, lease_s=None):
    wanted = ClaimRequest("train", ("x",), 2, whole=timeout_s > 0, lease_s=lease_s)
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
        session.tell(p.Unpin())
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
    """A process that is ended with the test, stopped or not."""

    def __init__(self, code, *arguments):
        command = [sys.executable, "-c", code, *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid

    def says(self):
        return self.process.stdout.readline().strip()

    def go_on(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def go_to(self, step):
        """Let it work up to a step, where it waits."""
        while (said := self.says()) != step:
            assert said not in ("done", "")
            assert not is_error(said)
            self.go_on()

    def finish(self):
        """Let it work to its end; what it says there: done, or the name of an error."""
        while not ((said := self.says()) == "done" or is_error(said)):
            assert said, "it died"
            self.go_on()
        return said

    def until_it_sleeps(self):
        """Until its only thread waits for an answer: it has asked."""
        until(lambda: state_of(self.pid) == "S")

    def stop(self):
        os.kill(self.pid, signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(self.pid, os.WUNTRACED)[1])

    def wake(self):
        os.kill(self.pid, signal.SIGCONT)

    def kill(self):
        self.process.kill()
        self.process.wait(_PATIENCE_S)

    def close(self):
        self.process.kill()
        self.process.communicate(timeout=_PATIENCE_S)


def is_error(said):
    return said.endswith(("Error", "Exceeded"))


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def until(condition):
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "the state did not come"
        threading.Event().wait(0.005)


def filled(value, rows):
    values = np.full(_ROW * rows, value, np.uint8)
    return Slices(values, [0], [values.size])


class SteppedStore:
    """A directory and a unit, each a process, and a client of both in this one. No Ray.

    Other clients go on from step to step when they are told to, so that a signal arrives exactly
    where a test wants it.
    """

    row_nbytes = _ROW
    rows = _UNIT // _ROW
    until = staticmethod(until)

    def __init__(self):
        self.children = []
        self.unit_process = self._child(_SERVERS, "unit", _UNIT)
        self.directory = self._child(_SERVERS, "directory", _UNIT)
        self.unit_address = self.unit_process.says()
        self.address = self.directory.says()
        self.link = Link(msgspec.json.decode(self.address, type=Address), timeout_s=_SOON_S)
        address = msgspec.json.decode(self.unit_address, type=UnitAddress)
        self.unit = UnitClient(address, _TOKEN, transport="shm")
        self.unit.connect(_PATIENCE_S)
        self.over_tcp = UnitClient(address, _TOKEN, transport="tcp")
        self.register("p")

    def _child(self, code, *arguments):
        self.children.append(Child(code, *arguments))
        return self.children[-1]

    def client(self, action, transport="shm"):
        code = _CLIENT.replace("{action}", action)
        return self._child(code, self.address, self.unit_address, transport)

    def close(self):
        self.link.close()
        self.unit.close()
        self.over_tcp.close()
        for child in reversed(self.children):
            child.close()

    def ask(self, request, answer=object, timeout_s=_SOON_S):
        return self.link.ask("test", request, answer, timeout_s)

    def register(self, name):
        self.ask(p.Register(PartitionDeclaration.checked(name, ["x"], 100, ["train"])))

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
        """The distinct bytes of a sample's row."""
        with self.link.session("get") as session:
            (part,) = session.ask(p.Read(partition, [sample_id], ["x"]), p.ReadAnswer).parts
            (block,) = part.blocks
            row = int(np.frombuffer(part.rows, np.int64)[0]) if part.rows else 0
            start = block.offset + row * _ROW
            values = set(self.unit.read([(start, start + _ROW)], _SOON_S).tolist())
            session.tell(p.Unpin())
        return values

    def claim(self, size, *, timeout_s=0.0, lease_s=None):
        wanted = ClaimRequest("train", ("x",), size, whole=timeout_s > 0, lease_s=lease_s)
        return self.ask(p.Claim("p", wanted, timeout_s), p.ClaimAnswer, timeout_s + _SOON_S)

    def clear(self, ids, *, partition="p", timeout_s=_SOON_S):
        with self.link.session("clear") as session:
            request = p.Clear(partition, ids, False, timeout_s)
            dropped = session.ask(request, p.ClearAnswer).dropped
            session.ask(p.Dropped(), type(None))
        return dropped

    def counts(self):
        return self.ask(p.Count("p", "train", ["x"]), TaskCounts)

    def used(self):
        return self.ask(p.ListStorage(), list[StorageSummary])[0].used

    def others_go_on(self):
        """Put, get, claim and clear of other samples, each within its deadline."""
        started = time.monotonic()
        self.put(["c", "d"], 3)
        assert self.get("d") == {3}
        assert self.claim(2).sample_ids == ["c", "d"]
        assert self.clear(["c", "d"]) == 2
        assert self.ask(p.ListPartitions(), list[PartitionSummary])
        assert time.monotonic() - started < _SOON_S


@pytest.fixture
def stepped():
    store = SteppedStore()
    yield store
    store.close()


# How long an example takes depends on what else the machine does.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
