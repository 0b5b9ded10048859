"""An admin service in a process of its own, which imports no more than the service itself does."""

from __future__ import annotations

import contextlib
import itertools
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
    from dataplane_core import InMemoryDataPlaneClient

PARTITION = "live"
"""Of the data plane that it looks into."""
_AT_ONCE = 10_000


@dataclass(frozen=True)
class Service:
    """An admin service.

    Attributes:
        folder: of its store.
        spawned: its process.
    """

    folder: Path
    spawned: Spawned

    @property
    def port(self) -> int:
        """Where it listens.

        Raises:
            RuntimeError: it did not start.
        """
        port: int = self.spawned.said
        return port

    def wait(self) -> None:
        """Return once it listens; raises as `port`."""
        self.spawned.said  # noqa: B018

    @property
    def process(self) -> psutil.Process:
        """For its memory."""
        return psutil.Process(self.spawned.pid)


@contextlib.contextmanager
def serving(*, live_samples: int, most_bytes: int | None = None) -> Iterator[Service]:
    """A service with its store in a folder of its own; it goes on starting in the background.

    Args:
        live_samples: in the data plane that it looks into; 0 for none.
        most_bytes: that the store keeps; None for no limit.
    """
    with (
        tempfile.TemporaryDirectory(prefix="bench-admin-") as folder,
        spawned("the admin service", _serve, Path(folder), live_samples, most_bytes) as process,
    ):
        yield Service(Path(folder), process)
        process.stop()


def _serve(pipe: Connection, folder: Path, live_samples: int, most_bytes: int | None) -> None:
    import uvicorn

    from dataplane_admin import create_app
    from dataplane_admin.settings import Settings
    from dataplane_admin.store import Retention

    settings = Settings(
        store_url=f"sqlite:///{folder}/admin.sqlite",
        retention=Retention(max_age_s=None, max_bytes=most_bytes),
    )
    with _live(live_samples) if live_samples else contextlib.nullcontext() as client:
        app = create_app(settings, inspector=client)
        service = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", access_log=False))
        thread = threading.Thread(target=service.run, daemon=True)
        thread.start()
        for _ in itertools.takewhile(lambda _: not service.started, itertools.repeat(None)):
            time.sleep(0.01)
        pipe.send(service.servers[0].sockets[0].getsockname()[1])
        pipe.recv()
        service.should_exit = True
        thread.join()


@contextlib.contextmanager
def _live(samples: int) -> Iterator[InMemoryDataPlaneClient]:
    """A data plane in memory with one partition, half of it written further than the rest."""
    import torch

    from dataplane_core import InMemoryDataPlaneClient

    fields = ["input_ids", "generation_logprobs", "prev_logprobs", "advantages"]
    with InMemoryDataPlaneClient() as client:
        client.register_partition(PARTITION, fields, samples, ["prev_lp", "train"])
        for start in range(0, samples, _AT_ONCE):
            ids = [f"live-{number:06d}" for number in range(start, start + _AT_ONCE)]
            some = fields[: 2 + start // _AT_ONCE % 2]
            client.put_columns(ids, PARTITION, {name: torch.zeros(len(ids)) for name in some})
        client.claim_meta(PARTITION, "prev_lp", fields[:1], samples // 3, blocking=False)
        # A run's samples live in another process; here a collection would look through them all,
        # which stops the service for 0.4 s.
        freeze_garbage()
        yield client
