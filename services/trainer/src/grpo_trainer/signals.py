"""Signals of the command lines."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_TERMINATED = 128 + signal.SIGTERM


class GracefulStop:
    """Lets a run end between two steps.

    Attributes:
        asked: whether it is to.
    """

    def __init__(self) -> None:
        self.asked = False
        self._steps_began = False
        self._ended = False

    @contextmanager
    def on_sigterm(self) -> Iterator[None]:
        """While a command runs, let SIGTERM ask for the stop. One that comes before the first step,
        or a second one, ends the command with status 143; what runs is taken down. One that comes
        after the last step changes nothing. The handler stays afterwards."""
        signal.signal(signal.SIGTERM, self._ask)
        try:
            yield
        except SystemExit as ended:
            # Ray has a status of its own where the signal came while it waited, which is 1, and a
            # handler of its own while it starts, which exits with the signal's number.
            if self._ended or ended.code == signal.SIGTERM:
                raise SystemExit(_TERMINATED) from None
            raise

    def steps_begin(self) -> None:
        """The steps of a run begin; it looks at ``asked`` after each, and soon ends after the last.
        Before them a status of 0 would say that something was trained: what started the command
        would count it as done."""
        self._steps_began = True

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        if self.asked or not self._steps_began:
            self._ended = True
            sys.exit(_TERMINATED)
        self.asked = True
