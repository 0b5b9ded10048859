"""Connections to PostgreSQL with a deadline for each answer.

The server ends slow statements, but not while it is stopped or while a firewall drops its packets.
The driver alone would wait for an answer without a limit.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any  # Any: what the driver's generators yield and are sent

import psycopg

ANSWER_S = 35.0
"""Deadline in seconds. The server's statement timeout is shorter, since its error says more."""


class TimedConnection(psycopg.Connection[Any]):
    """A connection that closes if an answer does not arrive within `ANSWER_S` seconds."""

    def wait(self, gen: Any, *arguments: Any, **options: Any) -> Any:
        """Wait for an answer.

        Raises psycopg.OperationalError if the answer did not arrive in time.
        """
        return super().wait(self._in_time(gen), *arguments, **options)

    def _in_time(self, gen: Any) -> Generator[Any, Any, Any]:
        deadline = time.monotonic() + ANSWER_S
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted  # resumes at short intervals, with or without data
                if not ready and time.monotonic() > deadline:
                    self.pgconn.finish()
                    raise psycopg.OperationalError(f"no answer within {ANSWER_S:g} s")
                wanted = gen.send(ready)
        except StopIteration as done:
            return done.value


def connect(_dialect: object, _record: object, arguments: Any, options: Any) -> TimedConnection:
    """Connect; a listener of SQLAlchemy's event ``do_connect``."""
    return TimedConnection.connect(*arguments, **options)
