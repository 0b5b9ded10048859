"""Settings of this process: rare garbage collections, and its end at SIGTERM or SIGINT."""

from __future__ import annotations

import gc
import signal
import sys
from types import FrameType

_YOUNG_OBJECTS = 50_000


def make_collections_rare() -> None:
    """Raise the thresholds of this process's garbage collections.

    The imports of the service, and each page, create many thousands of objects at once. With
    Python's thresholds, this causes collections that visit all objects for tens of milliseconds.
    """
    gc.set_threshold(_YOUNG_OBJECTS, 20, 20)


def exit_cleanly_on_signals() -> None:
    """Let SIGTERM and SIGINT end the process with status 0. Call it before listening.

    uvicorn handles the signals while it serves, and raises them again after it has stopped.
    """
    for stop_signal in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop_signal, _exit_cleanly)


def _exit_cleanly(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)
