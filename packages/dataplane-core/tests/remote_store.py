"""Store in memory for consumers in other processes: calls run in the serving process."""

from __future__ import annotations

import contextlib
import multiprocessing
import operator
import pickle
import threading
from collections.abc import Iterator
from multiprocessing.managers import BaseManager
from types import SimpleNamespace

from dataplane_core import InMemoryDataPlaneClient

KEY = b"test"


class Served(BaseManager):
    """Manager that a client connects with."""


Served.register("store")


class Serving(BaseManager):
    """Manager with which the store's process serves."""


class Remote(InMemoryDataPlaneClient):
    """Client of a store that another process serves at an address."""

    def __init__(self, address):
        multiprocessing.current_process().authkey = KEY
        manager = Served(tuple(address), authkey=KEY)
        manager.connect()
        self._remote = manager.store()

    @property
    def inspector(self):
        calls = ("count_samples", "list_claims", "list_assignments")
        return SimpleNamespace(**{name: self._call(f"inspector.{name}") for name in calls})

    def close(self):
        pass

    def _call(self, name):
        def call(*args, **kwargs):
            return pickle.loads(self._remote.call(name, pickle.dumps((args, kwargs))))

        return call


def _forward(name):
    def call(self, *args, **kwargs):
        return self._call(name)(*args, **kwargs)

    return call


for _name in ("claim_meta", "get_data", "acknowledge", "renew", "release"):
    setattr(Remote, _name, _forward(_name))


class Bytes:
    """Client whose arguments and results are bytes, so that no tensor is sent by descriptor."""

    def __init__(self, client: InMemoryDataPlaneClient) -> None:
        self._client = client

    def call(self, name: str, arguments: bytes) -> bytes:
        args, kwargs = pickle.loads(arguments)
        return pickle.dumps(operator.attrgetter(name)(self._client)(*args, **kwargs))


@contextlib.contextmanager
def serving(client: InMemoryDataPlaneClient) -> Iterator[tuple[str, int]]:
    """Serve a store in a thread of this process; the address is for `Remote`."""
    Serving.register("store", callable=lambda: Bytes(client))
    server = Serving(("127.0.0.1", 0), authkey=KEY).get_server()

    def serve() -> None:
        with contextlib.suppress(SystemExit):
            server.serve_forever()

    threading.Thread(target=serve, daemon=True).start()
    yield server.address
    server.stop_event.set()
