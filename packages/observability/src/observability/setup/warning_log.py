"""`WarningLog`: one warning per kind of trouble, for the first 64 kinds.

The SDK logs every failed batch and invalid attribute, through the standard logger ``opentelemetry``
and its children. From the first setup on, these log records are redirected here.
"""

from __future__ import annotations

import logging

import structlog

logger = structlog.get_logger("observability")

_MAX_KINDS = 64


class WarningLog:
    """A logger that logs each of the first 64 kinds of trouble once.

    Attributes:
        exporter_message: the last message that an SDK exporter logged. The message itself causes
            no warning, because the caller of the exporter reports the failure.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, object] = {}
        self.exporter_message = ""

    def warn(self, kind: str, **facts: object) -> None:
        """Log one warning, ``telemetry_trouble``, unless this kind was logged before.

        It never raises, and acquires no lock but that of the log's handler: it may be called
        wherever a span ends.

        Args:
            kind: description of the trouble.
            facts: details; only those of the first occurrence are logged.
        """
        # `setdefault` is atomic: only one of several threads gets its own marker back.
        marker = object()
        if len(self._kinds) >= _MAX_KINDS or self._kinds.setdefault(kind, marker) is not marker:
            return
        try:
            logger.warning("telemetry_trouble", trouble=kind, **facts)
        except Exception:  # noqa: BLE001  # an application's log processors may raise anything
            return


class _Handler(logging.Handler):
    warning_log: WarningLog | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.warning_log is None or record.levelno < logging.WARNING:
            return
        if record.name.endswith("_exporter"):
            self.warning_log.exporter_message = record.getMessage()
        else:
            kind = f"{record.name}: {record.msg}"
            self.warning_log.warn(kind, message=record.getMessage())


_handler = _Handler()


def redirect_logs(warning_log: WarningLog) -> None:
    """Redirect OpenTelemetry's log records to ``warning_log``."""
    sdk = logging.getLogger("opentelemetry")
    _handler.warning_log = warning_log
    sdk.propagate = False
    if _handler not in sdk.handlers:
        sdk.addHandler(_handler)
