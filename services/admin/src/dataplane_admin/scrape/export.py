"""Export of readings as OTLP metrics, with the exporter of OpenTelemetry's SDK.

The metrics are built here: instruments of the SDK refuse names with a colon, such as ``vllm:...``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import requests
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from dataplane_admin.load_metrics import source_of
from dataplane_admin.scrape.reading import Reading, ScrapeError

_SCOPE = InstrumentationScope("dataplane_admin.scrape")


class LoadExporter:
    """Exporter to the service, or to another receiver of OTLP over HTTP.

    Args:
        url: URL of the receiver, without the path of OTLP.
        timeout_s: deadline of an export, with its retries.
    """

    def __init__(self, url: str, *, token: str | None, timeout_s: float) -> None:
        session = requests.Session()
        session.trust_env = False  # no proxy: the service runs in the cluster
        self._exporter = OTLPMetricExporter(
            f"{url.rstrip('/')}/v1/metrics",
            headers={} if token is None else {"authorization": f"Bearer {token}"},
            timeout=timeout_s,
            session=session,
        )
        self._reasons = _Reasons()
        sdk = logging.getLogger("opentelemetry")
        sdk.propagate = False
        sdk.addHandler(self._reasons)

    def send(
        self, readings: Iterable[tuple[Mapping[str, str], Sequence[Reading]]], time_ns: int
    ) -> None:
        """Send readings, each list with the attributes of its resource.

        Raises ScrapeError if the receiver did not accept them.
        """
        data = MetricsData(
            [
                ResourceMetrics(
                    Resource(resource),
                    [ScopeMetrics(_SCOPE, _metrics(of_resource, time_ns), "")],
                    "",
                )
                for resource, of_resource in readings
            ]
        )
        if self._exporter.export(data) is not MetricExportResult.SUCCESS:
            raise ScrapeError(self._reasons.last or "the receiver did not accept the metrics")


def _metrics(readings: Sequence[Reading], time_ns: int) -> list[Metric]:
    points: dict[str, list[NumberDataPoint]] = {}
    for each in readings:
        point = NumberDataPoint(each.attributes, 0, time_ns, each.value)
        points.setdefault(each.name, []).append(point)
    return [Metric(name, "", "", _data(name, held)) for name, held in points.items()]


def _data(name: str, points: Sequence[NumberDataPoint]) -> Sum | Gauge:
    source = source_of(name)
    if source is not None and source.is_counter:
        return Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
    return Gauge(points)


class _Reasons(logging.Handler):
    """Log handler that keeps the last message of the exporter: why an export failed."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = " ".join(record.getMessage().split())[:300]
