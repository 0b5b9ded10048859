"""Lifecycle events and their attributes, and reports of open waits.

Imports internals: the `waits` of a process report after a second, and repeat the report after half
a minute, which is too slow for a test.
"""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from opentelemetry._logs import get_logger_provider
from setup_processes import run_script
from tensordict import TensorDict

from dataplane_core import InMemoryDataPlaneClient
from observability import (
    InstrumentedDataPlaneClient,
    LifecycleDataPlaneClient,
    emit,
    span,
    step_context,
)
from observability.middleware.waits import Waits

MAX_IDS = 4096
DEADLINE_S = 30


class Log:
    """Emitted events."""

    def __init__(self, exporter):
        self._exporter = exporter

    @property
    def records(self):
        return [data.log_record for data in self._exporter.get_finished_logs()]

    def named(self, *names):
        """Return name, ids and attributes of the events with these names, or of all."""
        return [
            (name, json.loads(record.body), facts_of(record))
            for record in self.records
            if (name := record.event_name.removeprefix("dataplane.")) in names or not names
        ]


def facts_of(record):
    return {key.removeprefix("dataplane."): value for key, value in record.attributes.items()}


def batch(count):
    return TensorDict({"x": torch.zeros(count)}, batch_size=[count])


@pytest.fixture
def log(sdk):
    return Log(sdk.logs)


@pytest.fixture
def client(log):
    config = {"enabled": True, "impl": "in_memory", "claim_lease_s": 60.0}
    with LifecycleDataPlaneClient(InMemoryDataPlaneClient(config)) as client:
        yield client


def test_a_put_that_acknowledges_is_two_events(client, log):
    client.register_partition("train", ["x"], 2, ["logprob"])
    client.put_samples(["a", "b"], "train", batch(2))
    claim = client.claim_meta("train", "logprob", ["x"], 2)
    # Only these attributes of a claim matter to a client.
    names = ("partition_id", "task_name", "sample_ids", "fields", "extra_info")
    plain = SimpleNamespace(**{name: getattr(claim, name) for name in names})
    client.put_samples(["b"], "train", batch(1), claim=plain, acknowledge=True)
    common = {"partition": "train", "samples": 1}
    assert log.named()[-2:] == [
        ("put", ["b"], {**common, "fields": ("x",), "bytes": 4}),
        ("acknowledged", ["b"], {**common, "task": "logprob"}),
    ]


def test_each_batch_operation_is_one_event_with_its_samples(client, log):
    client.register_partition("train", ["x"], 2, ["logprob"])
    client.put_samples(["a", "b"], "train", batch(2))
    claim = client.claim_meta("train", "logprob", ["x"], 2)
    client.get_data(claim)
    client.acknowledge(claim.subset([0]))
    client.release(claim.subset([1]))
    client.clear_samples(["a"], "train")
    client.clear_samples([], "train")
    client.withdraw_samples(["c"], "train")
    client.withdraw_samples([], "train")
    client.clear_samples(None, "train")
    events = log.named()
    assert events[2][2].pop("wait_s") >= 0
    common = {"partition": "train"}
    claimed = {**common, "samples": 2, "task": "logprob"}
    assert events == [
        ("registered", [], {**common, "samples": 2, "fields": ("x",), "tasks": ("logprob",)}),
        ("put", ["a", "b"], {**common, "samples": 2, "fields": ("x",), "bytes": 8}),
        ("claimed", ["a", "b"], {**claimed, "fields": ("x",), "leased": True}),
        ("read", ["a", "b"], {**common, "samples": 2, "fields": ("x",), "bytes": 8}),
        ("acknowledged", ["a"], {**common, "samples": 1, "task": "logprob"}),
        ("released", ["b"], {**common, "samples": 1, "task": "logprob"}),
        ("cleared", ["a"], {**common, "samples": 1}),
        ("cleared", ["c"], {**common, "samples": 1, "withdrawn": True}),
        ("cleared", [], {**common, "samples": 0}),
    ]


def test_among_failed_operations_only_a_claim_is_an_event(client, log):
    client.register_partition("train", ["x"], 1, ["logprob"])
    assert client.claim_meta("train", "logprob", ["x"], 1, blocking=False).size == 0
    with pytest.raises(KeyError):
        client.get_samples(["a"], "nowhere", ["x"])
    with pytest.raises(TimeoutError):
        client.claim_meta("train", "logprob", ["x"], 1, timeout_s=0.01)
    _, (name, ids, facts) = log.named()
    assert (name, ids, facts["task"]) == ("claim_failed", [], "logprob")
    assert facts["error.type"] == "ClaimTimeoutError"


def test_an_event_of_many_samples_is_several_bounded_parts(client, log):
    count = 100_000
    client.register_partition("train", ["x"], count, [])
    ids = [f"s{number}" for number in range(count)]
    client.put_samples(ids, "train", batch(count))
    parts = log.named("put")
    assert max(len(part_ids) for _, part_ids, _ in parts) == MAX_IDS
    assert [sample_id for _, part_ids, _ in parts for sample_id in part_ids] == ids
    assert [facts["part"] for _, _, facts in parts] == list(range(len(parts)))
    assert {(facts["parts"], facts["samples"]) for _, _, facts in parts} == {(len(parts), count)}


def test_ids_with_unusual_characters_are_unchanged(log):
    ids = ["\x1b[31m", "</script>", "ü\u202e", "a\nb", "'; drop table", "\ud800", "x" * 10_000]
    emit("put", "train", ids)
    assert log.named()[0][1] == ids


def test_events_have_run_step_version_and_span(log):
    with InstrumentedDataPlaneClient(InMemoryDataPlaneClient()) as client:
        with step_context("run-1", 3, 2), span("step") as step:
            client.register_partition("train", ["x"], 1, [])
        [record] = log.records
        step_facts = {"rl.run_id": "run-1", "rl.step": 3, "rl.weight_version": 2}
        assert facts_of(record).items() >= step_facts.items()
        assert 0 <= time.time_ns() - record.timestamp < 60e9
        assert record.trace_id == step.get_span_context().trace_id
        assert record.span_id not in (0, step.get_span_context().span_id)


def test_a_blocked_claim_is_reported_and_its_end_names_the_wait(client, log):
    client.register_partition("train", ["x"], 2, ["logprob"])
    claimer = threading.Thread(
        target=client.claim_meta, args=("train", "logprob", ["x"], 2), kwargs={"timeout_s": 60}
    )
    claimer.start()
    deadline = time.monotonic() + DEADLINE_S
    while not log.named("waiting"):
        assert time.monotonic() < deadline
        claimer.join(0.02)
    client.put_samples(["a", "b"], "train", batch(2))
    claimer.join(DEADLINE_S)
    [(_, _, waiting)] = log.named("waiting")
    [(_, ids, claimed)] = log.named("claimed")
    assert (waiting["task"], waiting["fields"], waiting["samples"]) == ("logprob", ("x",), 2)
    assert waiting["report_every_s"] == 30.0
    assert claimed["wait"] == waiting["wait"]
    assert ids == ["a", "b"]


class Reports:
    """Reports of waits, in order."""

    def __init__(self):
        self.waits = []
        self._new_reports = threading.Semaphore(0)

    def __call__(self, wait):
        self.waits.append(wait)
        self._new_reports.release()

    def wait_for(self, number):
        """Wait for a number of reports; return the wait of each."""
        for _ in range(number):
            assert self._new_reports.acquire(timeout=DEADLINE_S)
        return self.waits[:number]


def test_only_open_waits_are_reported_and_in_order():
    waits, reports = Waits(delay_s=0.3), Reports()
    open_waits = []
    for _ in range(3):
        ended = waits.begin(reports)
        open_waits.append(waits.begin(reports))
        waits.end(ended)
        assert not ended.reported
    assert reports.wait_for(3) == open_waits
    assert all(wait.reported for wait in open_waits)


def test_a_long_wait_is_reported_at_once_and_repeated(sdk, monkeypatch):
    flushes = []
    monkeypatch.setattr(get_logger_provider(), "force_flush", flushes.append)
    waits, reports = Waits(delay_s=0.01, report_every_s=0.02), Reports()
    open_waits = [waits.begin(reports) for _ in range(2)]
    assert reports.wait_for(8) == open_waits * 4
    for wait in open_waits:
        waits.end(wait)
    assert len(flushes) == 2


def test_a_long_report_interval_delays_no_other_wait():
    waits = Waits(delay_s=0.01, report_every_s=3600.0)
    for _ in range(3):
        reports = Reports()
        waits.begin(reports)
        reports.wait_for(1)


def test_a_forked_child_reports_its_own_waits():
    result = run_script("""
from observability.middleware.waits import Waits
waits = Waits(delay_s=0.05)
wait_of_parent = waits.begin(lambda wait: None)
is_locked, may_unlock = threading.Event(), threading.Event()

def hold_lock():
    with waits._changed:  # as a thread that begins or ends a wait
        is_locked.set()
        may_unlock.wait(30)

threading.Thread(target=hold_lock, daemon=True).start()
is_locked.wait(30)
if (child := os.fork()) == 0:
    signal.alarm(20)  # a child that hangs must not outlive the test
    reported, was_reported = [], threading.Event()
    own = waits.begin(lambda wait: (reported.append(wait.name), was_reported.set()))
    was_reported.wait(10)
    waits.end(own)
    waits.end(wait_of_parent)
    os._exit(0 if reported == [own.name] and not wait_of_parent.reported else 1)
report(child=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
may_unlock.set()
""")
    assert result.reports == [{"child": 0}]


def test_waits_of_different_processes_have_different_names():
    script = """
from observability import waits
report(name=waits.begin(lambda wait: None).name)
if (child := os.fork()) == 0:
    report(name=waits.begin(lambda wait: None).name)
    os._exit(0)
os.waitpid(child, 0)
"""
    names = [facts["name"] for _ in range(2) for facts in run_script(script).reports]
    # The random part is needed: a restarted container has a process with pid 1 again.
    assert len({name.rpartition("-")[0] for name in names}) == len(names) == 4
    assert {name.rpartition("-")[2] for name in names} == {"1"}
