"""Metrics of the service in Prometheus' text format, computed at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from operator import attrgetter

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dataplane_admin import models
from dataplane_admin.api.openapi import problems
from dataplane_admin.service import AdminService
from dataplane_admin.store.texts import bounded

MAX_ALERTS = 100
"""Maximum number of series of raised alerts."""
_MAX_LABEL = 200
MAX_PARTITIONS = 100
"""Maximum number of partitions reported; each has several series."""


def metrics_router(service: AdminService) -> APIRouter:
    """Return the route ``GET /metrics``."""
    registry = CollectorRegistry()
    registry.register(_ServiceCollector(service))
    routes = APIRouter(tags=["service"])

    @routes.get(
        "/metrics",
        response_class=Response,
        responses={
            200: {
                "description": "Prometheus' text format",
                "content": {"text/plain": {"schema": {"type": "string"}}},
            },
            **problems(400, 401, 403, 503),
        },
    )
    def get_metrics() -> Response:
        """Return the service's metrics."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return routes


class _ServiceCollector(Collector):
    """Collector that reads the status once per scrape."""

    def __init__(self, service: AdminService) -> None:
        self._service = service

    def describe(self) -> list[Metric]:
        """Return nothing: describing the metrics would collect them."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        status = self._service.status()
        yield from _service_metrics(status)
        yield from _alert_metrics(self._service.alerts(limit=1))
        if status.live.attached:  # otherwise, old numbers would look current
            partitions = self._service.partitions().partitions
            yield from _partition_metrics(partitions[:MAX_PARTITIONS])


def _service_metrics(status: models.Status) -> Iterator[Metric]:
    ingested = CounterMetricFamily(
        "dataplane_admin_ingested", "New records received", labels=["signal"]
    )
    for signal, count in status.telemetry.ingested.items():
        ingested.add_metric([signal], count)
    yield ingested
    for name, text, count in (
        ("repeated", "Spans and events already stored", status.telemetry.repeated),
        ("refused", "Rejected records", status.telemetry.refused),
        ("ignored", "Log records that are not stored", status.telemetry.ignored),
    ):
        yield CounterMetricFamily(f"dataplane_admin_{name}", text, value=count)
    for name, text, value in (
        ("store_bytes", "Bytes on disk", status.store.nbytes),
        ("store_traces", "Stored traces", status.store.traces),
        ("store_spans", "Stored spans", status.store.spans),
        ("store_events", "Stored lifecycle events", status.store.events),
        ("store_samples", "Samples named by stored events", status.store.samples),
        ("store_writable", "Whether telemetry can be stored", int(status.store.writable)),
        ("live_attached", "Whether the data plane can be read", int(status.live.attached)),
        ("subscribers", "Connections with live updates", status.subscribers),
        ("start_time_seconds", "Start time of the process", status.started_ns / 1e9),
    ):
        yield GaugeMetricFamily(f"dataplane_admin_{name}", text, value=value)
    if status.live.age_s is not None:
        yield GaugeMetricFamily(
            "dataplane_admin_live_age_seconds",
            "Age of the newest snapshot",
            value=status.live.age_s,
        )


def _alert_metrics(alerts: models.Alerts) -> Iterator[Metric]:
    raised = GaugeMetricFamily(
        "dataplane_admin_alerts", "Raised alerts", labels=["name", "severity", "run"]
    )
    counts = Counter(
        (alert.name, alert.severity, bounded(alert.run_id, _MAX_LABEL)) for alert in alerts.raised
    )
    for labels, count in list(counts.items())[:MAX_ALERTS]:
        raised.add_metric(labels, count)
    failures = CounterMetricFamily(
        "dataplane_admin_alert_evaluation_failures",
        "Failed evaluations of the alert rules",
        value=alerts.failed_evaluations,
    )
    yield from (raised, failures)
    for name, text, count_of in (
        ("failures", "Failed delivery attempts", attrgetter("failed")),
        ("delivered", "Delivered notifications", attrgetter("delivered")),
        ("dropped", "Dropped notifications", attrgetter("dropped")),
    ):
        counter = CounterMetricFamily(f"dataplane_admin_webhook_{name}", text, labels=["webhook"])
        for webhook in alerts.webhooks:
            counter.add_metric([webhook.name], count_of(webhook))
        yield counter


def _partition_metrics(partitions: list[models.Partition]) -> Iterator[Metric]:
    present = GaugeMetricFamily(
        "dataplane_partition_samples", "Samples present", labels=["partition"]
    )
    nbytes = GaugeMetricFamily(
        "dataplane_partition_bytes", "Bytes in the data plane", labels=["partition"]
    )
    tasks = GaugeMetricFamily(
        "dataplane_task_samples",
        "Samples by state for the task",
        labels=["partition", "task", "state"],
    )
    oldest = GaugeMetricFamily(
        "dataplane_task_oldest_unclaimed_seconds",
        "Age of the task's oldest unclaimed sample",
        labels=["partition", "task"],
    )
    for partition in partitions:
        present.add_metric([partition.id], partition.present)
        if partition.nbytes is not None:
            nbytes.add_metric([partition.id], partition.nbytes)
        for task in partition.tasks:
            for state in ("unclaimed", "assigned", "leased", "acknowledged"):
                tasks.add_metric([partition.id, task.name, state], getattr(task, state))
            if task.oldest_unclaimed_s is not None:
                oldest.add_metric([partition.id, task.name], task.oldest_unclaimed_s)
    yield from (present, nbytes, tasks, oldest)
