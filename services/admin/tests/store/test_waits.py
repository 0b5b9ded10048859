"""Blocked tasks, as read from the events of partitions, and silent processes."""

import os
import re
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from observability.records import Records, decode_logs
from observability.views import why

NEVER_NS = 1 << 62
FEW_EVENTS = "dataplane_admin.store.read_waits._FEW_EVENTS"


def without_duration(sentence):
    """Remove durations from sentences, since they depend on the time of the query."""
    return re.sub(r"blocked for .*?(?= on |: |; |$)", "blocked", sentence)


def waits(job, run="run"):
    return [without_duration(wait["sentence"].partition("; last seen")[0])
            for wait in job.get("why", run=run)]  # fmt: skip


def expected(logs):
    """Return the waits that the views find in all events."""
    everything = Records()
    for log in logs:
        everything.add(decode_logs(log.SerializeToString()))
    return [without_duration(str(wait)) for wait in why(everything, NEVER_NS)]


def steps_of_a_run(otlp, steps):
    """Yield steps that register, put, claim and clear by id; the last is blocked on a field."""
    for step in range(steps):
        at, ids = 10.0 * step, [f"s{step}-{number}" for number in range(6)]
        yield otlp.log("registered", at_s=at, samples=6, tasks=["train"], fields=["x", "y"])
        yield otlp.log("put", ids[:4], at_s=at + 1, fields=["x"], service="rollout")
        if step == steps - 1:
            yield otlp.log("put", ids[:1], at_s=at + 2, fields=["y"], service="policy")
            facts = {"task": "train", "fields": ["x", "y"], "samples": 6}
            yield otlp.log("waiting", at_s=at + 3, wait=f"w{step}", **facts)
            return
        yield otlp.log("waiting", at_s=at + 2, wait=f"w{step}", task="train", fields=["x"])
        yield otlp.log("put", ids[4:], at_s=at + 3, fields=["x"], service="rollout")
        yield otlp.log("claimed", ids, at_s=at + 4, wait=f"w{step}", task="train", fields=["x"])
        yield otlp.log("cleared", ids, at_s=at + 5)


@pytest.mark.parametrize("order", ["reported", "by_process"])
def test_why_matches_the_views_of_all_events(job, otlp, order):
    logs = list(steps_of_a_run(otlp, 4))
    wanted = expected(logs)
    if order == "by_process":  # each exports in its own batches
        logs.sort(key=lambda log: log.resource_logs[0].resource.attributes[0].value.string_value)
    job.send(*logs)
    assert waits(job) == wanted != []


def test_why_reads_only_present_samples_of_an_old_partition(job, otlp, monkeypatch):
    monkeypatch.setattr(FEW_EVENTS, 8)
    logs = [otlp.log("registered", tasks=["train"], samples=1_000)]
    logs.append(otlp.log("put", ["straggler"], at_s=1, fields=["x"]))
    for step in range(40):
        ids = [f"s{step}-{place}" for place in range(4)]
        at = 10.0 + 10 * step
        logs.append(otlp.log("put", ids, at_s=at, fields=["x"]))
        logs.append(otlp.log("claimed", ids, at_s=at + 1, task="train", fields=["x"]))
        logs.append(otlp.log("cleared", ids, at_s=at + 2))
    logs.append(otlp.log("waiting", at_s=500, wait="w", task="train", fields=["x"], samples=9))
    job.send(*logs)
    read = []

    def decode(records):
        read.append(len(decode_logs(records).events))
        return decode_logs(records)

    monkeypatch.setattr("dataplane_admin.store.reader.decode_logs", decode)
    assert waits(job) == expected(logs)
    assert "839 not put yet" in waits(job)[0]
    assert sum(read) < 20, "the wait, the declaration and the put of the straggler, twice"


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "registered",
                "put",
                "put",
                "claimed",
                "released",
                "cleared",
                "withdrawn",
                "partition cleared",
            ]
        ),
        st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True),
        st.sampled_from(["x", "y"]),
        st.sampled_from(["train", "other"]),
    ),
    max_size=25,
)


@given(operations=OPERATIONS, few=st.sampled_from([0, 2_000]), order=st.randoms())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_why_matches_the_views_for_any_history(shared, otlp, operations, few, order):
    run = os.urandom(8).hex()
    logs = []
    for at, (name, places, field, task) in enumerate(operations):
        ids = [str(place) for place in places]
        facts = {"at_s": at, "run": run, "task": task}
        if name == "registered":
            logs.append(otlp.log(name, samples=20, tasks=["train", "other"], **facts))
        elif name == "put":
            logs.append(otlp.log(name, ids, fields=[field], **facts))
        elif name == "partition cleared":
            logs.append(otlp.log("cleared", **facts))
        elif name == "withdrawn":
            logs.append(otlp.log("cleared", ids, withdrawn=True, **facts))
        else:
            # A claim may be reported before its put, since a put is reported when it returns.
            logs.append(otlp.log(name, ids, **facts))
    waiting = {"fields": ["x", "y"], "samples": 4, "at_s": 99, "run": run}
    logs += [
        otlp.log("waiting", wait=task + run, task=task, **waiting) for task in ("train", "other")
    ]
    wanted = sorted(expected(logs))
    order.shuffle(logs)
    shared.send(*logs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FEW_EVENTS, few)
        assert sorted(waits(shared, run)) == wanted


def test_a_wait_ends_even_if_its_end_arrives_first(job, otlp):
    job.send(
        otlp.log("answered", at_s=5, wait="w", partition=None),
        otlp.log("waiting", at_s=1, wait="w", partition=None),
        otlp.log("waiting", at_s=1, wait="w", partition=None, service="another"),
    )
    assert [wait["process"] for wait in job.get("why")] == ["another"]


def test_a_repeated_wait_counts_once_and_ends_once(job, otlp):
    def sent(at_s, service="driver"):
        since_ns = otlp.start_ns + 1_000_000_000
        return wait_of(otlp, service, at_s=at_s, since_ns=since_ns, report_every_s=30)

    job.send(sent(1), sent(31))
    job.send(sent(61), sent(2, "another"))
    assert sorted(wait["process"] for wait in job.get("why")) == ["another", "driver"]
    job.send(otlp.log("claimed", ["a"], at_s=70, wait="w", task="train", service="driver"))
    assert [wait["process"] for wait in job.get("why")] == ["another"]


@pytest.mark.parametrize("few", [0, 2_000])
@pytest.mark.parametrize(
    ("done", "shown"),
    [
        ([("put", "a"), ("cleared", "a")] * 3, "4 not put yet"),
        ([("put", "ab"), ("put", "a"), ("cleared", "b"), ("cleared", "b")], "5 not put yet"),
        ([("cleared", "xy")], "7 not put yet"),
        ([("cleared", "x"), ("put", "x"), ("cleared", "x")], "6 not put yet"),
        ([("cleared", "k")], "7 not put yet"),
        ([("cleared", "e")], "7 not put yet"),
        ([("put", "k"), ("cleared", "k"), ("put", "k"), ("cleared", "k")], "6 not put yet"),
    ],
)  # fmt: skip
def test_cleared_samples_are_subtracted_from_the_declared(job, otlp, monkeypatch, few, done, shown):
    monkeypatch.setattr(FEW_EVENTS, few)
    logs = [
        otlp.log("put", ["k", "e"], at_s=-9, fields=["x"]),
        otlp.log("cleared", ["e"], at_s=-8),
        # Present samples count as put.
        otlp.log("registered", samples=8, tasks=["train"]),
        *(otlp.log(name, ids, at_s=1 + at, fields=["x"]) for at, (name, ids) in enumerate(done)),
        otlp.log("waiting", at_s=90, wait="w", task="train", fields=["x"], samples=4),
    ]
    job.send(*logs)
    assert waits(job) == expected(logs)
    assert shown in waits(job)[0]


@pytest.mark.parametrize("few", [0, 2_000])
@pytest.mark.parametrize(
    "happened",
    [
        # A claim is reported before its put.
        [("registered", ""), ("claimed", "ab"), ("put", "ab"), ("cleared", "a"), ("claimed", "a"),
         ("put", "a")],
        # The entire partition was cleared.
        [("put", "ab"), ("cleared", ""), ("put", "c")],
        # Withdrawn samples count as not put.
        [("registered", ""), ("put", "abcd"), ("cleared", "a"), ("withdrawn", "bc")],
    ],
    ids=["early claim", "entire partition", "withdrawn"],
)  # fmt: skip
def test_only_the_present_state_of_a_partition_counts(job, otlp, monkeypatch, few, happened):
    monkeypatch.setattr(FEW_EVENTS, few)
    logs = []
    for at_s, (name, ids) in enumerate(happened):
        facts = {"at_s": at_s, "task": "train", "fields": ["x"]}
        if name == "registered":
            logs.append(otlp.log(name, samples=8, tasks=["train"], at_s=at_s))
        elif name == "withdrawn":
            logs.append(otlp.log("cleared", ids, withdrawn=True, **facts))
        else:
            logs.append(otlp.log(name, ids, **facts))
    logs.append(otlp.log("waiting", at_s=90, wait="w", task="train", fields=["x", "y"], samples=4))
    job.send(*logs)
    assert waits(job) == expected(logs)


def wait_of(otlp, service, run="run", **facts):
    shown = {"wait": "w", "task": "train", "fields": ["x"]} | facts
    return otlp.log("waiting", service=service, run=run, **shown)


def silent(job):
    """Return the silent processes of waits."""
    return {wait["process"] for wait in job.get("why") if wait["silent_s"] is not None}


def test_metrics_keep_a_blocked_process_from_being_silent(job, otlp, later):
    for service in ("alive", "killed"):
        job.send(wait_of(otlp, service), otlp.gauge(service))
    assert silent(job) == set()
    later(7_200)
    # Only metrics arrive, every minute.
    job.send(otlp.gauge("alive"))
    assert silent(job) == {"killed"}


def test_without_metrics_a_later_run_makes_a_run_silent(job, otlp, later):
    job.send(wait_of(otlp, "driver", run="first"))
    later(7_200)
    # A process that reports only its wait may be stuck or gone.
    assert silent(job) == set()
    job.send(otlp.trace(run="second"))
    assert silent(job) == {"driver"}


def wait_now(otlp, *, clock_s=0.0, service="driver", **facts):
    """Send a wait of a minute, reported now by a host whose clock is ahead by ``clock_s``."""
    now_ns = time.time_ns() + int(clock_s * 1e9)
    times = {"at_s": (now_ns - otlp.start_ns) / 1e9, "since_ns": now_ns - 60 * 10**9}
    return wait_of(otlp, service, **times, **facts)


@pytest.mark.parametrize("clock_s", [50, 3_600, -130, -86_400])
def test_the_duration_of_a_wait_ignores_its_hosts_clock(job, otlp, clock_s):
    job.send(wait_now(otlp, clock_s=clock_s, report_every_s=30))
    [wait] = job.get("why")
    assert abs(wait["seconds"] - 60) <= 5
    assert wait["silent_s"] is None


@pytest.mark.parametrize("clock_s", [0, 3_600, -3_600])
def test_an_unrepeated_wait_is_silent_by_the_services_clock(job_of, url, otlp, later, clock_s):
    job = job_of(store_url=url, silent_after_s=150.0)
    job.send(wait_now(otlp, clock_s=clock_s, report_every_s=30))
    later(100)
    assert silent(job) == set()
    later(100)
    [wait] = job.get("why")
    assert 200 <= wait["silent_s"] <= 215
    assert abs(wait["seconds"] - 60) <= 5
    assert "last seen 3 min 2" in wait["sentence"]
    job.send(wait_now(otlp, clock_s=clock_s, report_every_s=30))
    assert silent(job) == set()


def test_metrics_show_that_a_wait_continues(job, otlp, later):
    job.send(wait_now(otlp), otlp.gauge("driver"))
    later(400)
    assert silent(job) == {"driver"}
    job.send(otlp.gauge("driver"))
    [wait] = job.get("why")
    assert wait["silent_s"] is None
    assert "last seen" not in wait["sentence"]


def test_wait_that_its_live_process_no_longer_repeats_has_ended(job, otlp, later):
    job.send(wait_now(otlp, report_every_s=30), otlp.gauge("driver"))
    later(400)
    assert silent(job) == {"driver"}
    job.send(otlp.gauge("driver"))
    assert job.get("why") == []
    job.send(wait_now(otlp, report_every_s=30))
    assert len(job.get("why")) == 1


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("end", ["finished", "stopped", "failed"])
def test_an_ended_run_blocks_nothing_until_its_resumed_waits(job, otlp, end, late):
    """Killed processes do not report the end of their waits."""
    leftover = wait_now(otlp, service="killed", report_every_s=30)
    ended = otlp.run(end, at_s=1, error="OSError")
    job.send(otlp.trace(), otlp.run("started"), otlp.gauge("killed"))
    job.send(*([ended, leftover] if late else [leftover, ended]), wait_now(otlp, run="another"))
    assert [wait["run_id"] for wait in job.get("why")] == ["another"]
    assert re.search(f">Run {end}[^<]*; step 0 finished", job.client.get("/?run=run").text)
    job.send(otlp.run("started", at_s=2, resumed_from=1))
    assert late or job.get("why", run="run") == []
    job.send(wait_now(otlp, wait="resumed", service="resumed"))
    assert "resumed" in [wait["process"] for wait in job.get("why", run="run")]


def test_waits_of_one_run_do_not_displace_anothers(job, otlp):
    job.send(wait_now(otlp, run="small"))
    job.send(*(wait_now(otlp, run="big", service=f"rollout {rank}") for rank in range(220)))
    counts = [len(job.get("why", run=run)) for run in ("small", "big", "another")]
    assert counts == [1, 100, 0]


def test_a_run_is_found_by_its_full_and_by_its_cut_id(job, otlp):
    run = "team/" + "x" * 600
    job.send(wait_now(otlp, run=run))
    [listed] = [row["run_id"] for row in job.get("runs")["runs"]]
    assert listed != run
    assert len(job.get("why", run=run)) == len(job.get("why", run=listed)) == 1


def test_waits_of_killed_processes_do_not_displace_live_ones(job, otlp, later):
    job.send(wait_of(otlp, "alive"), otlp.gauge("alive"))
    killed = [f"killed {rank}" for rank in range(250)]
    job.send(*(wait_of(otlp, service) for service in killed))
    job.send(*map(otlp.gauge, killed))
    later(7_200)
    job.send(otlp.gauge("alive"))
    waits = job.get("why")
    assert len(waits) == 100
    assert (waits[0]["process"], waits[0]["silent_s"]) == ("alive", None)
