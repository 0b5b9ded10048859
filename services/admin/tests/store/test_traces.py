"""Lists of runs, steps and traces on both databases."""

import os
import re

import pytest
from sqlalchemy import Engine, create_engine, event

DAY_S = 86_400.0


def steps(traces):
    return [trace["step"] for trace in traces]


@pytest.mark.parametrize("together", [False, True])
def test_traces_are_listed_newest_first_in_pages(job, otlp, together):
    start_s = (lambda number: 1) if together else float
    job.send(*(otlp.trace(start_s=start_s(number), step=number) for number in range(7)))
    assert steps(job.all("traces", "traces", limit=2)) == [6, 5, 4, 3, 2, 1, 0]


def test_traces_are_selected_by_each_filter(job, otlp):
    job.send(
        otlp.trace(run="a", step=0, start_s=0, seconds=1),
        otlp.trace(run="a", step=1, start_s=1, seconds=2),
        otlp.trace(run="b", step=2, start_s=2, seconds=3, failed=True),
        otlp.trace(run="b", step=3, start_s=3, seconds=1, names=["grpo.validation"]),
    )
    for chosen, expected in (
        ({"run": "a"}, [0, 1]),
        ({"run": "a", "step": 1}, [1]),
        ({"step": 2}, [2]),
        ({"min_s": 2}, [1, 2]),
        ({"max_s": 1.5}, [0, 3]),
        ({"min_s": 2, "max_s": 2.5}, [1]),
        ({"error": True}, [2]),
        ({"error": False}, [0, 1, 3]),
        ({"name": "VALIDATION"}, [3]),
        ({"name": "100%_"}, []),
        ({"run": "unknown\0"}, []),
    ):
        assert sorted(steps(job.get("traces", **chosen)["traces"])) == expected, chosen


def test_traces_are_selected_by_any_of_their_services(job, otlp):
    first, second = os.urandom(16), os.urandom(16)
    job.send(
        otlp.trace(first, step=0, service="api\nserver"),
        otlp.trace(first, step=0, names=["child"], root=False, service="100%\0"),
        otlp.trace(second, step=1, service="apis"),
        otlp.trace(step=2, service=""),
    )
    for number in range(20):
        job.send(
            otlp.trace(second, step=1, names=["child"], root=False, service=f"rank{number:02}")
        )
    for service, expected in (
        ("api\nserver", [0]),
        ("100%\0", [0]),
        ("API", []),
        ("APIS", [1]),
        ("rank14", [1]),
        ("rank1_", []),
        ("rank19", []),  # only the first 16 names are stored
        ("\n", []),
        ("", [0, 1, 2]),
    ):
        assert sorted(steps(job.get("traces", service=service)["traces"])) == expected, service
    [trace] = job.get("traces", step=0)["traces"]
    assert trace["service_names"] == ["100%\ufffd", "api server"]
    assert job.get("traces", step=2)["traces"][0]["service_names"] == []


def ranges(job, run, count=10):
    answer = job.get("run/steps", run=run, ranges=count)["ranges"]
    return [(steps["first_step"], steps["max_s"], steps["failed"]) for steps in answer]


def test_finished_steps_of_a_run_come_in_order_of_arrival(job, otlp):
    job.send(
        otlp.trace(run="a", step=4, start_s=4, seconds=3),  # before it was resumed from step 3
        otlp.trace(run="a", step=3, start_s=2, seconds=1),
        otlp.trace(run="a", step=4, start_s=1, seconds=2, failed=True),  # its clock was set back
        otlp.trace(run="a", start_s=5, step=None),
        otlp.trace(run="b", step=5, start_s=6),
    )
    assert ranges(job, "a") == [(3, 1, 0), (4, 2, 1)]
    assert ranges(job, "unknown\0") == []


def test_a_repeated_step_counts_once(job, otlp):
    job.send(
        otlp.trace(run="a", step=1, start_s=0, seconds=3),
        otlp.trace(run="a", step=1, start_s=4, seconds=9, names=["grpo.validation"]),
        otlp.trace(run="a", step=2, start_s=20, seconds=3),
        otlp.trace(run="a", step=1, start_s=30, seconds=4),
        otlp.trace(run="a", step=2, start_s=40, seconds=5, root=False),  # unfinished
        otlp.trace(run="a", step=3, start_s=45, names=["grpo.validation"]),
        otlp.trace(run="b", step=7, start_s=50, names=["other"]),
        otlp.trace(run="b", step=7, start_s=51, seconds=2, names=["other"]),
    )
    assert ranges(job, "a") == [(2, 3, 0), (1, 4, 0)]
    assert ranges(job, "b") == [(7, 2, 0)]
    assert {run["run_id"]: run["steps"] for run in job.get("runs")["runs"]} == {"a": 2, "b": 1}


@pytest.mark.parametrize("late", [False, True])
def test_steps_that_a_resume_discards_do_not_count(job, otlp, late):
    """One repeated step joins its earlier trace, another begins before the resume is recorded."""
    joined = os.urandom(16)
    first = [otlp.trace(step=step, start_s=step, seconds=9) for step in range(60)]
    first[21] = otlp.trace(joined, step=21, start_s=21, seconds=9)
    resume = otlp.run("started", at_s=100, resumed_from=20)
    again = [otlp.trace(step=step, start_s=79.5 + step, seconds=2) for step in (20, 22, 23, 24)]
    again.append(otlp.trace(joined, step=21, start_s=110, seconds=1))
    killed = otlp.trace(step=25, start_s=70, root=False)
    job.send(*first, killed, otlp.run("started"), otlp.curve([1.0] * 25))
    job.send(*([*again, resume] if late else [resume, *again]))
    [run] = job.get("runs")["runs"]
    answer = job.get("run/steps", run="run", ranges=1)
    assert (run["steps"], answer["steps"], answer["ranges"][0]["last_step"]) == (25, 25, 24)
    [sentence] = re.findall(r"<h1>(.*?)</h1>", job.client.get("/run?run=run").text)
    assert " in steps 22 to 24, 9.00 s in steps 0 to 1" in sentence


def test_the_second_process_of_a_new_start_retains_no_discarded_steps(job, otlp):
    job.send(*(otlp.trace(step=step, start_s=step, seconds=1) for step in range(10)))
    job.send(otlp.run("started"), otlp.run("finished", at_s=50))
    for at_s in (60, 61):  # each process reports the start
        job.send(otlp.run("started", at_s=at_s))
    job.send(otlp.trace(step=0, start_s=62, seconds=1))
    [run] = job.get("runs")["runs"]
    assert (run["steps"], job.get("run/steps", run="run")["steps"]) == (1, 1)


def test_the_newest_run_with_a_finished_step_is_the_default(job, otlp):
    assert job.get("run/steps")["run_id"] == ""
    job.send(
        otlp.trace(run="old", step=1, start_s=1),
        otlp.trace(run="ended", step=1, start_s=5),
        otlp.trace(run="begun", step=1, start_s=60, root=False),
        otlp.trace(run="calls", step=None, start_s=70),
    )
    assert job.get("runs")["runs"][0]["run_id"] == "calls"
    assert job.get("run/steps")["run_id"] == "ended"


def test_runs_are_created_by_traces_and_events(job, otlp):
    job.send(
        otlp.trace(run="a", step=0, start_s=1, seconds=2),
        otlp.trace(run="a", step=1, start_s=4, seconds=2),
        otlp.log("put", ["x"], run="b", at_s=9),
    )
    assert [
        (run["run_id"], run["first_ns"] - otlp.start_ns, run["steps"])
        for run in job.get("runs")["runs"]
    ] == [("b", 9 * 10**9, 0), ("a", 10**9, 2)]


@pytest.mark.parametrize("ahead_s", [DAY_S, -DAY_S])
def test_order_follows_the_clock_of_the_service(job, otlp, ahead_s):
    job.send(otlp.trace(run="wrong", step=1, start_s=ahead_s))
    job.send(otlp.trace(run="right", step=1))
    job.send(otlp.trace(run="right", step=2, start_s=-1))
    traces = job.all("traces", "traces", limit=2)
    assert [(trace["run_id"], trace["step"]) for trace in traces] == [
        ("right", 2),
        ("right", 1),
        ("wrong", 1),
    ]
    assert traces[-1]["start_ns"] == otlp.start_ns + int(ahead_s * 1e9)  # as it was sent
    assert [run["run_id"] for run in job.get("runs")["runs"]] == ["right", "wrong"]
    assert job.get("run/steps")["run_id"] == "right"
    job.send(otlp.log("put", ["a"], run="wrong", at_s=-ahead_s))
    assert [run["run_id"] for run in job.get("runs")["runs"]] == ["wrong", "right"]


def test_links_are_followed_both_ways(job, otlp):
    put, claim, other = (os.urandom(16) for _ in range(3))
    job.send(otlp.trace(put), otlp.trace(claim, links=[put, put, claim, other]))
    assert job.trace(claim)["links_out"] == sorted([put.hex(), other.hex()])
    assert job.trace(put)["links_in"] == [claim.hex()]
    assert job.trace(put)["links_out"] == job.trace(claim)["links_in"] == []


def test_a_trace_joins_spans_of_several_processes(job, otlp):
    trace_id = os.urandom(16)
    job.send(otlp.trace(trace_id, names=["to_tq"], root=False, service="grpo.rollout", step=None))
    trace = job.trace(trace_id)
    facts = ("name", "has_root", "step", "processes")
    assert [trace[name] for name in facts] == ["to_tq", False, None, 1]
    job.send(otlp.trace(trace_id, start_s=0.5, seconds=3, step=7, failed=True))
    trace = job.trace(trace_id)
    assert [trace[name] for name in facts] == ["grpo.step", True, 7, 2]
    assert [trace[name] for name in ("spans", "errors", "run_id")] == [2, 1, "run"]
    times = [trace[name] - otlp.start_ns for name in ("start_ns", "end_ns")]
    assert times == [0, 3_500_000_000]


def test_a_trace_has_the_events_that_name_it(job, otlp):
    trace_id, span_id = os.urandom(16), os.urandom(8)
    job.send(
        otlp.trace(trace_id, span_id=span_id),
        otlp.log("put", ["b", "a"], trace_id=trace_id, span_id=span_id, fields=["x"]),
        otlp.log("put", ["c"], trace_id=os.urandom(16)),
    )
    trace = job.trace(trace_id)
    assert [row["name"] for row in trace["rows"]] == ["grpo.step"]
    [event_of_it] = trace["events"]
    assert (event_of_it["examples"], event_of_it["span_id"]) == (["b", "a"], span_id.hex())


def test_a_trace_has_its_earliest_events_and_counts_the_rest(job, otlp):
    trace_id, last = os.urandom(16), os.urandom(8)
    job.send(
        otlp.trace(trace_id, span_id=last),
        *(
            otlp.log("put", [f"s{at}"], at_s=at / 1e3, trace_id=trace_id)
            for at in range(519, -1, -1)
        ),
        otlp.log("got", ["late"], at_s=0.9, trace_id=trace_id, span_id=last),
    )
    trace = job.trace(trace_id)
    assert [event["examples"] for event in trace["events"]] == [[f"s{at}"] for at in range(500)]
    assert trace["events_omitted"] == 21
    page = {
        span: job.client.get("/trace", params={"id": trace_id.hex(), "span": span}).text
        for span in (last.hex(), os.urandom(8).hex(), "x\0", "")
    }
    assert {span for span, text in page.items() if ">late</a>" in text} == {last.hex()}


def test_totals_count_stored_and_rejected_records(job, otlp):
    refused = otlp.trace()
    refused.resource_spans[0].scope_spans[0].spans.add(trace_id=b"short")
    ignored = otlp.log("put")
    ignored.resource_logs[0].scope_logs[0].log_records[0].event_name = "another.event"
    for _ in range(2):
        job.send(refused, ignored)
    job.send(otlp.log("put", ["a", "b"]))
    counts = job.counts()
    assert [counts[name] for name in ("traces", "spans", "events", "samples")] == [1, 1, 1, 2]
    assert [counts[name] for name in ("repeated", "refused", "ignored")] == [1, 1, 1]
    assert counts["ingested"] == {"spans": 1, "events": 1}
    assert counts["nbytes"] > 10_000


def test_no_query_scans_a_large_table(tmp_path, job_of, otlp):
    path = f"sqlite:///{tmp_path}/plans.sqlite"
    job = job_of(store_url=path)
    trace_id = os.urandom(16)
    job.send(
        otlp.trace(trace_id, links=[os.urandom(16)]),
        otlp.log("registered", samples=4, tasks=["t"]),
        otlp.log("put", ["a", "b"], version=1, trace_id=trace_id),
        otlp.log("trained", ["a"], version=1, step=1, trace_id=trace_id),
        otlp.log("waiting", wait="w", task="t", fields=["x"]),
        otlp.log("cleared", at_s=99),
    )
    selects = []

    def remember(_connection, _cursor, statement, parameters, _context, _many):
        if statement.startswith("SELECT"):
            selects.append((statement, parameters))

    event.listen(Engine, "before_cursor_execute", remember)
    try:
        for path_of, query in (
            ("runs", {}),
            ("run/steps", {}),
            ("traces", {"run": "run", "step": 1, "error": False, "name": "x", "limit": 1}),
            ("traces", {}),
            ("trace", {"id": trace_id.hex()}),
            ("trace/compare", {"a": trace_id.hex(), "b": trace_id.hex()}),
            ("sample", {"id": "a"}),
            ("sample", {"id": "a", "partition": "train"}),
            ("samples", {"q": "a", "limit": 5}),
            ("samples", {"limit": 1}),
            ("why", {}),
            ("staleness", {}),
            ("status", {}),
            ("audit", {}),
        ):
            job.get(path_of, **query)
        job.app.state.store.generator_events("train")
    finally:
        event.remove(Engine, "before_cursor_execute", remember)
    assert len(selects) > 15
    big = {"events", "samples", "span_chunks", "event_samples", "trace_logs"}
    with create_engine(path).connect() as connection:
        for statement, parameters in selects:
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
            for row in plan:
                words = row.detail.split()
                # A scan in key order without a filter reads no more rows than its limit.
                ordered = "LIMIT" in statement and "ORDER BY" in statement
                ordered = ordered and "WHERE" not in statement
                scanned = words[0] == "SCAN" and words[1] in big
                assert not scanned or ordered, f"{row.detail}: {statement}"
                # Lists are read in the order of an index. Only events and the steps of a run are
                # sorted, after an index has selected them.
                if "ORDER BY traces.arrival" in statement and "OVER (" not in statement:
                    assert "TEMP B-TREE" not in row.detail, f"{row.detail}: {statement}"


def test_a_process_that_works_in_other_traces_is_not_idle(job, otlp):
    step, generator = os.urandom(16), "grpo.generation"
    job.send(
        with_bucket(otlp.trace(step, start_s=10, seconds=10), "idle"),
        with_bucket(
            otlp.trace(step, root=False, start_s=10, seconds=1, service=generator), "overhead"
        ),
        *(
            with_bucket(
                otlp.trace(run=run, step=None, start_s=start_s, seconds=3, service=generator),
                "productive",
            )
            for run, start_s in (("run", 5), ("run", 9), ("run", 11.5), ("run", 25), ("other", 15))
        ),
    )
    times = {time["process"]: time for time in job.trace(step)["process_times"]}
    assert times[generator]["busy_elsewhere"] == [[1.0, 4.5]]
    assert times[generator]["elsewhere_s"] == 3.5
    assert times[generator]["bubble_s"] == 5.5
    assert times["grpo.driver"]["elsewhere_s"] == 0


def test_bubbles_are_unknown_if_too_many_traces_overlap(job, otlp):
    step = os.urandom(16)
    others = [with_bucket(otlp.trace(step=None, names=["generate"] * 900), "idle") for _ in "12345"]
    job.send(with_bucket(otlp.trace(step), "overhead"), *others)
    trace = job.trace(step)
    assert trace["others_omitted"]
    assert [time["bubble_s"] for time in trace["process_times"]] == [None]
    page = job.client.get("/trace", params={"id": step.hex()}).text
    assert "Bubble times are unknown" in page
    assert "bubble-words" not in page


def with_bucket(traces, bucket):
    for span in traces.resource_spans[0].scope_spans[0].spans:
        span.attributes.add(key="rl.bucket").value.string_value = bucket
    return traces
