"""Processes that start in milliseconds: one that has imported everything forks itself for each.

Importing torch takes seconds, and the tests of faults start hundreds of processes. The process that
forks starts no thread and loads no NIXL, which would not survive it. What it forks is orphaned at
once and becomes the child of the test's own process, so that a test waits for it, kills it and sees
it stop as it would any child. That is what multiprocessing's forkserver lacks: its processes are
its own children, so that nobody else can wait for one to have stopped. Run as a script it is the
process that forks.
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
"""For the imports, or for a process to be forked; far more than either takes."""

_PR_SET_CHILD_SUBREAPER = 36
_MOST_BYTES = 1 << 20


class ForkedProcess:
    """A process, as `subprocess.Popen` shows one.

    Attributes:
        pid: of it.
        stdin: its standard input, text.
        stdout: its standard output, text.
        returncode: once `poll` or `wait` has seen its end.
    """

    def __init__(self, pid: int, stdin: IO[str], stdout: IO[str]) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | None = None
        # A process is reaped once; transports call back, and tests kill, from several threads.
        self._reaping = threading.Lock()

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        with self._reaping:
            if self.returncode is None:
                found, status = os.waitpid(self.pid, os.WNOHANG)
                if found:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float = WAIT_S) -> int:
        """Its exit code, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not.
        """
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.002)
        return code

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        with self._reaping:
            if self.returncode is None:
                os.kill(self.pid, signal.SIGKILL)


def prepare() -> None:
    """Start the process that forks, which `start` does otherwise; returns before it is ready."""
    _forking()


def start(program: str, *arguments: str) -> ForkedProcess:
    """Run ``main(*arguments)`` of a module of this folder in a process of its own."""
    return _forking().start(program, arguments)


class _Forking:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # One thread: torch's and numpy's others would not survive the fork.
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            cwd=Path(__file__).parent,
            env={**os.environ, **threads},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        ours.settimeout(WAIT_S)
        self._sock = ours

    def start(self, program: str, arguments: tuple[str, ...]) -> ForkedProcess:
        their_stdin, our_stdin = os.pipe()
        our_stdout, their_stdout = os.pipe()
        try:
            message = json.dumps([program, *arguments]).encode()
            socket.send_fds(self._sock, [message], [their_stdin, their_stdout])
        finally:
            os.close(their_stdin)
            os.close(their_stdout)
        answer = self._sock.recv(_MOST_BYTES)
        assert answer, "the process that forks has ended"
        return ForkedProcess(int(answer), os.fdopen(our_stdin, "w"), os.fdopen(our_stdout))

    def close(self) -> None:
        self._sock.close()
        self._process.wait(WAIT_S)


@functools.cache
def _forking() -> _Forking:
    made = _Forking()
    atexit.register(made.close)
    return made


def _serve(sock: socket.socket) -> None:
    """Fork for each message; returns in the process that was forked, when it is done, as well."""
    while True:
        message, files, _, _ = socket.recv_fds(sock, _MOST_BYTES, 2)
        if not message:
            return
        program, *arguments = json.loads(message)
        tell, told = os.pipe()
        between = os.fork()
        if not between:
            pid = os.fork()
            if pid:
                os.write(told, str(pid).encode())
                os._exit(0)  # now the other is an orphan
            sock.close()
            for file in (tell, told):
                os.close(file)
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            importlib.import_module(program).main(*arguments)
            return
        os.close(told)
        for file in files:
            os.close(file)
        pid = int(os.read(tell, 32))
        os.close(tell)
        os.waitpid(between, 0)
        sock.send(str(pid).encode())


if __name__ == "__main__":
    import refit_processes  # noqa: F401 - imported once, for all that are forked
    import soak_processes  # noqa: F401
    import torch
    import transport_processes  # noqa: F401

    import refit_mx.control.embedded
    import refit_mx.publisher
    import refit_mx.receiver  # noqa: F401

    torch.set_num_threads(1)
    _serve(socket.socket(fileno=int(sys.argv[1])))
