"""Programs whose exit a test checks; each is started by name in a separate process.

Imports internals: a receiver closes its transport at exit, and these programs do not.
"""

from __future__ import annotations

import sys

import torch
from transport_processes import SourceProcess, one_read

from refit_mx import Deadline, RefitTimeoutError
from refit_mx.transports.base import SourceReads
from refit_mx.transports.nixl import NixlTransport

MIB = 1 << 20


def read_and_leave() -> None:
    """Read with NIXL and exit without closing anything."""
    with SourceProcess(MIB, nixl=True) as source:
        transport = NixlTransport()
        scratch = torch.zeros(MIB, dtype=torch.uint8)
        transport.register(scratch)
        wanted = SourceReads(source.manifest, one_read(MIB))
        transport.read([wanted], scratch, deadline=Deadline(60, "program"))
        globals()["kept"] = (transport, scratch)


def leave_with_an_abandoned_read() -> None:
    """Exit while a read of a stopped source is still pending."""
    with SourceProcess(8 * MIB, nixl=True) as source:
        transport = NixlTransport()
        scratch = torch.zeros(8 * MIB, dtype=torch.uint8)
        transport.register(scratch)
        wanted = SourceReads(source.manifest, one_read(8 * MIB))
        transport.read([wanted], scratch, deadline=Deadline(60, "program"))
        source.stop()
        try:
            transport.read([wanted], scratch, deadline=Deadline(0.5, "program"))
        except RefitTimeoutError:
            assert transport.busy(scratch)
            transport.close()
            globals()["kept"] = (transport, scratch)
            return
        raise AssertionError("the read did not time out")


PROGRAMS = {program.__name__: program for program in (read_and_leave, leave_with_an_abandoned_read)}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
