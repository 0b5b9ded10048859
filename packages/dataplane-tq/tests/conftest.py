"""Fixtures: a real Ray cluster with a real TransferQueue, and a client in another process.

Each module gets its own, because tests of other packages in the same process start Ray too.
Tests that stop processes half-way use a directory and a unit without Ray.
"""

from __future__ import annotations

import operator
import sys
from pathlib import Path

import pytest
import ray
from hypothesis import settings
from integration.lean_ray import lean_ray, unforked_workers

# Tests are imported by path, so their folder is not on sys.path.
sys.path.insert(0, str(Path(__file__).parent))

from queue_setup import CONFIG, local_ray  # needs the line above
from stepped_store import SteppedStore

from dataplane_core import ConfigError
from dataplane_tq import TQDataPlaneClient
from dataplane_tq.storage import BACKENDS

__all__ = ["lean_ray", "unforked_workers"]


def config_of(backend):
    """Return the configuration of a backend; "unmirrored" is packed without the mirror."""
    if backend == "unmirrored":
        return {**CONFIG, "transfer_queue_mirror": False}
    return {**CONFIG, "backend": backend}


@pytest.fixture(scope="module")
def cluster():
    with local_ray():
        yield


@pytest.fixture(scope="module")
def backend():
    """Return the storage backend of a module's tests; a module may parametrize it."""
    return "packed"


@pytest.fixture(scope="module")
def require_backend():
    """Return a function that skips the test if a backend's extra is not installed."""

    def require(name):
        if name in BACKENDS:
            try:
                BACKENDS[name].check(config_of(name))
            except ConfigError as error:
                if "is not installed" not in str(error):
                    raise
                pytest.skip(f"needs a package: {error}")
        return name

    return require


@pytest.fixture
def config(backend):
    return config_of(backend)


class Host:
    """Ray actor that hosts an attached client."""

    def __init__(self, config):
        self.client = TQDataPlaneClient(config, bootstrap=False)

    def call(self, method, args, kwargs):
        return operator.attrgetter(method)(self.client)(*args, **kwargs)


class Calls:
    """Object whose methods are called in the process of a `Host`, on its client or a part of it."""

    def __init__(self, host, part=""):
        self._host = host
        self._part = part

    def __getattr__(self, method):
        def call(*args, **kwargs):
            name = self._part + method
            try:
                return ray.get(self._host.call.remote(name, args, kwargs), timeout=180)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None

        return call


class Peer(Calls):
    """Client that runs every call in another process."""

    capabilities = TQDataPlaneClient.capabilities

    def __init__(self, config):
        super().__init__(ray.remote(Host).options(num_cpus=0.1, max_concurrency=8).remote(config))

    @property
    def inspector(self):
        return Calls(self._host, "inspector.")

    def kill(self):
        ray.kill(self._host)


@pytest.fixture(scope="module")
def owner(cluster, backend):
    with TQDataPlaneClient(config_of(backend)) as client:
        yield client


@pytest.fixture(scope="module")
def attach(owner, backend):
    """Return a function that builds an attached client."""

    def attach(**changes):
        return TQDataPlaneClient({**config_of(backend), **changes}, bootstrap=False)

    return attach


@pytest.fixture(scope="module")
def other_process(owner, backend):
    return Peer(config_of(backend))


@pytest.fixture
def stepped():
    store = SteppedStore()
    yield store
    store.close()


# The duration of an example depends on the machine's load.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
