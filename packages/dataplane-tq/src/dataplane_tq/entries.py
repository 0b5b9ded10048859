"""`Entries`: puts that are visible and claims, of which TransferQueue is still being told.

The directory decides what is readable and claimable, so a put need not wait until the controller
has registered its rows for TransferQueue's own tools and metrics. A client's puts are entered in
their order. How many may wait is bounded, so that a controller that does not keep up slows puts
down; if one could not be entered, the client's next put says so. Claims are told in batches,
because telling each would slow the next one down more than a claim costs.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent import futures
from contextlib import suppress
from typing import Any  # Any: what a coroutine returns

import structlog

from dataplane_core import DeadlineExceededError, UnavailableError
from dataplane_tq import protocol as p
from dataplane_tq import transfer_queue_rows
from dataplane_tq.engine import Engine
from dataplane_tq.wire import Link, Session

logger = structlog.get_logger("dataplane_tq.entries")

_MOST_WAITING = 8
# Often enough for who looks at TransferQueue. A claim that meets it takes two to three times as
# long; five times a second, that is one in fifty of a process that claims every 20 ms.
_CLAIMS_EVERY_S = 1.0


class Entries:
    """One client's puts and claims on their way into TransferQueue. Threads may share it.

    Args:
        engine: runs what tells the controller.
        link: the sessions are its.
    """

    def __init__(self, engine: Engine, link: Link) -> None:
        self._engine = engine
        self._link = link
        self._turn = asyncio.Lock()
        self._lock = threading.Lock()
        self._waiting: deque[futures.Future[None]] = deque()
        self._claims: dict[tuple[str, str], list[str]] = {}
        self._telling_claims: futures.Future[None] | None = None
        self._flushing = asyncio.Event()

    def make_room(self, what: str) -> None:
        """Wait until few enough puts are under way.

        Raises:
            UnavailableError: an actor is dead, or an earlier put could not be entered.
            DeadlineExceededError: the controller does not answer, or did not for an earlier put.
        """
        while True:
            with self._lock:
                if not self._waiting:
                    return
                oldest = self._waiting[0]
                if oldest.done():
                    self._waiting.popleft()
                elif len(self._waiting) < _MOST_WAITING:
                    return
            try:
                self._engine.wait(what, oldest, cancel=False)
            except DeadlineExceededError:
                self._engine.check_alive(what)  # the dead do not answer either
                raise

    def add(
        self,
        session: Session,
        partition_id: str,
        tell: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """Go on with a put that was committed as entering.

        Args:
            session: of the put.
            partition_id: where it went.
            tell: tells the controller of its rows.
        """
        session.keep()
        with self._lock:
            self._waiting.append(self._engine.submit(self._enter, session, partition_id, tell))

    async def _enter(
        self, session: Session, partition_id: str, tell: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        try:
            async with self._turn:
                await self._tell(session, partition_id, tell)
        except BaseException as error:
            session.close()
            what = f"an earlier put to partition {partition_id!r}"
            if isinstance(error, TimeoutError):
                raise DeadlineExceededError(
                    f"{what} can be read, but TransferQueue's controller did not register it "
                    f"within {self._engine.timeout_s:g} s"
                ) from error
            if isinstance(error, Exception):
                raise UnavailableError(
                    f"{what} can be read, but TransferQueue's controller did not register it: "
                    f"{error}"
                ) from error
            raise
        self._link.end(session)

    async def _tell(
        self, session: Session, partition_id: str, tell: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        await asyncio.wait_for(tell(), self._engine.timeout_s)
        consumed = await asyncio.to_thread(session.ask, p.Entered(), list[p.Consumption])
        for item in consumed:
            await transfer_queue_rows.consume(
                self._engine.client, item.sample_ids, partition_id, item.task_name
            )

    def claimed(self, sample_ids: list[str], partition_id: str, task_name: str) -> None:
        """Tell of samples that a task claimed for good; nobody waits for it."""
        if not sample_ids:
            return
        with self._lock:
            self._claims.setdefault((partition_id, task_name), []).extend(sample_ids)
            if self._telling_claims is None or self._telling_claims.done():
                self._telling_claims = self._engine.submit(self._tell_claims)

    async def _tell_claims(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._flushing.wait(), _CLAIMS_EVERY_S)
            with self._lock:
                claims, self._claims = self._claims, {}
                if not claims:
                    self._telling_claims = None
                    return
            for (partition_id, task_name), sample_ids in claims.items():
                told = transfer_queue_rows.consume(
                    self._engine.client, sample_ids, partition_id, task_name
                )
                try:
                    await asyncio.wait_for(told, self._engine.timeout_s)
                except (TimeoutError, RuntimeError, ValueError, OSError) as error:
                    # The claims stand; what piles up behind a stopped controller is let go.
                    logger.warning(
                        "transfer_queue_not_told", claims=len(sample_ids), error=repr(error)
                    )

    async def _hurry(self) -> None:
        self._flushing.set()

    def flush(self, timeout_s: float) -> None:
        """Wait for what is under way, not longer than ``timeout_s``; what failed is logged."""
        with self._lock:
            waiting = [*self._waiting, *([self._telling_claims] if self._telling_claims else [])]
            self._waiting.clear()
        if not waiting:
            return
        try:
            self._engine.check_alive("close")
        except UnavailableError:
            timeout_s = 0.0  # nobody is there to be told
        self._engine.submit(self._hurry)
        done, late = futures.wait(waiting, timeout=timeout_s)
        for future in late:
            future.cancel()
        for future in done:
            if (error := future.exception()) is not None:
                logger.warning("transfer_queue_not_told", error=str(error))
        if late:
            logger.warning("transfer_queue_not_told", puts=len(late), waited_s=timeout_s)
