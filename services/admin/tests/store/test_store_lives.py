"""Ids that are used again: lives of a sample are told apart, whatever order events come in."""

import os
import time
from collections import Counter
from itertools import permutations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from dataplane_admin.ingest.events import batch_of_logs
from dataplane_admin.store import Batch, Store, lives
from dataplane_admin.store.models import PlaceModel, SampleModel
from observability.records import Records, decode_logs, decode_traces
from observability.views import steps_of

TRAINED = 100


def write(store, *batches):
    for waiting in [store.submit(batch) for batch in batches]:
        waiting.result(20)


@pytest.mark.parametrize("order", range(24))
@pytest.mark.parametrize("whole", [False, True])
def test_an_id_that_is_used_again_is_as_old_as_the_life_in_which_it_was_trained(
    store, otlp, whole, order
):
    told = [
        otlp.event("put", ["a"], at_s=1, version=1),
        otlp.event("cleared", [] if whole else ["a"], at_s=3),
        otlp.event("put", ["a"], at_s=4, version=7),
        otlp.event("put", ["a"], at_s=5, version=8),
    ]
    for one in list(permutations(told))[order]:
        write(store, one)
    write(
        store,
        otlp.event("cleared", ["a"], at_s=8),
        otlp.event("trained", ["a"], at_s=2, version=5, step=1),
        otlp.event("trained", ["a"], at_s=7, version=9, step=2),
    )
    assert dict(store.staleness("run").counts) == {4: 1, 2: 1}
    assert dict(store.staleness("run", 1).counts) == {2: 1}


@pytest.mark.parametrize("whole", [False, True])
def test_the_staleness_of_a_step_stays_when_later_ones_use_its_ids_again(store, otlp, whole):
    everything, traces = Records(), []
    ids = ["a", "b"]
    for step in range(5):
        spans = otlp.trace(start_s=10 * step, seconds=9, step=step)
        trace_id = spans.resource_spans[0].scope_spans[0].spans[0].trace_id
        traces.append(trace_id)
        everything.add(decode_traces(spans.SerializeToString()))
        for at, name, named in ((1, "put", ids), (2, "trained", ids), (3, "cleared", ids)):
            log = otlp.log(
                name,
                [] if whole and name == "cleared" else named,
                at_s=10 * step + at,
                version=step,
                step=step,
                trace_id=trace_id,
            )
            everything.add(decode_logs(log.SerializeToString()))
            write(store, batch_of_logs(log, otlp.limits, time.time_ns()))
    assert [step.staleness.mean for step in steps_of(everything)] == [0] * 5
    assert dict(store.staleness("run").counts) == {0: 10}
    for trace_id in traces:
        assert dict(store.trace_staleness(trace_id.hex()).counts) == {0: 2}


def test_what_is_trained_before_the_first_put_is_told_is_of_that_put(store, otlp):
    write(
        store,
        otlp.event("trained", ["a"], at_s=1, version=5, step=1),
        otlp.event("put", ["a"], at_s=2, version=4),
        otlp.event("cleared", ["a"], at_s=3),
        otlp.event("put", ["a"], at_s=4, version=8),
    )
    assert dict(store.staleness("run").counts) == {1: 1}


def test_a_life_is_read_without_those_long_before_it(store, otlp, monkeypatch):
    for step in range(60):
        write(
            store,
            otlp.event("put", ["a"], at_s=10 * step, version=step),
            otlp.event("trained", ["a"], at_s=10 * step + 2, version=step, step=step),
            otlp.event("cleared", ["a"], at_s=10 * step + 3),
        )
    read, unpack = [], lives.unpack_keys
    monkeypatch.setattr(lives, "unpack_keys", lambda packed: read.append(1) or unpack(packed))
    assert dict(store.staleness("run", 3).counts) == {0: 3}
    assert len(read) < 10


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with Store.open(f"sqlite:///{tmp_path_factory.mktemp('shared')}/admin.sqlite") as store:
        yield store


@given(
    told=st.lists(st.sampled_from(["put", "put", "cleared", "whole"]), min_size=1, max_size=8),
    order=st.randoms(use_true_random=False),
    commits=st.integers(1, 4),
)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_the_order_of_arrival_each_life_is_found(shared, otlp, told, order, commits):
    run = os.urandom(8).hex()
    there, lived, puts = False, [], []
    events, expected = [], []
    for at, name in enumerate(told, 1):
        if name == "put":
            puts.append(at)
            if not there:
                lived.append(at)
            there = True
            events.append(otlp.event("put", ["a"], at_s=at, version=at, run=run))
        else:
            there = False
            ids = ["a"] if name == "cleared" else []
            events.append(otlp.event("cleared", ids, at_s=at, run=run))
        expected.append(lived[-1] if lived else None)
        trained = {"at_s": at + 0.5, "version": TRAINED, "step": at, "run": run}
        events.append(otlp.event("trained", ["a"], **trained))
    order.shuffle(events)
    for first in range(commits):
        some = [one for batch in events[first::commits] for one in batch.events]
        write(shared, Batch(events=tuple(some)))
    with shared._reader.connect() as connection:
        row = connection.execute(
            select(SampleModel.weight_version, SampleModel.live_ns, PlaceModel.cleared_ns)
            .join(PlaceModel, PlaceModel.id == SampleModel.place_id)
            .where(PlaceModel.run_id == run)
        ).one()
    assert row.weight_version == (lived[-1] if lived else None)
    assert (row.live_ns > row.cleared_ns) == there
    # What was never put before it was trained is what was put first.
    known = [puts[0] if born is None else born for born in expected] if puts else []
    found = shared.staleness(run)
    assert found.counts == Counter(TRAINED - born for born in known)
    assert found.unknown == len(expected) - len(known)
