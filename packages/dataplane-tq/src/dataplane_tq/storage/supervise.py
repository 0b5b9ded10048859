"""Runs a command in a folder until it exits or standard input closes, then removes the folder.

The owner runs ``supervise.py FOLDER COMMAND...`` with a pipe as standard input. The kernel closes
the pipe when the owner exits in any way, so a ``kill -9`` of the owner kills the command too. The
first line of output is the two process ids; the rest is the command's output.

The script uses only the standard library, to start fast and to load nothing of the owner's.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(folder: str, command: list[str]) -> None:
    # Ray kills the children of an exiting worker; an orphan survives to remove the folder.
    if os.fork():
        os._exit(0)
    os.setsid()
    try:
        child = subprocess.Popen(  # noqa: S603 - the owner's command
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            preexec_fn=_die_with_parent,  # safe: this process has one thread
        )
        sys.stdout.write(f"{os.getpid()} {child.pid}\n")
        sys.stdout.flush()
        select.select([sys.stdin, os.pidfd_open(child.pid)], [], [])
        child.kill()
        child.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
