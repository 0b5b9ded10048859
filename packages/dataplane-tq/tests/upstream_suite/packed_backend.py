"""Pytest plugin that runs TransferQueue's own tests on the packed backend.

Two test modules select a backend from their `BACKEND_CONFIGS` by the name in ``TQ_TEST_BACKEND``;
the plugin adds an entry there. The module of checkpoints has one `_TQ_CONFIG`, which it replaces.
The other modules run on the functions of TransferQueue that the backend replaces. The plugin also
runs what they have written for pytest-asyncio, which is no dependency of this workspace. Load it
with ``-p packed_backend``. Imports internals: importing the module registers the backend.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from contextlib import ExitStack, nullcontext
from types import ModuleType

import pytest
from integration.lean_ray import lean_ray
from omegaconf import OmegaConf
from queue_setup import local_ray

from dataplane_tq.storage import packed_bootstrap  # noqa: F401
from dataplane_tq.storage.packed_rows import field_schema
from dataplane_tq.upstream import fast_metas

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


def async_fixture(function):
    """Return a fixture with the value that an async generator without arguments yields."""

    @pytest.fixture(name=function.__name__)
    def value():
        generator = function()
        with asyncio.Runner() as runner:
            yield runner.run(anext(generator))
            runner.run(generator.aclose())

    return value


PATCHES = ExitStack()  # until the process ends
PATCHES.enter_context(fast_metas(field_schema))

sys.modules["pytest_asyncio"] = ModuleType("pytest_asyncio")
sys.modules["pytest_asyncio"].fixture = async_fixture


def pytest_configure(config):
    config.addinivalue_line("markers", "asyncio: the test is a coroutine function")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not inspect.iscoroutinefunction(pyfuncitem.function):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_collection_modifyitems(items):
    for item in items:
        if hasattr(item.module, "_TQ_CONFIG"):
            item.module._TQ_CONFIG = OmegaConf.create(CONFIG)
        elif hasattr(item.module, "BACKEND_CONFIGS"):
            item.module.BACKEND_CONFIGS["PackedStorage"] = CONFIG


@pytest.fixture(scope="module", autouse=True)
def start_ray(request):
    """Start Ray with four CPUs for end-to-end tests, because their actors need three.

    The tests would start it with as many CPUs as the machine has.
    """
    with local_ray() if request.path.parent.name == "e2e" else nullcontext():
        yield
