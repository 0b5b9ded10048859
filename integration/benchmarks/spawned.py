"""A benchmark's process outside of Ray, which starts in the background."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any  # Any: arguments and first message of the process

_START_S = 120.0
_ANSWER_S = 120.0
_STOP_S = 60.0


class Spawned:
    """Process with no imports but those of its target; see `spawned`.

    Attributes:
        pid: process id.
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
    def ready(self) -> Any:
        """Message that the process sends once it is ready, such as a port; waits for it.

        Raises:
            RuntimeError: it did not start.
        """
        with contextlib.suppress(EOFError):
            if self._pipe.poll(_START_S):
                return self._pipe.recv()
        raise RuntimeError(f"{self._name} ended, or did not start within {_START_S:g} s")

    def ask(self, request: Any) -> Any:
        """Send a request to the process, and return its answer.

        Raises:
            RuntimeError: it did not answer.
        """
        with contextlib.suppress(EOFError, OSError):
            self._pipe.send(request)
            if self._pipe.poll(_ANSWER_S):
                return self._pipe.recv()
        raise RuntimeError(f"{self._name} ended, or did not answer within {_ANSWER_S:g} s")

    def stop(self) -> None:
        """Ask the process to exit, and wait for it; idempotent."""
        if self._process.is_alive():
            with contextlib.suppress(OSError):
                self._pipe.send("stop")
            self._process.join(_STOP_S)

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.join()


@contextlib.contextmanager
def spawned(name: str, target: Callable[..., None], *args: Any) -> Iterator[Spawned]:
    """Run ``target`` in a separate process, and kill it at the end.

    Args:
        name: name of the process, for errors.
        target: function that gets a pipe, sends one message when it is ready, and returns when it
            receives one.
        args: other arguments of ``target``.
    """
    process = Spawned(name, target, *args)
    try:
        yield process
    finally:
        process.kill()
