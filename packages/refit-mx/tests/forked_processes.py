"""Processes that start in milliseconds: a fork server has imported everything and forks itself.

Importing torch takes seconds, and the tests of faults start hundreds of processes. The fork server
starts no thread and does not load NIXL, since neither survives a fork. A forked process is orphaned
at once and becomes a child of the test's process (a subreaper), so the test can wait for it and see
it stop. With multiprocessing's forkserver it could not: there, processes are the server's children.
Run as a script, this module is the fork server.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

WAIT_S = 60.0
"""Timeout for the imports and for a fork, with a large margin."""

_PR_SET_CHILD_SUBREAPER = 36
_MAX_BYTES = 1 << 20


class ForkedProcess:
    """A process with an interface like `subprocess.Popen`.

    Attributes:
        pid: its process id.
        stdin: its standard input, text.
        stdout: its standard output, text.
        returncode: its exit code, set by `poll` or `wait`.
    """

    def __init__(self, pid: int, stdin: IO[str], stdout: IO[str]) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | None = None
        # Only one thread may reap the process; several threads poll and kill it.
        self._reaping = threading.Lock()

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        with self._reaping:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float = WAIT_S) -> int:
        """Wait for its end and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.002)
        return code

    def kill(self) -> None:
        """Send SIGKILL unless it was reaped."""
        with self._reaping:
            if self.returncode is None:
                os.kill(self.pid, signal.SIGKILL)


def start(program: str, *arguments: str) -> ForkedProcess:
    """Run ``main(*arguments)`` of a module of this folder in a new process."""
    return _fork_server().start(program, arguments)


class _ForkServer:
    def __init__(self) -> None:
        client, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # Further threads of torch and numpy would not survive the fork.
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(server.fileno())],
            stdin=subprocess.DEVNULL,
            cwd=Path(__file__).parent,
            env={**os.environ, **threads},
            pass_fds=[server.fileno()],
        )
        server.close()
        client.settimeout(WAIT_S)
        self._sock = client

    def start(self, program: str, arguments: tuple[str, ...]) -> ForkedProcess:
        child_stdin, stdin = os.pipe()
        stdout, child_stdout = os.pipe()
        try:
            message = json.dumps([program, *arguments]).encode()
            socket.send_fds(self._sock, [message], [child_stdin, child_stdout])
        finally:
            os.close(child_stdin)
            os.close(child_stdout)
        answer = self._sock.recv(_MAX_BYTES)
        assert answer, "the fork server exited"
        return ForkedProcess(int(answer), os.fdopen(stdin, "w"), os.fdopen(stdout))

    def close(self) -> None:
        self._sock.close()
        self._process.wait(WAIT_S)


@functools.cache
def _fork_server() -> _ForkServer:
    server = _ForkServer()
    atexit.register(server.close)
    return server


def _serve(sock: socket.socket) -> None:
    """Fork for each message. It also returns in each forked process, after its program."""
    while True:
        message, files, _, _ = socket.recv_fds(sock, _MAX_BYTES, 2)
        if not message:
            return
        program, *arguments = json.loads(message)
        pid_reader, pid_writer = os.pipe()
        intermediate = os.fork()
        if not intermediate:
            pid = os.fork()
            if pid:
                os.write(pid_writer, str(pid).encode())
                os._exit(0)  # now the other process is an orphan
            sock.close()
            for file in (pid_reader, pid_writer):
                os.close(file)
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            importlib.import_module(program).main(*arguments)
            return
        os.close(pid_writer)
        for file in files:
            os.close(file)
        pid = int(os.read(pid_reader, 32))
        os.close(pid_reader)
        os.waitpid(intermediate, 0)
        sock.send(str(pid).encode())


if __name__ == "__main__":
    import refit_processes  # noqa: F401 - imported once, for all forks
    import soak_processes  # noqa: F401
    import torch
    import transport_processes  # noqa: F401

    torch.set_num_threads(1)
    _serve(socket.socket(fileno=int(sys.argv[1])))
