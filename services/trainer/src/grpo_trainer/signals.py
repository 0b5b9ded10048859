"""Signals of the command lines."""

from __future__ import annotations

import signal
import sys
from types import FrameType


def exit_on_sigterm() -> None:
    """Let SIGTERM end the process by SystemExit, so that everything that runs is taken down."""
    signal.signal(signal.SIGTERM, _terminate)


def _terminate(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)
