"""Written records are stored exactly once, whatever happens.

These tests use the store: HTTP can neither hold back its queue, nor write records that a database
rejects, nor make its writer fail. So internals are imported.
"""

import os
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine, text

from dataplane_admin.store import (
    Batch,
    QueueFull,
    Store,
    StoreUnavailable,
    WriteRefused,
    WriteUnfinished,
    writer,
)
from dataplane_admin.store import store as store_module

TIMEOUT_S = 20.0
examples = settings(
    max_examples=12,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def spans_of(store):
    rows, _ = store.traces(limit=1000)
    records = [store.trace_records(row.trace_id)[0] for row in rows]
    return sorted(span.span_id for each in records for span in each.spans)


def test_a_rejected_batch_does_not_fail_others(store, batches):
    good = [batches.spans() for _ in range(6)]
    bad = batches.spans()
    bad = replace(bad, chunks=(replace(bad.chunks[0], step=1 << 70),))
    waiting = [store.submit(batch) for batch in [*good[:3], bad, *good[3:]]]
    with pytest.raises(WriteRefused):
        waiting.pop(3).result(TIMEOUT_S)
    assert [future.result(TIMEOUT_S).spans for future in waiting] == [1] * 6
    assert store.totals().spans == 6


def hold(url):
    """Hold the writers' lock until closed."""
    engine = create_engine(url)
    connection = engine.connect()
    if engine.dialect.name == "sqlite":
        connection.connection.dbapi_connection.isolation_level = None
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    else:
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": 0x64617461706C616E})
    return engine, connection


def test_the_size_of_a_batch_includes_attributes_and_configurations(batches, otlp):
    text = "x" * 4_000
    data = otlp.gauge()
    [metric] = data.resource_metrics[0].scope_metrics[0].metrics
    metric.gauge.data_points[0].attributes.add(key="note").value.string_value = text
    assert batches.metrics(data).nbytes > len(text)
    [event] = batches.event("run_started", partition=None).events
    event = replace(event, run=replace(event.run, config={"note": text}))
    assert Batch(events=(event,)).nbytes > len(text)


def test_close_leaves_a_stuck_writer_behind(store, batches, monkeypatch):
    began, ended, apply = threading.Event(), threading.Event(), writer.apply

    def stuck(*arguments):
        began.set()
        ended.wait(TIMEOUT_S)
        return apply(*arguments)

    monkeypatch.setattr(writer, "apply", stuck)
    monkeypatch.setattr(store_module, "_CLOSE_S", 0.1)
    store.submit(batches.spans())
    assert began.wait(TIMEOUT_S)
    closing_s = time.monotonic()
    store.close()
    assert time.monotonic() - closing_s < TIMEOUT_S / 2
    ended.set()


def test_reads_do_not_wait_and_a_full_queue_refuses(url, store, batches, monkeypatch):
    store.write(batches.spans())
    monkeypatch.setattr(writer, "MAX_WAITING", 3)
    engine, connection = hold(url)
    try:
        taken = []

        def submit_many():
            for _ in range(100):
                taken.append(store.submit(batches.spans()))

        with pytest.raises(QueueFull, match="expected at most 3") as refused:
            submit_many()
        assert refused.value.retry_s > 0
        began = time.monotonic()
        assert store.totals().spans == 1
        assert len(store.traces()[0]) == 1
        assert time.monotonic() - began < 2
        assert not any(future.done() for future in taken)
    finally:
        connection.rollback()
        connection.close()
        engine.dispose()
    assert sum(future.result(TIMEOUT_S).spans for future in taken) == len(taken)


def test_a_slow_write_times_out(url, store, batches):
    engine, connection = hold(url)
    try:
        with pytest.raises(WriteUnfinished, match=r"did not write within 1 s, but may still"):
            store.write(batches.spans(), timeout_s=1.0)
        with pytest.raises(StoreUnavailable, match=r"did not write within 0\.2 s$"):
            store.write(batches.spans(), timeout_s=0.2)  # still queued behind the first
    finally:
        connection.rollback()
        connection.close()
        engine.dispose()


def test_a_stopped_writer_fails_queued_and_new_batches(url, batches, monkeypatch):
    def broken(self):
        raise KeyError("a bug")

    monkeypatch.setattr(writer.Writer, "_work", broken)
    monkeypatch.setattr(threading, "excepthook", lambda failed: None)  # not in the test's output
    with Store.open(url) as store:
        writes = (store.write(batches.spans()) for _ in iter(time.monotonic, None))
        until = time.monotonic() + TIMEOUT_S
        with pytest.raises(StoreUnavailable):
            any(time.monotonic() > until for _ in writes)


def test_a_closed_store_refuses_batches(url, batches):
    store = Store.open(url)
    store.close()
    store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        store.write(batches.spans())


def test_the_revision_grows_with_every_commit_and_over_restarts(url, batches):
    with Store.open(url) as store:
        before = store.revision
        store.write(batches.spans())
        between = store.revision
        assert between > before
    with Store.open(url) as store:
        assert store.revision == between
        store.write(Batch())  # as a probe does
        assert store.revision == between


def test_two_services_on_one_database_share_it(url, batches):
    batch = batches.spans()
    with Store.open(url) as first, Store.open(url) as second:
        waiting = [store.submit(batch) for _ in range(5) for store in (first, second)]
        waiting += [store.submit(batches.spans()) for _ in range(5) for store in (first, second)]
        assert sum(done.result(TIMEOUT_S).spans for done in waiting) == 11
        assert first.revision == second.revision
        assert first.totals().traces == second.totals().traces == 11


@examples
@given(data=st.data())
def test_acknowledged_records_are_stored_exactly_once(new_url, batches, otlp, data):
    traces = [os.urandom(16) for _ in range(3)]
    requests = []
    for _ in range(data.draw(st.integers(1, 6), "requests")):
        request = otlp.trace(data.draw(st.sampled_from(traces)), names=["a", "b"])
        for more in data.draw(st.lists(st.sampled_from(traces), max_size=2)):
            request.MergeFrom(otlp.trace(more, names=["c"]))
        ids = data.draw(st.lists(st.sampled_from("abcdef"), unique=True, max_size=4))
        event = batches.event("put", ids, at_s=len(requests))
        requests.append(replace(batches.of(request), events=event.events))
    order = data.draw(st.lists(st.sampled_from(range(len(requests))), max_size=12), "sent")
    url = new_url()
    sent = set()
    store = Store.open(url)
    try:
        for place in order:
            waiting = [store.submit(requests[place]), store.submit(requests[place])]
            for future in waiting:
                future.result(TIMEOUT_S)
            sent.add(place)
            if data.draw(st.booleans(), "restart"):
                store.close()
                store = Store.open(url)
        chunks = [chunk for place in sent for chunk in requests[place].chunks]
        assert store.totals().spans == sum(chunk.spans for chunk in chunks)
        assert len(spans_of(store)) == len(set(spans_of(store))) == store.totals().spans
        assert store.totals().events == len(sent)
        for letter in "abcdef":
            events = sum(letter.encode() in requests[place].events[0].sample_ids for place in sent)
            assert len(store.sample_records(letter, "run").events) == events
    finally:
        store.close()
