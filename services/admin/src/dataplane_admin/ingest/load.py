"""Decoding of the load of engines and nodes from data points of metrics.

A server may report a metric once per label set, and a node once per processor. So the points of a
request that belong to one subject, metric and second are added up before they are stored.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any  # Any: data points have no common type

from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AggregationTemporality,
    DataPointFlags,
    Metric,
)

from dataplane_admin.load_metrics import METRICS, source_of
from dataplane_admin.store import LoadPoint
from dataplane_admin.store.texts import bounded
from observability.records import Process

_MAX_NAME = 200
_MAX_DEVICE = 64
_MAX_NUMBER = 1e18
_AHEAD_NS = 3_600 * 10**9
_DELTA = AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA
_NO_VALUE = DataPointFlags.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK
# Of each tuple, the first attribute that is present is used.
_ENGINES = ("engine", "dp_rank")  # vLLM, SGLang
_DEVICES = ("hw.id", "gpu")  # OpenTelemetry, DCGM
_STATES = ("cpu.mode", "system.memory.state", "state")  # conventions, then the collector's


class LoadPoints:
    """The points of load of one request."""

    def __init__(self, now_ns: int) -> None:
        self._now_ns = now_ns
        self._points: dict[tuple[bytes, int], LoadPoint] = {}

    def add(self, process: Process, run_id: str, metric: Metric, point: Any) -> str | None:
        """Add a data point.

        Returns:
            None if the point shows no load. Else the reason for its rejection; empty if it was
            added or skipped.
        """
        source = source_of(metric.name)
        kind = metric.WhichOneof("data")
        if source is None or kind not in ("gauge", "sum"):
            return None
        if source.is_counter and kind == "sum" and metric.sum.aggregation_temporality == _DELTA:
            return None
        time_ns = point.time_unix_nano or self._now_ns
        if time_ns > self._now_ns + _AHEAD_NS:
            return "the time of a metric of load is more than an hour ahead"
        form = point.WhichOneof("value")
        number = math.nan if form is None else float(getattr(point, form))
        if point.flags & _NO_VALUE or not 0 <= number <= _MAX_NUMBER:
            return ""
        facts = {pair.key: _text(pair.value) for pair in point.attributes}
        state = _first(facts, _STATES)
        if source.total_states is not None and state not in source.total_states:
            return ""
        if any(facts.get(label, "") not in values for label, values in source.accepted.items()):
            return ""
        counts = source.value_states is None or state in source.value_states
        subject, device = _subject(process, METRICS[source.metric].kind, facts)
        key = json.dumps([subject, source.metric, source.is_counter, device, run_id]).encode()
        digest = hashlib.blake2b(key, digest_size=16).digest()
        place = digest, time_ns // 10**9
        before = self._points.get(place)
        self._points[place] = LoadPoint(
            digest=digest,
            kind=METRICS[source.metric].kind,
            subject=subject,
            metric=source.metric,
            is_counter=source.is_counter,
            device=device,
            run_id=run_id,
            second=time_ns // 10**9,
            value=(before.value if before else 0.0) + counts * source.value * number,
            total=(before.total if before else 0.0) + source.total * number + source.count,
        )
        return ""

    def points(self) -> tuple[LoadPoint, ...]:
        """Return the points so far."""
        return tuple(self._points.values())


def _subject(process: Process, kind: str, facts: Mapping[str, str]) -> tuple[str, str]:
    """Return the name of the engine or node of a point, and the device; empty without a device."""
    device = bounded(_first(facts, _DEVICES), _MAX_DEVICE)
    if kind == "node":
        # An exporter of GPUs is scraped over the network, so its label ``Hostname`` names the node.
        name = facts.get("Hostname") or process.host or process.full_label
        return bounded(name, _MAX_NAME), device
    resource = process.resource
    port = resource.get("server.port")
    address = resource.get("server.address")
    name = process.instance or (f"{address}:{port}" if address and port else process.full_label)
    index = _first(facts, _ENGINES)
    of_index = f"{name} engine {index}" if index not in ("", "0") else name
    return bounded(of_index, _MAX_NAME), ""


def _first(facts: Mapping[str, str], names: Iterable[str]) -> str:
    return next((facts[name] for name in names if facts.get(name)), "")


def _text(value: AnyValue) -> str:
    kind = value.WhichOneof("value")
    known = ("string_value", "int_value", "bool_value", "double_value")
    return str(getattr(value, kind)) if kind in known else ""
