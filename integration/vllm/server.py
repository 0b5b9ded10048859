"""vLLM HTTP servers for tests: they start within seconds and end with all of their processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import psutil
from integration.ports import hold_port

MAX_MODEL_LEN = 512
START_S = 200.0
"""Timeout of a start. On an idle machine with two cores, a start takes 4 s, the first one 19 s."""

ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
"""Variables of the servers that differ from those of the tests."""
RUNNING: list[VllmServer] = []
"""Servers that are not yet closed; a failed test shows their logs."""
_ROOT = Path(__file__).parents[2]


class _ForkServer:
    """The process of `integration.vllm.fork_server`, which ends with this one."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "integration.vllm.fork_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ENVIRONMENT},
            cwd=_ROOT,
            text=True,
            start_new_session=True,  # it survives a signal to the tests, to kill its forks
        )
        assert self._read() == "ready"

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Send a request and return the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.strip() == "ready" or line.strip().lstrip("-").isdigit() or line == "null\n":
                return line.strip()
        raise RuntimeError(f"the fork server ended with {self._process.wait()}; see its output")


@cache
def _fork_server() -> _ForkServer:
    return _ForkServer()


def _has_ended(process: psutil.Process) -> bool:
    """Return true for a zombie without threads: its last thread closes its sockets."""
    return process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1


@dataclass
class ForkedProcess:
    """A process forked from one that has imported vLLM; it leads a process group.

    Attributes:
        pid: its process id.
        log: file of its output.
    """

    pid: int
    log: Path

    @classmethod
    def start(
        cls,
        target: str,
        arguments: Mapping[str, Any],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> ForkedProcess:
        """Start the function ``target`` (``module:function``) with JSON arguments."""
        request = {
            "target": target,
            "arguments": dict(arguments),
            "environment": dict(environment or {}),
            "log": str(log),
        }
        return cls(_fork_server().ask(request), log)

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process; None while it runs."""
        code = _fork_server().ask({"ended": self.pid})
        return None if code is None else int(code)

    def signal(self, number: signal.Signals) -> None:
        """Signal the process, but not its children."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it and its children, and wait until all are gone.

        The children share its listening socket: the address is free when the last one is gone.
        """
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while self.exit_code is None or self._is_any_running():
            if time.monotonic() > deadline:
                raise TimeoutError(f"process group {self.pid} survives SIGKILL")
            time.sleep(0.01)

    def _is_any_running(self) -> bool:
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getpgid(process.pid) == self.pid and not _has_ended(process):
                    return True
        return False

    def log_tail(self, lines: int = 60) -> str:
        """Return the last ``lines`` of its output."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@dataclass(eq=False)
class VllmServer:
    """A vLLM server that can be killed and restarted at the same address.

    Attributes:
        address: ``http://127.0.0.1:<port>``.
        process: the API server; the engine's processes are its children.
        log: file of its output.
        port: bound socket that reserves the port while the server starts or is down.
    """

    address: str
    log: Path
    port: socket.socket
    options: Sequence[str]
    environment: Mapping[str, str]
    process: ForkedProcess = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start its process; call `wait_until_ready` before using it."""
        self.process = ForkedProcess.start(
            "integration.vllm.fork_server:serve",
            {"options": list(self.options)},
            self.log,
            self.environment,
        )

    def signal(self, number: signal.Signals) -> None:
        """Signal only the API server."""
        self.process.signal(number)

    def processes(self) -> list[psutil.Process]:
        """Return the API server and the engine's processes."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def workers(self) -> list[psutil.Process]:
        """Return the processes that hold the weights, ordered by rank."""
        workers = [p for p in self.processes() if p.name().startswith("VLLM::Worker")]
        return sorted(workers, key=lambda process: process.pid)

    def kill(self) -> None:
        """Kill all of its processes."""
        self.process.kill()

    def close(self) -> None:
        """Kill the server and release its port."""
        RUNNING.remove(self)
        self.kill()
        self.port.close()

    def log_tail(self, lines: int = 60) -> str:
        """Return the last ``lines`` of its output."""
        return self.process.log_tail(lines)


def start_server(
    model: Path, folder: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> VllmServer:
    """Start a server; call `wait_until_ready` before using it.

    Args:
        model: folder of the model.
        folder: folder of the log.
        arguments: further options of the server.
        environment: further variables.
    """
    # Both sockets allow reuse. Only vLLM's listens, so all connections reach it.
    held = hold_port()
    port = held.getsockname()[1]
    options = {
        "--model": str(model),
        "--served-model-name": "tiny",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": "float32",
        "--max-model-len": str(MAX_MODEL_LEN),
        "--kv-cache-memory-bytes": "134217728",
    }
    server = VllmServer(
        address=f"http://127.0.0.1:{port}",
        log=folder / f"vllm-{port}.log",
        port=held,
        options=[
            *("--enforce-eager", "--enable-scale-out", "--enable-server-load-tracking"),
            *(part for option in options.items() for part in option),
            *arguments,
        ],
        environment=environment or {},
    )
    RUNNING.append(server)
    return server


def wait_until_ready(servers: Sequence[VllmServer], timeout_s: float = START_S) -> None:
    """Wait until all of ``servers`` answer.

    Raises:
        RuntimeError: a server exited; the message has the end of its log.
        TimeoutError: a server does not answer in time; the message has the end of its log.
    """
    deadline = time.monotonic() + timeout_s
    for server in servers:
        while True:
            with suppress(httpx.TransportError):
                if httpx.get(f"{server.address}/health", timeout=5).is_success:
                    break
            if server.process.exit_code is not None:
                raise RuntimeError(f"vLLM ended while starting:\n{server.log_tail()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"vLLM is not up after {timeout_s:g} s:\n{server.log_tail()}")
            time.sleep(0.1)


@contextmanager
def running_server(
    model: Path, folder: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[VllmServer]:
    """Run a server during the block, which starts when it is ready."""
    server = start_server(model, folder, *arguments, environment=environment)
    try:
        wait_until_ready([server])
        yield server
    finally:
        server.close()
