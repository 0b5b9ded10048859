"""How each process of a run sets up its telemetry, and hands over what it has before it ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from observability.setup import Telemetry

SHUTDOWN_S = 5.0
"""How long a process may take to send what it has left."""


@dataclass(frozen=True)
class Reporting:
    """What a process needs to know; it travels to the actors.

    Attributes:
        run_id: of the run.
        endpoint: base URL of an OTLP/HTTP collector, or None for the ``OTEL_*`` variables.
    """

    run_id: str
    endpoint: str | None

    def start(self, service: str, instance: str | None = None) -> Telemetry:
        """Set up this process.

        Args:
            service: ``service.name``.
            instance: ``service.instance.id``, a rank for example.
        """
        # The SDK takes a while to import, which a run without tracing need not wait for.
        import observability

        return observability.setup(
            service,
            instance=instance,
            run_id=self.run_id,
            endpoint=self.endpoint,
            shutdown_timeout_s=SHUTDOWN_S,
        )


class ReportingActor:
    """Base of the run's actors."""

    _telemetry: Telemetry | None = None

    def _report(
        self, reporting: Reporting | None, service: str, instance: str | None = None
    ) -> None:
        if reporting is not None:
            self._telemetry = reporting.start(service, instance)

    def end_reports(self) -> None:
        """Send what is left; the actor is killed afterwards."""
        if self._telemetry is not None:
            self._telemetry.shutdown(SHUTDOWN_S)
