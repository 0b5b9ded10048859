"""A fixture that makes each Ray of the tests start faster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def lean_ray() -> Iterator[None]:
    """Start Ray without its autoscaler, log monitor and dashboard, which no test uses.

    They take a third of the start's CPU time. This affects a Ray that the test's process starts.
    """
    with pytest.MonkeyPatch.context() as patch:
        for start in ("start_monitor", "start_log_monitor", "start_api_server"):
            patch.setattr(f"ray._private.node.Node.{start}", lambda *_, **__: None)
        yield
