"""Spans of operations have names, attributes and links, and do not change results."""

from __future__ import annotations

import pytest
import torch
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode
from tensordict import TensorDict

from dataplane_core import InMemoryDataPlaneClient, PartitionNotFoundError
from observability import TracingDataPlaneClient, span, step_context

MAX_LINKS = 128


@pytest.fixture
def spans(sdk):
    """Finished spans of this test."""
    return sdk.spans


def batch(*fields, count):
    return TensorDict({name: torch.zeros(count) for name in fields}, batch_size=[count])


class StoreWithoutOrigins(InMemoryDataPlaneClient):
    """Store that has no support for origins, like an adapter with only the documented methods."""

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


def spans_named(spans, name):
    return [span for span in spans.get_finished_spans() if span.name == name]


def test_a_put_is_a_producer_span_with_the_messaging_attributes(client, spans):
    client.put_samples(["a", "b"], "train", batch("x", "y", count=2))
    [put] = spans.get_finished_spans()
    assert (put.name, put.kind) == ("send train", SpanKind.PRODUCER)
    assert dict(put.attributes) == {
        "messaging.system": "dataplane",
        "messaging.operation.name": "put",
        "messaging.operation.type": "send",
        "messaging.destination.name": "train",
        "messaging.batch.message_count": 2,
        "dataplane.fields": ("x", "y"),
        "dataplane.bytes": 16,
        "rl.bucket": "overhead",
    }


def test_batch_operations_have_spans_and_inspections_have_none(client, spans):
    client.put_samples(["a"], "train", batch("x", count=1))
    client.claim_meta("train", "train", ["x"], 1)
    client.get_samples(["a"], "train", ["x"])
    client.get_columns(["a"], "train", ["x"])
    client.check_consumption_status("train", ["train"])
    client.inspector.count_samples("train", "train", ["x"])
    client.inspector.list_partitions()
    client.clear_samples(["a"], "train")
    names = [span.name for span in spans.get_finished_spans()]
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
        client.put_samples(["secret-id"], "train", batch("x", count=1))
        client.claim_meta("train", "train", ["x"], 1)
        with pytest.raises(KeyError):
            client.get_samples(["secret-id", "other-id"], "train", ["x"])
    assert "-id" not in "".join(span.to_json() for span in spans.get_finished_spans())


def test_claims_and_reads_link_to_the_puts_they_consume(client, spans):
    client.put_samples(["a", "b"], "train", batch("x", count=2))
    client.put_samples(["c", "d"], "train", batch("x", count=2))
    client.put_samples(["a", "b"], "train", batch("y", count=2))
    first, second, third = (span.context for span in spans_named(spans, "send train"))
    client.claim_meta("train", "train", ["x"], 4)
    client.get_samples(["a"], "train", ["x", "y"])
    client.get_columns(["c", "d"], "train", ["x"])

    def ids(*contexts):
        return {(context.trace_id, context.span_id) for context in contexts}

    def links(name):
        return [ids(*(link.context for link in span.links)) for span in spans_named(spans, name)]

    assert links("receive train") == [ids(first, second)]
    assert links("get train") == [ids(first, third), ids(second)]


def test_links_beyond_128_are_counted(client, spans):
    client.register_partition("many", ["x"], 140, ["train"])
    for number in range(140):
        client.put_samples([f"s{number}"], "many", batch("x", count=1))
    client.claim_meta("many", "train", ["x"], 140)
    [claim] = spans_named(spans, "receive many")
    assert len(claim.links) == MAX_LINKS
    assert claim.attributes["dataplane.links_dropped"] == 12


def test_an_error_is_recorded_by_class_and_raised_unchanged(client, spans):
    with pytest.raises(PartitionNotFoundError):
        client.get_samples(["a"], "nowhere", ["x"])
    [failed] = spans.get_finished_spans()
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.attributes["error.type"] == "PartitionNotFoundError"
    assert failed.attributes["rl.bucket"] == "wasted"
    assert not failed.events  # an event would have the error's text, which could quote samples


@pytest.mark.parametrize("store", [InMemoryDataPlaneClient, StoreWithoutOrigins])
def test_users_tags_come_back_as_they_were_put(spans, store):
    with TracingDataPlaneClient(store()) as client:
        client.register_partition("train", ["x", "y"], 2, ["train", "other"])
        tags = [{"weight_version": 3}, {}]
        assert client.put_samples(["a", "b"], "train", batch("x", count=2), tags).tags == tags
        client.put_samples(["a"], "train", batch("y", count=1))
        assert client.claim_meta("train", "train", ["x"], 2).tags == tags
        assert [len(span.links) for span in spans_named(spans, "receive train")] == [1]
        raw = client.inner.claim_meta("train", "other", ["x"], 2).tags
        if store is StoreWithoutOrigins:  # then the origin travels with the tags
            assert [tag.pop("traceparent").count("-") for tag in raw] == [3, 3]
        assert raw == tags


def test_an_origin_names_span_time_and_weight_version(client, spans):
    with step_context("run", 4, 3):
        client.put_samples(["a"], "train", batch("x", count=1))
    [text] = client.read_origins(["a"], "train", ["x"])
    [put] = spans.get_finished_spans()
    traceparent, time_ns, version = text.split(";")
    assert traceparent.startswith(f"00-{put.context.trace_id:032x}-{put.context.span_id:016x}-")
    assert put.start_time - 1e9 < int(time_ns) < put.end_time
    assert version == "3"


@pytest.mark.parametrize("text", ["", "x", "a;b;c", "00-0-0-01;1;1", "00-zz-zz-zz;1;1", "é" * 99])
def test_unparsable_origin_is_not_linked(client, spans, text):
    client.put_samples(["a"], "train", batch("x", count=1), origin=text)
    assert client.read_origins(["a"], "train", ["x"]) == {text: 1}
    client.claim_meta("train", "train", ["x"], 1)
    [claim] = spans_named(spans, "receive train")
    assert claim.links == ()


def test_spans_are_children_of_the_current_span(client, spans):
    with span("rollout", "idle") as outer:
        client.put_samples(["a"], "train", batch("x", count=1))
    put, rollout = spans.get_finished_spans()
    assert put.parent.span_id == rollout.context.span_id == outer.get_span_context().span_id
    assert trace.get_current_span() is trace.INVALID_SPAN
