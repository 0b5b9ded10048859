"""The page of a run is made of one look at its steps, of a run that has some."""

import os
import time

import pytest
from fastapi.testclient import TestClient
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from dataplane_admin.ingest.limits import Limits
from dataplane_admin.ingest.spans import batch_of_spans
from dataplane_admin.pages.run_page import run_page


@pytest.fixture
def app(make_app):
    return make_app()


def tell(app, run, step, *, name="grpo.step", ended=True):
    data = TracesData()
    told = data.resource_spans.add()
    told.resource.attributes.add(key="rl.run_id").value.string_value = run
    now_ns = time.time_ns()
    span = told.scope_spans.add().spans.add(
        trace_id=os.urandom(16),
        span_id=os.urandom(8),
        parent_span_id=b"" if ended else os.urandom(8),
        name=name,
        start_time_unix_nano=now_ns - 1_000_000_000,
        end_time_unix_nano=now_ns,
    )
    if step is not None:
        span.attributes.add(key="rl.step").value.int_value = step
    app.state.store.write(batch_of_spans(data, data.SerializeToString(), Limits()))


def test_steps_that_go_while_the_page_is_made_are_on_all_of_it(app, monkeypatch):
    for step in range(3):
        tell(app, "run", step)
    answers, store = app.state.answers, app.state.store
    read = store.run_steps
    answered = iter([read("run", 10)])
    monkeypatch.setattr(store, "run_steps", lambda *_: next(answered, ([], False)))
    assert run_page(answers, "run").steps.steps == 3


def test_without_a_choice_it_is_the_newest_run_of_which_a_step_has_ended(app):
    client = TestClient(app, base_url="http://localhost")
    assert "No step has ended yet" in client.get("/run").text
    tell(app, "older", 1)
    tell(app, "newest", 1, ended=False)
    tell(app, "newest", None, name="call")
    page = client.get("/run").text
    assert "1 step: 1.00 s in step 1" in page
    assert client.get("/api/v1/run/steps").json()["run_id"] == "older"
    of_the_newest = client.get("/run?run=newest").text
    assert "No step of this run has ended" in of_the_newest


def test_a_step_that_was_done_again_counts_once_wherever_it_is_counted(app):
    for _ in range(2):
        tell(app, "run", 5)
    tell(app, "run", 5, name="grpo.validation")
    client = TestClient(app, base_url="http://localhost")
    assert client.get("/api/v1/run/steps").json()["steps"] == 1
    assert client.get("/api/v1/runs").json()["runs"][0]["steps"] == 1
