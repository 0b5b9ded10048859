"""Wrong tokens: each is answered late, and of one address only few are compared at a time."""

from __future__ import annotations

import asyncio
from collections import Counter

import structlog

from observability.peer_log import PeerLog

MAX_HELD = 5
"""Forms with a wrong token of one address whose answers are held back at a time."""


class FailedLogins:
    """Holds back the answers to wrong tokens. Of one event loop.

    A request with the right token in its header is never held back nor refused: behind a proxy all
    clients have one address, and whoever guesses there must not keep telemetry out.

    Args:
        delay_s: of each answer, in seconds.
    """

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._held: Counter[str] = Counter()
        self._log = PeerLog(structlog.get_logger("dataplane_admin"))

    def has_too_many(self, peer: str) -> bool:
        """Whether a form of this address is to be refused without a look at its token."""
        return self._held[peer] >= MAX_HELD

    async def hold(self, peer: str) -> None:
        """Return when a wrong token of this address may be answered."""
        self._log.warn("wrong_token", peer)
        self._held[peer] += 1
        try:
            await asyncio.sleep(self._delay_s)
        finally:
            self._held[peer] -= 1
            if not self._held[peer]:
                del self._held[peer]
