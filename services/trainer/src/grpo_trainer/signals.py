"""Signals of the command lines."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def exit_on_sigterm() -> None:
    """Let SIGTERM end the process by SystemExit, so that everything that runs is taken down."""
    signal.signal(signal.SIGTERM, _terminate)


class GracefulStop:
    """Lets a run end between two steps.

    Attributes:
        asked: whether it is to.
    """

    def __init__(self) -> None:
        self.asked = False
        self._between_steps = False

    def on_sigterm(self) -> None:
        """Let SIGTERM ask for it. One that comes before the first step, or a second one, ends the
        process at once, as `exit_on_sigterm`."""
        signal.signal(signal.SIGTERM, self._ask)

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Around the steps of a run, which looks at ``asked`` after each."""
        self._between_steps = True
        try:
            yield
        finally:
            self._between_steps = False

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        if self.asked or not self._between_steps:
            _terminate(signum, frame)
        self.asked = True


def _terminate(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)
