"""Spans of a GRPO run that never was: forty steps, eight processes, about a hundred spans each."""

import hashlib
import random
import time
from dataclasses import replace

from dataplane_admin.store import StalenessRow, StepRow, TraceRow
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


def trace_id_of(step):
    return hashlib.md5(f"step {step}".encode(), usedforsecurity=False).hexdigest()


class Maker:
    """Makes spans of one trace, with ids that are the same every time."""

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
        made = Span(
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
        self.spans.append(made)
        return made

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
                sample_ids=tuple(f"s{self.step}_p{i // 8}_g{i % 8}" for i in range(samples)),
                process=span.process,
                trace_id=span.trace_id,
                span_id=span.span_id,
            )
        )

    def records(self):
        return Records(spans=list(self.spans), events=list(self.events))


def grpo_step(step, *, slow_train=1.0, hostile=False, fails=False):
    """Spans and events of one step, about a hundred spans."""
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
        asked = make.span(turn, "generate", ROLLOUT, moment + 0.002, generate, "idle")
        make.span(
            asked,
            HOSTILE if hostile and number == 1 else "generate",
            GENERATION,
            moment + 0.006,
            generate - 0.01,
            "productive",
        )
        asked = make.span(
            turn, "environment_step", ROLLOUT, moment + generate + 0.004, environment, "idle"
        )
        make.span(
            asked, "step", ENVIRONMENT, moment + generate + 0.006, environment - 0.004, "productive"
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
            optimizer = make.span(
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
            make.event(optimizer, "trained", "train", 8)
            moment += took + 0.003
        make.spans[make.spans.index(call)] = replace(call, end_ns=make.start_ns + int(moment * 1e9))
        ends.append(moment + 0.004)
    at = max(ends)
    make.spans[make.spans.index(outer)] = replace(outer, end_ns=make.start_ns + int(at * 1e9))
    clear = make.span(root, "clear", DRIVER, at + 0.004, 0.02, "overhead")
    make.span(clear, "settle train", DRIVER, at + 0.006, 0.016, "overhead")
    make.spans[0] = replace(root, end_ns=make.start_ns + int((at + 0.026) * 1e9))
    return make.records()


class MadeUpStore:
    """What the service's own `traces.trace` asks of a store."""

    def __init__(self):
        self.held = {}
        for step in range(STEPS):
            slow = 1.6 if step == STEPS - 1 else 1.0
            records = grpo_step(
                step, slow_train=slow, hostile=step == STEPS - 2, fails=step == STEPS - 4
            )
            self.held[trace_id_of(step)] = records
        # Of one step the spans of a worker, and the root, never arrived.
        torn = self.held[trace_id_of(STEPS - 3)]
        kept = [span for span in torn.spans if span.parent_id and span.name != "compute_logprobs"]
        self.held[trace_id_of(STEPS - 3)] = Records(kept, torn.events)
        self.rows = {one: self._row(one, records) for one, records in self.held.items()}

    def trace(self, trace_id):
        return self.rows.get(trace_id)

    def run_steps(self, run_id, limit):
        ended = [row for row in self.rows.values() if row.run_id == run_id and row.has_root]
        rows = [
            StepRow(row.step, row.trace_id, row.start_ns, row.seconds, row.errors) for row in ended
        ]
        return rows[-limit:], len(rows) > limit

    def trace_records(self, trace_id, *, events=True):
        held = self.held[trace_id]
        return held if events else Records(spans=held.spans)

    def series(self, name=None):
        return []

    def trace_staleness(self, trace_id):
        if trace_id == trace_id_of(STEPS - 1):
            return StalenessRow({}, 8)
        return StalenessRow({0: 96, 2: 32}, 4)

    def linked(self, trace_id):
        return (
            ([trace_id_of(0)], [trace_id_of(1)]) if trace_id == trace_id_of(STEPS - 1) else ([], [])
        )

    def _row(self, trace_id, records):
        roots = [span for span in records.spans if span.parent_id is None]
        first = roots[0] if roots else records.spans[0]
        return TraceRow(
            trace_id=trace_id,
            run_id=RUN,
            step=records.spans[0].attributes["rl.step"],
            name=first.name,
            start_ns=min(span.start_ns for span in records.spans),
            end_ns=max(span.end_ns for span in records.spans),
            has_root=bool(roots),
            spans=len(records.spans),
            errors=sum(span.outcome == "error" for span in records.spans),
            processes=len({span.process for span in records.spans}),
            rejected=0 if roots else 7,
            updated_ns=NOW_NS,
        )
