"""Fixtures of several tests.

Imports internals: OpenTelemetry accepts a global provider once per process, and here each test has
a separate one.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from observability.receiver import Receiver
from observability.setup import providers
from observability.setup.warning_log import WarningLog

# Tests are imported by path, so the modules they share have to be found.
FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER / "views")]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as result:
        yield result


@dataclass
class Exported:
    """Exports of the SDK behind OpenTelemetry's global providers."""

    spans: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)
    logs: InMemoryLogRecordExporter = field(default_factory=InMemoryLogRecordExporter)
    metrics: InMemoryMetricReader = field(default_factory=InMemoryMetricReader)


@pytest.fixture
def sdk() -> Iterator[Exported]:
    """SDK for one test; the tests of `setup` run in separate processes."""
    exported = Exported()
    tracers, loggers = TracerProvider(), LoggerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exported.spans))
    loggers.add_log_record_processor(SimpleLogRecordProcessor(exported.logs))
    meters = MeterProvider([exported.metrics])
    providers.set_providers(
        tracers=tracers, loggers=loggers, meters=meters, warning_log=WarningLog()
    )
    yield exported
    providers.remove_providers()
    for provider in (tracers, loggers, meters):
        provider.shutdown()


# How long an example takes depends on what else the machine does.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
