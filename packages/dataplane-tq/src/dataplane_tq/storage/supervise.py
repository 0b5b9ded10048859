"""Runs a command in a folder until standard input ends; then neither is left.

Started by path, as ``supervise.py FOLDER COMMAND...``, from the process that owns the pipe: the
kernel closes it however the owner ends, so a ``kill -9`` of the owner ends the command, too. The
first line written is the two process ids, the rest is the command's output.

Only the standard library: this must start fast and must not load what the owner loads.
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
    # Ray kills the children of a worker that ends; an orphan still gets to remove the folder.
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
