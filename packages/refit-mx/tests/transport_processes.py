"""A source in a separate process, for tests that stop, kill and restart it.

The process serves an arena, prints its manifest, and reads commands from stdin. Imports internals:
a publisher cannot be stopped within a read.
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

from refit_mx import Deadline, Manifest
from refit_mx.manifest.format import ShardColumns
from refit_mx.memory.arena import Arena
from refit_mx.source.server import SourceServer
from refit_mx.transports.base import ReadTable

LINE_TIMEOUT_S = 120.0


def soon(timeout_s: float = 60.0) -> Deadline:
    return Deadline(timeout_s, "test")


def one_read(nbytes: int, first: int = 0) -> ReadTable:
    """Return one read of the arena's first ``nbytes`` to offset ``first`` of the scratch."""
    return ReadTable(np.array([[0, first, nbytes, 1, 0, 0, 1, 0, 0]], np.int64))


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    """Return random bytes of a seed."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8))


def random_reads(nbytes: int, count: int, seed: int, *, max_run: int = 512) -> ReadTable:
    """Draw valid reads between memories of ``nbytes``, with two loops, disjoint in the scratch."""
    draw = np.random.default_rng(seed)
    free = nbytes // count
    rows = []
    for index in range(count):
        run = int(draw.integers(1, min(max_run, free) + 1))
        n1 = int(draw.integers(1, min(64, free // run) + 1))
        n2 = int(draw.integers(1, min(8, free // (run * n1)) + 1))
        row = [0, index * free, run, n1, 0, 0, n2, 0, 0]
        for at, of, first in ((0, nbytes, 0), (1, free, index * free)):
            # Spend the spare bytes on the strides, then on the offset.
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
    """Return the bytes of each row, run by run."""
    data = memory.numpy().tobytes()
    at, first, second = (0, 4, 7) if side == "source" else (1, 5, 8)
    rows = []
    for row in reads.rows.tolist():
        starts = (
            row[at] + j * row[second] + i * row[first] for j in range(row[6]) for i in range(row[3])
        )
        rows.append(b"".join(data[start : start + row[2]] for start in starts))
    return rows


def manifest(server: SourceServer, arena: Arena, *, version_id: str = "v1", **fields) -> Manifest:
    """Return a manifest for transports, without tensors."""
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
    """A process that runs `main`; a context manager that kills it in any state.

    Args:
        nbytes: size of its arena, whose bytes are `pattern` of ``seed``.
        nixl: it has a NIXL agent.
        shm: it shares its memory.
        port: port of its server; 0 picks a free one.
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
        except BaseException:  # the caller gets no process that it could end
            self.end()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def command(self, command: str) -> str:
        """Send a command, wait until it is done, and return the answer."""
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self.line()

    def line(self) -> str:
        """Return the next line that is meant for the test."""
        while True:
            line = self._lines.get(timeout=LINE_TIMEOUT_S)
            if not line:
                raise AssertionError(f"the source ended with {self._process.wait(10)}")
            if line.startswith(("source ", "done")):
                return line.strip()

    def stop(self) -> None:
        """Send SIGSTOP, and wait until the process has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)

    def exit(self) -> int:
        """Make the process exit, and return its exit code."""
        self._process.stdin.write("exit\n")
        self._process.stdin.close()
        return self._process.wait(60)

    def end(self) -> None:
        if self._process.poll() is None:
            self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if not pipe.closed:
                with contextlib.suppress(OSError):  # unread data
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
    """Serve an arena until the command "exit" or the end of stdin."""
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
        from refit_mx.transports.nixl_source import NixlSource

        source = NixlSource()
        nixl = source.register(arena.memory)
    encoded = manifest(server, arena, nixl=nixl, shm=arena.shared).encode()
    say("source " + base64.b64encode(encoded).decode())
    for line in sys.stdin:
        match line.split():
            case ["drop", version_id]:
                server.drop_version(version_id)
            case ["fill", value]:
                arena.memory.fill_(int(value))
            case ["unregister"]:
                assert source is not None
                source.unregister(arena.memory)
            case ["exit"]:
                break
        say("done")
    if source is not None:
        source.close()
    server.close()
