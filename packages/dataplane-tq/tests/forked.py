"""Processes for tests that step, stop and kill them.

They are forks of a server that has imported their modules. A test has three of them, and each
would otherwise take more than a second for its imports.
"""

from __future__ import annotations

import multiprocessing
import os
import sys

_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(
    [
        "pytest",  # imported by each process, since its parent's main module imports it
        "dataplane_tq.directory.server",
        "dataplane_tq.packed.arena",
        "dataplane_tq.packed.unit",
        "dataplane_tq.packed.unit_client",
    ]
)


def start(code, *arguments):
    """Start a process that runs the code like ``python -c``.

    Return it with its standard input and output.
    """
    its_input, input_end = _FORKED.Pipe(duplex=False)
    output_end, its_output = _FORKED.Pipe(duplex=False)
    process = _FORKED.Process(target=_run, args=(code, arguments, its_input, its_output))
    process.start()
    its_input.close()
    its_output.close()
    return process, _opened(input_end, "w"), _opened(output_end, "r")


def _opened(connection, mode):
    with connection:
        return os.fdopen(os.dup(connection.fileno()), mode)


def _run(code, arguments, its_input, its_output):
    sys.stdin, sys.stdout = _opened(its_input, "r"), _opened(its_output, "w")
    sys.argv = ["-c", *map(str, arguments)]
    exec(code, {"__name__": "__main__"})
