"""Ray that starts faster: without the side processes that no test uses, and with forked workers.

``python -m integration.lean_ray SCRIPT ARGUMENT...`` runs an installed command with such a Ray.
"""

from __future__ import annotations

import functools
import gc
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any  # Any: Ray's private node

import pytest
from integration import fork_server, rare_gc

_MODULES = (
    "tensordict",
    "torch.distributed.fsdp",
    "transformers.models.auto.modeling_auto",
    "grpc",
    "msgspec",
    "opentelemetry.sdk.trace",
    "safetensors.torch",
)
"""Modules that workers import slowly; not Ray, which reads a cluster's token only once."""


LEAN = (sys.executable, "-m", "integration.lean_ray")
"""Beginning of a command line whose Ray is lean; the path of an installed command follows."""

LEAN_ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parents[1])}
"""Environment variables with which `LEAN` works in any folder."""


@contextmanager
def start_lean_rays() -> Iterator[None]:
    """Make each Ray that this process starts a lean one.

    Without autoscaler, log monitor and dashboard, a start takes a third less CPU time. A forked
    worker that uses torch takes three quarters less.
    """
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        for start in ("start_monitor", "start_log_monitor", "start_api_server"):
            patch.setattr(f"ray._private.node.Node.{start}", lambda *_, **__: None)
        from ray._private.node import Node

        start_raylet = Node.start_raylet
        addresses: list[str] = []

        @functools.wraps(start_raylet)
        def start_raylet_of_forks(node: Any, *arguments: Any, **options: Any) -> None:
            if not addresses:
                # A fork server of this process, not of a parent: its workers must be descendants.
                addresses.append(stack.enter_context(_serve_forks()))
                patch.setenv(fork_server.ADDRESS, addresses[0])
            node._ray_params.setup_worker_path = fork_server.__file__
            start_raylet(node, *arguments, **options)

        patch.setattr(Node, "start_raylet", start_raylet_of_forks)
        yield


@contextmanager
def _serve_forks() -> Iterator[str]:
    """Run a fork server, and yield its address. It ends with this process at the latest."""
    with tempfile.TemporaryDirectory(prefix="fork-") as folder:
        address = str(Path(folder) / "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(64)  # a request waits until the modules are imported
            command = [sys.executable, fork_server.__file__, "--serve", str(listener.fileno())]
            server = subprocess.Popen(
                [*command, *_MODULES],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                # As Ray sets it for its workers: OpenMP reads it when torch is imported.
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        with server:
            yield address
            assert server.stdin is not None
            server.stdin.close()


@pytest.fixture(scope="session", autouse=True)
def lean_ray() -> Iterator[None]:
    """Make each Ray that the test's process starts a lean one."""
    with start_lean_rays():
        yield


@pytest.fixture(scope="module")
def unforked_workers(lean_ray: None) -> Iterator[None]:
    """Start the workers of a module's Ray as programs, so that they import only what they need."""
    from ray._private.node import Node

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Node, "start_raylet", Node.start_raylet.__wrapped__)
        yield


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    gc.set_threshold(*rare_gc.THRESHOLDS)
    with start_lean_rays():
        runpy.run_path(sys.argv[0], run_name="__main__")
