"""A process of a benchmark beside Ray's, which starts in the background."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any  # Any: what the process is given and says

_START_S = 120.0
_STOP_S = 60.0


class Spawned:
    """A process that has imported nothing but what it runs; see `spawned`.

    Attributes:
        pid: its number.
    """

    def __init__(self, name: str, target: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._name = name
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=target, args=(other, *args), daemon=True)
        self._process.start()
        other.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @cached_property
    def said(self) -> Any:
        """What it says once it is ready, a server its port; waits until then.

        Raises:
            RuntimeError: it did not start.
        """
        with contextlib.suppress(EOFError):
            if self._pipe.poll(_START_S):
                return self._pipe.recv()
        raise RuntimeError(f"{self._name} did not start within {_START_S:g} s")

    def stop(self) -> None:
        """Tell it to end and wait until it has; stopping twice is fine."""
        if self._process.is_alive():
            with contextlib.suppress(OSError):
                self._pipe.send("stop")
            self._process.join(_STOP_S)

    def kill(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.join()


@contextlib.contextmanager
def spawned(name: str, target: Callable[..., None], *args: Any) -> Iterator[Spawned]:
    """Run ``target`` in a process of its own, which is gone at the end.

    Args:
        name: for errors.
        target: gets a pipe, says one thing through it when it is ready, and ends when something
            comes back.
        args: the target's other arguments.
    """
    process = Spawned(name, target, *args)
    try:
        yield process
    finally:
        process.kill()
