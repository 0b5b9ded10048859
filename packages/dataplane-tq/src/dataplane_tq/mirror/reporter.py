"""`Reporter`: reports one client's operations to TransferQueue's controller.

The directory decides what is readable and claimable, so a put need not wait until the controller
has registered its rows. A client's puts are reported in their order. The number of unreported puts
is bounded, so a slow controller slows puts down. If a report fails, the client's next put raises
the error. Claims are reported in batches: a report after each claim would slow down the next claim.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent import futures
from contextlib import suppress
from functools import partial
from typing import Any  # Any: tags

import structlog

from dataplane_core import DeadlineExceededError, UnavailableError
from dataplane_tq.directory import protocol as p
from dataplane_tq.directory.wire import Link, Session
from dataplane_tq.mirror import rows
from dataplane_tq.mirror.engine import Engine

logger = structlog.get_logger("dataplane_tq.mirror")

_MAX_PENDING = 8
_FLUSH_S = 5.0
# A claim takes two to three times as long during a report. With one report a second, this affects
# one in fifty claims of a process that claims every 20 ms.
_CLAIMS_EVERY_S = 1.0


class Reporter:
    """Queue of one client's reports to TransferQueue. Threads may share it.

    Args:
        engine: engine that runs the reports.
        link: link of the sessions passed to `report_put`.
    """

    def __init__(self, engine: Engine, link: Link) -> None:
        self._engine = engine
        self._link = link
        self._turn = asyncio.Lock()
        self._lock = threading.Lock()
        self._pending: deque[futures.Future[None]] = deque()
        self._claims: dict[tuple[str, str], list[str]] = {}
        self._reporting_claims: futures.Future[None] | None = None
        self._flushing = asyncio.Event()

    def wait_for_turn(self, what: str) -> None:
        """Wait until fewer than `_MAX_PENDING` puts are being reported.

        Raises:
            UnavailableError: an actor is dead, or the report of an earlier put failed.
            DeadlineExceededError: the controller does not answer, or did not answer an earlier
                report.
        """
        while True:
            with self._lock:
                if not self._pending:
                    return
                oldest = self._pending[0]
                if oldest.done():
                    self._pending.popleft()
                elif len(self._pending) < _MAX_PENDING:
                    return
            try:
                self._engine.wait(what, oldest, cancel=False)
            except DeadlineExceededError:
                self._engine.check_alive(what)  # a dead actor is the better explanation
                raise

    def report_put(
        self,
        session: Session,
        partition_id: str,
        sample_ids: Sequence[str],
        tags: list[dict[str, Any]] | None,
        orphans: Sequence[p.Orphans],
        fields: Sequence[str],
    ) -> None:
        """Report, in the background, a put that was committed with ``will_report``.

        Args:
            session: session of the put; it ends with the report.
            partition_id: partition of the put.
            sample_ids: samples of the put.
            tags: their tags; the caller must not change them.
            orphans: rows to drop first.
            fields: fields that the put wrote.
        """
        session.detach()
        ids = list(sample_ids)  # the caller may change its meta's list
        enter = partial(
            rows.enter, self._engine.client, ids, partition_id, tags, orphans, list(fields)
        )
        with self._lock:
            self._pending.append(
                self._engine.submit(self._report_put, session, partition_id, enter)
            )

    async def _report_put(
        self, session: Session, partition_id: str, enter: Callable[[], Awaitable[None]]
    ) -> None:
        try:
            async with self._turn:
                await asyncio.wait_for(enter(), self._engine.timeout_s)
                consumed = await asyncio.to_thread(session.ask, p.Reported(), list[p.Consumption])
                for item in consumed:
                    await self._consume(item.sample_ids, partition_id, item.task_name)
        except BaseException as error:  # a cancellation, too, must end the session
            session.close()
            what = (
                f"an earlier put to partition {partition_id!r} can be read, but TransferQueue's "
                "controller did not register it"
            )
            if isinstance(error, TimeoutError):
                raise DeadlineExceededError(
                    f"{what} within {self._engine.timeout_s:g} s"
                ) from error
            if isinstance(error, Exception):
                raise UnavailableError(f"{what}: {error}") from error
            raise
        self._link.end(session)

    def report_claim(self, sample_ids: list[str], partition_id: str, task_name: str) -> None:
        """Report samples that a task has consumed, in the background."""
        if not sample_ids:
            return
        with self._lock:
            self._claims.setdefault((partition_id, task_name), []).extend(sample_ids)
            if self._reporting_claims is None or self._reporting_claims.done():
                self._reporting_claims = self._engine.submit(self._report_claims)

    async def _report_claims(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._flushing.wait(), _CLAIMS_EVERY_S)
            with self._lock:
                claims, self._claims = self._claims, {}
                if not claims:
                    self._reporting_claims = None
                    return
            for (partition_id, task_name), sample_ids in claims.items():
                await self._consume(sample_ids, partition_id, task_name)

    async def _consume(self, sample_ids: list[str], partition_id: str, task_name: str) -> None:
        report = rows.consume(self._engine.client, sample_ids, partition_id, task_name)
        try:
            await asyncio.wait_for(report, self._engine.timeout_s)
        except Exception as error:  # noqa: BLE001  # TransferQueue's client raises many types
            # The claims stay valid; only their report is dropped.
            logger.warning(
                "transfer_queue_report_failed", samples=len(sample_ids), error=repr(error)
            )

    async def _set_flushing(self) -> None:
        self._flushing.set()

    def flush(self) -> None:
        """End all reports before the engine is closed: wait briefly, then log those that failed."""
        timeout_s = min(self._engine.timeout_s, _FLUSH_S)
        with self._lock:
            waiting = [
                *self._pending,
                *([self._reporting_claims] if self._reporting_claims else []),
            ]
            self._pending.clear()
        if not waiting:
            return
        try:
            self._engine.check_alive("close")
        except UnavailableError:
            timeout_s = 0.0  # no actor to report to
        self._engine.submit(self._set_flushing)
        done, unfinished = futures.wait(waiting, timeout=timeout_s)
        for future in unfinished:
            future.cancel()
        for future in done:
            if (error := future.exception()) is not None:
                logger.warning("transfer_queue_report_failed", error=str(error))
        if unfinished:
            logger.warning(
                "transfer_queue_report_failed", reports=len(unfinished), waited_s=timeout_s
            )
