"""What is asked is answered from indexes, as the views would from everything."""

import os
import time
from dataclasses import replace

import pytest
from sqlalchemy import event

from dataplane_admin.ingest.events import batch_of_logs
from dataplane_admin.store import Cursor, Store, TraceFilter, read_staleness
from observability.records import Records, decode_logs, decode_traces
from observability.views import life_of


def write(store, *batches):
    for waiting in [store.submit(batch) for batch in batches]:
        waiting.result(20)


def test_traces_are_listed_from_the_newest_in_pages(store, otlp):
    write(store, *(otlp.spans(start_s=number, step=number) for number in range(7)))
    seen, before = [], None
    for _ in range(4):
        rows, before = store.traces(TraceFilter(), before, 2)
        seen += [row.step for row in rows]
    assert seen == [6, 5, 4, 3, 2, 1, 0]
    assert before is None
    assert store.traces(TraceFilter(), Cursor(0), 2) == ([], None)


def test_traces_that_began_at_once_are_listed_once(store, otlp):
    write(store, *(otlp.spans(start_s=1) for _ in range(7)))
    seen, before = [], None
    while True:
        rows, before = store.traces(TraceFilter(), before, 3)
        seen += [row.trace_id for row in rows]
        if before is None:
            break
    assert len(seen) == len(set(seen)) == 7


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (TraceFilter(run_id="a"), [0, 1]),
        (TraceFilter(run_id="a", step=1), [1]),
        (TraceFilter(step=2), [2]),
        (TraceFilter(min_s=2), [1, 2]),
        (TraceFilter(max_s=1.5), [0, 3]),
        (TraceFilter(min_s=2, max_s=2.5), [1]),
        (TraceFilter(error=True), [2]),
        (TraceFilter(error=False), [0, 1, 3]),
        (TraceFilter(name="VALIDATION"), [3]),
        (TraceFilter(name="100%_"), []),
        (TraceFilter(run_id="nobody\0"), []),
    ],
)
def test_traces_are_chosen_by_each_filter(store, otlp, chosen, expected):
    write(
        store,
        otlp.spans(run="a", step=0, start_s=0, seconds=1),
        otlp.spans(run="a", step=1, start_s=1, seconds=2),
        otlp.spans(run="b", step=2, start_s=2, seconds=3, failed=True),
        otlp.spans(run="b", step=3, start_s=3, seconds=1, names=["grpo.validation"]),
    )
    rows, _ = store.traces(chosen)
    assert sorted(row.step for row in rows) == expected


def test_steps_of_a_run_that_ended_come_in_order_of_arrival(store, otlp):
    write(
        store,
        otlp.spans(run="a", step=4, start_s=4, seconds=3),  # before it was resumed from step 3
        otlp.spans(run="a", step=3, start_s=2, seconds=1),
        otlp.spans(run="a", step=4, start_s=1, seconds=2, failed=True),  # its clock was set back
        otlp.spans(run="a", start_s=5, step=None),
        otlp.spans(run="b", step=5, start_s=6),
    )
    rows, older = store.run_steps("a", 10)
    assert [(row.step, row.seconds, row.errors) for row in rows] == [(3, 1, 0), (4, 2, 1)]
    assert not older
    rows, older = store.run_steps("a", 1)
    assert [row.step for row in rows] == [4], "the newest"
    assert older
    assert store.run_steps("nobody\0", 10) == ([], False)


def test_a_step_that_was_done_again_or_that_is_told_of_beside_it_is_one_step(store, otlp):
    write(
        store,
        otlp.spans(run="a", step=1, start_s=0, seconds=3),
        otlp.spans(run="a", step=1, start_s=4, seconds=9, names=["grpo.validation"]),
        otlp.spans(run="a", step=2, start_s=20, seconds=3),
        otlp.spans(run="a", step=1, start_s=30, seconds=4),
        otlp.spans(run="a", step=2, start_s=40, seconds=5, root=False),  # has not ended
        otlp.spans(run="b", step=7, start_s=50, names=["other"]),
        otlp.spans(run="b", step=7, start_s=51, seconds=2, names=["other"]),
    )
    rows, older = store.run_steps("a", 2)
    assert [(row.step, row.seconds) for row in rows] == [(2, 3), (1, 4)]
    assert not older
    assert len(rows) == {run.run_id: run.steps for run in store.runs()}["a"]
    assert [(row.step, row.seconds) for row in store.run_steps("b", 5)[0]] == [(7, 2)]


def test_the_newest_run_of_which_a_step_has_ended_is_known(store, otlp):
    assert store.run_with_steps() is None
    write(store, otlp.spans(run="begun", step=1, start_s=60, root=False))
    assert store.run_with_steps() is None
    write(
        store,
        otlp.spans(run="old", step=1, start_s=1),
        otlp.spans(run="ended", step=1, start_s=5),
        otlp.spans(run="calls", step=None, start_s=70),
    )
    assert store.runs()[0].run_id == "calls"
    assert store.run_with_steps() == "ended"


def test_runs_are_known_by_their_traces_and_events(store, otlp, start_ns):
    write(
        store,
        otlp.spans(run="a", step=0, start_s=1, seconds=2),
        otlp.spans(run="a", step=1, start_s=4, seconds=2),
        otlp.event("put", ["x"], run="b", at_s=9),
    )
    found = [(row.run_id, row.first_ns - start_ns, row.steps) for row in store.runs()]
    assert found == [("b", 9 * 10**9, 0), ("a", 10**9, 2)]


def test_links_are_followed_both_ways(store, otlp):
    put, claim, other = (os.urandom(16) for _ in range(3))
    write(store, otlp.spans(put), otlp.spans(claim, links=[put, put, claim, other]))
    assert store.linked(claim.hex()) == (sorted([put.hex(), other.hex()]), [])
    assert store.linked(put.hex()) == ([], [claim.hex()])


@pytest.mark.parametrize("trace_id", ["", "../../etc/passwd", "0" * 31, "g" * 32, "\0" * 32])
def test_what_is_no_trace_id_finds_nothing(store, trace_id):
    assert store.trace(trace_id) is None
    assert store.trace_records(trace_id) == Records()
    assert store.linked(trace_id) == ([], [])


def test_the_records_of_a_trace_are_its_spans_and_the_events_that_name_it(store, otlp):
    trace_id, span_id = os.urandom(16), os.urandom(8)
    write(
        store,
        otlp.spans(trace_id, span_id=span_id),
        otlp.event("put", ["b", "a"], trace_id=trace_id, span_id=span_id, fields=["x"]),
        otlp.event("put", ["c"], trace_id=os.urandom(16)),
    )
    found = store.trace_records(trace_id.hex())
    assert [span.name for span in found.spans] == ["grpo.step"]
    assert [event.sample_ids for event in found.events] == [("b", "a")]
    assert found.events[0].span_id == span_id.hex()
    assert found.events[0].attributes["dataplane.fields"] == ["x"]


def test_samples_are_found_by_the_beginning_of_their_id_in_pages(store, otlp):
    ids = ["a", "ab", "ab\uffff", "abc", "b", "é1", "é2", "ab" + "x" * 700, "ab" + "x" * 800]
    write(store, otlp.event("put", ids, version=3), otlp.event("put", ["ab"], partition="other"))
    seen, after = [], None
    while rows := store.find_samples("ab", 2, after):
        seen += [row.sample_id for row in rows]
        after = rows[-1].cursor
    assert sorted(seen) == sorted([*(one for one in ids if one.startswith("ab")), "ab"])
    assert [row.sample_id for row in store.find_samples("é", 9)] == ["é1", "é2"]
    assert [row.sample_id for row in store.find_samples("ab" + "x" * 750)] == [ids[-1]]
    assert len(store.find_samples("", 100)) == 10
    assert store.find_samples("a", 1)[0].weight_version == 3


def test_the_life_of_a_sample_is_what_the_views_make_of_everything(store, otlp):
    trace_id = os.urandom(16)
    logs = [
        otlp.log("put", ["a", "b"], at_s=1, trace_id=trace_id, version=1),
        otlp.log("claimed", ["a"], at_s=2, task="logprobs"),
        otlp.log("cleared", ["b"], at_s=3),
        otlp.log("cleared", at_s=4),
        otlp.log("put", ["a"], at_s=5, partition="other"),
        otlp.log("cleared", at_s=6, partition="third"),
    ]
    everything = Records()
    data = otlp.trace(trace_id, names=["grpo.step", "rollout"])
    everything.add(decode_traces(data.SerializeToString()))
    write(store, otlp.batch(data))
    for data in logs:
        everything.add(decode_logs(data.SerializeToString()))
        write(store, batch_of_logs(data, otlp.limits, time.time_ns()))
    for sample_id in ("a", "b"):
        assert life_of(sample_id, store.sample_records(sample_id)) == life_of(sample_id, everything)
    only = store.sample_records("a", "other")
    assert [hop.partition for hop in life_of("a", only)] == ["other"]
    assert store.sample_records("nobody") == Records()


def test_staleness_counts_each_trained_sample_once_a_version(store, otlp):
    write(
        store,
        otlp.event("put", ["a", "b"], at_s=1, version=3),
        otlp.event("put", ["a"], at_s=2, version=9),  # another field, later
        otlp.event("put", ["c"], at_s=1),
        otlp.event("trained", ["a", "b", "c"], at_s=3, version=4, step=5, service="policy 0"),
        otlp.event("trained", ["a", "b", "c"], at_s=3, version=4, step=5, service="policy 1"),
        otlp.event("trained", ["a"], at_s=4, version=6, step=6),
        otlp.event("trained", ["a"], at_s=4, version=6, step=6, service="policy 1"),
        otlp.event("trained", ["a"], at_s=4, version=7, step=6, run="other"),
    )
    found = store.staleness("run")
    assert (dict(found.counts), found.unknown) == ({1: 2, 3: 1}, 1)
    assert dict(store.staleness("run", 1).counts) == {3: 1}
    assert dict(store.staleness("nobody").counts) == {}


def test_staleness_of_very_many_samples_is_that_of_the_newest_steps(store, otlp, monkeypatch):
    monkeypatch.setattr(read_staleness, "_STEPS", 2)
    monkeypatch.setattr(read_staleness, "_MOST_SAMPLES", 5)
    for step in range(10, 17):
        ids = [f"{step}-{place}" for place in range(2)]
        write(
            store,
            otlp.event("put", ids, at_s=step, version=0),
            otlp.event("trained", ids, at_s=step, version=step, step=step),
        )
    found = store.staleness("run", 100)
    assert dict(found.counts) == {14: 2, 15: 2, 16: 2}
    assert found.left_out == 4
    assert store.staleness("run", 3).left_out == 0


def test_staleness_without_steps_is_that_of_the_newest_samples(store, otlp, monkeypatch):
    monkeypatch.setattr(read_staleness, "_EVENTS", 2)
    monkeypatch.setattr(read_staleness, "_MOST_SAMPLES", 5)
    trace_id = os.urandom(16)
    for version in range(9):
        ids = [f"{version}-{place}" for place in range(2)]
        write(
            store,
            otlp.event("put", ids, at_s=version, version=0),
            otlp.event("trained", ids, at_s=version, version=version, trace_id=trace_id),
        )
    newest = {8: 2, 7: 2, 6: 2, 5: 2}
    assert dict(store.staleness("run").counts) == newest
    assert dict(store.trace_staleness(trace_id.hex()).counts) == newest


def test_staleness_of_a_step_counts_samples_that_an_earlier_one_put(store, otlp):
    first, second = os.urandom(16), os.urandom(16)
    write(
        store,
        otlp.event("put", ["a", "b"], at_s=1, version=3, trace_id=first),
        otlp.event("put", ["c"], at_s=2, version=5, trace_id=second),
        otlp.event("put", ["d"], at_s=2, trace_id=second),
        otlp.event("trained", ["a", "b", "c", "d"], version=5, at_s=3, trace_id=second),
    )
    found = store.trace_staleness(second.hex())
    assert (dict(found.counts), found.unknown) == ({2: 2, 0: 1}, 1)
    assert store.trace_staleness(first.hex()).counts == {}


def test_the_first_put_counts_whatever_order_events_arrive_in(store, otlp):
    write(
        store,
        otlp.event("trained", ["a"], at_s=9, version=4, step=1),
        otlp.event("put", ["a"], at_s=5, version=3),
        otlp.event("put", ["a"], at_s=1, version=1),
    )
    assert dict(store.staleness("run").counts) == {3: 1}


def test_a_task_is_known_to_claim_from_its_events(store, otlp):
    write(
        store,
        otlp.event("claimed", ["a"], task="t", fields=["x"]),
        otlp.event("claimed", ["a"], task="t", fields=["x"], run="another"),
        otlp.event("waiting", wait="w", task="waits", fields=["x"]),
    )
    assert store.claimants("train") == {"t"}
    assert store.claimants("other") == set()
    claims, read_to, complete = store.newest_claims(0, 100)
    assert [(one.task, one.claimed) for one in claims] == [
        ("t", True),  # each run
        ("t", True),
        ("waits", False),
    ]
    assert {one.partition for one in claims} == {"train"}
    assert complete
    assert store.newest_claims(read_to, 100) == ([], read_to, True)
    assert store.newest_claims(0, 1)[1:] == (read_to, False)


def test_of_each_task_the_newest_claim_is_read_however_many_it_made_before(store, otlp):
    def fields(event_id, most):
        return {one.task: one.fields for one in store.newest_claims(event_id, most)[0]}

    write(
        store,
        *(otlp.event("claimed", [f"{at}"], at_s=at, task="t", fields=["x"]) for at in range(9)),
        otlp.event("claimed", ["a"], at_s=10, task="t", fields=["x", "y"]),
        otlp.event("waiting", at_s=11, wait="w", task="u", fields=["z"]),
        otlp.event("claimed", ["a"], at_s=11, task="tells none"),
        otlp.event("put", ["b"], at_s=12, fields=["x"]),
    )
    assert fields(0, 100) == {"t": ("x", "y"), "u": ("z",), "tells none": None}
    assert fields(0, 3) == {"u": ("z",), "tells none": None}
    read_to = store.newest_claims(0, 100)[1]
    assert fields(read_to, 100) == {}
    write(store, otlp.event("claimed", ["c"], at_s=13, task="t", fields=["y"]))
    assert fields(read_to, 100) == {"t": ("y",)}


def test_a_task_that_waits_after_it_claimed_has_claimed(store, otlp):
    write(
        store,
        otlp.event("claimed", ["a"], at_s=1, task="t", fields=["x"]),
        otlp.event("waiting", at_s=2, wait="w", task="t", fields=["y"]),
    )
    [found] = store.newest_claims(0, 100)[0]
    assert (found.claimed, found.fields) == (True, ("y",))


def test_newest_events_come_in_the_order_of_their_arrival(store, otlp):
    for number in range(5):
        write(store, otlp.event("put", [str(number)], at_s=9 - number, task=str(number)))
    rows = store.events_since(0, 3)
    assert [row.task for row in rows] == ["2", "3", "4"]
    assert store.events_since(rows[-1].id, 3) == []
    assert rows[0].partition == "train"
    assert rows[0].samples == 1


def test_totals_say_what_there_is_and_what_became_of_the_rest(store, otlp):
    refused = replace(otlp.spans(), refused=(b"1", b"2", b"3"), ignored=(b"1", b"2"))
    write(store, refused, refused, otlp.event("put", ["a", "b"]))
    totals = store.totals()
    assert (totals.traces, totals.spans, totals.events, totals.samples) == (1, 1, 1, 2)
    assert (totals.ingested_spans, totals.repeated, totals.refused, totals.ignored) == (1, 1, 3, 2)
    assert totals.bytes_on_disk > 10_000
    assert abs(totals.oldest_ns - time.time_ns()) < 60 * 10**9


def test_no_answer_reads_events_samples_or_chunks_from_end_to_end(tmp_path, otlp):
    with Store.open(f"sqlite:///{tmp_path}/admin.sqlite") as store:
        trace_id = os.urandom(16)
        write(
            store,
            otlp.spans(trace_id, links=[os.urandom(16)]),
            otlp.event("registered", samples=4, tasks=["t"]),
            otlp.event("put", ["a", "b"], version=1, trace_id=trace_id),
            otlp.event("trained", ["a"], version=1, step=1),
            otlp.event("waiting", wait="w", task="t", fields=["x"]),
            otlp.event("cleared", at_s=99),
        )
        asked = []
        engine = store._database.readers

        @event.listens_for(engine, "before_cursor_execute")
        def remember(_connection, _cursor, statement, parameters, _context, _many):
            if statement.startswith("SELECT"):
                asked.append((statement, parameters))

        store.runs()
        store.traces(TraceFilter(run_id="run", step=1, error=False, name="x"), Cursor(1))
        store.traces()
        store.trace(trace_id.hex())
        store.trace_records(trace_id.hex())
        store.linked(trace_id.hex())
        store.sample_records("a")
        store.sample_records("a", "train")
        store.find_samples("a", 5)
        store.find_samples("", 5, ("a", 1))
        store.wait_records()
        store.claimants("train")
        store.steps("run")
        store.newest_claims(1, 5)
        store.staleness("run")
        store.trace_staleness(trace_id.hex())
        store.events_since(1, 5)
        store.totals()
        event.remove(engine, "before_cursor_execute", remember)
        assert len(asked) > 15
        with engine.connect() as connection:
            for statement, parameters in asked:
                plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
                for step in plan:
                    big = {"events", "samples", "span_chunks", "event_samples"}
                    words = step.detail.split()
                    scanned = words[0] == "SCAN" and words[1] in big
                    # In the order of a key, ended by a limit, is not from end to end.
                    ordered = "LIMIT" in statement and "ORDER BY" in statement
                    assert not scanned or ordered, f"{step.detail}: {statement}"
                    # Events are sorted once an index has narrowed them down; a list never is.
                    if "ORDER BY traces.arrival" in statement:
                        assert "TEMP B-TREE" not in step.detail, f"{step.detail}: {statement}"


def test_a_file_tells_what_room_its_disk_has(url, store):
    room = store.room_bytes()
    assert (room is None) == url.startswith("postgresql")
    assert room is None or room > 0
