"""End of the process at SIGTERM or SIGINT."""

from __future__ import annotations

import signal
import sys
from types import FrameType


def exit_cleanly_on_signals() -> None:
    """Let SIGTERM and SIGINT end the process with status 0. Call it before listening.

    uvicorn handles the signals while it serves, and raises them again after it has stopped.
    """
    for stop_signal in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop_signal, _exit_cleanly)


def _exit_cleanly(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)
