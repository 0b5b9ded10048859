"""Programs that end in a way a test waits for; started by name, each in a process of its own."""

from __future__ import annotations

import sys

import numpy as np
import torch
from transport_processes import SourceProcess

from refit_mx.arena import Arena
from refit_mx.deadline import Deadline
from refit_mx.errors import RefitTimeoutError
from refit_mx.reads import ReadTable
from refit_mx.transports.base import Fetch
from refit_mx.transports.nixl import NixlTransport
from refit_mx.transports.nixl_library import new_agent

MIB = 1 << 20


def whole(nbytes: int) -> ReadTable:
    return ReadTable(np.array([[0, 0, nbytes, 1, 0, 0, 1, 0, 0]], np.int64))


def read_and_leave() -> None:
    """Read with NIXL and exit without closing anything."""
    with SourceProcess(MIB, nixl=True) as source:
        transport = NixlTransport()
        scratch = Arena(MIB).memory
        transport.register(scratch)
        fetch = Fetch(source.manifest, whole(MIB))
        transport.fetch([fetch], scratch, deadline=Deadline(60, "program"))
        globals()["kept"] = (transport, scratch)


def leave_with_an_abandoned_read() -> None:
    """Exit while a read of a stopped source is still under way."""
    with SourceProcess(8 * MIB, nixl=True) as source:
        transport = NixlTransport()
        scratch = Arena(8 * MIB).memory
        transport.register(scratch)
        fetch = Fetch(source.manifest, whole(8 * MIB))
        transport.fetch([fetch], scratch, deadline=Deadline(60, "program"))
        source.stop()
        try:
            transport.fetch([fetch], scratch, deadline=Deadline(0.5, "program"))
        except RefitTimeoutError:
            assert transport.busy(scratch)
            transport.close()
            globals()["kept"] = (transport, scratch)
            return
        raise AssertionError("the read did not time out")


def register_twice() -> None:
    """What NIXL does not survive: one tensor twice in one call."""
    agent = new_agent("twice", serves=True)
    tensor = torch.zeros(MIB, dtype=torch.uint8)
    registration = agent.register_memory([tensor, tensor])
    agent.deregister_memory(registration)


PROGRAMS = {
    program.__name__: program
    for program in (read_and_leave, leave_with_an_abandoned_read, register_twice)
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
