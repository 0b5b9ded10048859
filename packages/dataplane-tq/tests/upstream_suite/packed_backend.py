"""Pytest plugin that runs TransferQueue's own tests on the packed backend.

Most test modules select a backend from their `BACKEND_CONFIGS` by the name in ``TQ_TEST_BACKEND``;
the plugin adds an entry there. The module of checkpoints has one `_TQ_CONFIG`, which it replaces.
Load it with ``-p packed_backend``. Imports internals: importing the module registers the backend.
"""

from __future__ import annotations

import pytest
from integration.lean_ray import lean_ray
from omegaconf import OmegaConf
from queue_setup import local_ray

from dataplane_tq.storage import packed_bootstrap  # noqa: F401

__all__ = ["lean_ray"]

CONFIG = {
    "controller": {"polling_mode": True},
    "backend": {
        "storage_backend": "PackedStorage",
        "PackedStorage": {
            "num_storage_units": 2,
            "global_segment_size": 64 << 20,
            "storage_capacity": 200,  # as in TransferQueue's own configurations
        },
    },
}


def pytest_collection_modifyitems(items):
    for item in items:
        if hasattr(item.module, "_TQ_CONFIG"):
            item.module._TQ_CONFIG = OmegaConf.create(CONFIG)
        else:
            item.module.BACKEND_CONFIGS["PackedStorage"] = CONFIG


@pytest.fixture(scope="module", autouse=True)
def start_ray():
    """Start Ray with four CPUs, because the tests' actors need three.

    The tests would start it with as many CPUs as the machine has.
    """
    with local_ray():
        yield
