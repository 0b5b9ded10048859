"""Pages of runs, traces and comparisons: their words fit what was received."""

import os
import re
import time

from loads import node


def test_retention_does_not_make_the_run_page_inconsistent(job, otlp, monkeypatch):
    job.send(*(otlp.trace(step=step) for step in range(3)))
    store = job.app.state.store
    answered = iter([store.run_steps("run", 10)])
    monkeypatch.setattr(store, "run_steps", lambda *_: next(answered, ([], False)))
    page = job.client.get("/run?run=run").text
    assert "3 traced steps; step duration 1.00 s in" in page


def test_the_default_is_the_newest_run_with_a_finished_step(job, otlp):
    assert "No finished step yet" in job.client.get("/run").text
    job.send(otlp.trace(run="older", step=1))
    job.send(otlp.trace(run="newest", step=1, root=False))
    job.send(otlp.trace(run="newest", step=None, names=["call"]))
    page = job.client.get("/run").text
    [heading] = re.findall('<div id="run-head" data-live>(.*?)</div>', page, re.DOTALL)
    assert "1 traced step; step duration 1.00 s in step 1" in heading
    assert job.client.get("/run?run=unknown").status_code == 404
    assert job.get("run/steps")["run_id"] == "older"
    of_the_newest = job.client.get("/run?run=newest").text
    assert "No finished step in this run" in of_the_newest


def test_a_run_without_traces_is_shown_by_its_metrics(job, otlp, later):
    job.send(otlp.trace(run="older", step=1))
    later(90)
    job.send(otlp.run("started", "metrics"), otlp.curve([0.25, 0.5, 0.75], run="metrics"))
    job.send(otlp.curve([0.5], run="metrics", name="eval_loss", first=3))  # no step
    for query in ("", "?run=metrics"):
        overview = job.client.get(f"/{query}").text
        assert re.search(r"<h1[^>]*>Running: step 2 reported \d+ s ago</h1>", overview)
        assert 'aria-label="Reward over all steps"' in overview
        assert "OTEL_EXPORTER_OTLP_ENDPOINT" not in overview
        page = job.client.get(f"/run{query}").text
        assert "<h1>metrics</h1>" in page
        assert 'data-curve="rl.reward.mean"' in page
        assert "No traces" in page
        links = re.findall(r'<a href="([^"]+)">(?:\d raised alerts|Samples|Engines)</a>', page)
        assert links[2:] == ["/alerts", "/samples?run=metrics", "/engines?run=metrics"]
        assert "last hour, run metrics" in job.client.get(links[-1]).text
    later(1_000)
    assert re.search(r">No task is blocked; step 2 reported 1\d min", job.client.get("/").text)
    job.send(otlp.run("failed", "metrics", at_s=9, error="OSError"))
    overview = job.client.get("/").text
    assert re.search(r">Run failed: OSError; step 2 reported 1\d min [^<]* ago</h1>", overview)
    job.send(otlp.trace(run="older", step=2))
    assert "Running: step 2 finished in 1.00 s" in job.client.get("/").text
    page = job.client.get("/run").text
    assert "2 traced steps" in page
    assert "Newest trace, step 2</a>" in page


def test_the_heading_says_how_reward_and_duration_changed(job, otlp):
    job.send(*(otlp.trace(step=step, seconds=1 + step // 10) for step in range(20)))
    heading = "teps are 100 % slower: 2.00 s in steps 18 to 19, 1.00 s in steps 0 to 1</h1>"
    assert f"<h1>S{heading}" in job.client.get("/run?run=run").text
    for part in range(20):
        job.send(otlp.curve([8.0] * 20, **{"rl.component": f"part {part}"}))
    job.send(otlp.curve([float(step) for step in range(20)]))
    expected = f"<h1>Mean reward rose from 0.5 to 18.5; s{heading}"
    assert expected in job.client.get("/run?run=run").text


def test_an_unfinished_trace_is_in_progress_until_it_is_silent(job, otlp, later):
    job.send(otlp.trace(step=0, root=False))
    assert "in progress" in job.client.get("/traces").text
    later(61)
    page = job.client.get("/traces").text
    assert "no root" in page
    assert "in progress" not in page


def test_a_comparison_names_what_opposed_the_change(job, otlp):
    ids = [os.urandom(16) for _ in range(2)]
    for number, (trace_id, refit_s, train_s) in enumerate(
        zip(ids, (2.0, 0.5), (1.0, 2.0), strict=True)
    ):
        names = ["grpo.step", "refit", "train"]
        seconds = refit_s + train_s
        sent = otlp.trace(trace_id, names=names, step=number, seconds=seconds)
        _, refit, train = sent.resource_spans[0].scope_spans[0].spans
        refit.end_time_unix_nano = refit.start_time_unix_nano + int(refit_s * 1e9)
        train.start_time_unix_nano = train.end_time_unix_nano - int(train_s * 1e9)
        job.send(sent)
    page = job.client.get("/compare", params={"a": ids[0].hex(), "b": ids[1].hex()}).text
    assert "mostly in refit (−1.50 s), against train (+1.00 s)" in page  # noqa: RUF001


def test_the_maximum_of_a_lane_is_not_below_its_newest_value(job):
    now_s = time.time_ns() / 1e9
    for ago_s in range(60, 0, -5):
        used = 90e9 if ago_s == 5 else 20e9
        job.send(node(now_s - ago_s, memory={"used": used, "free": 100e9 - used}))
    page = job.client.get("/engines").text
    [newest] = re.findall(r">memory ([\d.]+) %<", page)
    [maximum] = re.findall(r"memory, max ([\d.]+) %", page)
    assert float(maximum) >= float(newest) > 20
    assert "No engine has reported" in page
