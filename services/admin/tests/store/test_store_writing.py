"""What is written is there, once, whatever happens."""

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine, text

from dataplane_admin.store import (
    AuditEntry,
    Batch,
    QueueFull,
    Store,
    StoreUnavailable,
    WriteRefused,
    writer,
)

PATIENCE_S = 20.0
numbers = itertools.count()
examples = settings(
    max_examples=12,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def spans_of(store):
    rows, _ = store.traces(limit=1000)
    return sorted(span.span_id for row in rows for span in store.trace_records(row.trace_id).spans)


def test_what_was_written_is_read_back_after_a_restart(url, otlp):
    batch = otlp.spans(names=["grpo.step", "rollout", "train"])
    with Store.open(url) as store:
        assert store.write(batch).spans == 3
        store.write(otlp.event("put", ["a", "b"]))
    with Store.open(url) as store:
        trace_id = batch.chunks[0].trace_id.hex()
        names = [span.name for span in store.trace_records(trace_id).spans]
        assert names == ["grpo.step", "rollout", "train"]
        assert [one.sample_ids for one in store.sample_records("a").events] == [("a",)]


def test_a_retry_changes_nothing(store, otlp):
    batch = replace(otlp.spans(failed=True), events=otlp.event("put", ["a", "b"]).events)
    first = store.write(batch)
    before = store.totals()
    again = store.write(batch)
    assert (first.spans, first.events, first.repeated) == (1, 1, 0)
    assert (again.spans, again.events, again.repeated) == (0, 0, 2)
    after = store.totals()
    assert (after.spans, after.events, after.samples) == (1, 1, 2)
    assert (before.spans, before.events, before.samples) == (1, 1, 2)
    assert store.traces()[0][0].errors == 1
    assert len(store.sample_records("a").events) == 1


def test_a_retry_within_one_group_counts_once(store, otlp):
    batch = replace(otlp.spans(), events=otlp.event("put", ["a"]).events)
    waiting = [store.submit(batch) for _ in range(20)]
    results = [one.result(PATIENCE_S) for one in waiting]
    assert sum(result.spans for result in results) == 1
    assert sum(result.events for result in results) == 1
    assert store.totals().spans == 1


def test_a_trace_comes_together_from_requests_of_several_processes(store, otlp, start_ns):
    trace_id = os.urandom(16)
    store.write(
        otlp.spans(trace_id, names=["rollout_to_tq"], root=False, service="grpo.rollout", step=None)
    )
    row = store.trace(trace_id.hex())
    assert (row.name, row.has_root, row.step, row.processes) == ("rollout_to_tq", False, None, 1)
    store.write(otlp.spans(trace_id, start_s=0.5, seconds=3, step=7, failed=True))
    row = store.trace(trace_id.hex())
    assert (row.name, row.has_root, row.step, row.processes) == ("grpo.step", True, 7, 2)
    assert (row.spans, row.errors, row.run_id) == (2, 1, "run")
    assert (row.start_ns, row.end_ns) == (start_ns, start_ns + 3_500_000_000)


def test_a_batch_that_the_database_refuses_does_not_fail_its_neighbours(store, otlp):
    good = [otlp.spans() for _ in range(6)]
    bad = otlp.spans()
    bad = replace(bad, chunks=(replace(bad.chunks[0], step=1 << 70),))
    waiting = [store.submit(batch) for batch in [*good[:3], bad, *good[3:]]]
    with pytest.raises(WriteRefused):
        waiting.pop(3).result(PATIENCE_S)
    assert [one.result(PATIENCE_S).spans for one in waiting] == [1] * 6
    assert store.totals().spans == 6


def hold(url):
    """Keeps the writers' lock until closed."""
    engine = create_engine(url)
    connection = engine.connect()
    if engine.dialect.name == "sqlite":
        connection.connection.dbapi_connection.isolation_level = None
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    else:
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": 0x64617461706C616E})
    return engine, connection


def test_readers_do_not_wait_for_a_writer_and_a_full_queue_refuses(url, store, otlp, monkeypatch):
    store.write(otlp.spans())
    monkeypatch.setattr(writer, "MOST_WAITING", 3)
    engine, connection = hold(url)
    try:
        taken = []

        def submit_many():
            for _ in range(100):
                taken.append(store.submit(otlp.spans()))

        with pytest.raises(QueueFull, match="expected at most 3") as refused:
            submit_many()
        assert refused.value.retry_s > 0
        began = time.monotonic()
        assert store.totals().spans == 1
        assert len(store.traces()[0]) == 1
        assert time.monotonic() - began < 2
        assert not any(one.done() for one in taken)
    finally:
        connection.rollback()
        connection.close()
        engine.dispose()
    assert sum(one.result(PATIENCE_S).spans for one in taken) == len(taken)


def test_a_write_that_takes_too_long_says_so(url, store, otlp):
    engine, connection = hold(url)
    try:
        with pytest.raises(StoreUnavailable, match=r"not written within 0\.2 s"):
            store.write(otlp.spans(), timeout_s=0.2)
    finally:
        connection.rollback()
        connection.close()
        engine.dispose()


def test_a_writer_that_ended_fails_who_waits_and_who_comes(url, otlp, monkeypatch):
    def broken(self):
        raise KeyError("a bug")

    monkeypatch.setattr(writer.Writer, "_work", broken)
    monkeypatch.setattr(threading, "excepthook", lambda failed: None)  # not on the test's screen
    with Store.open(url) as store:
        writes = (store.write(otlp.spans()) for _ in iter(time.monotonic, None))
        until = time.monotonic() + PATIENCE_S
        with pytest.raises(StoreUnavailable):
            any(time.monotonic() > until for _ in writes)


def test_a_closed_store_takes_nothing(url, otlp):
    store = Store.open(url)
    store.close()
    store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        store.write(otlp.spans())


def test_the_revision_grows_with_every_commit_and_over_restarts(url, otlp):
    with Store.open(url) as store:
        before = store.revision
        store.write(otlp.spans())
        between = store.revision
        assert between > before
    with Store.open(url) as store:
        assert store.revision == between
        store.write(Batch())  # what a probe does
        assert store.revision == between


def test_two_services_on_one_database_share_it(url, otlp):
    batch = otlp.spans()
    with Store.open(url) as one, Store.open(url) as other:
        waiting = [store.submit(batch) for _ in range(5) for store in (one, other)]
        waiting += [store.submit(otlp.spans()) for _ in range(5) for store in (one, other)]
        assert sum(done.result(PATIENCE_S).spans for done in waiting) == 11
        assert one.revision == other.revision
        assert one.totals().traces == other.totals().traces == 11


def test_actions_are_kept_with_the_newest_first(store):
    for number in range(3):
        entry = AuditEntry("somebody", "clear", "train\0", {"ids": [number]}, "done", number)
        store.record_action(entry)
    first = store.audit(limit=2)
    assert [one.parameters for one in first] == [{"ids": [2]}, {"ids": [1]}]
    assert [one.time_ns for one in store.audit(before=first[-1].id)] == [0]


any_id = st.text(st.characters(), max_size=30) | st.text(
    st.characters(categories=["Cs", "Cc", "Co"]), min_size=1, max_size=6
)


@examples
@given(
    ids=st.lists(any_id, min_size=1, max_size=6, unique=True),
    long=st.sampled_from(["", "x" * 600, "\ud800" * 700, "é" * 2000]),
    name=st.text(max_size=8),
)
def test_ids_of_any_text_are_held_exactly(store, otlp, ids, long, name):
    ids = list({json.dumps(long + one): long + one for one in ids}.values())
    partition = f"p{next(numbers)}{name}"
    batch = otlp.event("put", ids, partition=partition, task=f"\0{name}")
    assert store.write(batch).events == 1
    for one in ids:
        events = store.sample_records(one, partition).events
        assert [event.sample_ids for event in events] == [(one,)]
        assert events[0].attributes["dataplane.partition"] == partition
        found = store.find_samples(one, limit=1000)
        told = json.loads(json.dumps(one))  # a pair of surrogates came as one character
        assert told in {row.sample_id for row in found}
        assert all(row.sample_id.startswith(told) for row in found)


@examples
@given(data=st.data())
def test_what_was_acknowledged_is_there_exactly_once_across_retries_and_restarts(
    new_url, otlp, data
):
    traces = [os.urandom(16) for _ in range(3)]
    requests = []
    for _ in range(data.draw(st.integers(1, 6), "requests")):
        request = otlp.trace(data.draw(st.sampled_from(traces)), names=["a", "b"])
        for more in data.draw(st.lists(st.sampled_from(traces), max_size=2)):
            request.MergeFrom(otlp.trace(more, names=["c"]))
        ids = data.draw(st.lists(st.sampled_from("abcdef"), unique=True, max_size=4))
        event = otlp.event("put", ids, at_s=len(requests))
        requests.append(replace(otlp.batch(request), events=event.events))
    order = data.draw(st.lists(st.sampled_from(range(len(requests))), max_size=12), "sent")
    url = new_url()
    sent = set()
    store = Store.open(url)
    try:
        for place in order:
            waiting = [store.submit(requests[place]), store.submit(requests[place])]
            for one in waiting:
                one.result(PATIENCE_S)
            sent.add(place)
            if data.draw(st.booleans(), "restart"):
                store.close()
                store = Store.open(url)
        chunks = [chunk for place in sent for chunk in requests[place].chunks]
        assert store.totals().spans == sum(chunk.spans for chunk in chunks)
        assert len(spans_of(store)) == len(set(spans_of(store))) == store.totals().spans
        assert store.totals().events == len(sent)
        for letter in "abcdef":
            told = sum(letter.encode() in requests[place].events[0].sample_ids for place in sent)
            assert len(store.sample_records(letter).events) == told
    finally:
        store.close()


def test_everything_acknowledged_survives_a_kill(url, otlp):
    program = textwrap.dedent(
        f"""
        import os, sys, importlib.util
        path = {str(Path(__file__).parent / "conftest.py")!r}
        spec = importlib.util.spec_from_file_location("made", path)
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        from dataplane_admin.store import Store
        store = Store.open({url!r})
        otlp = made.Otlp()
        number = 0
        while True:
            batches = [otlp.spans(names=["a"] * 5) for _ in range(8)]
            batches.append(otlp.event("put", [f"s{{number}}-{{i}}" for i in range(50)]))
            number += 1
            waiting = [store.submit(batch) for batch in batches]
            for batch, one in zip(batches, waiting):
                one.result()
                told = [chunk.trace_id.hex() for chunk in batch.chunks] or ["event"]
                sys.stdout.write(f"{{told[0]}}\\n")
                sys.stdout.flush()
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        told = [process.stdout.readline() for _ in range(150)]
        process.send_signal(signal.SIGKILL)
        rest, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    lines = "".join(told) + rest
    acknowledged = lines[: lines.rfind("\n")].split("\n")
    assert len(acknowledged) >= 150, errors
    events = acknowledged.count("event")
    with Store.open(url) as store:
        for trace_id in set(acknowledged) - {"event"}:
            assert len(store.trace_records(trace_id).spans) == 5
        assert store.totals().events >= events
        for number in range(events):
            assert len(store.sample_records(f"s{number}-49").events) == 1
        assert store.write(otlp.spans()).spans == 1
