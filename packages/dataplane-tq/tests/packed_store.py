"""A store of TransferQueue's rows in this process. No Ray.

Imports internals: the store is behind TransferQueue's storage manager.
"""

from contextlib import ExitStack, contextmanager

from dataplane_tq.directory.server import Directory
from dataplane_tq.packed.arena import Arena
from dataplane_tq.packed.unit import UnitServer
from dataplane_tq.packed.unit_wire import UnitSpec
from dataplane_tq.storage.packed_rows import RawStore, RowsConnection

TOKEN = b"secret"


@contextmanager
def opened(*capacities, samples=1000):
    """Serve a store with units of these capacities; yield a client."""
    with ExitStack() as stack:
        addresses, specs = {}, []
        for number, capacity in enumerate(capacities):
            name = f"unit{number}"
            arena = stack.enter_context(Arena.create(name, capacity))
            addresses[name] = stack.enter_context(UnitServer(arena, TOKEN, "127.0.0.1")).address
            specs.append(UnitSpec(name, "node", capacity))
        directory = Directory(samples, specs, "127.0.0.1", mirrored=False)
        store = RawStore(RowsConnection(directory.start(), addresses, TOKEN, "auto", 20.0))
        stack.callback(store.close)
        yield store
