"""Spans of a made-up GRPO run: forty steps, eight processes, about a hundred spans each."""

import hashlib
import json
import random
import time
from dataclasses import replace

from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.proto.trace.v1.trace_pb2 import Status, TracesData

from observability.records import Event, Link, Process, Records, Span

NOW_NS = time.time_ns()
RUN = "grpo-math/20261121-2114"
HOSTILE = '<script>alert(1)</script>"onload="alert(2)'
REVERSED = "user\u202egnp.exe"
HOSTILE_PARTITION = f"{HOSTILE}&id=x#\u202e"
STEPS = 40
DRIVER = Process("grpo.driver", "", "node-0", 4001)
ROLLOUT = Process("grpo.rollout", "", "node-0", 4002)
GENERATION = Process("grpo.generation", "", "node-1", 4003)
ENVIRONMENT = Process("grpo.environment", "", "node-0", 4004)
POLICIES = [Process("grpo.policy", str(rank), "node-2", 4010 + rank) for rank in range(4)]
FIELDS = [
    "input_ids",
    "token_mask",
    "generation_logprobs",
    "rewards",
    "logprobs",
    "reference_logprobs",
    "advantages",
]
TASKS = ["logprob", "reference", "train"]


def sample_id(step, place):
    """Return a sample id of a step; the last step has two hostile ids."""
    if step == STEPS - 1 and place in (3, 4):
        return HOSTILE if place == 3 else REVERSED
    return f"s{step}_p{place // 8}_g{place % 8}"


def trace_id_of(step):
    return hashlib.md5(f"step {step}".encode(), usedforsecurity=False).hexdigest()


class Maker:
    """Builder of spans of one trace with reproducible ids."""

    def __init__(self, step, trace_id=None):
        self.trace_id = trace_id or trace_id_of(step)
        self.step = step
        self.start_ns = NOW_NS - int((STEPS - step) * 2.6e9)
        self.random = random.Random(step)
        self.spans = []
        self.events = []

    def span(self, parent, name, process, start, seconds, bucket=None, **more):
        attributes = {"rl.run_id": RUN, "rl.step": self.step, "rl.weight_version": self.step}
        if bucket:
            attributes["rl.bucket"] = bucket
        attributes.update(more.pop("attributes", {}))
        number = hashlib.md5(f"{self.trace_id}{len(self.spans)}".encode(), usedforsecurity=False)
        new_span = Span(
            trace_id=self.trace_id,
            span_id=number.hexdigest()[:16],
            parent_id=parent.span_id if parent else None,
            name=name,
            kind=more.pop("kind", "internal"),
            start_ns=self.start_ns + int(start * 1e9),
            end_ns=self.start_ns + int((start + seconds) * 1e9),
            attributes=attributes,
            process=process,
            **more,
        )
        self.spans.append(new_span)
        return new_span

    def put(self, parent, process, start, seconds, n_bytes, fields):
        return self.span(
            parent,
            "send train",
            process,
            start,
            seconds,
            "overhead",
            kind="producer",
            attributes={
                "messaging.system": "dataplane",
                "messaging.operation.name": "put",
                "messaging.operation.type": "send",
                "messaging.destination.name": "train",
                "messaging.batch.message_count": 128,
                "dataplane.bytes": n_bytes,
                "dataplane.fields": fields,
            },
        )

    def get(self, parent, process, start, seconds, n_bytes, puts):
        return self.span(
            parent,
            "get train",
            process,
            start,
            seconds,
            "overhead",
            kind="client",
            attributes={
                "db.system.name": "dataplane",
                "db.operation.name": "get",
                "db.collection.name": "train",
                "db.operation.batch.size": 128,
                "dataplane.bytes": n_bytes,
            },
            links=tuple(Link(put.trace_id, put.span_id) for put in puts),
        )

    def event(self, span, name, task="", samples=128):
        self.events.append(
            Event(
                name=name,
                time_ns=span.end_ns,
                attributes={
                    "dataplane.partition": "train",
                    "dataplane.task": task,
                    "dataplane.samples": samples,
                    "rl.run_id": RUN,
                    "rl.step": self.step,
                    "rl.weight_version": self.step,
                },
                sample_ids=tuple(sample_id(self.step, place) for place in range(samples)),
                process=span.process,
                trace_id=span.trace_id,
                span_id=span.span_id,
            )
        )

    def records(self):
        return Records(spans=list(self.spans), events=list(self.events))


def grpo_step(step, *, slow_train=1.0, hostile=False, fails=False):
    """Return spans and events of one step, about a hundred spans."""
    make = Maker(step)
    noise = lambda seconds: seconds * make.random.uniform(0.9, 1.15)  # noqa: E731
    root = make.span(None, "grpo.step", DRIVER, 0, 0)
    at = 0.01
    refit = make.span(root, "refit", DRIVER, at, 0.12, "idle")
    make.span(refit, "publish_weights", POLICIES[0], at + 0.005, 0.03, "overhead")
    make.span(refit, "install_weights", GENERATION, at + 0.04, 0.07, "overhead")
    at += 0.125
    make.span(root, "register train", DRIVER, at, 0.004, "overhead")
    at += 0.006
    rollout = make.span(root, "rollout", DRIVER, at, 0, "idle")
    inner = make.span(rollout, "rollout_to_tq", ROLLOUT, at + 0.004, 0)
    moment = at + 0.006
    for number in range(3):
        generate, environment = noise(0.19), noise(0.03)
        turn = make.span(
            inner,
            "turn",
            ROLLOUT,
            moment,
            generate + environment + 0.01,
            attributes={"rl.turn": number, "rl.rows": 128},
        )
        call = make.span(turn, "generate", ROLLOUT, moment + 0.002, generate, "idle")
        make.span(
            call,
            HOSTILE if hostile and number == 1 else "generate",
            GENERATION,
            moment + 0.006,
            generate - 0.01,
            "productive",
        )
        call = make.span(
            turn, "environment_step", ROLLOUT, moment + generate + 0.004, environment, "idle"
        )
        make.span(
            call, "step", ENVIRONMENT, moment + generate + 0.006, environment - 0.004, "productive"
        )
        moment += generate + environment + 0.012
    make.span(inner, "flatten", ROLLOUT, moment, 0.03, "overhead")
    put = make.put(inner, ROLLOUT, moment + 0.032, 0.018, 41_900_000, FIELDS[:4])
    make.event(put, "put")
    moment += 0.054
    make.spans[make.spans.index(inner)] = replace(inner, end_ns=make.start_ns + int(moment * 1e9))
    make.spans[make.spans.index(rollout)] = replace(
        rollout, end_ns=make.start_ns + int((moment + 0.004) * 1e9)
    )
    if step % 6 == 5:
        moment += 0.006
        drop = make.span(root, "drop", DRIVER, moment, 0.05, "wasted")
        make.span(drop, "settle train", DRIVER, moment + 0.005, 0.04, "overhead")
        moment += 0.05
    at = moment + 0.01
    written = [put]
    for stage, work, column in (
        ("logprobs", "compute_logprobs", "logprobs"),
        ("reference", "compute_logprobs", "reference_logprobs"),
    ):
        outer = make.span(root, stage, DRIVER, at, 0, "idle")
        ends = []
        for rank, policy in enumerate(POLICIES):
            forward = noise(0.17) * (1.25 if rank == 2 else 1)
            call = make.span(outer, work, policy, at + 0.004, forward + 0.05)
            make.get(call, policy, at + 0.006, 0.016, 8_200_000, [put])
            make.span(
                call,
                "forward",
                policy,
                at + 0.024,
                forward,
                "productive",
                attributes={"gpu.tokens": 61_440},
            )
            written.append(make.put(call, policy, at + 0.026 + forward, 0.012, 1_050_000, [column]))
            ends.append(at + forward + 0.058)
        at = max(ends)
        make.spans[make.spans.index(outer)] = replace(outer, end_ns=make.start_ns + int(at * 1e9))
        at += 0.004
    advantages = make.span(root, "advantages", DRIVER, at, 0.04, "overhead")
    written.append(make.put(advantages, DRIVER, at + 0.018, 0.02, 1_048_576, ["advantages"]))
    at += 0.046
    outer = make.span(root, "train", DRIVER, at, 0, "idle")
    ends = []
    for rank, policy in enumerate(POLICIES):
        call = make.span(outer, "train", policy, at + 0.004, 0)
        got = make.get(call, policy, at + 0.006, 0.024, 13_100_000, written)
        make.event(got, "read", "train", 32)
        moment = at + 0.034
        for batch in range(4):
            took = noise(0.085) * slow_train
            bad = fails and rank == 3 and batch == 3
            make.span(
                call,
                REVERSED if hostile and rank == 0 and batch == 0 else "optimizer_step",
                policy,
                moment,
                took,
                "wasted" if bad else "productive",
                outcome="error" if bad else "unset",
                message="OutOfMemoryError" if bad else "",
                attributes={
                    "rl.global_batch": batch,
                    **({"error.type": "torch.OutOfMemoryError"} if bad else {}),
                },
            )
            moment += took + 0.003
        make.spans[make.spans.index(call)] = replace(call, end_ns=make.start_ns + int(moment * 1e9))
        ends.append(moment + 0.004)
    at = max(ends)
    make.spans[make.spans.index(outer)] = replace(outer, end_ns=make.start_ns + int(at * 1e9))
    clear = make.span(root, "clear", DRIVER, at + 0.004, 0.02, "overhead")
    make.span(clear, "settle train", DRIVER, at + 0.006, 0.016, "overhead")
    make.spans[0] = replace(root, end_ns=make.start_ns + int((at + 0.026) * 1e9))
    return make.records()


def _attributes(record, attributes):
    kinds = {bool: "bool_value", int: "int_value", float: "double_value", str: "string_value"}
    for key, value in attributes.items():
        held = record.attributes.add(key=key).value
        for item in value if isinstance(value, list) else [value]:
            target = held.array_value.values.add() if isinstance(value, list) else held
            setattr(target, kinds[type(item)], item)


def _resource(target, process):
    facts = {"service.name": process.service, "host.name": process.host}
    facts |= {"process.pid": process.pid, "rl.run_id": RUN}
    _attributes(
        target.resource,
        facts | ({"service.instance.id": process.instance} if process.instance else {}),
    )
    return target


def requests_of(records):
    """Return export requests of spans and of events."""
    traces, logs = TracesData(), LogsData()
    for span in records.spans:
        target = (
            _resource(traces.resource_spans.add(), span.process)
            .scope_spans.add()
            .spans.add(
                trace_id=bytes.fromhex(span.trace_id),
                span_id=bytes.fromhex(span.span_id),
                parent_span_id=bytes.fromhex(span.parent_id or ""),
                name=span.name,
                kind=SpanMessage.SpanKind.Value(f"SPAN_KIND_{span.kind.upper()}"),
                start_time_unix_nano=span.start_ns,
                end_time_unix_nano=span.end_ns,
            )
        )
        _attributes(target, span.attributes)
        if span.outcome == "error":
            target.status.code, target.status.message = Status.STATUS_CODE_ERROR, span.message
        for link in span.links:
            ids = bytes.fromhex(link.trace_id), bytes.fromhex(link.span_id)
            target.links.add(trace_id=ids[0], span_id=ids[1])
    for event in records.events:
        scope = _resource(logs.resource_logs.add(), event.process).scope_logs.add()
        record = scope.log_records.add(
            event_name=f"dataplane.{event.name}",
            time_unix_nano=event.time_ns,
            trace_id=bytes.fromhex(event.trace_id),
            span_id=bytes.fromhex(event.span_id),
        )
        record.body.string_value = json.dumps(event.sample_ids)
        _attributes(record, event.attributes)
    return traces, logs
