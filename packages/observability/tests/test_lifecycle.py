"""Lifecycle events: which, with what, in which parts, and waits that are told while they last."""

from __future__ import annotations

import json
import sys
import threading
import time

import pytest
import torch
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider
from setup_processes import run
from tensordict import TensorDict

from dataplane_core import InMemoryDataPlaneClient, telemetry
from observability import (
    InstrumentedDataPlaneClient,
    LifecycleDataPlaneClient,
    emit,
    lifecycle,
    step_context,
)
from observability.lifecycle import MOST_IDS
from observability.waits import Waits


@pytest.fixture
def log(monkeypatch):
    exporter = InMemoryLogRecordExporter()
    provider = LoggerProvider()
    provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    monkeypatch.setattr(lifecycle, "get_logger_provider", lambda: provider)
    yield Log(exporter)
    provider.shutdown()


class Log:
    def __init__(self, exporter):
        self._exporter = exporter

    @property
    def records(self):
        return [data.log_record for data in self._exporter.get_finished_logs()]

    def facts(self):
        """Event name, ids and attributes, of all."""
        return [
            (
                record.event_name.removeprefix("dataplane."),
                json.loads(record.body),
                facts_of(record),
            )
            for record in self.records
        ]

    def named(self, name):
        return [item for item in self.facts() if item[0] == name]


def facts_of(record):
    return {key.removeprefix("dataplane."): value for key, value in record.attributes.items()}


def batch(count, **fields):
    return TensorDict(fields, batch_size=[count])


@pytest.fixture
def client(log):
    config = {"enabled": True, "impl": "in_memory", "claim_lease_s": 60.0}
    with LifecycleDataPlaneClient(InMemoryDataPlaneClient(config)) as client:
        yield client


def test_each_batch_operation_is_one_event_with_its_samples(client, log):
    client.register_partition("train", ["x"], 2, ["logprob"])
    client.put_samples(["a", "b"], "train", batch(2, x=torch.zeros(2)))
    claim = client.claim_meta("train", "logprob", ["x"], 2)
    client.get_data(claim)
    client.acknowledge(claim.subset([0]))
    client.release(claim.subset([1]))
    client.clear_samples(["a"], "train")
    client.clear_samples([], "train")
    client.withdraw_samples(["c"], "train")
    client.withdraw_samples([], "train")
    client.clear_samples(None, "train")
    events = log.facts()
    waited = events[2][2].pop("wait_s")
    assert waited >= 0
    own = {"partition": "train"}
    claimed = {**own, "samples": 2, "task": "logprob"}
    assert events == [
        ("registered", [], {**own, "samples": 2, "fields": ("x",), "tasks": ("logprob",)}),
        ("put", ["a", "b"], {**own, "samples": 2, "fields": ("x",), "bytes": 8}),
        ("claimed", ["a", "b"], {**claimed, "fields": ("x",), "leased": True}),
        ("read", ["a", "b"], {**own, "samples": 2, "fields": ("x",), "bytes": 8}),
        ("acknowledged", ["a"], {**own, "samples": 1, "task": "logprob"}),
        ("released", ["b"], {**own, "samples": 1, "task": "logprob"}),
        ("cleared", ["a"], {**own, "samples": 1}),
        ("cleared", ["c"], {**own, "samples": 1, "withdrawn": True}),
        ("cleared", [], {**own, "samples": 0}),
    ]


def test_an_operation_that_failed_is_no_event(client, log):
    with pytest.raises(KeyError):
        client.get_samples(["a"], "nowhere", ["x"])
    assert log.records == []


def test_a_claim_that_failed_is_told(client, log):
    client.register_partition("train", ["x"], 1, ["logprob"])
    with pytest.raises(TimeoutError):
        client.claim_meta("train", "logprob", ["x"], 1, timeout_s=0.01)
    [(_, ids, facts)] = log.named("claim_failed")
    assert (ids, facts["task"], facts["error.type"]) == ([], "logprob", "ClaimTimeoutError")


def test_a_hundred_thousand_samples_are_told_in_bounded_parts_that_add_up(client, log):
    count = 100_000
    client.register_partition("train", ["x"], count, [])
    ids = [f"s{number}" for number in range(count)]
    client.put_samples(ids, "train", batch(count, x=torch.zeros(count)))
    parts = log.named("put")
    assert max(len(part_ids) for _, part_ids, _ in parts) == MOST_IDS
    assert [sample_id for _, part_ids, _ in parts for sample_id in part_ids] == ids
    assert [facts["part"] for _, _, facts in parts] == list(range(len(parts)))
    assert {(facts["parts"], facts["samples"]) for _, _, facts in parts} == {(len(parts), count)}


def test_ids_with_odd_characters_pass_unchanged(client, log):
    ids = ["\x1b[31m", "</script>", "ü\u202e", "a\nb", "'; drop table", "x" * 10_000]
    client.register_partition("train", ["x"], len(ids), [])
    client.put_samples(ids, "train", batch(len(ids), x=torch.zeros(len(ids))))
    assert log.named("put")[0][1] == ids


def test_events_carry_run_step_and_version_and_the_span_of_the_operation(log, monkeypatch):
    provider = TracerProvider()
    monkeypatch.setattr(telemetry, "tracer", lambda: provider.get_tracer("test"))
    with InstrumentedDataPlaneClient(InMemoryDataPlaneClient()) as client:
        with step_context("run-1", 3, 2), telemetry.span("step") as step:
            client.register_partition("train", ["x"], 1, [])
        [record] = log.records
        assert (
            facts_of(record).items()
            >= {
                "rl.run_id": "run-1",
                "rl.step": 3,
                "rl.weight_version": 2,
            }.items()
        )
        assert 0 <= time.time_ns() - record.timestamp < 60e9
        assert record.trace_id == step.get_span_context().trace_id
        assert record.span_id not in (0, step.get_span_context().span_id)


def test_a_claim_that_waits_is_told_while_it_waits_and_its_end_names_the_wait(
    client, log, monkeypatch
):
    monkeypatch.setattr(lifecycle, "waits", Waits(patience_s=0.05))
    client.register_partition("train", ["x"], 2, ["logprob"])
    told = threading.Event()
    original = lifecycle.emit

    def emit_and_notice(event, *args, **kwargs):
        original(event, *args, **kwargs)
        if event == "waiting":
            told.set()

    monkeypatch.setattr(lifecycle, "emit", emit_and_notice)
    claimer = threading.Thread(
        target=client.claim_meta, args=("train", "logprob", ["x"], 2), kwargs={"timeout_s": 60}
    )
    claimer.start()
    assert told.wait(30)
    client.put_samples(["a", "b"], "train", batch(2, x=torch.zeros(2)))
    claimer.join(30)
    [(_, _, waiting)] = log.named("waiting")
    [(_, ids, claimed)] = log.named("claimed")
    assert (waiting["task"], waiting["fields"], waiting["samples"]) == ("logprob", ("x",), 2)
    assert waiting["again_s"] == 30.0
    assert claimed["wait"] == waiting["wait"]
    assert ids == ["a", "b"]


def test_a_claim_that_does_not_wait_is_not_told_as_waiting(client, log):
    client.register_partition("train", ["x"], 0, ["logprob"])
    assert client.claim_meta("train", "logprob", ["x"], 1, blocking=False).size == 0
    assert [name for name, _, _ in log.facts()] == ["registered"]


def test_waits_that_end_are_forgotten_and_those_that_last_are_told_in_their_order():
    waits = Waits(patience_s=0.02)
    told, all_told = [], threading.Event()

    def tell(wait):
        told.append(wait.name)
        if len(told) == 3:
            all_told.set()

    begun = [waits.begin(tell) for _ in range(6)]
    for wait in begun[::2]:
        waits.end(wait)
    assert all_told.wait(30)
    assert told == [wait.name for wait in begun[1::2]]
    assert [wait.told for wait in begun] == [False, True] * 3


def test_a_wait_that_lasts_is_told_again_and_again_until_its_end():
    waits = Waits(patience_s=0.01, again_s=0.02)
    heard: list[tuple[str, int]] = []
    enough = threading.Event()

    def tell(wait):
        heard.append((wait.name, wait.since_ns))
        if len(heard) == 8:
            enough.set()

    begun = [waits.begin(tell) for _ in range(2)]
    assert enough.wait(30)
    for wait in begun:
        waits.end(wait)
    with waits._changed:
        assert not waits._told
    assert heard[:8] == [(wait.name, wait.since_ns) for wait in begun] * 4


def test_a_wait_that_is_told_again_much_later_delays_no_other():
    waits = Waits(patience_s=0.01, again_s=3600.0)
    for _ in range(3):
        told = threading.Event()
        waits.begin(lambda wait, told=told: told.set())
        assert told.wait(30)
        time.sleep(0.02)  # until the thread sleeps


def test_only_the_first_that_is_told_of_a_wait_is_exported_at_once(monkeypatch):
    waits = Waits(patience_s=0.01, again_s=0.01)
    told, hurried = threading.Semaphore(0), []
    # The module's name is also that of what it holds.
    module = sys.modules[Waits.__module__]
    monkeypatch.setattr(module, "hurry", lambda: hurried.append(None))
    wait = waits.begin(lambda wait: told.release())
    assert all(told.acquire(timeout=30) for _ in range(5))
    waits.end(wait)
    assert len(hurried) == 1


def test_a_forked_child_tells_of_its_own_waits_whatever_its_parent_was_doing():
    ran = run("""
from observability.waits import Waits
waits = Waits(patience_s=0.05)
parents = waits.begin(lambda wait: None)
inside, over = threading.Event(), threading.Event()

def be_inside():
    with waits._changed:  # as somebody who begins or ends a wait
        inside.set()
        over.wait(30)

threading.Thread(target=be_inside, daemon=True).start()
inside.wait(30)
if (child := os.fork()) == 0:
    signal.alarm(20)  # what hangs must not outlive the test
    told, heard = [], threading.Event()
    own = waits.begin(lambda wait: (told.append(wait.name), heard.set()))
    heard.wait(10)
    waits.end(own)
    waits.end(parents)
    os._exit(0 if told == [own.name] and not parents.told else 1)
tell(child=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
over.set()
""")
    assert ran.told == [{"child": 0}]


def test_no_two_processes_give_a_wait_the_same_name():
    script = """
from observability.waits import waits
tell(name=waits.begin(lambda wait: None).name)
if (child := os.fork()) == 0:
    tell(name=waits.begin(lambda wait: None).name)
    os._exit(0)
os.waitpid(child, 0)
"""
    names = [facts["name"] for _ in range(2) for facts in run(script).told]
    # Without what makes them unique those of pid 1 in a container that was started again repeat.
    assert len({name.rpartition("-")[0] for name in names}) == len(names) == 4
    assert {name.rpartition("-")[2] for name in names} == {"1"}


def test_an_event_without_an_sdk_is_nothing():
    emit("put", "train", ["a"], bytes=1)
