"""`DaemonActor`: a Ray actor that owns an external daemon and has the same lifetime.

A daemon that dies ends its actor, so clients, which check the actors, detect it. An actor that
dies in any way ends its daemon (see `dataplane_tq.storage.supervise`).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any  # Any: Ray handles have no static types

import ray
from ray.exceptions import RayError

from dataplane_core import UnavailableError
from dataplane_tq.storage import supervise

_OUTPUT_LINES = 30
_POLL_S = 0.05
_STOP_TIMEOUT_S = 10.0


class DaemonActor:
    """Base class of actors that run one daemon; a subclass adds ``start``."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="dataplane-tq-"))
        self._pids: list[int] = []
        self._output: deque[str] = deque(maxlen=_OUTPUT_LINES)
        self._supervisor: subprocess.Popen[str] | None = None
        self._reader = threading.Thread(target=self._read, name="daemon-output", daemon=True)
        self._stopping = threading.Event()

    def run(
        self,
        command: list[str],
        *,
        env: dict[str, str] | None = None,
        ready: Callable[[], bool],
        timeout_s: float,
    ) -> None:
        """Run ``command`` in `folder` and wait until it is ready.

        Args:
            command: the daemon and its arguments; it must stay in the foreground.
            env: environment variables to add.
            ready: predicate that is polled until it returns True.
            timeout_s: deadline in seconds.

        Raises:
            UnavailableError: the daemon exited, or is not ready in time. It is stopped, and the
                message contains its last lines of output.
        """
        name = Path(command[0]).name
        self._supervisor = subprocess.Popen(  # noqa: S603 - the commands come from subclasses
            [sys.executable, "-I", supervise.__file__, str(self.folder), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **(env or {})},
        )
        self._reader.start()
        self._supervisor.wait()  # it forks; the child continues with the pipes
        deadline = time.monotonic() + timeout_s
        while not ready():
            self._reader.join(_POLL_S)
            ended = not self._reader.is_alive()
            if ended or time.monotonic() > deadline:
                self.stop()
                problem = "ended while it started" if ended else f"not ready after {timeout_s:g} s"
                raise UnavailableError(f"{name}: {problem}; its last output:\n{self._tail()}")
        threading.Thread(target=self._watch, args=(name,), name="daemon-end", daemon=True).start()

    def pids(self) -> list[int]:
        """Return the process ids of the supervisor and the daemon."""
        return self._pids

    def stop(self) -> None:
        """Stop the daemon, and wait until it and `folder` are gone."""
        self._stopping.set()
        if self._supervisor is not None and self._supervisor.stdin is not None:
            self._supervisor.stdin.close()
            self._reader.join(_STOP_TIMEOUT_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self) -> None:
        """Keep the last lines of the output, until the daemon and its supervisor exit."""
        assert self._supervisor is not None
        assert self._supervisor.stdout is not None
        for line in self._supervisor.stdout:
            words = line.split()
            if not self._pids and words and all(word.isdecimal() for word in words):
                self._pids = [int(word) for word in words]
            else:
                self._output.append(line)

    def _watch(self, name: str) -> None:
        self._reader.join()
        if not self._stopping.is_set():
            shutil.rmtree(self.folder, ignore_errors=True)  # a killed supervisor did not remove it
            sys.stderr.write(f"{name} ended; its last output:\n{self._tail()}\n")
            sys.stderr.flush()
            os._exit(1)

    def _tail(self) -> str:
        return "".join(self._output).strip() or "(none)"


def end_daemon(actor: Any) -> None:
    """Have a `DaemonActor` stop its daemon, and wait for at most 20 s.

    If its Ray cluster was shut down, actor and daemon are gone; a call would start a new cluster.
    """
    if ray.is_initialized():
        with suppress(RayError, ValueError):  # a handle of an earlier cluster
            ray.wait([actor.stop.remote()], timeout=2 * _STOP_TIMEOUT_S)


def package_folder(module: str) -> Path:
    """Return the folder of an installed package, without importing it."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def free_port(host: str) -> int:
    """Return a TCP port of ``host`` that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def listens(host: str, port: int) -> bool:
    """Return True if ``host:port`` accepts connections."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0
