"""From an export request of metrics to what is stored: the newest value of every series."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from typing import Any  # Any: data points have no common type

from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric, MetricsData

from dataplane_admin.ingest.limits import Limits
from dataplane_admin.ingest.values import MOST_INT, process_of, unique_label
from dataplane_admin.store import Batch, SeriesPoint


def batch_of_metrics(request: MetricsData, limits: Limits) -> Batch:
    """What a request brings."""
    series: dict[bytes, SeriesPoint] = {}
    over = late = taken = 0
    for resource_metrics in request.resource_metrics:
        process = unique_label(process_of(resource_metrics.resource))
        for scope_metrics in resource_metrics.scope_metrics:
            for metric in scope_metrics.metrics:
                for point in _points(metric):
                    if taken >= limits.points:
                        over += 1
                    elif point.time_unix_nano > MOST_INT:
                        late += 1
                    else:
                        taken += 1
                        one = _series(process, metric, point, limits)
                        series[one.digest] = one
    reasons = []
    if over:
        reasons.append(f"{over} data points: a request may bring {limits.points}")
    if late:
        reasons.append(f"{late} data points: a time is after the year 2262")
    return Batch(series=tuple(series.values()), refused=over + late, reasons=tuple(reasons))


def _points(metric: Metric) -> Iterable[Any]:
    kind = metric.WhichOneof("data")
    return getattr(metric, kind).data_points if kind else ()


def _series(process: str, metric: Metric, point: Any, limits: Limits) -> SeriesPoint:
    pairs = sorted(
        (pair.key[: limits.attribute_length], _scalar(pair.value, limits))
        for pair in point.attributes[: limits.attributes]
    )
    attributes = json.dumps(dict(pairs))
    name, unit = metric.name[: limits.attribute_length], metric.unit[: limits.attribute_length]
    key = json.dumps([process, name, unit, attributes])
    value, histogram = _value(metric, point, limits)
    return SeriesPoint(
        digest=hashlib.blake2b(key.encode(), digest_size=16).digest(),
        process=process,
        name=name,
        unit=unit,
        attributes=attributes,
        value=value,
        histogram=histogram,
        time_ns=point.time_unix_nano,
    )


def _value(metric: Metric, point: Any, limits: Limits) -> tuple[float | None, str | None]:
    kind = metric.WhichOneof("data")
    if kind in ("gauge", "sum"):
        number = float(
            point.as_double if point.WhichOneof("value") == "as_double" else point.as_int
        )
        return (number if math.isfinite(number) else None), None
    told: dict[str, object] = {"count": point.count, "sum": _finite(point.sum)}
    if kind != "summary":
        told |= {
            name: _finite(getattr(point, name)) for name in ("min", "max") if point.HasField(name)
        }
    if kind == "histogram":
        told["bounds"] = [_finite(one) for one in point.explicit_bounds[: limits.attributes]]
        told["counts"] = list(point.bucket_counts[: limits.attributes + 1])
    return None, json.dumps(told)


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _scalar(value: AnyValue, limits: Limits) -> str:
    kind = value.WhichOneof("value")
    if kind == "string_value":
        return value.string_value[: limits.attribute_length]
    if kind == "bool_value":
        return "true" if value.bool_value else "false"
    if kind in ("int_value", "double_value"):
        return str(getattr(value, kind))
    return ""
