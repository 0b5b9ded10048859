"""Spans of operations: names, attributes, links, and that they change nothing."""

from __future__ import annotations

import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from tensordict import TensorDict

from dataplane_core import InMemoryDataPlaneClient, PartitionNotFoundError, telemetry
from dataplane_core.testing import DataPlaneClientContract, LeaseContract
from observability import (
    InstrumentedDataPlaneClient,
    TracingDataPlaneClient,
    span,
    step_context,
)
from observability.origin import TRACEPARENT_TAG, Origin
from observability.tracing import MOST_LINKS


@pytest.fixture
def spans(monkeypatch):
    """The finished spans of this test."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "tracer", lambda: provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


def batch(count, **fields):
    return TensorDict(fields, batch_size=[count])


class PublishedOnly(InMemoryDataPlaneClient):
    """A store that keeps no origins, as an adapter for the published contract alone."""

    capabilities = InMemoryDataPlaneClient.capabilities.__class__(
        read_your_writes=True, exclusive_claims=True
    )

    def put_samples(self, sample_ids, partition_id, fields=None, tags=None):
        return super().put_samples(sample_ids, partition_id, fields, tags)


@pytest.fixture
def client(spans):
    with TracingDataPlaneClient(InMemoryDataPlaneClient()) as client:
        client.register_partition("train", ["x", "y"], 4, ["logprob", "train"])
        spans.clear()
        yield client


def named(spans, name):
    return [made for made in spans.get_finished_spans() if made.name == name]


def test_a_put_is_a_producer_span_with_the_messaging_attributes(client, spans):
    client.put_samples(["a", "b"], "train", batch(2, x=torch.zeros(2, 3), y=torch.zeros(2)))
    [put] = spans.get_finished_spans()
    assert (put.name, put.kind) == ("send train", SpanKind.PRODUCER)
    assert dict(put.attributes) == {
        "messaging.system": "dataplane",
        "messaging.operation.name": "put",
        "messaging.operation.type": "send",
        "messaging.destination.name": "train",
        "messaging.batch.message_count": 2,
        "dataplane.fields": ("x", "y"),
        "dataplane.bytes": 32,
        "rl.bucket": "overhead",
    }


def test_every_batch_operation_has_its_span_and_looking_has_none(client, spans):
    client.put_samples(["a"], "train", batch(1, x=torch.zeros(1)))
    client.claim_meta("train", "train", ["x"], 1)
    client.get_samples(["a"], "train", ["x"])
    client.get_columns(["a"], "train", ["x"])
    client.check_consumption_status("train", ["train"])
    client.count_samples("train", "train", ["x"])
    client.list_partitions()
    client.clear_samples(["a"], "train")
    names = [made.name for made in spans.get_finished_spans()]
    assert names == ["send train", "receive train", "get train", "get train", "settle train"]
    receive, get, _, settle = spans.get_finished_spans()[1:]
    assert receive.attributes["messaging.consumer.group.name"] == "train"
    assert receive.attributes["messaging.batch.message_count"] == 1
    assert get.attributes["db.operation.batch.size"] == 1
    assert get.attributes["db.collection.name"] == "train"
    assert get.attributes["dataplane.bytes"] == 4
    assert settle.attributes["messaging.operation.name"] == "clear"


def test_no_span_names_a_sample(client, spans):
    with span("step"):
        client.put_samples(["secret-id"], "train", batch(1, x=torch.zeros(1)))
        client.claim_meta("train", "train", ["x"], 1)
        with pytest.raises(KeyError):
            client.get_samples(["secret-id", "other-id"], "train", ["x"])
    told = "".join(made.to_json() for made in spans.get_finished_spans())
    assert "-id" not in told


def test_claims_and_reads_link_to_each_put_that_wrote_what_they_consume(client, spans):
    x = torch.zeros(2)
    client.put_samples(["a", "b"], "train", batch(2, x=x))
    client.put_samples(["c", "d"], "train", batch(2, x=x))
    client.put_samples(["a", "b"], "train", batch(2, y=x))
    first, second, third = (made.context for made in named(spans, "send train"))
    client.claim_meta("train", "train", ["x"], 4)
    client.get_samples(["a"], "train", ["x", "y"])
    client.get_columns(["c", "d"], "train", ["x"])

    def links(name):
        return [
            {(link.context.trace_id, link.context.span_id) for link in made.links}
            for made in named(spans, name)
        ]

    def ids(*contexts):
        return {(context.trace_id, context.span_id) for context in contexts}

    assert links("receive train") == [ids(first, second)]
    assert links("get train") == [ids(first, third), ids(second)]


def test_at_most_128_links_and_the_rest_is_counted(client, spans):
    client.register_partition("many", ["x"], 140, ["train"])
    for number in range(140):
        client.put_samples([f"s{number}"], "many", batch(1, x=torch.zeros(1)))
    client.claim_meta("many", "train", ["x"], 140)
    [claim] = named(spans, "receive many")
    assert len(claim.links) == MOST_LINKS
    assert claim.attributes["dataplane.links_dropped"] == 12


def test_an_error_is_recorded_by_its_class_and_raised_as_it_is(client, spans):
    with pytest.raises(PartitionNotFoundError):
        client.get_samples(["a"], "nowhere", ["x"])
    [failed] = spans.get_finished_spans()
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.attributes["error.type"] == "PartitionNotFoundError"
    assert failed.attributes["rl.bucket"] == "wasted"
    assert not failed.events  # no text, which could hold what samples say


def test_users_tags_come_back_as_they_were_put(client, spans):
    tags = [{"weight_version": 3}, {}]
    answered = client.put_samples(["a", "b"], "train", batch(2, x=torch.zeros(2)), tags)
    client.put_samples(["a"], "train", batch(1, y=torch.zeros(1)))
    assert answered.tags == tags
    assert client.claim_meta("train", "train", ["x"], 2).tags == tags
    assert client.inner.claim_meta("train", "logprob", ["x"], 2).tags == tags


def test_a_store_without_origins_carries_the_traceparent_in_tags_that_users_do_not_see(spans):
    with TracingDataPlaneClient(PublishedOnly()) as client:
        client.register_partition("train", ["x"], 2, ["train", "other"])
        tags = [{"v": 1}, {}]
        x = torch.zeros(2)
        assert client.put_samples(["a", "b"], "train", batch(2, x=x), tags).tags == tags
        assert client.claim_meta("train", "train", ["x"], 2).tags == tags
        raw = client.inner.claim_meta("train", "other", ["x"], 2).tags
        assert [tag.keys() for tag in raw] == [{"v", TRACEPARENT_TAG}, {TRACEPARENT_TAG}]
        assert [len(made.links) for made in named(spans, "receive train")] == [1]


def test_a_put_without_tags_leaves_the_tags_of_a_store_without_origins_alone(spans):
    with TracingDataPlaneClient(PublishedOnly()) as client:
        client.register_partition("train", ["x"], 1, ["train"])
        client.put_samples(["a"], "train", batch(1, x=torch.zeros(1)), [{"v": 1}])
        client.put_samples(["a"], "train", batch(1, x=torch.ones(1)))
        assert client.claim_meta("train", "train", ["x"], 1).tags == [{"v": 1}]


def test_an_origin_tells_span_time_and_weight_version(client, spans):
    with step_context("run", 4, 3):
        client.put_samples(["a"], "train", batch(1, x=torch.zeros(1)))
    [text] = client.read_origins(["a"], "train", ["x"])
    origin = Origin.parsed(text)
    [put] = spans.get_finished_spans()
    assert (origin.span.trace_id, origin.span.span_id, origin.weight_version) == (
        put.context.trace_id,
        put.context.span_id,
        3,
    )
    assert put.start_time - 1e9 < origin.time_ns < put.end_time
    assert str(origin) == text


@pytest.mark.parametrize("text", ["", "x", "a;b;c", "00-0-0-01;1;1", "00-zz-zz-zz;1;1", "é" * 99])
def test_what_another_producer_left_as_origin_is_no_link(client, spans, text):
    client.inner.put_samples(["a"], "train", batch(1, x=torch.zeros(1)), origin=text)
    client.claim_meta("train", "train", ["x"], 1)
    [claim] = spans.get_finished_spans()
    assert claim.links == ()


def test_an_origin_that_the_caller_gives_is_the_one_that_is_kept(client):
    client.put_samples(["a"], "train", batch(1, x=torch.zeros(1)), origin="mine")
    assert client.read_origins(["a"], "train", ["x"]) == {"mine": 1}


def test_spans_nest_below_the_current_one(client, spans):
    with span("rollout", "idle") as outer:
        client.put_samples(["a"], "train", batch(1, x=torch.zeros(1)))
    put, rollout = spans.get_finished_spans()
    assert put.parent.span_id == rollout.context.span_id == outer.get_span_context().span_id
    assert trace.get_current_span() is trace.INVALID_SPAN


class TestTracedClient(DataPlaneClientContract):
    """A traced client keeps the whole contract, its spans being recorded."""

    @pytest.fixture
    def client(self, spans):
        with InstrumentedDataPlaneClient(InMemoryDataPlaneClient()) as client:
            yield client

    @pytest.fixture
    def peer(self, client):
        return InMemoryDataPlaneClient(bootstrap=False)


class TestTracedLeases(LeaseContract):
    @pytest.fixture
    def make_client(self, spans):
        clients = []

        def make(**config):
            inner = InMemoryDataPlaneClient({"enabled": True, "impl": "in_memory", **config})
            clients.append(InstrumentedDataPlaneClient(inner))
            return clients[-1]

        yield make
        for client in clients:
            client.close()
