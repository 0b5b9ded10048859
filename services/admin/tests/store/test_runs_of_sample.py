"""Runs may use the same sample ids; pages, API and commands show the sample of one run."""

import re

import httpx
import pytest
import torch
from tensordict import TensorDict
from typer.testing import CliRunner
from waiting import until

from dataplane_admin.cli import app
from dataplane_core import InMemoryDataPlaneClient

ID = "000000000_g0"
HOSTILE = "<img src=x onerror=alert(1)>\n\0"


def life(otlp, run, *, at_s=0.0, version=0, partition="train"):
    """Return the lifecycle of `ID` in a run."""
    facts = {"run": run, "partition": partition}
    return (
        otlp.log("registered", at_s=at_s, **facts),
        otlp.log("put", [ID], at_s=at_s + 1, version=version, **facts),
        otlp.log("claimed", [ID], at_s=at_s + 2, task="train", **facts),
        otlp.log("trained", [ID], at_s=at_s + 3, version=version, **facts),
        otlp.log("cleared", at_s=at_s + 4, **facts),
    )


def page_of(job, **query):
    answer = job.client.get("/sample", params={"id": ID, **query})
    assert answer.status_code == 200, answer.text
    return answer.text


def test_a_lifecycle_has_the_hops_of_one_run(job, otlp):
    job.send(*life(otlp, "run-a"), *life(otlp, "run-b", at_s=90_000, version=3))
    for query, run, other in (
        ({}, "run-b", "run-a"),
        ({"run": "run-a"}, "run-a", "run-b"),
        ({"run": "run-b", "partition": "train"}, "run-b", "run-a"),
    ):
        shown = job.get("sample", id=ID, **query)
        assert (shown["run_id"], shown["other_runs"]) == (run, [other])
        assert [hop["name"] for hop in shown["hops"]] == ["put", "claimed", "trained", "cleared"]
        assert {hop["run_id"] for hop in shown["hops"]} == {run}
        assert shown["hops"][-1]["seconds"] == 3.0


def test_the_sample_page_shows_one_run_and_links_to_the_others(job, otlp):
    job.send(*life(otlp, "run-a"), *life(otlp, "run-b", at_s=90_000, version=3))
    page = page_of(job, run="run-a")
    assert "<dt>Training version</dt><dd>0" in page
    assert "0 versions stale" in page
    assert "<dt>Lifetime</dt><dd>3.00 s" in page
    [other] = re.findall(r'this sample id: <a href="([^"]*)">run-b</a>', page)
    assert "<dt>Training version</dt><dd>3" in job.client.get(other.replace("&amp;", "&")).text
    assert "<dt>Training version</dt><dd>3" in page_of(job)


def test_search_hits_lead_to_the_sample_of_their_run(job, otlp):
    for run in ("", HOSTILE, "run-b"):
        job.send(*life(otlp, run))
    hits = job.client.get("/samples", params={"q": ID}).text
    links = re.findall(r'href="(/sample[?][^"]+)"', hits)
    shown = [job.client.get(link.replace("&amp;", "&")) for link in links]
    assert {answer.status_code for answer in shown} == {200}
    runs = [re.findall(r"<dt>Run</dt><dd><a[^>]*>([^<]*)<", answer.text) for answer in shown]
    named = "&lt;img src=x onerror=alert(1)&gt;\\n\N{REPLACEMENT CHARACTER}"
    assert sorted(runs) == [[], [named], ["run-b"]]
    assert job.get("sample", id=ID, run="")["run_id"] == ""


def test_text_and_lifecycle_are_of_the_same_run(job_of, otlp):
    job = job_of(keep_sample_text=True)
    for run, at_s in (("run-b", 0.0), ("run-a", 100.0)):
        body = f'{{"ids": ["{ID}"], "reward": [{at_s}]}}'
        facts = otlp.log("x", run=run, at_s=at_s, partition=None, body=body)
        facts.resource_logs[0].scope_logs[0].log_records[0].event_name = "rl.sample.facts"
        job.send(facts, *life(otlp, run, at_s=200.0 - at_s))
    page = page_of(job)
    assert "run=run-b" in page
    assert "<dt>Reward</dt><dd>0<" in page


def test_a_run_without_the_sample_is_an_error_that_names_its_runs(job, otlp):
    job.send(*life(otlp, "run-a"))
    answer = job.client.get("/api/v1/sample", params={"id": ID, "run": "run-c"})
    assert answer.status_code == 404
    assert f"has sample '{ID}' of run 'run-c'" in answer.json()["detail"]
    assert "runs with this id: 'run-a'" in answer.json()["detail"]


@pytest.mark.parametrize("registered", [True, False])
def test_the_live_state_is_shown_for_its_run_only(job_of, otlp, registered):
    with InMemoryDataPlaneClient({"enabled": True, "impl": "in_memory"}) as plane:
        plane.register_partition("train", ["a"], 4, ["train"])
        plane.put_samples([ID], "train", TensorDict({"a": torch.zeros(1)}, [1]))
        job = job_of(inspector=plane.inspector, poll_s=0.02)
        until(lambda: job.app.state.live.snapshot.partitions)
        events = life(otlp, "run-b", at_s=9)[:2] if not registered else life(otlp, "run-b")[:1]
        job.send(*life(otlp, "run-a"), *events)
        for run, live in ((None, True), ("run-a", False), ("run-b", True)):
            shown = job.get("sample", id=ID, **({} if run is None else {"run": run}))
            assert (shown["live"] is not None) == live
            assert (shown["run_id"], shown["live_run_id"]) == (run or "run-b", "run-b")
        page = page_of(job, run="run-a")
        assert "In the data plane, this id belongs to a sample of run run-b." in page


def test_the_command_shows_the_sample_of_a_run(start, otlp, tmp_path):
    service = start("--db", str(tmp_path / "admin.sqlite"))
    for log in (*life(otlp, "run-a"), *life(otlp, "run-b", at_s=90_000)):
        headers = {"content-type": "application/x-protobuf"}
        body = log.SerializeToString()
        assert httpx.post(f"{service.url}/v1/logs", content=body, headers=headers).is_success
    done = CliRunner().invoke(app, ["sample", ID, "--run", "run-a", "--url", service.url])
    assert f"{ID}, run run-a" in done.stdout
    assert "Other runs with this sample id: 'run-b'; see --run" in done.stdout
    assert done.stdout.count("trained") == 1
