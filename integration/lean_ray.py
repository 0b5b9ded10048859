"""Ray without the side processes that no test uses, which starts faster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def leave_out_side_processes() -> Iterator[None]:
    """Start Ray without its autoscaler, log monitor and dashboard.

    They take a third of the start's CPU time. This affects a Ray that this process starts.
    """
    with pytest.MonkeyPatch.context() as patch:
        for start in ("start_monitor", "start_log_monitor", "start_api_server"):
            patch.setattr(f"ray._private.node.Node.{start}", lambda *_, **__: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def lean_ray() -> Iterator[None]:
    """Make each Ray that the test's process starts a lean one."""
    with leave_out_side_processes():
        yield
