"""Publisher processes that can be one publisher after another, control planes that can be killed,
and a connection that can be cut."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import forked_processes
from forked_processes import ForkedProcess
from ports import held_port
from refit_processes import Process

WAIT_S = 60.0
"""For a process to start, or to answer; far more than any takes."""


class Line:
    """JSON, one a line, over a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._rest = b""

    def send(self, message: object) -> None:
        self._sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """The next message; None at the end."""
        self._sock.settimeout(timeout_s)
        while b"\n" not in self._rest:
            data = self._sock.recv(1 << 16)
            if not data:
                return None
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        found: dict[str, Any] = json.loads(line)
        return found

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()


class Host:
    """A process that can be one publisher after another."""

    def __init__(self, process: ForkedProcess, line: Line) -> None:
        self.process = process
        self.pid = process.pid
        self._line = line
        self.worker_id = ""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What this process has open for it."""
        ends = (self.process.stdin, self.process.stdout, self._line)
        return tuple(each.fileno() for each in ends)

    def send(self, **command: object) -> None:
        """A command; `answer` waits for what it does."""
        self._line.send(command)

    def answer(self) -> dict[str, Any]:
        """What became of the last command: ``done`` and more, or ``error``."""
        found = self._line.receive(WAIT_S)
        assert found is not None, f"publisher process {self.pid} ended"
        assert "traceback" not in found, found["traceback"]
        return found

    def ask(self, **command: object) -> dict[str, Any]:
        self.send(**command)
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        self._line.close()
        self.process.stdin.close()
        self.process.stdout.close()


class Hosts:
    """Starts publisher processes.

    Args:
        folder: of the socket that they connect to.

    Attributes:
        folder: the same.
        started: how many there were.
    """

    def __init__(self, folder: Path) -> None:
        forked_processes.prepare()
        self.folder = folder
        self._address = str(folder / "hosts")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._address)
        self._listener.listen()
        self._listener.settimeout(WAIT_S)
        self.started = 0

    def start(self) -> Host:
        """A new process."""
        process = forked_processes.start("soak_processes", self._address)
        self.started += 1
        return Host(process, Line(self._listener.accept()[0]))

    def kill(self, host: Host) -> None:
        """SIGKILL; returns when the process is gone."""
        host.signal(signal.SIGKILL)
        assert self.end(host) == -signal.SIGKILL

    def end(self, host: Host) -> int:
        """Let a process end by itself; its exit code."""
        host.close()
        return host.process.wait(WAIT_S)

    def close(self) -> None:
        """No further process can be started."""
        self._listener.close()


class Control:
    """A control plane in a process, which keeps its port and its state when it is killed.

    Args:
        stack: ends it.
        folder: of its state.
        retention: of the control plane.
    """

    def __init__(self, stack: ExitStack, folder: Path, *, retention: int) -> None:
        self._settings = {
            "port": stack.enter_context(held_port()),
            "state": str(folder / f"control-{retention}-{secrets.token_hex(4)}"),
            "retention": retention,
        }
        self._process = Process("control", **self._settings)
        self.address = str(self._process.ready["address"])
        stack.callback(lambda: self._process.close())

    def signal(self, number: signal.Signals) -> None:
        """SIGKILL or SIGSTOP."""
        self._process.signal(number)

    def mend(self, number: signal.Signals) -> None:
        """It goes on, or there is another with its state."""
        if number == signal.SIGSTOP:
            self._process.signal(signal.SIGCONT)
            return
        self._process.close()
        self._process = Process("control", **self._settings)

    @property
    def leases(self) -> int:
        """That are held now."""
        found: int = self._process.ask(do="count")["leases"]
        return found


class Relay:
    """A connection to a server that can be cut: what comes then is refused, what is open ends."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._cut = False
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        with self._lock:
            self._cut = True
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        with self._lock:
            self._cut = False

    def close(self) -> None:
        self.cut()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(WAIT_S)

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            with self._lock:
                self._threads = [each for each in self._threads if each.is_alive()]
                try:
                    far = None if self._cut else socket.create_connection(self._server)
                except ConnectionRefusedError:  # there is no server now
                    far = None
                if far is None:
                    near.close()
                    continue
                self._open |= {near, far}
                pair = threading.Thread(target=self._pass, args=(near, far), daemon=True)
                self._threads.append(pair)
                pair.start()

    def _pass(self, near: socket.socket, far: socket.socket) -> None:
        back = threading.Thread(target=_pump, args=(far, near), daemon=True)
        back.start()
        _pump(near, far)
        back.join()
        with self._lock:
            self._open -= {near, far}
        near.close()
        far.close()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for each in (source, sink):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def open_files(without: Iterable[int] = ()) -> list[str]:
    """What each open file of this process is, but for some descriptors."""
    found = []
    for name in {*os.listdir("/proc/self/fd")} - {*map(str, without)}:
        with contextlib.suppress(OSError):  # the one that lists them is closed by now
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(found)


# What runs in the other processes


class Publishing:
    """The commands of a publisher process, one method each."""

    def __init__(self) -> None:
        self._publisher: Any = None
        self._settings: dict[str, Any] = {}
        self._manifests: dict[str, tuple[Any, list[Any]]] = {}

    def open(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Become a publisher; with ``token``, under the worker id of an earlier life."""
        from refit_mx.publisher import MxV2TrainingPublisher

        token = settings.get("token") or secrets.token_hex(8)
        made = secrets.token_hex

        def token_hex(nbytes: int | None = None) -> str:
            return token if nbytes == 8 else made(nbytes)

        self._settings = settings
        self._manifests.clear()
        with mock.patch("refit_mx.publisher.secrets.token_hex", token_hex):
            self._publisher = MxV2TrainingPublisher(
                settings["model"],
                settings["slot"],
                control=settings["control"],
                transports=settings["transports"],
                wire_dtype=settings["wire"],
                heartbeat_ttl_s=60,
            )
        return {"worker": self._publisher.worker_id}

    def publish(self, version: str, timeout_s: float) -> dict[str, Any]:
        import torch
        from soak_model import Drawn, numbers

        from refit_mx.shard_sources import LocalShard
        from refit_mx.tensor_types import Box

        model = {
            name: Drawn(dtype, tuple(shape), wire)
            for name, (dtype, shape, wire) in self._settings["tensors"].items()
        }
        whole = numbers(self._settings["seed"], version, model)
        shards = []
        for name, (start, shape) in self._settings["held"]:
            box = Box(tuple(start), tuple(shape))
            part = torch.from_numpy(whole[name])[box.slices()]
            shards.append(LocalShard(name, model[name].shape, box, part))
        manifest = self._publisher.publish(version, shards, timeout_s=timeout_s)
        self._manifests[version] = (manifest, shards)
        return {}

    def flip(self, version: str, name: str, at: list[int], byte: int, bit: int) -> dict[str, Any]:
        """Change one bit of an element in the arena, as failing memory does; again to undo it."""
        import numpy as np

        manifest, shards = self._manifests[version]
        offsets = np.frombuffer(manifest.shards.offset, "<i8").tolist()
        for shard, offset in zip(shards, offsets, strict=True):
            if shard.name != name:
                continue
            place = [a - first for a, first in zip(at, shard.box.start, strict=True)]
            if any(not 0 <= i < n for i, n in zip(place, shard.box.shape, strict=True)):
                continue
            item_size = self._settings["item_sizes"][name]
            flat = int(np.ravel_multi_index(place, shard.box.shape)) if place else 0
            address = manifest.arena_address + offset + flat * item_size + byte
            ctypes.c_uint8.from_address(address).value ^= 1 << bit
            return {}
        raise AssertionError(f"{name} {at} is not held")

    def close(self) -> dict[str, Any]:
        """Be no publisher any more."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        return {"descriptors": open_files()}


def _host(line: Line) -> None:
    import traceback

    from refit_mx.errors import RefitError

    publishing = Publishing()
    commands: dict[str, Callable[..., dict[str, Any]]] = {
        name: getattr(publishing, name) for name in ("open", "publish", "flip", "close")
    }
    while (command := line.receive()) is not None:
        try:
            line.send({"done": True, **commands[command.pop("do")](**command)})
        except RefitError as error:
            line.send({"error": type(error).__name__, "message": str(error)})
        except BaseException:  # noqa: BLE001 - the test raises it
            line.send({"traceback": traceback.format_exc()})
    publishing.close()


def main(address: str) -> None:
    """What runs in each process."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(address)
    _host(Line(sock))
