"""Export of readings as OTLP metrics, with the exporter of OpenTelemetry's SDK.

The metrics are built here: instruments of the SDK refuse names with a colon, such as ``vllm:...``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

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
from dataplane_admin.scrape.reading import Reading
from observability.setup.session import CollectorSession
from observability.setup.settings import redacted

_SCOPE = InstrumentationScope("dataplane_admin.scrape")


class LoadExporter:
    """Exporter to the service, or to another receiver of OTLP over HTTP.

    Args:
        url: URL of the receiver, without the path of OTLP.
        timeout_s: deadline of an export, with its retries.

    Attributes:
        endpoint: URL of the requests, without user, password and query.
    """

    def __init__(self, url: str, *, token: str | None, timeout_s: float) -> None:
        endpoint = f"{url.rstrip('/')}/v1/metrics"
        self.endpoint = redacted(endpoint)
        self._session = CollectorSession("metrics")
        self._session.trust_env = False  # no proxy: the service runs in the cluster
        self._exporter = OTLPMetricExporter(
            endpoint,
            headers={} if token is None else {"authorization": f"Bearer {token}"},
            timeout=timeout_s,
            session=self._session,
        )
        # The scraper reports failures itself: the SDK's messages do not name the cause.
        sdk = logging.getLogger("opentelemetry")
        sdk.propagate = False
        sdk.addHandler(logging.NullHandler())

    def send(
        self, readings: Iterable[tuple[Mapping[str, str], Sequence[Reading]]], time_ns: int
    ) -> tuple[str, str] | None:
        """Send readings, each list with the attributes of its resource.

        Returns:
            Kind and details of the trouble if the receiver did not accept all of them, else None.
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
        self._session.reset()
        try:
            is_sent = self._exporter.export(data) is MetricExportResult.SUCCESS
        except Exception:  # noqa: BLE001  # the session records the error and may raise any
            is_sent = False
        if not is_sent and self._session.trouble is None:
            return "metrics not exported", "no request was sent"
        return self._session.trouble


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
