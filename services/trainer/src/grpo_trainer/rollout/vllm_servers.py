"""vLLM servers that a run starts on this machine's loopback.

vLLM needs other package versions than the trainer, so servers run in a separate environment.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import httpx

from grpo_trainer.errors import WorkerError
from grpo_trainer.rollout import vllm_guard

_LOG_LINES = 20
_LOG_BYTES = 64 * 1024
_POLL_S = 0.2
_GUARD_S = 10.0
"""Seconds that a guard may take to start."""

STOP_S = 20.0
"""Seconds that a server may take to end."""


class VllmServer:
    """Server and its guard process; see `grpo_trainer.rollout.vllm_guard`.

    ``command`` starts the server, without ``--host`` and ``--port``; ``environment`` has all
    variables of its processes.

    Raises:
        WorkerError: the command cannot be started.

    Attributes:
        address: ``http://127.0.0.1:<port>``.
    """

    def __init__(
        self, number: int, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        self._number, self._log = number, log
        self._end: str | None = None
        # Reserves the port until vLLM listens. Both sockets allow reuse, and clients connect only
        # to the one that listens, vLLM's.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("127.0.0.1", 0))
        port = self._port.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        guard = [sys.executable, vllm_guard.__file__, str(log)]
        self._guard = subprocess.Popen(  # noqa: S603  # the run's own command
            [*guard, *command, "--host", "127.0.0.1", "--port", str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
        )
        line = self._read(_GUARD_S)
        if line is None:
            self._guard.kill()  # if it has not forked yet; else `close` ends the guard
        with suppress(subprocess.TimeoutExpired):
            self._guard.wait(_GUARD_S)  # the started process exits at once; the guard is its child
        if line is None or not line.startswith("started "):
            self.close()
            raise WorkerError(
                f"policy.generation.command: {command[0]}: cannot be started: "
                f"{(line or 'no answer').removeprefix('failed ')}"
            )
        self.pid = int(line.split()[1])

    def answers(self) -> bool:
        """Return whether the server answers.

        Raises:
            WorkerError: the server exited; the message has the end of its log.
        """
        if self._end is None:
            self._end = self._read(0.0)
        if self._end is not None:
            raise self.error(self._end)
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.address}/health", timeout=5, trust_env=False).is_success
        return False

    def error(self, problem: str) -> WorkerError:
        """Return an error about the server that shows the end of its log."""
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - _LOG_BYTES))
            lines = log.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
        text = "\n".join(lines)
        return WorkerError(f"vLLM server {self._number} {problem}; {self._log}:\n{text}")

    def begin_close(self) -> None:
        """Have the guard stop the server."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()

    def close(self) -> None:
        """Stop the server and wait until its processes have exited; closing twice is fine."""
        self.begin_close()
        if self._end is None:
            self._end = self._read(STOP_S)
        self._port.close()

    def _read(self, timeout_s: float) -> str | None:
        """Return the guard's next line, None after ``timeout_s``, "is gone" if the guard exited."""
        assert self._guard.stdout is not None
        if not select.select([self._guard.stdout], [], [], timeout_s)[0]:
            return None
        return self._guard.stdout.readline().decode().strip() or "is gone"


class VllmServers:
    """Servers of a run.

    `start` and `close` may be called from two threads: `close` makes a running `start` fail.

    Args:
        command: command of each server.
        count: number of servers.
        environment: variables of each server, in addition to those of this process.
        token_env: name of the variable with the token of the control plane, or None.
        folder: folder of the logs, ``vllm-0.log`` and so on.
        start_timeout_s: deadline of the start of all servers, in seconds.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        count: int,
        environment: Mapping[str, str],
        token_env: str | None,
        folder: str,
        start_timeout_s: float,
    ) -> None:
        self._command, self._count = command, count
        self._environment, self._token_env = environment, token_env
        self._folder = Path(folder)
        self._timeout_s = start_timeout_s
        self._lock = threading.Lock()
        self._closed = False
        self._servers: list[VllmServer] = []

    def start(self) -> list[str]:
        """Start all servers, and return their addresses once all serve.

        Raises:
            WorkerError: a server cannot be started, exits or times out; the message has the end of
                its log, and all servers are stopped.
        """
        deadline = time.monotonic() + self._timeout_s
        try:
            for number in range(self._count):
                self._start(number)
            for server in self._servers:
                while not server.answers():
                    if time.monotonic() > deadline:
                        raise server.error(f"does not answer after {self._timeout_s:g} s")
                    time.sleep(_POLL_S)
        except BaseException:  # no server may stay behind, whatever the error
            self.close()
            raise
        return [server.address for server in self._servers]

    def _start(self, number: int) -> None:
        log = self._folder / f"vllm-{number}.log"
        environment = {
            **os.environ,
            **devices_of(number, self._count, os.environ),
            **self._environment,
        }
        if self._token_env is not None:
            environment["REFIT_MX_CONTROL_TOKEN"] = os.environ.get(self._token_env, "")
        with self._lock:
            if self._closed:
                raise WorkerError("vLLM servers: closed while they start")
            self._folder.mkdir(parents=True, exist_ok=True)
            self._servers.append(VllmServer(number, self._command, environment, log))

    def close(self) -> None:
        """End all processes of all servers; closing twice is fine."""
        with self._lock:
            self._closed = True
            for server in self._servers:
                server.begin_close()
            for server in self._servers:
                server.close()


def devices_of(number: int, count: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that gives a server its part of this process's GPUs.

    Args:
        number: number of the server.
        count: number of servers; all share the GPUs if there are fewer GPUs than servers.
        environment: environment of this process.
    """
    name = "CUDA_VISIBLE_DEVICES"
    devices = [device for device in environment.get(name, "").split(",") if device]
    each = len(devices) // count
    return {name: ",".join(devices[number * each : (number + 1) * each])} if each else {}
