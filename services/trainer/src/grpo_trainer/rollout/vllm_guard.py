"""Program that starts a vLLM server and ends all its processes when the generation worker exits.

It imports nothing of the trainer. vLLM's engine outlives its API server if that is killed, and Ray
kills the children of a worker. So this process detaches from the worker: its parent exits at once.
It holds one end of a pipe, which closes when the worker ends for any reason. It adopts all orphaned
processes of the server.

Usage: ``python vllm_guard.py LOG COMMAND...``. It writes ``started PID`` or ``failed REASON``, and
``ended with status STATUS`` once no process of the server remains.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

import psutil

_GRACE_S = 10.0
"""Seconds for vLLM to end its processes; then all are killed."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_C = ctypes.CDLL(None)


def main() -> None:
    """Guard one server."""
    log, *command = sys.argv[1:]
    if os.fork():
        os._exit(0)
    _C.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        with open(log, "ab") as output:
            process = subprocess.Popen(  # noqa: S603  # the run's own command
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_end_with_guard,
            )
    except OSError as error:
        _report(f"failed {error}")
        return
    _report(f"started {process.pid}")
    server = os.pidfd_open(process.pid)
    if server not in select.select([sys.stdin, server], [], [])[0]:
        os.kill(process.pid, signal.SIGTERM)
        select.select([server], [], [], _GRACE_S)
    _report(f"ended with status {_end_all(process.pid)}")


def _end_with_guard() -> None:
    """Have Linux send the server SIGTERM when its parent, the guard, ends."""
    _C.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end_all(server: int) -> int:
    """Kill every descendant until none remains, and return the server's status."""
    status = 0
    while True:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        try:
            pid, wait_status = os.waitpid(-1, 0)
        except ChildProcessError:
            return status
        if pid == server:
            status = os.waitstatus_to_exitcode(wait_status)


def _report(line: str) -> None:
    with suppress(BrokenPipeError):
        os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main()
