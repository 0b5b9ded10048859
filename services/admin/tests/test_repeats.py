"""What exporters send open, again or in part: list, page, status and metrics say the same."""

import re

import pytest
from fastapi.testclient import TestClient
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

PROTOBUF = {"content-type": "application/x-protobuf"}
TRACE = b"t" * 16
BEGIN = 1_790_000_000_000_000_000
END = BEGIN + 4_000_000_000


@pytest.fixture
def client(make_app):
    with TestClient(make_app(), base_url="http://localhost") as client:
        yield client


def post(client, *spans):
    """Spans of (letter, start, end), of which ``r`` is the root."""
    data = TracesData()
    made = data.resource_spans.add().scope_spans.add().spans
    for letter, start_ns, end_ns in spans:
        made.add(
            trace_id=TRACE,
            span_id=letter * 8,
            parent_span_id=b"" if letter == b"r" else b"r" * 8,
            name=letter.decode(),
            start_time_unix_nano=start_ns,
            end_time_unix_nano=end_ns,
        )
    answer = client.post("/v1/traces", content=data.SerializeToString(), headers=PROTOBUF)
    assert answer.status_code == 200


def trace(client):
    return client.get("/api/v1/trace", params={"id": TRACE.hex()}).json()


def counts(client):
    """How many spans each place says there are."""
    [listed] = client.get("/api/v1/traces").json()["traces"]
    status = client.get("/api/v1/status").json()
    metrics = client.get("/metrics").text
    return {
        len(trace(client)["rows"]),
        trace(client)["spans"],
        listed["spans"],
        status["store"]["spans"],
        status["telemetry"]["ingested"]["spans"],
        int(float(re.search(r"^dataplane_admin_store_spans (\S+)$", metrics, re.M)[1])),
        int(
            float(
                re.search(r'^dataplane_admin_ingested_total{signal="spans"} (\S+)$', metrics, re.M)[
                    1
                ]
            )
        ),
    }


def test_spans_sent_again_in_other_portions_count_once_everywhere(client):
    first, second = [(b"r", BEGIN, END), (b"a", BEGIN, END)], [(b"b", BEGIN, END)]
    for portion in (first, second, first, [*first, *second], first[:1], second):
        post(client, *portion)
    assert counts(client) == {3}
    assert client.get("/api/v1/status").json()["telemetry"]["repeated"] == 7


def test_an_open_span_has_no_duration_until_it_has_ended(client):
    post(client, (b"r", BEGIN, 0), (b"a", BEGIN, END))
    found = trace(client)
    assert (found["has_root"], found["seconds"], found["start_ns"]) == (False, 4.0, BEGIN)
    assert [row["seconds"] for row in found["rows"]] == [None, 4.0]
    assert found["incomplete"] == ["no end was reported of 'r' of unknown"]
    page = client.get("/trace", params={"id": TRACE.hex(), "span": (b"r" * 8).hex()}).text
    assert "n/a" in page
    assert not re.search(r"-\d+[ .\d]* (%|s|min)", page)
    post(client, (b"r", BEGIN, END), (b"a", BEGIN, 0))
    found = trace(client)
    assert (found["has_root"], found["incomplete"]) == (True, [])
    assert [row["seconds"] for row in found["rows"]] == [4.0, 4.0]
    assert counts(client) == {2}


def test_a_child_without_a_start_does_not_begin_in_1970(client):
    post(client, (b"r", BEGIN, END), (b"a", 0, END), (b"b", 0, 0))
    assert (trace(client)["start_ns"], trace(client)["seconds"]) == (BEGIN, 4.0)
    assert [row["seconds"] for row in trace(client)["rows"]] == [4.0, None, None]
    for path in ("/", "/traces", f"/trace?id={TRACE.hex()}"):
        assert "1970" not in client.get(path).text


def test_a_trace_without_any_time_is_shown(client):
    post(client, (b"a", 0, 0))
    assert (trace(client)["start_ns"], trace(client)["seconds"]) == (None, 0.0)
    for path in ("/", "/traces", f"/trace?id={TRACE.hex()}"):
        page = client.get(path)
        assert page.status_code == 200
        assert "1970" not in page.text
    assert "n/a" in client.get("/traces").text
