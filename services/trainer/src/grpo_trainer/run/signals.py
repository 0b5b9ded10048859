"""Signals of the command lines."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_TERMINATED = 128 + signal.SIGTERM


class GracefulStop:
    """Request to stop a run between two steps.

    Attributes:
        requested: whether the run must stop.
    """

    def __init__(self) -> None:
        self.requested = False
        self._steps_began = False
        self._ended = False

    @contextmanager
    def on_sigterm(self) -> Iterator[None]:
        """Let SIGTERM request the stop while a command runs.

        SIGTERM before the first step, or a second one, ends the command with status 143 and stops
        its processes. After the last step it has no effect. The handler stays installed.
        """
        signal.signal(signal.SIGTERM, self._request)
        try:
            yield
        except SystemExit as ended:
            # If the signal arrives while Ray waits, Ray exits with status 1. While Ray starts, its
            # handler exits with the signal's number.
            if self._ended or ended.code == signal.SIGTERM:
                raise SystemExit(_TERMINATED) from None
            raise

    def start_steps(self) -> None:
        """Record that the steps begin; the run checks ``requested`` after each of them.

        An earlier SIGTERM ends the command with 143, not 0: nothing was trained.
        """
        self._steps_began = True

    def _request(self, signum: int, frame: FrameType | None) -> None:
        if self.requested or not self._steps_began:
            self._ended = True
            sys.exit(_TERMINATED)
        self.requested = True
