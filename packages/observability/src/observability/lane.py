"""`Lane`: what is to be told of an operation, but not while somebody waits for it.

Events, metrics and the attributes of spans are made of what an operation leaves behind. Where
`observability.setup` has set up the providers they are made in a thread of the lane, a moment
later; with the providers of others at once, since those may look at the thread and the moment.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import structlog

logger = structlog.get_logger("observability")

INTERVAL_S = 2.5
_MOST = 4096
_LOOKS = 5
_MANY = 512
"""Queued, they are not left until the interval is over."""

Work = Callable[[], object]


def later(provider: object, work: Work) -> None:
    """Do ``work`` in the lane of a provider that has one, else now."""
    put = getattr(provider, "later", None)
    if put is None:
        work()
    else:
        put(work)


class Lane:
    """Work in its order. Nobody who puts some waits: where too much is queued it is done at once.

    Args:
        interval_s: seconds that work waits at most; a fifth of it where much is queued.
        most: queued at once.
    """

    def __init__(self, interval_s: float = INTERVAL_S, most: int = _MOST) -> None:
        self._interval_s = interval_s
        self._most = most
        # Appended to and taken from without a lock, as a signal handler may come in between.
        self._queue: deque[Work] = deque()
        # Reentrant, since work may fork.
        self._draining = threading.RLock()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="observability-lane", daemon=True).start()
        # Work takes locks of its own, which a child must not inherit locked. A child has another
        # lock, which is the one to hold when it forks in turn.
        os.register_at_fork(
            before=lambda: self._draining.acquire(),
            after_in_parent=lambda: self._draining.release(),
            after_in_child=self._renew,
        )

    def put(self, work: Work) -> None:
        """Let it be done soon; at once if the lane is full or closed."""
        if len(self._queue) >= self._most or self._closed.is_set():
            _do(work)
        else:
            self._queue.append(work)
            if self._closed.is_set():  # meanwhile, and nobody may look again
                self.drain()

    def drain(self) -> None:
        """Return when all that was put before this call is done."""
        with self._draining:
            for _ in range(len(self._queue)):
                try:
                    work = self._queue.popleft()
                except IndexError:  # work that drains itself
                    return
                _do(work)

    def close(self) -> None:
        """Do what is queued; what is put from now on is done at once. May be called again."""
        self._closed.set()
        self.drain()

    def _renew(self) -> None:
        self._draining = threading.RLock()

    def _run(self) -> None:
        looks = 0
        while not self._closed.wait(self._interval_s / _LOOKS):
            looks += 1
            if looks == _LOOKS or len(self._queue) >= _MANY:
                looks = 0
                self.drain()
        self.drain()  # of what was put while it was closed


def _do(work: Work) -> None:
    try:
        work()
    except Exception:  # nothing of observability makes an operation fail
        # An application's log processors raise what they like, and the lane goes on.
        with suppress(Exception):
            logger.exception("observation_failed")
