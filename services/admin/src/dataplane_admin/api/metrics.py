"""The service's own metrics in Prometheus' text format, made when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dataplane_admin.answers import Answers, models
from dataplane_admin.api.openapi import problems

MOST_PARTITIONS = 100
"""Partitions that are told of; each is several series."""


def metrics_router(answers: Answers) -> APIRouter:
    """GET /metrics."""
    registry = CollectorRegistry()
    registry.register(_Figures(answers))
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
    def metrics() -> Response:
        """The service's own metrics."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return routes


class _Figures(Collector):
    """Reads the status once a scrape."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def describe(self) -> list[Metric]:
        """Nothing beforehand: to describe them would be to collect them."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Every metric, as Prometheus names them."""
        status = self._answers.status()
        yield from _of_service(status)
        yield from _of_partitions(self._answers.partitions().partitions[:MOST_PARTITIONS])


def _of_service(status: models.Status) -> Iterator[Metric]:
    taken = CounterMetricFamily(
        "dataplane_admin_ingested", "Records that were new", labels=["signal"]
    )
    for signal, count in status.telemetry.ingested.items():
        taken.add_metric([signal], count)
    yield taken
    for name, text, count in (
        ("repeated", "Spans and events that were there already", status.telemetry.repeated),
        ("refused", "Records kept out by limits", status.telemetry.refused),
        ("ignored", "Log records that are no lifecycle events", status.telemetry.ignored),
    ):
        yield CounterMetricFamily(f"dataplane_admin_{name}", text, value=count)
    for name, text, value in (
        ("store_bytes", "Bytes on disk", status.store.nbytes),
        ("store_traces", "Traces that are kept", status.store.traces),
        ("store_spans", "Spans that are kept", status.store.spans),
        ("store_events", "Lifecycle events that are kept", status.store.events),
        ("store_samples", "Samples that are kept", status.store.samples),
        ("store_writable", "Whether what arrives can be kept", int(status.store.writable)),
        ("live_attached", "Whether the data plane can be read", int(status.live.attached)),
        ("subscribers", "Connections that wait for live updates", status.subscribers),
        ("start_time_seconds", "When the process began", status.started_ns / 1e9),
    ):
        yield GaugeMetricFamily(f"dataplane_admin_{name}", text, value=value)
    if status.live.age_s is not None:
        yield GaugeMetricFamily(
            "dataplane_admin_live_age_seconds", "Age of the newest look", value=status.live.age_s
        )


def _of_partitions(partitions: list[models.Partition]) -> Iterator[Metric]:
    present = GaugeMetricFamily(
        "dataplane_partition_samples", "Samples that are there", labels=["partition"]
    )
    nbytes = GaugeMetricFamily(
        "dataplane_partition_bytes", "Bytes that the store holds", labels=["partition"]
    )
    tasks = GaugeMetricFamily(
        "dataplane_task_samples",
        "Samples by what the task has done with them",
        labels=["partition", "task", "state"],
    )
    oldest = GaugeMetricFamily(
        "dataplane_task_oldest_unclaimed_seconds",
        "Age of the oldest sample that the task has not claimed",
        labels=["partition", "task"],
    )
    for one in partitions:
        present.add_metric([one.id], one.present)
        if one.nbytes is not None:
            nbytes.add_metric([one.id], one.nbytes)
        for task in one.tasks:
            for state in ("unclaimed", "assigned", "leased", "settled"):
                tasks.add_metric([one.id, task.name, state], getattr(task, state))
            if task.oldest_unclaimed_s is not None:
                oldest.add_metric([one.id, task.name], task.oldest_unclaimed_s)
    yield from (present, nbytes, tasks, oldest)
