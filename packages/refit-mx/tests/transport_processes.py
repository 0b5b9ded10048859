"""A source in a process of its own, for tests that stop, kill and restart it.

There it holds an arena, serves it, says its manifest on stdout and obeys lines on stdin.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import os
import queue
import secrets
import signal
import sys
import threading

import forked_processes
import numpy as np
import torch

from refit_mx.arena import Arena
from refit_mx.manifest import Manifest, ShardColumns
from refit_mx.reads import ReadTable
from refit_mx.source_server import SourceServer

LINE_TIMEOUT_S = 120.0


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    """Bytes that differ from place to place and from seed to seed."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8))


def random_reads(nbytes: int, count: int, seed: int, *, most_run: int = 512) -> ReadTable:
    """Valid reads between memories of ``nbytes``, up to three levels, disjoint at the scratch."""
    draw = np.random.default_rng(seed)
    room = nbytes // count
    rows = []
    for index in range(count):
        run = int(draw.integers(1, min(most_run, room) + 1))
        n1 = int(draw.integers(1, min(64, room // run) + 1))
        n2 = int(draw.integers(1, min(8, room // (run * n1)) + 1))
        row = [0, index * room, run, n1, 0, 0, n2, 0, 0]
        for at, of, first in ((0, nbytes, 0), (1, room, index * room)):
            # The spare room goes to the strides, then to the beginning.
            spare = of - run * n1 * n2
            gap1 = int(draw.integers(0, spare // (n1 * n2) + 1)) * int(draw.integers(0, 2))
            stride1 = run + gap1 if n1 > 1 else 0
            inner = run + (n1 - 1) * stride1
            gap2 = int(draw.integers(0, (of - inner * n2) // n2 + 1)) * int(draw.integers(0, 2))
            stride2 = inner + gap2 if n2 > 1 else 0
            end = inner + (n2 - 1) * stride2
            row[at] = first + int(draw.integers(0, of - end + 1))
            row[4 + at], row[7 + at] = stride1, stride2
        rows.append(row)
    return ReadTable(np.array(rows, np.int64))


def reference_bytes(memory: torch.Tensor, reads: ReadTable, side: str) -> list[bytes]:
    """The bytes of each row, run by run."""
    data = memory.numpy().tobytes()
    at, first, second = (0, 4, 7) if side == "source" else (1, 5, 8)
    found = []
    for row in reads.rows.tolist():
        starts = (
            row[at] + j * row[second] + i * row[first] for j in range(row[6]) for i in range(row[3])
        )
        found.append(b"".join(data[start : start + row[2]] for start in starts))
    return found


def manifest(server: SourceServer, arena: Arena, *, version_id: str = "v1", **fields) -> Manifest:
    """What transports need to know of a source; it names no tensors."""
    values = {
        "model_name": "model",
        "version_id": version_id,
        "source_slot_id": "fsdp-0",
        "worker_id": f"worker-{server.incarnation}",
        "incarnation": server.incarnation,
        "endpoint": server.endpoint,
        "registry": None,
        "arena_address": arena.address,
        "arena_bytes": arena.nbytes,
        "nixl": None,
        "table_digest": b"",
        "table": b"",
        "shards": ShardColumns(axes=0, tensor=b"", start=b"", shape=b"", offset=b""),
        "digests": b"",
    }
    return Manifest(**(values | fields))


class SourceProcess:
    """Starts the program below. A context manager that ends it, whatever its state.

    Args:
        nbytes: of its arena, whose bytes are `pattern` of ``seed``.
        nixl: whether it has a NIXL agent.
        shm: whether it shares its memory.
        port: of its server; 0 takes a free one.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        seed: int = 1,
        nixl: bool = False,
        shm: bool = False,
        port: int = 0,
    ) -> None:
        options = ["--bytes", str(nbytes), "--seed", str(seed), "--port", str(port)]
        options += [*["--nixl"] * nixl, *["--shm"] * shm]
        self._process = forked_processes.start("transport_processes", *options)
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.manifest = Manifest.decode(base64.b64decode(self.line().removeprefix("source ")))
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, command: str) -> str:
        """Send a command and wait until it is done; says its answer."""
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self.line()

    def line(self) -> str:
        """The next line that is meant for the test."""
        while True:
            line = self._lines.get(timeout=LINE_TIMEOUT_S)
            if not line:
                raise AssertionError(f"the source ended with {self._process.wait(10)}")
            if line.startswith(("source ", "done")):
                return line.strip()

    def stop(self) -> None:
        """SIGSTOP, and wait until it is stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)

    def exit(self) -> int:
        """Let it end by itself; says its exit code."""
        self._process.stdin.write("exit\n")
        self._process.stdin.close()
        return self._process.wait(60)

    def end(self) -> None:
        if self._process.poll() is None:
            self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if not pipe.closed:
                with contextlib.suppress(OSError):  # what it did not read
                    pipe.close()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def __enter__(self) -> SourceProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(*arguments: str) -> None:
    """The program, in a process of its own."""
    options = argparse.ArgumentParser()
    options.add_argument("--bytes", type=int, required=True)
    options.add_argument("--seed", type=int, required=True)
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--nixl", action="store_true")
    options.add_argument("--shm", action="store_true")
    given = options.parse_args(arguments)
    server = SourceServer(port=given.port, incarnation=secrets.token_hex(8))
    arena = Arena(given.bytes, shared=given.shm)
    arena.memory[: given.bytes] = pattern(given.bytes, given.seed)
    server.serve_version("v1", arena.memory)
    nixl = None
    source = None
    if given.nixl:
        from refit_mx.transports.nixl import NixlSource

        source = NixlSource()
        nixl = source.register(arena.memory)
    made = manifest(server, arena, nixl=nixl, shm=arena.shared)
    say("source " + base64.b64encode(made.encode()).decode())
    for line in sys.stdin:
        match line.split():
            case ["drop", version_id]:
                server.drop_version(version_id)
            case ["serve", version_id]:
                server.serve_version(version_id, arena.memory)
            case ["fill", value]:
                arena.memory.fill_(int(value))
            case ["unregister"]:
                assert source is not None
                source.unregister(arena.memory)
            case ["deregister"]:
                # What NixlSource never does: the agent stays.
                assert source is not None
                _, agent, registration = source._registered[arena.address]
                agent.deregister_memory(registration)
            case ["exit"]:
                break
        say("done")
    if source is not None:
        source.close()
    server.close()
