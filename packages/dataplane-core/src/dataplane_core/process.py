"""`process_name`: the name under which this process claims."""

from __future__ import annotations

import os
import socket

_HOST = socket.gethostname()


def process_name() -> str:
    """Return this process as host:pid."""
    return f"{_HOST}:{os.getpid()}"
