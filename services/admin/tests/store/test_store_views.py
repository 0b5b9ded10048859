"""What a real run exports is shown from the store as from an in-memory receiver."""

import contextlib
import os
import threading
import time
import urllib.request

import pytest
import torch
import uvicorn
from fastapi import FastAPI
from opentelemetry import trace
from tensordict import TensorDict

from dataplane_admin.ingest import Limits, router
from dataplane_core import InMemoryDataPlaneClient, telemetry
from observability import InstrumentedDataPlaneClient, emit
from observability.receiver import Receiver
from observability.records import Records
from observability.setup import setup
from observability.views import critical_path, life_of, steps_of, why

PATIENCE_S = 20.0
NEVER_NS = 1 << 62


class Tee:
    """An ASGI application that passes every export request on to a receiver as well."""

    def __init__(self, app, endpoint):
        self.app = app
        self.endpoint = endpoint

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = bytearray()
        messages = []
        while True:
            message = await receive()
            messages.append(message)
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        kept = {b"content-type", b"content-encoding"}
        headers = {key.decode(): value.decode() for key, value in scope["headers"] if key in kept}
        request = urllib.request.Request(self.endpoint + scope["path"], bytes(body), headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            assert answer.status == 200
        left = iter(messages)

        async def again():
            return next(left)

        await self.app(scope, again, send)


@contextlib.contextmanager
def serve(app):
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + PATIENCE_S
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)


def run_steps(count):
    """Steps of a run in one process; the last one waits for a field that nobody writes."""
    tracer = trace.get_tracer("test")
    batch = TensorDict({"x": torch.arange(4)}, batch_size=[4])
    with InMemoryDataPlaneClient() as inner:
        client = InstrumentedDataPlaneClient(inner)
        for step in range(count):
            ids = [f"s{step}-{number}" for number in range(4)]
            with (
                telemetry.step_context("the-run", step, weight_version=step),
                tracer.start_as_current_span("grpo.step", attributes={"rl.step": step}),
            ):
                client.register_partition("train", ["x", "y"], 4, ["train"])
                with tracer.start_as_current_span("rollout"):
                    client.put_samples(ids, "train", batch)
                with tracer.start_as_current_span("train"):
                    client.claim_meta("train", "train", ["x"], 4, dp_rank=0)
                    client.get_samples(ids, "train", ["x"])
                    emit("trained", "train", ids, task="train")
                if step < count - 1:
                    client.clear_samples(ids, "train")
        with telemetry.step_context("the-run", count, weight_version=count):
            emit(
                "waiting", "train", samples=4, wait="w", since_ns=1, task="other", fields=["x", "y"]
            )


def normal(records):
    """In one order, whatever the order of arrival."""
    return Records(
        sorted(records.spans, key=lambda span: (span.start_ns, span.span_id)),
        sorted(records.events, key=lambda event: (event.time_ns, event.name, event.span_id)),
    )


def test_the_views_show_from_the_store_what_they_show_from_memory(store):
    app = FastAPI()
    app.include_router(router(store, Limits()))
    with Receiver() as receiver, serve(Tee(app, receiver.endpoint)) as endpoint:
        exported = setup("grpo.driver", run_id="the-run", endpoint=endpoint)
        try:
            run_steps(3)
        finally:
            exported.shutdown()
        told = receiver.snapshot()
    assert len(told.spans) > 15
    expected = steps_of(told)
    rows, _ = store.traces()
    found = [step for row in reversed(rows) for step in steps_of(store.trace_records(row.trace_id))]
    assert [step.number for step in found] == [step.number for step in expected] == [0, 1, 2]
    for one, other in zip(found, expected, strict=True):
        assert one.spans == other.spans
        assert normal(Records(events=list(one.events))) == normal(
            Records(events=list(other.events))
        )
        assert one.staleness == other.staleness
        assert one.incomplete == other.incomplete
        assert critical_path(one) == critical_path(other)
        row = store.trace(one.trace_id)
        assert (row.name, row.step, row.run_id, row.spans) == (
            "grpo.step",
            one.number,
            "the-run",
            len(one.spans),
        )
    for sample_id in ("s0-0", "s2-3"):
        assert life_of(sample_id, store.sample_records(sample_id)) == life_of(sample_id, told)
    waits = why(told, NEVER_NS)
    assert [str(one) for one in why(store.wait_records(), NEVER_NS)] == [str(one) for one in waits]
    assert len(waits) == 1
    # By its metrics a process is known to go on while it waits.
    assert {row.process_id for row in store.series()} == {waits[0].process.identity}
    assert {row.name for row in store.series()} >= {"messaging.client.operation.duration"}
    assert store.totals().refused == 0


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
