"""Sample lifecycles and staleness, for any order of arrival."""

import itertools
import json
import os
import pkgutil
import time
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from observability.records import Records, decode_logs, decode_traces
from observability.views import lineage_of, steps_of

TRAINED = 100
numbers = itertools.count()
examples = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def staleness(job, run="run", steps=20):
    answer = job.get("staleness", run=run, steps=steps)
    return {int(age): count for age, count in answer["counts"].items()}, answer["unknown"]


def test_samples_are_found_by_id_prefix(job, otlp):
    ids = ["a", "ab", "ab\uffff", "abc", "b", "é1", "é2"]
    ids += ["ab" + "x" * length for length in (33, 34, 35, 546, 547, 700, 800)]
    job.send(otlp.log("put", ids, version=3), otlp.log("put", ["ab"], partition="other"))

    def listed(q, **query):
        return [hit["sample_id"] for hit in job.all("samples", "samples", q=q, **query)]

    assert sorted(listed("ab", limit=2)) == sorted(
        [*(sample_id for sample_id in ids if sample_id.startswith("ab")), "ab"]
    )
    assert listed("é") == ["é1", "é2"]
    for prefix in ("ab" + "x" * length for length in (34, 35, 546, 547, 750)):
        assert listed(prefix) == [sample_id for sample_id in ids if sample_id.startswith(prefix)]
    by_id = sorted([*ids, "ab"], key=str.encode)
    assert listed("", limit=2) == sorted(by_id, key=lambda sample_id: len(sample_id) > 36)
    assert job.get("samples", q="a", limit=1)["samples"][0]["weight_version"] == 3


def test_a_page_of_samples_is_filled_from_its_partition(job, otlp):
    for ids in ([f"s{place:02}" for place in range(60)], [f"s{place:060}" for place in range(60)]):
        job.send(otlp.log("put", ids), otlp.log("put", ids[-2:], partition="other"))
        hits = job.get("samples", q=ids[0][:-2], partition="other", limit=1)
        assert [(hit["sample_id"], hit["partition"]) for hit in hits["samples"]] == [
            (ids[-2], "other")
        ]
        hits = job.get("samples", q=ids[0][:-2], partition="other", cursor=hits["next"])
        assert ([hit["sample_id"] for hit in hits["samples"]], hits["next"]) == ([ids[-1]], None)


any_id = st.text(st.characters(), min_size=1, max_size=30) | st.text(
    st.characters(categories=["Cs", "Cc", "Co"]), min_size=1, max_size=6
)


@settings(examples, max_examples=15)
@given(
    ids=st.lists(any_id, min_size=1, max_size=6, unique=True),
    long=st.sampled_from(["", "x" * 600, "\ud800" * 700, "é" * 2000]),
)
def test_any_id_is_stored_exactly(job, otlp, ids, long):
    ids = list({json.dumps(long + sample_id): long + sample_id for sample_id in ids}.values())
    partition = f"p{next(numbers)}"
    job.send(otlp.log("put", ids, partition=partition, task="\0"))
    shown = {
        hit["sample_id"]
        for hit in job.all("samples", "samples", partition=partition, limit=1000)
        if hit["partition"] == partition
    }
    # A pair of surrogates is one character; a lone surrogate is shown as its escape.
    paired = [json.loads(json.dumps(sample_id)) for sample_id in ids]
    assert shown == {sample_id.encode("utf-8", "backslashreplace").decode() for sample_id in paired}
    for sample_id in paired:
        if all(not "\ud800" <= character <= "\udfff" for character in sample_id):
            [hop] = job.get("sample", id=sample_id, partition=partition)["hops"]
            assert hop["batch"] == len(ids)


def test_a_sample_lifecycle_matches_the_views_of_all_events(job, otlp):
    trace_id = os.urandom(16)
    everything = Records()
    spans = otlp.trace(trace_id, names=["grpo.step", "rollout"])
    everything.add(decode_traces(spans.SerializeToString()))
    job.send(spans)
    for log in (
        otlp.log("put", ["a", "b"], at_s=1, trace_id=trace_id, version=1),
        otlp.log("claimed", ["a"], at_s=2, task="logprobs"),
        otlp.log("cleared", ["b"], at_s=3),
        otlp.log("cleared", at_s=4),
        otlp.log("put", ["a"], at_s=5, partition="other"),
        otlp.log("cleared", at_s=6, partition="third"),
    ):
        everything.add(decode_logs(log.SerializeToString()))
        job.send(log)
    for sample_id in ("a", "b"):
        hops = job.get("sample", id=sample_id)["hops"]
        expected = lineage_of(sample_id, everything)
        assert len(hops) == len(expected) > 1
        for hop, wanted in zip(hops, expected, strict=True):
            for name in ("name", "time_ns", "partition", "task", "stage", "span_id", "seconds"):
                assert hop[name] == getattr(wanted, name), name
    [hop] = job.get("sample", id="a", partition="other")["hops"]
    assert hop["partition"] == "other"


@pytest.mark.parametrize("off_s", [-86_400, 86_400])
def test_a_sample_lifecycle_follows_the_services_clock(job, otlp, off_s):
    def now_s():
        return (time.time_ns() - otlp.start_ns) / 1e9

    sent_s = now_s() + off_s
    job.send(otlp.log("put", ["a"], at_s=now_s(), service="right"))
    job.send(otlp.log("claimed", ["a"], at_s=now_s() + off_s, service="wrong"))
    job.send(otlp.log("cleared", at_s=now_s() + off_s, service="wrong"))
    hops = job.get("sample", id="a")["hops"]
    assert [hop["name"] for hop in hops] == ["put", "claimed", "cleared"]
    assert all(0 <= hop["seconds"] < 60 for hop in hops)
    assert (
        0 <= hops[1]["time_ns"] - otlp.start_ns - sent_s * 1e9 < 60e9
    )  # the sender's clock is shown


def test_staleness_counts_a_sample_once_per_trained_version(job, otlp):
    trained = {"at_s": 3, "version": 4, "step": 5}
    job.send(
        otlp.log("put", ["a", "b"], at_s=1, version=3),
        otlp.log("put", ["a"], at_s=2, version=9),  # another field, later
        otlp.log("put", ["c"], at_s=1),
        otlp.log("trained", ["a", "b", "c"], service="policy 0", **trained),
        otlp.log("trained", ["a", "b", "c"], service="policy 1", **trained),
        otlp.log("trained", ["a"], at_s=4, version=6, step=6),
        otlp.log("trained", ["a"], at_s=4, version=6, step=6, service="policy 1"),
        otlp.log("trained", ["a"], at_s=4, version=7, step=6, run="other"),
    )
    assert staleness(job) == ({1: 2, 3: 1}, 1)
    assert staleness(job, steps=1)[0] == {3: 1}
    assert staleness(job, "unknown") == ({}, 0)


def test_staleness_of_many_samples_covers_the_newest_steps(job, otlp, monkeypatch):
    monkeypatch.setattr("dataplane_admin.store.read_staleness._STEPS", 2)
    monkeypatch.setattr("dataplane_admin.store.read_staleness._MAX_SAMPLES", 5)
    for step in range(10, 17):
        ids = [f"{step}-{place}" for place in range(2)]
        job.send(
            otlp.log("put", ids, at_s=step, version=0),
            otlp.log("trained", ids, at_s=step, version=step, step=step),
        )
    assert staleness(job, steps=100)[0] == {14: 2, 15: 2, 16: 2}
    assert job.get("staleness", run="run", steps=100)["steps_omitted"] == 4
    assert job.get("staleness", run="run", steps=3)["steps_omitted"] == 0


def test_staleness_without_steps_covers_the_newest_samples(job, otlp, monkeypatch):
    monkeypatch.setattr("dataplane_admin.store.read_staleness._EVENTS", 2)
    monkeypatch.setattr("dataplane_admin.store.read_staleness._MAX_SAMPLES", 5)
    trace_id = os.urandom(16)
    job.send(otlp.trace(trace_id))
    for version in range(9):
        ids = [f"{version}-{place}" for place in range(2)]
        job.send(
            otlp.log("put", ids, at_s=version, version=0),
            otlp.log("trained", ids, at_s=version, version=version, trace_id=trace_id),
        )
    assert staleness(job)[0] == {8: 2, 7: 2, 6: 2, 5: 2}
    assert job.trace(trace_id)["staleness"]["mean"] == 6.5


def test_a_step_counts_samples_that_an_earlier_one_put(job, otlp):
    first, second = os.urandom(16), os.urandom(16)
    job.send(
        otlp.trace(first),
        otlp.trace(second),
        otlp.log("put", ["a", "b"], at_s=1, version=3, trace_id=first),
        otlp.log("put", ["c"], at_s=2, version=5, trace_id=second),
        otlp.log("put", ["d"], at_s=2, trace_id=second),
        otlp.log("trained", ["a", "b", "c", "d"], version=5, at_s=3, trace_id=second),
    )
    staleness_of_step = job.trace(second)["staleness"]
    assert staleness_of_step.pop("mean") == pytest.approx(4 / 3)
    assert staleness_of_step == {"minimum": 0, "maximum": 2, "samples": 3, "unknown": 1}
    assert job.trace(first)["staleness"] is None


def test_a_put_without_version_does_not_hide_a_later_one(job, otlp):
    runs = {}
    for number, order in enumerate(itertools.permutations(range(5))):
        run = f"run {number}"
        logs = [
            otlp.log("put", ["a"], at_s=1, run=run),  # its prompt
            otlp.log("put", ["a"], at_s=2, version=3, run=run),  # its response
            otlp.log("put", ["a"], at_s=3, version=5, run=run),  # log-probabilities of the policy
            otlp.log("cleared", ["a"], at_s=5, run=run),
            otlp.log("put", ["a"], at_s=6, run=run),
        ]
        trained = otlp.log("trained", ["a"], at_s=4, version=5, step=1, run=run)
        runs[run] = [*(logs[place] for place in order), trained]
    for requests in zip(*runs.values(), strict=True):  # all runs share a request
        job.send(*requests)
    assert {run: staleness(job, run) for run in runs} == dict.fromkeys(runs, ({2: 1}, 0))
    for name, facts in (
        ("put", {"at_s": 7, "version": 8}),
        ("trained", {"at_s": 8, "version": 9, "step": 2}),
    ):
        job.send(*(otlp.log(name, ["a"], run=run, **facts) for run in runs))
    assert {run: staleness(job, run) for run in runs} == dict.fromkeys(runs, ({1: 1, 2: 1}, 0))


@pytest.mark.parametrize("of_partition", [False, True])
def test_reused_ids_do_not_change_earlier_staleness(job, otlp, of_partition):
    everything, traces, ids = Records(), [], ["a", "b"]
    for step in range(5):
        traces.append(os.urandom(16))
        spans = otlp.trace(traces[-1], start_s=10 * step, seconds=9, step=step)
        everything.add(decode_traces(spans.SerializeToString()))
        job.send(spans)
        for at_s, name in ((1, "put"), (2, "trained"), (3, "cleared")):
            log = otlp.log(
                name,
                [] if of_partition and name == "cleared" else ids,
                at_s=10 * step + at_s,
                version=step,
                step=step,
                trace_id=traces[-1],
            )
            everything.add(decode_logs(log.SerializeToString()))
            job.send(log)
    assert [step.staleness.mean for step in steps_of(everything)] == [0] * 5
    assert staleness(job)[0] == {0: 10}
    for trace_id in traces:
        staleness_of_step = job.trace(trace_id)["staleness"]
        assert (staleness_of_step["mean"], staleness_of_step["samples"]) == (0, 2)


def test_reading_a_life_skips_much_older_ones(job, otlp, monkeypatch):
    for step in range(60):
        job.send(
            otlp.log("put", ["a"], at_s=10 * step, version=step),
            otlp.log("trained", ["a"], at_s=10 * step + 2, version=step, step=step),
            otlp.log("cleared", ["a"], at_s=10 * step + 3),
        )
    read = []
    unpack_keys = pkgutil.resolve_name("dataplane_admin.store.lives.unpack_keys")

    def unpack(packed):
        read.append(1)
        return unpack_keys(packed)

    monkeypatch.setattr("dataplane_admin.store.lives.unpack_keys", unpack)
    assert staleness(job, steps=3)[0] == {0: 3}
    assert len(read) < 10


@settings(examples, max_examples=100)
@given(
    happened=st.lists(
        st.sampled_from(["put", "put", "cleared", "partition cleared"]), min_size=1, max_size=8
    ),
    order=st.randoms(use_true_random=False),
    commits=st.integers(1, 4),
)
def test_lives_do_not_depend_on_the_order_of_arrival(shared, otlp, happened, order, commits):
    run = os.urandom(8).hex()
    there, born, puts, logs, expected = False, [], [], [], []
    for at_s, name in enumerate(happened, 1):
        if name == "put":
            puts.append(at_s)
            if not there:
                born.append(at_s)
            there = True
            logs.append(otlp.log("put", ["a"], at_s=at_s, version=at_s, run=run))
        else:
            there = False
            ids = ["a"] if name == "cleared" else []
            logs.append(otlp.log("cleared", ids, at_s=at_s, run=run))
        expected.append(born[-1] if born else None)
        trained = {"at_s": at_s + 0.5, "version": TRAINED, "step": at_s, "run": run}
        logs.append(otlp.log("trained", ["a"], **trained))
    order.shuffle(logs)
    for first in range(commits):
        if logs[first::commits]:
            shared.send(*logs[first::commits])
    [hit] = [
        sample for sample in shared.all("samples", "samples", limit=1000) if sample["run_id"] == run
    ]
    assert hit["weight_version"] == (born[-1] if born else None)
    # A sample trained before any put belongs to the first put.
    known = [puts[0] if at_s is None else at_s for at_s in expected] if puts else []
    assert staleness(shared, run) == (
        Counter(TRAINED - at_s for at_s in known),
        len(expected) - len(known),
    )
