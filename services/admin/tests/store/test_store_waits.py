"""Waits: what is read of their partitions, and who of those that wait goes on."""

import os
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from dataplane_admin.answers import waits as answers
from dataplane_admin.ingest.events import batch_of_logs
from dataplane_admin.store import Batch, SeriesPoint, Store, read_waits
from dataplane_core import PartitionSummary
from observability.records import Records, decode_logs, process_of
from observability.views import why

NEVER_NS = 1 << 62


def write(store, *batches):
    for waiting in [store.submit(batch) for batch in batches]:
        waiting.result(20)


def waits(records):
    return [
        (
            wait.process.service,
            wait.partition,
            (wait.there, wait.ready, wait.unput, wait.claimed),
            [(name, lack.count, lack.examples) for name, lack in wait.lacks.items()],
        )
        for wait in why(records, NEVER_NS)
    ]


def steps_of_a_run(otlp, steps, *, stuck):
    """Every step registers, puts, claims and clears by id; the last one waits for a field."""
    for step in range(steps):
        at, ids = 10.0 * step, [f"s{step}-{number}" for number in range(6)]
        yield otlp.log("registered", at_s=at, samples=6, tasks=["train"], fields=["x", "y"])
        yield otlp.log("put", ids[:4], at_s=at + 1, fields=["x"], service="rollout")
        if stuck and step == steps - 1:
            yield otlp.log("put", ids[:1], at_s=at + 2, fields=["y"], service="policy")
            yield otlp.log(
                "waiting", at_s=at + 3, wait=f"w{step}", task="train", fields=["x", "y"], samples=6
            )
            return
        yield otlp.log("waiting", at_s=at + 2, wait=f"w{step}", task="train", fields=["x"])
        yield otlp.log("put", ids[4:], at_s=at + 3, fields=["x"], service="rollout")
        yield otlp.log("claimed", ids, at_s=at + 4, wait=f"w{step}", task="train", fields=["x"])
        yield otlp.log("cleared", ids, at_s=at + 5)


@pytest.mark.parametrize("order", ["told", "by_process"])
def test_why_it_is_stuck_is_what_the_views_make_of_everything(store, otlp, order):
    logs = list(steps_of_a_run(otlp, 4, stuck=True))
    everything = Records()
    for data in logs:
        everything.add(decode_logs(data.SerializeToString()))
    if order == "by_process":  # each exports in its own batches
        logs.sort(key=lambda one: one.resource_logs[0].resource.attributes[0].value.string_value)
    write(store, *(batch_of_logs(data, otlp.limits, time.time_ns()) for data in logs))
    found = store.wait_records()
    assert waits(found) == waits(everything) != []
    # Steps that are over are not read.
    assert len(found.events) < len(everything.events) / 2


def test_why_reads_of_a_partition_in_use_for_long_only_what_is_there(store, otlp, monkeypatch):
    monkeypatch.setattr(read_waits, "_FEW_EVENTS", 8)
    logs = [otlp.log("registered", tasks=["train"], samples=1_000)]
    logs.append(otlp.log("put", ["straggler"], at_s=1, fields=["x"]))
    for step in range(40):
        ids = [f"s{step}-{place}" for place in range(4)]
        at = 10.0 + 10 * step
        logs.append(otlp.log("put", ids, at_s=at, fields=["x"]))
        logs.append(otlp.log("claimed", ids, at_s=at + 1, task="train", fields=["x"]))
        logs.append(otlp.log("cleared", ids, at_s=at + 2))
    logs.append(otlp.log("waiting", at_s=500, wait="w", task="train", fields=["x"], samples=9))
    everything = Records()
    for data in logs:
        everything.add(decode_logs(data.SerializeToString()))
    write(store, *(batch_of_logs(data, otlp.limits, time.time_ns()) for data in logs))
    read, of_ids = [], read_waits._of_ids
    monkeypatch.setattr(
        read_waits, "_of_ids", lambda *asked: read.extend(asked[2]) or of_ids(*asked)
    )
    found = store.wait_records()
    assert len(read) == 2, "the wait and the put of the straggler"
    assert (
        waits(found) == waits(everything) == [("grpo.driver", "train", (1, 1, 1_000 - 161, 0), [])]
    )
    # And whatever was told last, for whose run it is.
    assert len(found.events) == 3 + 1


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["registered", "put", "put", "claimed", "released", "cleared", "withdrawn", "whole"]
        ),
        st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True),
        st.sampled_from(["x", "y"]),
        st.sampled_from(["train", "other"]),
    ),
    max_size=25,
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with Store.open(f"sqlite:///{tmp_path_factory.mktemp('shared')}/admin.sqlite") as store:
        yield store


@given(operations=OPERATIONS, few=st.sampled_from([0, 2_000]), order=st.randoms())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_happened_why_is_what_the_views_make_of_everything(
    shared, otlp, operations, few, order
):
    run = os.urandom(8).hex()
    logs = []
    for at, (name, places, field, task) in enumerate(operations):
        ids = [str(place) for place in places]
        told = {"at_s": at, "run": run, "task": task}
        if name == "registered":
            logs.append(otlp.log(name, samples=20, tasks=["train", "other"], **told))
        elif name == "put":
            logs.append(otlp.log(name, ids, fields=[field], **told))
        elif name == "whole":
            logs.append(otlp.log("cleared", **told))
        elif name == "withdrawn":
            logs.append(otlp.log("cleared", ids, withdrawn=True, **told))
        else:
            # A claim is perhaps told before the put that it got, which tells when it returns.
            logs.append(otlp.log(name, ids, **told))
    waiting = {"fields": ["x", "y"], "samples": 4, "at_s": 99, "run": run}
    logs += [otlp.log("waiting", wait=one + run, task=one, **waiting) for one in ("train", "other")]
    everything = Records()
    for data in logs:
        everything.add(decode_logs(data.SerializeToString()))
    order.shuffle(logs)
    write(shared, *(batch_of_logs(data, otlp.limits, time.time_ns()) for data in logs))
    before, read_waits._FEW_EVENTS = read_waits._FEW_EVENTS, few
    try:
        found = [one for one in why(shared.wait_records(), NEVER_NS) if one.run_id == run]
    finally:
        read_waits._FEW_EVENTS = before
        ends = [otlp.event("answered", wait=one + run, run=run) for one in ("train", "other")]
        write(shared, *ends)
    assert sorted(map(str, found)) == sorted(map(str, why(everything, NEVER_NS)))


def test_a_wait_is_over_even_if_its_end_arrives_first(store, otlp):
    write(
        store,
        otlp.event("answered", at_s=5, wait="w", partition=None),
        otlp.event("waiting", at_s=1, wait="w", partition=None),
        otlp.event("waiting", at_s=1, wait="w", partition=None, service="another"),
    )
    assert [one[0] for one in waits(store.wait_records())] == ["another"]


def test_of_a_wait_that_is_told_again_the_newest_telling_is_read_and_its_end_ends_it(
    store, otlp, start_ns
):
    def at_ns(seconds):
        return start_ns + seconds * 1_000_000_000

    def told(at_s):
        return wait_of(otlp, "driver", at_s=at_s, since_ns=at_ns(1), again_s=30)

    write(store, told(1), told(31))
    write(store, told(61), wait_of(otlp, "another", at_s=2))
    records = store.wait_records()
    told_by = [
        (one.process.service, one.time_ns) for one in records.events if one.name == "waiting"
    ]
    assert sorted(told_by) == [("another", at_ns(2)), ("driver", at_ns(61))]
    first = why(records, at_ns(62))[0]
    assert (first.process.service, first.since_ns, first.silent_s) == ("driver", at_ns(1), 0)
    [wait] = [one for one in why(records, at_ns(361)) if one.process.service == "driver"]
    assert wait.silent_s == 300
    write(store, otlp.event("claimed", ["a"], at_s=70, wait="w", task="train", service="driver"))
    assert [one[0] for one in waits(store.wait_records())] == ["another"]


@pytest.mark.parametrize("few", [0, 2_000])
def test_a_claim_told_before_the_put_that_it_got_counts(store, otlp, monkeypatch, few):
    monkeypatch.setattr(read_waits, "_FEW_EVENTS", few)
    logs = [
        otlp.log("registered", samples=8, tasks=["train"]),
        otlp.log("claimed", ["a", "b"], at_s=2.999, task="train", fields=["x"]),
        otlp.log("put", ["a", "b"], at_s=3, fields=["x"], service="rollout"),
        otlp.log("cleared", ["a"], at_s=4),
        otlp.log("claimed", ["a"], at_s=4.9, task="train", fields=["x"]),
        otlp.log("put", ["a"], at_s=5, fields=["x"], service="rollout"),
        otlp.log("waiting", at_s=6, wait="w", task="train", fields=["x"]),
    ]
    write(store, *(batch_of_logs(data, otlp.limits, time.time_ns()) for data in logs))
    [(_, _, (there, ready, _, claimed), _)] = waits(store.wait_records())
    assert (there, ready, claimed) == (2, 0, 2)


def test_a_whole_partition_that_was_cleared_holds_nothing(store, otlp):
    write(
        store,
        otlp.event("put", ["a", "b"], at_s=1, fields=["x"]),
        otlp.event("cleared", at_s=2),
        otlp.event("put", ["c"], at_s=3, fields=["x"]),
        otlp.event("waiting", at_s=4, wait="w", task="train", fields=["x", "y"]),
    )
    assert waits(store.wait_records()) == [
        ("grpo.driver", "train", (1, 0, 0, 0), [("y", 1, ("c",))])
    ]


def test_what_was_withdrawn_is_still_to_be_put(store, otlp):
    write(
        store,
        otlp.event("registered", samples=8, tasks=["train"]),
        otlp.event("put", ["a", "b", "c", "d"], at_s=1, fields=["x"]),
        otlp.event("cleared", ["a"], at_s=2),
        otlp.event("cleared", ["b", "c"], at_s=3, withdrawn=True),
        otlp.event("waiting", at_s=4, wait="w", task="train", fields=["x"]),
    )
    assert waits(store.wait_records()) == [("grpo.driver", "train", (1, 1, 6, 0), [])]


@pytest.mark.parametrize(
    ("done", "unput"),
    [
        ([("put", "a"), ("cleared", "a")] * 3, 4),
        ([("put", "ab"), ("put", "a"), ("cleared", "b"), ("cleared", "b")], 5),
        ([("cleared", "xy")], 7),
        ([("cleared", "x"), ("put", "x"), ("cleared", "x")], 6),
        ([("cleared", "k")], 7),
        ([("cleared", "e")], 7),
        ([("put", "k"), ("cleared", "k"), ("put", "k"), ("cleared", "k")], 6),
    ],
)
def test_what_is_left_to_be_put_counts_what_was_there_each_time_that_it_was_cleared(
    store, otlp, done, unput
):
    logs = [
        otlp.log("put", ["k", "e"], at_s=-9, fields=["x"]),
        otlp.log("cleared", ["e"], at_s=-8),
        # What is there counts as put.
        otlp.log("registered", samples=8, tasks=["train"]),
        *(otlp.log(name, ids, at_s=1 + at, fields=["x"]) for at, (name, ids) in enumerate(done)),
        otlp.log("waiting", at_s=90, wait="w", task="train", fields=["x"], samples=4),
    ]
    everything = Records()
    for data in logs:
        everything.add(decode_logs(data.SerializeToString()))
    write(store, *(batch_of_logs(data, otlp.limits, time.time_ns()) for data in logs))
    [(_, _, (_, _, found, _), _)] = waits(store.wait_records())
    assert found == unput
    assert waits(store.wait_records()) == waits(everything)


@pytest.mark.parametrize("last", ["registered", "put", "claimed", "cleared", "trained", "waiting"])
@pytest.mark.parametrize("ahead_s", [0, 3_600])
def test_a_wait_of_a_run_that_is_over_is_never_described_by_what_is_there_now(
    store, otlp, last, ahead_s
):
    summary = PartitionSummary(
        partition_id="train",
        declared=100,
        put=100,
        present=100,
        reserved=0,
        group_size=None,
        fields=(),
        tasks=(),
    )
    samples = {"registered": 100, "waiting": 4}
    told = {"samples": samples[last]} if last in samples else {"ids": ["b"]}
    write(
        store,
        otlp.event("registered", at_s=ahead_s, samples=8, tasks=["train"], run="over"),
        wait_of(otlp, "dead", run="over", at_s=ahead_s + 1, samples=4),
        otlp.event("registered", at_s=50, samples=100, tasks=["train"], run="live"),
        otlp.event(last, at_s=60, run="live", task="train", fields=["x"], wait="of it", **told),
    )
    found = {one.run_id: one for one in why(store.wait_records(), NEVER_NS, [summary])}
    assert (found["over"].there, found["over"].unput) == (0, 8)
    write(store, wait_of(otlp, "alive", run="live", at_s=70))
    found = {one.run_id: one for one in why(store.wait_records(), NEVER_NS, [summary])}
    assert (found["over"].there, found["live"].there) == (0, 100)


def process(service, run="run"):
    """As the events and waits of `otlp` report it."""
    resource = Resource()
    for key, value in (("rl.run_id", run), ("service.name", service)):
        resource.attributes.add(key=key).value.string_value = value
    return process_of(resource)


def point(service, *, name="up"):
    who = process(service)
    return Batch(
        series=(
            SeriesPoint(
                digest=f"{service}{name}".encode(),
                point=os.urandom(8),
                process=who.full_label,
                process_id=bytes.fromhex(who.identity),
                scope="",
                name=name,
                unit="",
                attributes="{}",
                figures={"value": 1.0},
                temporality="newest",
                start_ns=0,
                time_ns=time.time_ns(),
            ),
        )
    )


def later(monkeypatch, seconds):
    """From now on the service's clock is so much further."""
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + int(seconds * 1e9))


def wait_of(otlp, service, run="run", **facts):
    return otlp.event(
        "waiting", wait="w", task="train", fields=["x"], service=service, run=run, **facts
    )


def silent(store, *services, run="run"):
    """Which of these services wait and are silent."""
    found = {identity for identity, _ in store.wait_records(silent_after_s=300).silent}
    known = {process(service, run).identity: service for service in services}
    return {known.get(identity, identity) for identity in found}


def test_who_waits_and_sends_metrics_goes_on_and_who_stopped_sending_them_is_silent(
    store, otlp, monkeypatch
):
    for one in ("alive", "killed"):
        write(store, wait_of(otlp, one), point(one))
    assert silent(store) == set()
    later(monkeypatch, 7_200)
    # Nothing but the metrics that come every minute.
    write(store, point("alive"))
    assert silent(store, "killed", "alive") == {"killed"}


def test_without_metrics_a_run_that_waits_is_silent_once_another_was_told_of_much_later(
    store, otlp, monkeypatch
):
    write(store, wait_of(otlp, "driver", run="first"))
    later(monkeypatch, 7_200)
    # It may be stuck as well as gone.
    assert silent(store) == set()
    write(store, otlp.spans(run="second"))
    assert silent(store, "driver", run="first") == {"driver"}


def wait_now(otlp, *, clock_s=0.0, ago_s=60.0, **facts):
    """Told now by a host whose clock is ahead by so much."""
    now_ns = time.time_ns() + int(clock_s * 1e9)
    told = {"at_s": (now_ns - otlp.start_ns) / 1e9, "since_ns": now_ns - int(ago_s * 1e9)}
    return wait_of(otlp, facts.pop("service", "driver"), **(told | facts))


def shown(store, **asked):
    """Of each wait how long it is and how long nothing was heard of it, in whole seconds."""
    asked.setdefault("silent_after_s", 300.0)
    return [
        (round(one.seconds), None if one.silent_s is None else round(one.silent_s))
        for one in answers.waits(store, None, **asked)
    ]


@pytest.mark.parametrize("clock_s", [50, 3_600, -130, -86_400])
def test_a_wait_lasts_as_long_as_it_does_whatever_its_hosts_clock(store, otlp, clock_s):
    write(store, wait_now(otlp, clock_s=clock_s, again_s=30))
    [(found, silent_s)] = shown(store)
    assert abs(found - 60) <= 5
    assert silent_s is None


@pytest.mark.parametrize("clock_s", [0, 3_600, -3_600])
def test_a_wait_that_is_not_told_again_is_gone_by_the_services_clock(
    store, otlp, monkeypatch, clock_s
):
    write(store, wait_now(otlp, clock_s=clock_s, again_s=30))
    later(monkeypatch, 200)
    assert shown(store)[0][1] is None
    [(_, silent_s)] = shown(store, silent_after_s=150)
    assert 200 <= silent_s <= 210
    later(monkeypatch, 200)
    assert shown(store)[0][1] >= 400
    write(store, wait_now(otlp, clock_s=clock_s, again_s=30))
    assert shown(store)[0][1] is None


def test_metrics_of_a_process_tell_that_its_wait_goes_on(store, otlp, monkeypatch):
    write(store, wait_now(otlp, again_s=30), point("driver"))
    later(monkeypatch, 400)
    assert shown(store)[0][1] is not None
    write(store, point("driver"))
    assert shown(store)[0][1] is None
    assert "not heard of" not in answers.waits(store, None, silent_after_s=300)[0].sentence


def test_of_one_run_its_waits_are_read_however_much_another_one_waits(store, otlp):
    write(store, wait_now(otlp, run="small"))
    write(store, *(wait_now(otlp, run="big", service=f"rollout {rank}") for rank in range(220)))
    assert len(shown(store, run="small")) == 1
    assert len(shown(store, run="big")) == 100
    assert shown(store, run="another") == []


def test_a_run_is_found_by_its_own_id_and_by_the_one_that_is_listed(store, otlp):
    run = "team/" + "x" * 600
    write(store, wait_now(otlp, run=run))
    [listed] = [one.run_id for one in store.runs()]
    assert listed != run
    assert len(shown(store, run=run)) == len(shown(store, run=listed)) == 1


def test_waits_of_killed_processes_never_push_out_those_of_processes_that_go_on(
    store, otlp, monkeypatch
):
    write(store, wait_of(otlp, "alive"), point("alive"))
    write(store, *(wait_of(otlp, f"killed {rank}") for rank in range(250)))
    write(store, *(point(f"killed {rank}") for rank in range(250)))
    later(monkeypatch, 7_200)
    write(store, point("alive"))
    told = {one.process.service for one in store.wait_records().events}
    assert "alive" in told
    assert len(told) == 200
