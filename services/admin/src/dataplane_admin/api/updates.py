"""Live updates as server-sent events: that something changed, for those who then ask again.

One task looks for changes while anybody waits. Whoever waits costs a connection and a coroutine,
and of these there is a bounded number.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from dataplane_admin.answers import Answers
from dataplane_admin.answers.models import Changed
from dataplane_admin.problem import ProblemResponse
from dataplane_admin.store import StoreError

LOOK_S = 0.5
"""Between two looks for changes: what changes meanwhile is told as one."""
KEEP_ALIVE_S = 15.0
_RETRY_MS = 2_000


class LiveUpdates:
    """Those who wait for changes. Used within one event loop.

    Args:
        answers: tells the revisions.
        most: connections that may wait at a time.
    """

    def __init__(self, answers: Answers, most: int) -> None:
        self._answers = answers
        self._most = most
        self._waiting = 0
        self._ending = False
        self._newest: Changed | None = None
        self._changed = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    def subscribe(self) -> Response:
        """The stream, or a refusal if as many wait as may."""
        if self._ending or self._waiting >= self._most:
            return ProblemResponse(
                503,
                f"found {self._waiting} connections that wait for live updates; expected fewer "
                f"than {self._most}",
                headers={"retry-after": "10", "connection": "close"},
            )
        self._count(1)
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        return _Stream(self)

    def end(self) -> None:
        """End every stream, and take no more."""
        self._ending = True
        self._wake()

    def leave(self) -> None:
        """One stream has ended."""
        self._count(-1)
        if self._waiting == 0 and self._looking is not None:
            self._looking.cancel()
            self._looking = self._newest = None

    async def events(self) -> AsyncIterator[bytes]:
        """What one connection is sent."""
        yield f"retry: {_RETRY_MS}\n\n".encode()
        told: Changed | None = None
        while not self._ending:
            if self._newest is not None and self._newest != told:
                told = self._newest
                yield f"event: changed\ndata: {told.model_dump_json()}\n\n".encode()
                continue
            try:
                await asyncio.wait_for(self._changed.wait(), KEEP_ALIVE_S)
            except TimeoutError:
                yield b": keep-alive\n\n"

    def _count(self, change: int) -> None:
        self._waiting += change
        self._answers.subscribed(change)

    def _wake(self) -> None:
        self._changed.set()
        # Who waits next waits for the next change.
        self._changed = asyncio.Event()

    async def _look(self) -> None:
        while not self._ending:
            # What the store cannot tell now, it tells later.
            with contextlib.suppress(StoreError):
                newest = await asyncio.to_thread(lambda: self._answers.revisions)
                if newest != self._newest:
                    self._newest = newest
                    self._wake()
            await asyncio.sleep(LOOK_S)


class _Stream(StreamingResponse):
    """Counts as waiting until it has ended, however that happens."""

    def __init__(self, updates: LiveUpdates) -> None:
        super().__init__(
            updates.events(),
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )
        self._updates = updates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._updates.leave()
