"""Per module a real Ray with a real TransferQueue, and a client in another process.

Not per session: the tests of other packages, run in the same process, start a Ray of their own.
"""

from __future__ import annotations

import tempfile

import pytest
import ray

from dataplane_core import Capabilities, DataPlaneClient
from dataplane_tq import TQDataPlaneClient

CONFIG = {
    "enabled": True,
    "impl": "transfer_queue",
    "backend": "simple",
    "storage_capacity": 100_000,
    "num_storage_units": 2,
    "claim_meta_poll_interval_s": 5.0,
    "global_segment_size": 0,
    "local_buffer_size": 0,
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


@pytest.fixture
def config():
    return dict(CONFIG)


class Host:
    """Runs an attached client in a process of its own."""

    def __init__(self, config):
        self.client = TQDataPlaneClient(config, bootstrap=False)

    def call(self, method, args, kwargs):
        return getattr(self.client, method)(*args, **kwargs)


class Peer(DataPlaneClient):
    """A client whose every call runs in another process."""

    capabilities = Capabilities(backpressure=True)

    def __init__(self, config):
        self.host = ray.remote(Host).options(num_cpus=0.1, max_concurrency=8).remote(config)

    def _call(self, method, *args, **kwargs):
        try:
            return ray.get(self.host.call.remote(method, args, kwargs), timeout=60)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def register_partition(self, *args, **kwargs):
        self._call("register_partition", *args, **kwargs)

    def claim_meta(self, *args, **kwargs):
        return self._call("claim_meta", *args, **kwargs)

    def get_data(self, *args, **kwargs):
        return self._call("get_data", *args, **kwargs)

    def check_consumption_status(self, *args, **kwargs):
        return self._call("check_consumption_status", *args, **kwargs)

    def put_samples(self, *args, **kwargs):
        return self._call("put_samples", *args, **kwargs)

    def get_samples(self, *args, **kwargs):
        return self._call("get_samples", *args, **kwargs)

    def clear_samples(self, *args, **kwargs):
        return self._call("clear_samples", *args, **kwargs)

    def close(self):
        self._call("close")


@pytest.fixture(scope="module")
def owner(cluster):
    with TQDataPlaneClient(CONFIG) as client:
        yield client


@pytest.fixture(scope="module")
def other_process(owner):
    return Peer(CONFIG)
