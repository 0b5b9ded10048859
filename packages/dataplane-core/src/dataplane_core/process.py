"""`process_name`: the name under which this process claims."""

from __future__ import annotations

import functools
import os
import socket


def process_name() -> str:
    """Return this process as host:pid."""
    return f"{_host()}:{os.getpid()}"


@functools.cache
def _host() -> str:
    return socket.gethostname()
