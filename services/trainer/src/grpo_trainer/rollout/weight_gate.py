"""`WeightGate`: lets a refit replace a model's weights between forward passes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from grpo_trainer.errors import WorkerError


class WeightGate:
    """Gate between threads that use a model's weights and one that replaces them.

    A waiting replacement has priority: no user enters before it is done.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._users = 0
        self._is_replacing = False
        self._replacements = 0

    @contextmanager
    def using(self) -> Iterator[None]:
        """Use the weights during the block; wait for a replacement first."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def pause(self, seconds: float = 0.0) -> bool:
        """Let replacements proceed for some time; return whether there was one.

        For a thread inside `using`, at a point where the weights may change. A pause of 0 s only
        waits for a replacement that is waiting.
        """
        if not (seconds or self._is_replacing):
            return False
        before = self._replacements
        self._leave()
        try:
            time.sleep(seconds)
        finally:
            self._enter()
        return self._replacements != before

    @contextmanager
    def replacing(self, timeout_s: float) -> Iterator[None]:
        """Replace the weights during the block, which no user overlaps.

        Raises:
            WorkerError: the users did not leave within ``timeout_s``.
        """
        with self._changed:
            self._is_replacing = True
            try:
                if not self._changed.wait_for(lambda: self._users == 0, timeout_s):
                    raise WorkerError(
                        f"the weights are still in use after {timeout_s:g} s: {self._users} "
                        "calls of generate are running"
                    )
                self._replacements += 1
                yield
            finally:
                self._is_replacing = False
                self._changed.notify_all()

    def _enter(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_replacing)
            self._users += 1

    def _leave(self) -> None:
        with self._changed:
            self._users -= 1
            self._changed.notify_all()
