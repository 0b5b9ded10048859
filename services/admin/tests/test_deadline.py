"""All queries of one answer to the data plane share a deadline."""

import threading
import time

import pytest
import torch
from fastapi.testclient import TestClient
from tensordict import TensorDict
from waiting import until

from dataplane_core import InMemoryDataPlaneClient

QUERY_TIMEOUT_S = 2.0
SLOW_S = 0.2
PARTITIONS = 20


@pytest.fixture
def client(make_app, monkeypatch):
    with InMemoryDataPlaneClient({"enabled": True, "impl": "in_memory"}) as plane:
        for place in range(PARTITIONS):
            plane.register_partition(f"p{place:02}", ["a"], 1, ["t"])
        batch = TensorDict({"a": torch.zeros(1)}, [1])
        plane.put_samples(["first"], "p00", batch, [{"group": "g"}])
        for name in ("read_sample", "find_samples"):
            inspector = type(plane.inspector)
            monkeypatch.setattr(inspector, name, slowly(getattr(inspector, name)))
        app = make_app(inspector=plane.inspector, poll_s=0.05, query_timeout_s=QUERY_TIMEOUT_S)
        with TestClient(app, base_url="http://localhost") as client:
            until(lambda: len(client.get("/api/v1/partitions").json()["partitions"]) == PARTITIONS)
            yield client


def slowly(question):
    def slow(*args, **kwargs):
        threading.Event().wait(SLOW_S)
        return question(*args, **kwargs)

    return slow


@pytest.mark.parametrize(
    ("path", "query"),
    [("samples", {"tag": "group", "value": "g"}), ("samples", {"q": "unknown"})],
)
def test_all_queries_of_one_answer_share_a_deadline(client, path, query):
    began = time.monotonic()
    answer = client.get(f"/api/v1/{path}", params=query)
    assert time.monotonic() - began < PARTITIONS * SLOW_S
    assert answer.status_code == 200, answer.text
    body = answer.json()
    [note] = body["notes"]
    assert note.startswith("not searched in ")
    assert note.partition(" live partitions: ")[0].rpartition(" ")[2] in map(
        str, range(1, PARTITIONS)
    )
    assert [sample["sample_id"] for sample in body["samples"]] == (
        ["first"] if "tag" in query else []
    )


def test_a_partial_sample_search_is_noted(client):
    answer = client.get("/api/v1/sample", params={"id": "unknown"})
    assert answer.status_code == 404
    assert "not searched in " in answer.json()["detail"]
