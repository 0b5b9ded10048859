"""Decoding of data points from export requests of metrics.

A series belongs to one resource, one scope, one metric and one set of attributes. A number with the
attribute ``rl.step`` is also a point of a curve; its series omits run and step. A point of
``rl.not_finite`` names another metric, whose value it stores as not finite. Metrics of
`load_metrics` become points of load, not series: each node might report a series per processor.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal  # Any: data points and attribute values have no common type

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AggregationTemporality,
    DataPointFlags,
    Metric,
    MetricsData,
)

from dataplane_admin.ingest.limits import Limits
from dataplane_admin.ingest.load import LoadPoints
from dataplane_admin.ingest.values import digest_of
from dataplane_admin.store import Batch, SeriesPoint
from dataplane_admin.store.chunk import MAX_INT, RUN_ID, STEP, run_and_step
from dataplane_admin.store.texts import bounded
from observability.records import Process, identity_of, process_of
from observability.step_metrics import METRIC, NOT_FINITE

_TEMPORALITIES: Mapping[int, Literal["delta", "cumulative"]] = {
    AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA: "delta",
    AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE: "cumulative",
}
_SUMMED = ("sum", "histogram", "exponential_histogram")
_NO_VALUE = DataPointFlags.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK


@dataclass(frozen=True)
class _Source:
    """Process and scope of metrics."""

    process: Process
    run_id: str
    scope: str
    identity: bytes


def batch_of_metrics(request: MetricsData, limits: Limits, now_ns: int) -> Batch:
    """Return the data points of a request, received at ``now_ns``, as a batch."""
    series: list[SeriesPoint] = []
    load, taken = LoadPoints(now_ns), 0
    refused: list[bytes] = []
    reasons: Counter[str] = Counter()
    for resource_metrics in request.resource_metrics:
        process = process_of(resource_metrics.resource)
        run_id, _ = run_and_step(resource_metrics.resource.attributes)
        for scope_metrics in resource_metrics.scope_metrics:
            scope = scope_metrics.scope
            identity = bytes.fromhex(process.identity) + _identity(scope, scope_metrics.schema_url)
            source = _Source(process, run_id, scope.name[: limits.attribute_length], identity)
            for metric in scope_metrics.metrics:
                for point in _points(metric):
                    reason = _reason_against(metric, point, taken, limits)
                    if reason is None:
                        load_reason = load.add(process, run_id, metric, point)
                        if load_reason is None:
                            series.append(_point(source, metric, point, limits))
                        reason = load_reason or None
                    if reason is None:
                        taken += 1
                    else:
                        refused.append(digest_of(point))
                        reasons[reason] += 1
    return Batch(
        series=tuple(series),
        load=load.points(),
        refused=tuple(refused),
        reasons=tuple(f"{count} data points: {reason}" for reason, count in reasons.items()),
    )


def _identity(scope: InstrumentationScope, schema_url: str) -> bytes:
    names = json.dumps([scope.name, scope.version, schema_url]).encode()
    return hashlib.blake2b(names, digest_size=16).digest() + identity_of(scope.attributes)


def _points(metric: Metric) -> Iterable[Any]:
    kind = metric.WhichOneof("data")
    return getattr(metric, kind).data_points if kind else ()


def _reason_against(metric: Metric, point: Any, taken: int, limits: Limits) -> str | None:
    if taken >= limits.points:
        return f"more than {limits.points} in a request"
    if max(point.time_unix_nano, point.start_time_unix_nano) > MAX_INT:
        return "a time is after the year 2262"
    kind = metric.WhichOneof("data")
    if kind in _SUMMED and getattr(metric, kind).aggregation_temporality not in _TEMPORALITIES:
        return "the aggregation temporality is neither delta nor cumulative"
    return None


def _point(source: _Source, metric: Metric, point: Any, limits: Limits) -> SeriesPoint:
    kind = metric.WhichOneof("data")
    data = getattr(metric, str(kind))
    temporality: Literal["delta", "cumulative", "newest"] = "newest"
    if kind in _SUMMED:
        temporality = _TEMPORALITIES[data.aggregation_temporality]
    monotonic = kind != "sum" or data.is_monotonic
    run_id, step = run_and_step(point.attributes) if kind in ("gauge", "sum") else ("", None)
    pairs, name, unit = point.attributes, metric.name, metric.unit
    if step is not None:
        pairs = [pair for pair in pairs if pair.key not in (RUN_ID, STEP)]
    not_finite = _metric_not_finite(name, pairs) if step is not None else ""
    if not_finite:
        pairs, name, unit = [pair for pair in pairs if pair.key != METRIC], not_finite, ""
    key = json.dumps([name, unit, kind, temporality, monotonic]).encode()
    digest = hashlib.blake2b(source.identity + identity_of(pairs), digest_size=16)
    digest.update(key)
    if temporality == "cumulative" and not monotonic:
        temporality = "newest"  # a gauge in effect: it starts at 0 with its process
    attributes = {
        bounded(pair.key, limits.attribute_length): plain(pair.value, limits)
        for pair in sorted(pairs[: limits.attributes], key=lambda pair: pair.key)
    }
    return SeriesPoint(
        digest=digest.digest(),
        point_digest=digest_of(point) if point.time_unix_nano else b"",
        process=source.process.full_label,
        process_id=bytes.fromhex(source.process.identity),
        scope=source.scope,
        name=bounded(name, limits.attribute_length),
        unit=unit[: limits.attribute_length],
        attributes=json.dumps(attributes),
        figures=(
            None if not_finite or point.flags & _NO_VALUE else _figures(str(kind), point, limits)
        ),
        temporality=temporality,
        start_ns=point.start_time_unix_nano,
        time_ns=point.time_unix_nano,
        run_id=run_id or source.run_id,
        step=step if step is not None and step >= 0 and not point.flags & _NO_VALUE else None,
    )


def _metric_not_finite(name: str, pairs: Iterable[KeyValue]) -> str:
    """Return the metric that this point reports as not finite; empty for any other point."""
    if name != NOT_FINITE:
        return ""
    return next((pair.value.string_value for pair in pairs if pair.key == METRIC), "")


def _figures(kind: str, point: Any, limits: Limits) -> Mapping[str, Any] | None:
    """Return the numbers that a point reports; None if it reports none."""
    if kind in ("gauge", "sum"):
        name = point.WhichOneof("value")
        number = math.nan if name is None else float(getattr(point, name))
        return {"value": number} if math.isfinite(number) else None
    figures: dict[str, Any] = {"count": point.count}
    # The sum of a summary is always set.
    optional = ("sum",) if kind == "summary" else _set(point, ("sum", "min", "max"))
    numbers = {name: getattr(point, name) for name in optional}
    figures |= {name: number for name, number in numbers.items() if math.isfinite(number)}
    if kind == "histogram":
        bounds, counts = list(point.explicit_bounds), list(point.bucket_counts)
        # Without counts there are no buckets. Storing only some buckets would give a wrong
        # histogram.
        fits = len(counts) == len(bounds) + 1 and len(bounds) <= limits.attributes
        if fits and all(map(math.isfinite, bounds)):
            figures |= {"bounds": bounds, "counts": counts}
    return figures


def _set(point: Any, names: Iterable[str]) -> Iterator[str]:
    return (name for name in names if point.HasField(name))


def plain(value: AnyValue, limits: Limits) -> Any:
    """Return a value of an attribute for JSON, cut to the limits."""
    kind = value.WhichOneof("value")
    match kind:
        case "string_value":
            return bounded(value.string_value, limits.attribute_length)
        case "bytes_value":
            return value.bytes_value[: limits.attribute_length].hex()
        case "double_value":
            number = value.double_value
            return number if math.isfinite(number) else str(number)
        case "bool_value" | "int_value":
            return getattr(value, kind)
        case "array_value":
            return [plain(item, limits) for item in value.array_value.values[: limits.attributes]]
        case "kvlist_value":
            pairs = value.kvlist_value.values[: limits.attributes]
            length = limits.attribute_length
            return {pair.key[:length]: plain(pair.value, limits) for pair in pairs}
    return None
