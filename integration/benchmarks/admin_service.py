"""An admin service in a separate process, with no imports beyond the service's own."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from integration.benchmarks.garbage import freeze_garbage
from integration.benchmarks.spawned import Spawned, spawned

if TYPE_CHECKING:
    from fastapi import FastAPI

    from dataplane_core import StoreInspector

PARTITION = "live"
"""Partition of the data plane that the service inspects."""
_CHUNK = 10_000


@dataclass(frozen=True)
class Service:
    """Running admin service.

    Attributes:
        folder: folder of its store.
        spawned: its process.
    """

    folder: Path
    spawned: Spawned

    @property
    def port(self) -> int:
        """Port on which it listens.

        Raises:
            RuntimeError: it did not start.
        """
        port: int = self.spawned.ready
        return port

    def wait(self) -> None:
        """Wait until the service listens; raise as `port`."""
        self.spawned.ready  # noqa: B018

    @property
    def process(self) -> psutil.Process:
        """Process of the service, to read its memory."""
        return psutil.Process(self.spawned.pid)


@contextlib.contextmanager
def serving(
    *, live_samples: int, max_bytes: int | None = None, core: int | None = None
) -> Iterator[Service]:
    """Run a service with its store in a temporary folder; it starts in the background.

    Args:
        live_samples: samples in the data plane that it inspects; 0 for no data plane.
        max_bytes: maximum size of the store; None for no limit.
        core: the only core that it uses; None for all.
    """
    with (
        tempfile.TemporaryDirectory(prefix="bench-admin-") as folder,
        spawned(
            "the admin service", _serve, Path(folder), live_samples, max_bytes, core
        ) as process,
    ):
        yield Service(Path(folder), process)
        process.stop()


def _serve(
    pipe: Connection, folder: Path, live_samples: int, max_bytes: int | None, core: int | None
) -> None:
    from dataplane_admin import Retention, Settings, create_app

    if core is not None:
        os.sched_setaffinity(0, {core})
    settings = Settings(
        store_url=f"sqlite:///{folder}/admin.sqlite",
        retention=Retention(max_age_s=None, max_bytes=max_bytes),
    )
    with _live(live_samples) if live_samples else contextlib.nullcontext() as inspector:
        run_app(pipe, create_app(settings, inspector=inspector))


def run_app(pipe: Connection, app: FastAPI) -> None:
    """Serve an app on a free port, which is sent to the pipe, until a message comes back."""
    import uvicorn

    service = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", access_log=False))
    thread = threading.Thread(target=service.run, daemon=True)
    thread.start()
    while not service.started:
        time.sleep(0.01)
    pipe.send(service.servers[0].sockets[0].getsockname()[1])
    pipe.recv()
    service.should_exit = True
    thread.join()


@contextlib.contextmanager
def _live(samples: int) -> Iterator[StoreInspector]:
    """Run a data plane in memory with one partition; half of its samples have one field more."""
    import torch

    from dataplane_core import InMemoryDataPlaneClient

    fields = ["input_ids", "generation_logprobs", "prev_logprobs", "advantages"]
    with InMemoryDataPlaneClient() as client:
        client.register_partition(PARTITION, fields, samples, ["prev_lp", "train"])
        for start in range(0, samples, _CHUNK):
            ids = [f"live-{number:06d}" for number in range(start, start + _CHUNK)]
            names = fields[: 2 + start // _CHUNK % 2]
            client.put_columns(ids, PARTITION, {name: torch.zeros(len(ids)) for name in names})
        client.claim_meta(PARTITION, "prev_lp", fields[:1], samples // 3, blocking=False)
        # A real run's samples are in another process. Here a garbage collection would visit them
        # all, which stops the service for 0.4 s.
        freeze_garbage()
        yield client.inspector
