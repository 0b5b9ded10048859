"""Telemetry of the run's processes: set up at the start, flushed before the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpo_trainer.actors.address import node_address

if TYPE_CHECKING:
    from observability.setup import Telemetry

SHUTDOWN_S = 5.0
"""Seconds that a process may take to export its remaining telemetry."""


@dataclass(frozen=True)
class TelemetrySettings:
    """Settings of a run's telemetry; they travel to the actors.

    Attributes:
        run_id: the run's id.
        endpoint: base URL of an OTLP/HTTP collector, or None for the ``OTEL_*`` variables.
        records_texts: whether texts and tokens of samples are recorded.
    """

    run_id: str
    endpoint: str | None
    records_texts: bool = False

    def start(self, service: str, instance: str | None = None) -> Telemetry:
        """Set up this process as an ``instance``, a rank for example, of ``service``."""
        # Importing the SDK is slow, and a run without tracing does not need it.
        import observability

        return observability.setup(
            service,
            instance=instance,
            run_id=self.run_id,
            endpoint=self.endpoint,
            shutdown_timeout_s=SHUTDOWN_S,
        )


class RunActor:
    """Base of the run's actors."""

    _process_telemetry: Telemetry | None = None
    _records_texts = False

    def node_address(self) -> str:
        """Return the address by which Ray knows this process's machine."""
        return node_address()

    def _start_telemetry(
        self, settings: TelemetrySettings | None, service: str, instance: str | None = None
    ) -> None:
        if settings is not None:
            self._records_texts = settings.records_texts
            self._process_telemetry = settings.start(service, instance)

    def shutdown_telemetry(self) -> None:
        """Export the remaining telemetry; the actor is killed afterwards."""
        if self._process_telemetry is not None:
            self._process_telemetry.shutdown(SHUTDOWN_S)
