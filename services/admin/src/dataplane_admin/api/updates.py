"""Live updates: server-sent events that announce a change, so that clients read again.

One task polls for changes while there are subscribers. Each subscriber costs a connection and a
coroutine; their number is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from dataplane_admin.models import Changed
from dataplane_admin.service import AdminService
from dataplane_admin.store import StoreError
from dataplane_admin.web import ProblemResponse

POLL_S = 0.5
"""Seconds between polls; all changes between two polls are one event."""
KEEP_ALIVE_S = 15.0
_RETRY_MS = 2_000


class LiveUpdates:
    """Subscribers of live updates. Used within one event loop."""

    def __init__(self, service: AdminService, maximum: int) -> None:
        self._service = service
        self._maximum = maximum
        self._subscribers = 0
        self._ending = False
        self._newest: Changed | None = None
        self._changed = asyncio.Event()
        self._polling: asyncio.Task[None] | None = None

    def subscribe(self) -> Response:
        """Return the event stream, or 503 at the maximum of subscribers or during the shutdown."""
        if self._ending:
            return _refuse("the service is shutting down; retry later")
        if self._subscribers >= self._maximum:
            return _refuse(
                f"too many live updates: {self._subscribers} of at most {self._maximum} "
                "connections; retry later"
            )
        self._count(1)
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll())
        return _Stream(self)

    def end(self) -> None:
        """End all streams and accept no more."""
        self._ending = True
        self._wake()

    def leave(self) -> None:
        """Remove one subscriber."""
        self._count(-1)
        if self._subscribers == 0 and self._polling is not None:
            self._polling.cancel()
            self._polling = self._newest = None

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events for one subscriber."""
        yield f"retry: {_RETRY_MS}\n\n".encode()
        sent: Changed | None = None
        while not self._ending:
            if self._newest is not None and self._newest != sent:
                sent = self._newest
                yield f"event: changed\ndata: {sent.model_dump_json()}\n\n".encode()
                continue
            try:
                await asyncio.wait_for(self._changed.wait(), KEEP_ALIVE_S)
            except TimeoutError:
                yield b": keep-alive\n\n"

    def _count(self, change: int) -> None:
        self._subscribers += change
        self._service.subscribed(change)

    def _wake(self) -> None:
        self._changed.set()
        # Later waiters wait for the next change.
        self._changed = asyncio.Event()

    async def _poll(self) -> None:
        while not self._ending:
            # If the store is unavailable, the next poll reads the change.
            with contextlib.suppress(StoreError):
                newest = await asyncio.to_thread(lambda: self._service.revisions)
                if newest != self._newest:
                    self._newest = newest
                    self._wake()
            await asyncio.sleep(POLL_S)


def _refuse(reason: str) -> Response:
    return ProblemResponse(503, reason, headers={"retry-after": "10", "connection": "close"})


class _Stream(StreamingResponse):
    """Event stream that removes its subscriber at the end, also after an error."""

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
