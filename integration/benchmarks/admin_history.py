"""A long history of a run: OTLP requests of many GRPO steps."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, MetricsData
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span, TracesData

RUN = "grpo-7b"
OTHER_RUN = "grpo-7b-second"
"""A run with curves only."""
PARTITION = "train"
_STEP_NS = 2_000_000_000
_POLICY = [f"grpo.policy {rank}" for rank in range(4)]
# Event, process that emits it, task, fields; in the order of a sample's lifecycle.
_LIFE: Sequence[tuple[str, str, str, str]] = (
    ("put", "grpo.rollout", "", "input_ids"),
    ("claimed", "grpo.policy 0", "prev_lp", "input_ids"),
    ("read", "grpo.policy 0", "", "input_ids"),
    ("put", "grpo.policy 0", "", "prev_logprobs"),
    ("acknowledged", "grpo.policy 0", "prev_lp", ""),
    ("claimed", "grpo.policy 1", "train", "advantages"),
    ("read", "grpo.policy 1", "", "advantages"),
    ("trained", "grpo.policy 1", "train", ""),
    ("acknowledged", "grpo.policy 1", "train", ""),
    ("cleared", "grpo.driver", "", ""),
)
EVENTS_A_SAMPLE = len(_LIFE)
_LEARNING = (
    "rl.reward.mean",
    "rl.reward.std",
    "rl.loss",
    "rl.kl",
    "rl.entropy",
    "rl.clip_fraction",
    "rl.grad_norm",
    "rl.response.length",
    "rl.staleness.mean",
    "rl.logprob_gap.mean",
    "rl.tokens_per_s",
)
_CUMULATIVE = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
LARGE_SPANS = 10_000
_LARGE_TURNS = 2_487


@dataclass(frozen=True)
class Step:
    """OTLP requests of one step.

    Attributes:
        traces: export requests of its spans, one per process.
        logs: export requests of its events, one per process.
        spans: number of spans.
        events: number of events, each of one sample.
    """

    traces: list[bytes]
    logs: list[bytes]
    spans: int
    events: int


def steps(count: int, *, samples: int, start_ns: int, seed: int = 20_263) -> Iterator[Step]:
    """Yield the steps of one run, two seconds apart.

    Args:
        count: number of steps.
        samples: samples per step; each event is of one sample, as in an asynchronous run.
        start_ns: start of the first step, in nanoseconds since 1970.
        seed: seed of ids and durations.
    """
    rng = random.Random(seed)
    for number in range(count):
        yield _step(number, samples, start_ns + number * _STEP_NS, rng)


def large_step(number: int, *, start_ns: int, seed: int = 20_266) -> Step:
    """Return one step with `LARGE_SPANS` spans of 69 processes, and without samples.

    Args:
        number: number of the step.
        start_ns: start of the step, in nanoseconds since 1970.
        seed: seed of ids and durations.
    """
    return _step(number, 0, start_ns, random.Random(seed), turns=_LARGE_TURNS, concurrent=32)


def curves(
    metrics: int, steps: int, *, start_ns: int, run: str = RUN, seed: int = 20_265
) -> Iterator[bytes]:
    """Yield export requests of gauges by step, a thousand steps of one metric each.

    The first metrics have the names of `_LEARNING`, so that pages draw them.

    Args:
        metrics: number of metrics.
        steps: number of steps, one point each.
        start_ns: time of the first point, in nanoseconds since 1970.
        run: id of the run.
        seed: seed of the values.
    """
    rng = random.Random(seed)
    for number in range(metrics):
        name = _LEARNING[number] if number < len(_LEARNING) else f"rl.metric.{number:03d}"
        for begin in range(0, steps, 1_000):
            data = MetricsData()
            resource = data.resource_metrics.add()
            _describe(resource.resource, "grpo.driver")
            gauge = resource.scope_metrics.add().metrics.add(name=name).gauge
            for step in range(begin, min(steps, begin + 1_000)):
                point = gauge.data_points.add(
                    as_double=rng.gauss(step / steps, 0.1), time_unix_nano=start_ns + step
                )
                add_attributes(point.attributes, {"rl.run_id": run, "rl.step": step})
            yield data.SerializeToString()


def sample_facts(steps: int, *, samples: int, start_ns: int, seed: int = 20_267) -> Iterator[bytes]:
    """Yield an export request per step with the facts of its samples, in groups of 16.

    The arguments are those of `steps`.
    """
    rng = random.Random(seed)
    for step in range(steps):
        data = LogsData()
        _describe(data.resource_logs.add().resource, "grpo.driver")
        record = (
            data.resource_logs[0]
            .scope_logs.add()
            .log_records.add(
                event_name="rl.sample.facts", time_unix_nano=start_ns + step * _STEP_NS
            )
        )
        ids = [sample_id(step, number) for number in range(samples)]
        rewards = [float(rng.random() < 0.5) for _ in ids]
        columns = {
            "ids": ids,
            "group": [name.partition("_")[0] for name in ids],
            "reward": rewards,
            "advantage": [reward - 0.5 for reward in rewards],
            "length": [rng.randrange(100, 4_096) for _ in ids],
            "truncated": [rng.random() < 0.05 for _ in ids],
            "first_version": [step] * samples,
            "last_version": [step] * samples,
            "state": ["trained"] * samples,
        }
        record.body.string_value = json.dumps(columns)
        add_attributes(record.attributes, {"rl.run_id": RUN, "rl.step": step})
        yield data.SerializeToString()


def engine_load(
    engines: int, seconds: int, *, end_ns: int, every_s: int = 5, seed: int = 20_268
) -> Iterator[bytes]:
    """Yield export requests with the load of vLLM servers, one per moment.

    Args:
        engines: number of servers.
        seconds: length of the history.
        end_ns: time of the last moment, in nanoseconds since 1970.
        every_s: seconds between two moments.
        seed: seed of the values.
    """
    rng = random.Random(seed)
    for ago_s in range(seconds, -1, -every_s):
        data = MetricsData()
        for engine in range(engines):
            resource = data.resource_metrics.add()
            facts: dict[str, str | int] = {
                "service.name": "vllm",
                "service.instance.id": f"node-{engine}:8000",
                "rl.run_id": RUN,
            }
            add_attributes(resource.resource.attributes, facts)
            metrics = resource.scope_metrics.add().metrics
            time_ns = end_ns - ago_s * 1_000_000_000
            for name, value in (
                ("num_requests_running", float(rng.randrange(64))),
                ("num_requests_waiting", float(rng.randrange(8))),
                ("kv_cache_usage_perc", rng.random()),
            ):
                gauge = metrics.add(name=f"vllm:{name}").gauge
                gauge.data_points.add(as_double=value, time_unix_nano=time_ns)
            total = metrics.add(name="vllm:generation_tokens_total").sum
            total.is_monotonic = True
            total.aggregation_temporality = _CUMULATIVE
            produced = 900.0 * (seconds - ago_s)
            total.data_points.add(as_double=produced, time_unix_nano=time_ns)
        yield data.SerializeToString()


def sample_id(step: int, number: int) -> str:
    """Return the id of a sample of a step."""
    return f"prompt-{step:06d}-{number // 16:03d}_g{number % 16}"


def _step(
    number: int,
    samples: int,
    start_ns: int,
    rng: random.Random,
    *,
    turns: int = 2,
    concurrent: int = 1,
) -> Step:
    trace_id = rng.randbytes(16)
    traces: dict[str, TracesData] = {}
    spans: dict[str, bytes] = {}

    def span(process: str, name: str, parent: str, first: float, last: float, bucket: str) -> str:
        key = f"{process}/{name}/{len(spans)}"
        spans[key] = rng.randbytes(8)
        data = traces.setdefault(process, TracesData())
        if not data.resource_spans:
            _describe(data.resource_spans.add().resource, process)
            data.resource_spans[0].scope_spans.add().scope.name = "rl-dataplane"
        jitter = rng.uniform(-0.03, 0.03) * (last - first)
        record = (
            data.resource_spans[0]
            .scope_spans[0]
            .spans.add(
                trace_id=trace_id,
                span_id=spans[key],
                parent_span_id=spans.get(parent, b""),
                name=name,
                kind=Span.SPAN_KIND_INTERNAL,
                start_time_unix_nano=start_ns + int(first * 1e9),
                end_time_unix_nano=start_ns + int((last + (jitter if parent else 0)) * 1e9),
            )
        )
        facts: dict[str, str | int] = {
            "rl.run_id": RUN,
            "rl.step": number,
            "rl.weight_version": number,
        }
        if bucket:
            facts["rl.bucket"] = bucket
        if name.startswith(("get", "send")):
            facts |= {"db.system.name": "dataplane", "dataplane.bytes": rng.randrange(1 << 24)}
        add_attributes(record.attributes, facts)
        return key

    root = span("grpo.driver", "grpo.step", "", 0.0, 1.9, "")
    rollout = span("grpo.driver", "rollout", root, 0.02, 0.7, "idle")
    actor = span("grpo.rollout", "rollout_to_tq", rollout, 0.03, 0.69, "")
    turn_s = 0.6 * concurrent / turns
    for turn in range(turns):
        worker = f" {turn % concurrent}" if concurrent > 1 else ""
        process = f"grpo.rollout{worker}"
        at = 0.04 + turn // concurrent * turn_s
        generated, end = at + 0.83 * turn_s, at + 0.93 * turn_s
        group = span(process, "turn", actor, at, end, "")
        request = span(process, "generate", group, at, generated, "idle")
        span(f"grpo.generation{worker}", "generate", request, at, generated, "productive")
        span(process, "environment_step", group, generated, end, "idle")
    span("grpo.rollout", f"send {PARTITION}", actor, 0.65, 0.68, "overhead")
    for stage, method, first in (
        ("logprobs", "compute_logprobs", 0.7),
        ("reference", "compute_logprobs", 0.95),
    ):
        parent = span("grpo.driver", stage, root, first, first + 0.24, "idle")
        for process in _POLICY:
            call = span(process, method, parent, first + 0.01, first + 0.23, "")
            span(process, f"get {PARTITION}", call, first + 0.01, first + 0.03, "overhead")
            span(process, "forward", call, first + 0.03, first + 0.21, "productive")
            span(process, f"send {PARTITION}", call, first + 0.21, first + 0.22, "overhead")
    train = span("grpo.driver", "train", root, 1.2, 1.85, "idle")
    for process in _POLICY:
        call = span(process, "train", train, 1.21, 1.84, "")
        span(process, f"get {PARTITION}", call, 1.21, 1.25, "overhead")
        span(process, "optimizer_step", call, 1.25, 1.83, "productive")
    clear = span("grpo.driver", "clear", root, 1.86, 1.88, "overhead")
    logs = _events(number, samples, start_ns, trace_id, spans[clear])
    return Step(
        [data.SerializeToString() for data in traces.values()],
        [data.SerializeToString() for data in logs.values()],
        len(spans),
        samples * EVENTS_A_SAMPLE,
    )


def _events(
    number: int, samples: int, start_ns: int, trace_id: bytes, span_id: bytes
) -> dict[str, LogsData]:
    logs: dict[str, LogsData] = {}
    for place, (event, process, task, fields) in enumerate(_LIFE):
        data = logs.setdefault(process, LogsData())
        if not data.resource_logs:
            _describe(data.resource_logs.add().resource, process)
            data.resource_logs[0].scope_logs.add().scope.name = "rl-dataplane"
        records = data.resource_logs[0].scope_logs[0].log_records
        for sample in range(samples):
            record = records.add(
                event_name=f"dataplane.{event}",
                time_unix_nano=start_ns + place * 180_000_000 + sample * 1_000,
                trace_id=trace_id,
                span_id=span_id,
            )
            record.body.string_value = json.dumps([sample_id(number, sample)])
            facts: dict[str, str | int] = {
                "rl.run_id": RUN,
                "rl.step": number,
                "rl.weight_version": number,
                "dataplane.partition": PARTITION,
                "dataplane.samples": 1,
            }
            if task:
                facts["dataplane.task"] = task
            add_attributes(record.attributes, facts)
            if fields:
                attribute = record.attributes.add(key="dataplane.fields")
                attribute.value.array_value.values.add(string_value=fields)
    return logs


def _describe(resource: Resource, process: str) -> None:
    service, _, instance = process.partition(" ")
    facts: dict[str, str | int] = {
        "service.name": service,
        "host.name": "node-17",
        "process.pid": 40_000 + sum(map(ord, process)),
        "rl.run_id": RUN,
    }
    if instance:
        facts["service.instance.id"] = instance
    add_attributes(resource.attributes, facts)


def add_attributes(attributes: object, facts: dict[str, str | int]) -> None:
    """Add facts to the attributes of a record."""
    for key, value in facts.items():
        pair = KeyValue(key=key)
        if isinstance(value, int):
            pair.value.int_value = value
        else:
            pair.value.string_value = value
        attributes.append(pair)  # type: ignore[attr-defined]  # a repeated field
