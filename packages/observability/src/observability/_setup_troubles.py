"""One warning per kind of trouble, whoever notices it and however often.

The SDK logs once per failed batch, dropped item or bad attribute. While telemetry is set up, what
the standard logger ``opentelemetry`` and its children say ends here instead.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

logger = structlog.get_logger("observability")

_MOST_KINDS = 64


class Troubles:
    """Tells each kind of trouble once."""

    def __init__(self) -> None:
        self._told: dict[str, object] = {}
        self._heard = threading.local()

    def tell(self, kind: str, **facts: object) -> None:
        """Log one warning, ``telemetry_trouble``, unless this kind was told before.

        Neither locks nor raises, because it is called wherever a span ends.

        Args:
            kind: what went wrong, in words.
            facts: what helps to find out why; of the first time only.
        """
        mark = object()
        if len(self._told) >= _MOST_KINDS or self._told.setdefault(kind, mark) is not mark:
            return
        try:
            logger.warning("telemetry_trouble", trouble=kind, **facts)
        except Exception:  # noqa: BLE001  # an application's log processors raise what they like
            return

    def hear(self, record: logging.LogRecord) -> None:
        """Take a log record of OpenTelemetry."""
        if record.levelno < logging.WARNING:
            return
        if getattr(self._heard, "listening", False):
            self._heard.last = record.getMessage()
            return
        kind = f"{record.name}: {record.msg}"
        self.tell(kind, message=record.getMessage())

    @contextmanager
    def listening(self) -> Iterator[None]:
        """What OpenTelemetry logs in this thread meanwhile is kept for `heard`, and not told."""
        self._heard.listening, self._heard.last = True, ""
        try:
            yield
        finally:
            self._heard.listening = False

    def heard(self) -> str:
        """The last that OpenTelemetry logged in this thread while `listening`, or nothing."""
        return str(getattr(self._heard, "last", ""))


class _Quiet(logging.Handler):
    troubles: Troubles | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.troubles is not None:
            self.troubles.hear(record)


_quiet = _Quiet()


def quieten(troubles: Troubles) -> None:
    """From now on what OpenTelemetry logs goes to ``troubles`` and nowhere else."""
    theirs = logging.getLogger("opentelemetry")
    _quiet.troubles = troubles
    theirs.propagate = False
    if _quiet not in theirs.handlers:
        theirs.addHandler(_quiet)
