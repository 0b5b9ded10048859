"""Per module a real Ray with a real TransferQueue, and a client in another process.

Not per session: the tests of other packages, run in the same process, start a Ray of their own.
"""

from __future__ import annotations

import tempfile

import pytest
import ray

from dataplane_tq import TQDataPlaneClient

CONFIG = {
    "enabled": True,
    "impl": "transfer_queue",
    "backend": "packed",
    "storage_capacity": 100_000,
    "num_storage_units": 2,
    "claim_meta_poll_interval_s": 5.0,
    "global_segment_size": 64 << 20,
    "local_buffer_size": 16 << 20,
    "ack_timeout_ms": 20_000,
}


@pytest.fixture(scope="module")
def cluster():
    with tempfile.TemporaryDirectory(prefix="tq-") as folder:
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            _temp_dir=folder,
            namespace="dataplane-tq-tests",
            logging_level="ERROR",
            log_to_driver=False,
        )
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def backend():
    """The storage backend of a module's tests; a module parametrises it."""
    return "packed"


@pytest.fixture
def config(backend):
    return {**CONFIG, "backend": backend}


class Host:
    """Runs an attached client in a process of its own."""

    def __init__(self, config):
        self.client = TQDataPlaneClient(config, bootstrap=False)

    def call(self, method, args, kwargs):
        return getattr(self.client, method)(*args, **kwargs)


class Peer:
    """A client whose every call runs in another process."""

    capabilities = TQDataPlaneClient.capabilities

    def __init__(self, config):
        self._host = ray.remote(Host).options(num_cpus=0.1, max_concurrency=8).remote(config)

    def __getattr__(self, method):
        def call(*args, **kwargs):
            try:
                return ray.get(self._host.call.remote(method, args, kwargs), timeout=60)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None

        return call


@pytest.fixture(scope="module")
def owner(cluster, backend):
    with TQDataPlaneClient({**CONFIG, "backend": backend}) as client:
        yield client


@pytest.fixture(scope="module")
def other_process(owner, backend):
    return Peer({**CONFIG, "backend": backend})
