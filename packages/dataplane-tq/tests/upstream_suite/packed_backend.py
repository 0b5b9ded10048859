"""A pytest plugin that has TransferQueue's own tests run on our storage backend.

Their modules choose a backend by name, ``TQ_TEST_BACKEND``, from the module's `BACKEND_CONFIGS`;
the plugin adds an entry there and changes nothing else. Load it with ``-p packed_backend``.
"""

from __future__ import annotations

import tempfile

import pytest
import ray

from dataplane_tq import start_local_ray
from dataplane_tq.packed import bootstrap  # noqa: F401  # enters TransferQueue's registries

CONFIG = {
    "controller": {"polling_mode": True},
    "backend": {
        "storage_backend": "PackedStorage",
        "PackedStorage": {
            "num_storage_units": 2,
            "global_segment_size": 64 << 20,
            "storage_capacity": 200,  # as theirs
        },
    },
}


def pytest_collection_modifyitems(items):
    for item in items:
        item.module.BACKEND_CONFIGS["PackedStorage"] = CONFIG


@pytest.fixture(scope="module", autouse=True)
def ray_before_theirs():
    """Theirs takes as many CPUs as the machine has, which two may be; their actors need three."""
    with tempfile.TemporaryDirectory(prefix="tq-") as folder:
        start_local_ray(
            num_cpus=4,
            include_dashboard=False,
            _temp_dir=folder,
            logging_level="ERROR",
            log_to_driver=False,
        )
        yield
        ray.shutdown()
