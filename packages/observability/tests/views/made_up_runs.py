"""Made-up records of a run's processes, named as in docs/telemetry.md."""

import itertools

from hypothesis import strategies as st

from observability.records import Event, Link, Process, Records, Span
from observability.views import steps_of

BEGIN = 1_790_000_000_000_000_000
"""Start of the steps, in nanoseconds since 1970."""

DRIVER = Process("grpo.driver", host="node-a", pid=100)
ROLLOUT = Process("grpo.rollout", host="node-a", pid=101)
GENERATION = Process("grpo.generation", host="node-b", pid=102)
ENVIRONMENT = Process("grpo.environment", host="node-a", pid=103)
POLICIES = tuple(Process("grpo.policy", str(rank), "node-c", 110 + rank) for rank in range(8))

HOSTILE = (
    "\x1b[31mred",
    "[red]markup[/red]",
    "two\nlines\r",
    "turn\u202eround",
    "</script><script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "null\x00byte",
    "{{ 7 * 7 }}",
    "lone\ud800surrogate",
)
"""Names and ids that a terminal, page or template would interpret unless they are escaped."""


def ns(seconds):
    return BEGIN + round(seconds * 1e9)


def step_of(records):
    """Return the only step of the records."""
    (step,) = steps_of(records)
    return step


class TraceMaker:
    """Factory of spans and events of one trace; times are seconds after `BEGIN`."""

    def __init__(self, step=0, run_id="run-a", trace_id=None):
        self.records = Records()
        self.step = step
        self.run_id = run_id
        self.trace_id = trace_id or f"{step + 1:032x}"
        self._ids = itertools.count(1)

    def span(
        self,
        name,
        process,
        start,
        end,
        parent=None,
        bucket=None,
        links=(),
        attributes=(),
        **outcome,
    ):
        attributes = {"rl.run_id": self.run_id, "rl.step": self.step, **dict(attributes)}
        if bucket:
            attributes["rl.bucket"] = bucket
        span = Span(
            trace_id=self.trace_id,
            span_id=f"{next(self._ids):08x}{self.step:08x}",
            parent_id=parent.span_id if isinstance(parent, Span) else parent,
            name=name,
            kind="internal",
            start_ns=ns(start),
            end_ns=ns(end),
            attributes=attributes,
            process=process,
            links=tuple(Link(linked.trace_id, linked.span_id) for linked in links),
            **outcome,
        )
        self.records.spans.append(span)
        return span

    def event(self, name, process, at, ids, span=None, partition="train", **details):
        attributes = {"rl.run_id": self.run_id, "rl.step": self.step}
        if partition:
            attributes["dataplane.partition"] = partition
        attributes["dataplane.samples"] = details.pop("samples", len(ids))
        version = details.pop("version", None)
        if version is not None:
            attributes["rl.weight_version"] = version
        attributes |= {f"dataplane.{key}": value for key, value in details.items()}
        event = Event(
            name=name,
            time_ns=ns(at),
            attributes=attributes,
            sample_ids=tuple(ids),
            process=process,
            trace_id=span.trace_id if span else "",
            span_id=span.span_id if span else "",
        )
        self.records.events.append(event)
        return event

    def put(self, process, start, end, parent, ids, fields, n_bytes, version=None):
        span = self.span(
            "send train",
            process,
            start,
            end,
            parent,
            "overhead",
            attributes={"messaging.operation.name": "put", "dataplane.bytes": n_bytes},
        )
        self.event("put", process, end, ids, span, fields=fields, bytes=n_bytes, version=version)
        return span

    def get(self, process, start, end, parent, ids, fields, n_bytes, links=()):
        span = self.span(
            "get train",
            process,
            start,
            end,
            parent,
            "overhead",
            links=links,
            attributes={
                "db.operation.name": "get",
                "dataplane.fields": fields,
                "dataplane.bytes": n_bytes,
            },
        )
        self.event("read", process, end, ids, span, fields=fields, bytes=n_bytes)
        return span


def sample_ids(step=0, count=8):
    return [f"{step:02x}prompt{i // 4}_g{i % 4}" for i in range(count)]


def grpo_step(number=0, *, run_id="run-a", policies=2, samples=8, at=0.0):
    """Return a complete step of 10 s: two turns, logprobs, advantages, training, clear."""
    maker = TraceMaker(number, run_id)
    ids = sample_ids(number, samples)
    dropped_ids = ids[-2:]
    trained_ids = ids[:-2]
    ranks = POLICIES[:policies]

    def span(name, process, start, end, *args, **options):
        return maker.span(name, process, at + start, at + end, *args, **options)

    root = span("grpo.step", DRIVER, 0, 10)
    refit = span("refit", DRIVER, 0.1, 0.9, root, "idle")
    span("publish_weights", ranks[0], 0.11, 0.5, refit, "overhead")
    span("install_weights", GENERATION, 0.5, 0.88, refit, "overhead")
    register = span("register train", DRIVER, 0.9, 0.92, root, "overhead")
    maker.event(
        "registered",
        DRIVER,
        at + 0.92,
        [],
        register,
        samples=samples,
        fields=["input_ids", "prev_logprobs", "advantages"],
        tasks=["prev_lp", "train"],
    )
    rollout = span("rollout", DRIVER, 1, 5, root, "idle")
    rollout_to_tq = span("rollout_to_tq", ROLLOUT, 1.01, 4.99, rollout)
    for turn, start in enumerate((1.1, 3.0)):
        turn_span = span(
            "turn", ROLLOUT, start, start + 1.8, rollout_to_tq, attributes={"rl.turn": turn}
        )
        call = span("generate", ROLLOUT, start, start + 1.5, turn_span, "idle")
        span(
            "generate",
            GENERATION,
            start + 0.02,
            start + 1.48,
            call,
            "productive",
            attributes={"rl.weight_version": number},
        )
        call = span("environment_step", ROLLOUT, start + 1.5, start + 1.8, turn_span, "idle")
        span("step", ENVIRONMENT, start + 1.52, start + 1.78, call, "productive")
    span("flatten", ROLLOUT, 4.8, 4.85, rollout_to_tq, "overhead")
    rollout_put = maker.put(
        ROLLOUT, at + 4.85, at + 4.98, rollout_to_tq, ids, ["input_ids"], 8_000, version=number
    )
    logprobs = span("logprobs", DRIVER, 5, 6.5, root, "idle")
    logprob_puts = []
    for rank in ranks:
        worker_span = span("compute_logprobs", rank, 5.01, 6.4, logprobs)
        maker.get(rank, at + 5.02, at + 5.1, worker_span, ids, ["input_ids"], 8_000, [rollout_put])
        span("forward", rank, 5.1, 6.3, worker_span, "productive")
        logprob_puts.append(
            maker.put(rank, at + 6.3, at + 6.39, worker_span, ids, ["prev_logprobs"], 4_000)
        )
    advantages = span("advantages", DRIVER, 6.5, 6.7, root, "overhead")
    advantage_put = maker.put(DRIVER, at + 6.6, at + 6.69, advantages, ids, ["advantages"], 4_000)
    drop = span("drop", DRIVER, 6.7, 6.75, root, "wasted")
    maker.event("dropped", DRIVER, at + 6.74, dropped_ids, drop, reason="equal_rewards")
    maker.event("cleared", DRIVER, at + 6.75, dropped_ids, drop)
    train = span("train", DRIVER, 6.8, 9.7, root, "idle")
    for rank in ranks:
        worker_span = span("train", rank, 6.81, 9.6, train)
        maker.event(
            "claimed",
            rank,
            at + 6.85,
            trained_ids,
            worker_span,
            task="train",
            fields=["advantages"],
            wait_s=0.04,
        )
        maker.get(
            rank,
            at + 6.9,
            at + 7.0,
            worker_span,
            trained_ids,
            ["input_ids"],
            6_000,
            [rollout_put, *logprob_puts, advantage_put],
        )
        for batch in range(4):
            start = 7.0 + 0.65 * batch
            optimizer_step = span(
                "optimizer_step", rank, start, start + 0.64, worker_span, "productive"
            )
        maker.event(
            "trained", rank, at + 9.5, trained_ids, optimizer_step, task="train", version=number + 1
        )
    clear = span("clear", DRIVER, 9.8, 9.9, root, "overhead")
    settle = span("settle train", DRIVER, 9.81, 9.89, clear, "overhead")
    maker.event("cleared", DRIVER, at + 9.89, [], settle, samples=0)
    return maker.records


def run_of(count=2, **options):
    """Return the records of a run of several consecutive steps."""
    records = Records()
    for number in range(count):
        records.add(grpo_step(number, at=10.5 * number, **options))
    return records


@st.composite
def trees(draw, max_children=25):
    """Return spans of one trace with one root; a child may extend beyond its parent."""
    maker = TraceMaker()
    buckets = st.sampled_from([None, "productive", "overhead", "idle", "wasted", "odd"])
    times = st.integers(0, 40)
    length = draw(st.integers(0, 40))
    spans = [maker.span("grpo.step", DRIVER, 0, length, None, draw(buckets))]
    for _ in range(draw(st.integers(0, max_children))):
        parent = draw(st.sampled_from(spans))
        start = draw(times) - 5
        process = draw(st.sampled_from([DRIVER, ROLLOUT, *POLICIES[:2]]))
        name = draw(st.sampled_from(["a", "b"]))
        end = start + draw(st.integers(0, 30))
        spans.append(maker.span(name, process, start, end, parent, draw(buckets)))
    return Records(spans=draw(st.permutations(spans)))
