"""The run page shows one snapshot of the steps of a run with finished steps."""


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
    assert "1 traced step; step duration 1.00 s in step 1" in page
    assert job.get("run/steps")["run_id"] == "older"
    of_the_newest = job.client.get("/run?run=newest").text
    assert "No finished step in this run" in of_the_newest


def test_the_heading_says_how_reward_and_duration_changed(job, otlp):
    job.send(*(otlp.trace(step=step, seconds=1 + step // 10) for step in range(20)))
    heading = "teps are 100 % slower: 2.00 s in steps 18 to 19, 1.00 s in steps 0 to 1</h1>"
    assert f"<h1>S{heading}" in job.client.get("/run?run=run").text
    job.send(otlp.curve([8.0] * 20, **{"rl.component": "format"}))
    job.send(otlp.curve([float(step) for step in range(20)]))
    expected = f"<h1>Reward rose from 0.5 to 18.5; s{heading}"
    assert expected in job.client.get("/run?run=run").text
