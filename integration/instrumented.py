"""Environment of a program that runs under ``opentelemetry-instrument`` and starts Ray."""

from __future__ import annotations

import os


def instrumented_environment(endpoint: str, ray_folder: str) -> dict[str, str]:
    """Return the variables of the program.

    Args:
        endpoint: where it sends its telemetry, a URL.
        ray_folder: Ray's temporary folder; its path must be short.
    """
    return {
        **os.environ,
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_EXPERIMENTAL_RESOURCE_DETECTORS": "process",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
        "OTEL_BLRP_SCHEDULE_DELAY": "200",
        "RAY_TMPDIR": ray_folder,
    }
