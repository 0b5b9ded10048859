"""A collector in a separate process with the lowest priority; it counts records by step."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection

from observability.receiver import Receiver


class Collector:
    """Handle of the process of `collector`."""

    def __init__(self, endpoint: str, pipe: Connection, pid: int) -> None:
        self.endpoint = endpoint
        self.pid = pid
        self._pipe = pipe

    def count(self) -> dict[str, dict[int, int]]:
        """Return the numbers of spans and events by step; call it after the last export."""
        self._pipe.send("count")
        counted: dict[str, dict[int, int]] = self._pipe.recv()
        return counted


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """Run a collector during the block."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=_collect, args=(other,), daemon=True)
    process.start()
    try:
        assert process.pid is not None
        yield Collector(pipe.recv(), pipe, process.pid)
    finally:
        process.terminate()
        process.join()


def _collect(pipe: Connection) -> None:
    os.nice(19)
    with Receiver() as receiver:
        pipe.send(receiver.endpoint)
        pipe.recv()
        records = receiver.snapshot()
        counted: dict[str, dict[int, int]] = {"spans": {}, "events": {}}
        for name, batch in (("spans", records.spans), ("events", records.events)):
            for record in batch:
                step = record.attributes.get("rl.step")
                counted[name][step] = counted[name].get(step, 0) + 1
        pipe.send(counted)
        with contextlib.suppress(EOFError):
            pipe.recv()
