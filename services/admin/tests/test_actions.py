"""Actions run only if allowed and confirmed, and are always recorded.

Imports internals: the store is made to fail.
"""

import json

import pytest
import torch
from fastapi.testclient import TestClient
from tensordict import TensorDict
from waiting import until

from dataplane_admin.store import Store, StoreUnavailable, WriteUnfinished
from dataplane_core import InMemoryDataPlaneClient

TOKEN = "3f2b8c0d9e7a6b5c"
IDS = [f"s{place}" for place in range(4)]


@pytest.fixture
def plane():
    cfg = {"enabled": True, "impl": "in_memory", "claim_lease_s": 60.0}
    with InMemoryDataPlaneClient(cfg) as client:
        client.register_partition("train", ["a"], 4, ["t"])
        client.put_samples(IDS, "train", TensorDict({"a": torch.zeros(4)}, [4]))
        yield client


@pytest.fixture
def inspector(plane):
    return plane.inspector


@pytest.fixture
def client(make_app, inspector):
    app = make_app(inspector=inspector, token=TOKEN, allow_actions=True, poll_s=0.02)
    headers = {"authorization": f"Bearer {TOKEN}"}
    with TestClient(app, base_url="http://localhost", headers=headers) as client:
        until(lambda: client.get("/readyz").json()["live"] == "attached")
        yield client


def act(client, action, **change):
    change = {"partition": "train", "confirm": "train", **change}
    headers = {"content-type": "application/json"}
    # json= would not encode lone surrogates.
    return client.post(f"/api/v1/actions/{action}", content=json.dumps(change), headers=headers)


def entries(client):
    return client.get("/api/v1/audit").json()["entries"]


def audit(client):
    """Return the outcome entries of the audit log."""
    return [entry for entry in entries(client) if entry["outcome"] != "requested"]


def test_clearing_samples_is_recorded(client, plane):
    answer = act(client, "clear", sample_ids=["s0", "s1"])
    assert answer.status_code == 200, answer.text
    assert [sample.sample_id for sample in plane.inspector.list_samples("train")] == ["s2", "s3"]
    [entry] = audit(client)
    assert (entry["action"], entry["target"]) == ("clear", "train")
    assert entry["actor"] == "token from testclient"
    assert entry["outcome"] == "done: samples of partition 'train' cleared: 2"
    assert entry["parameters"]["samples"] == {"count": 2, "first": ["s0", "s1"]}
    assert TOKEN not in str(entry)


def test_an_action_is_recorded_before_it_runs(client, inspector, monkeypatch):
    clear, seen = inspector.clear_samples, []

    def clear_after_reading(*args, **kwargs):
        seen.extend(entries(client))
        clear(*args, **kwargs)

    monkeypatch.setattr(inspector, "clear_samples", clear_after_reading)
    assert act(client, "clear", sample_ids=["s0"]).status_code == 200
    assert [entry["outcome"] for entry in seen] == ["requested"]
    done, requested = entries(client)
    assert done["outcome"] == "done: samples of partition 'train' cleared: 1"
    alike = ("actor", "action", "target", "parameters")
    assert [done[name] for name in alike] == [requested[name] for name in alike]


def test_an_action_that_cannot_be_recorded_does_not_run(client, plane, monkeypatch):
    def full(self, entry):
        raise StoreUnavailable("the disk is full")

    monkeypatch.setattr(Store, "record_action", full)
    answer = act(client, "clear", sample_ids=["s0"])
    assert answer.status_code == 503
    assert "nothing was changed" in answer.json()["detail"]
    assert "the disk is full" in answer.json()["detail"]
    assert len(plane.inspector.list_samples("train")) == 4


@pytest.mark.parametrize(("sample_ids", "status"), [(["s0"], 200), (["s1"], 409)])
def test_an_unrecorded_outcome_is_still_answered(client, plane, monkeypatch, sample_ids, status):
    plane.register_partition("train", ["a"], 4, ["t"])
    record = Store.record_action

    def full(self, entry):
        if entry.outcome != "requested":
            raise StoreUnavailable("the disk is full")
        record(self, entry)

    monkeypatch.setattr(Store, "record_action", full)
    if status == 409:
        plane.claim_meta("train", "t", ["a"], 4, blocking=False)
    answer = act(client, "clear", sample_ids=sample_ids)
    assert answer.status_code == status
    assert [entry["outcome"] for entry in entries(client)] == ["requested"]
    if status == 200:
        sentence = answer.json()["sentence"]
        assert sentence.startswith(
            "samples of partition 'train' cleared: 1; the audit log has no outcome"
        )
        assert len(plane.inspector.list_samples("train")) == 3
    else:
        assert "are leased" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("error", "outcome"), [(StoreUnavailable, "failed"), (WriteUnfinished, "unknown")]
)
def test_the_audit_log_has_the_reason_why_tagging_failed(client, monkeypatch, error, outcome):
    def fail(self, *_arguments, **_options):
        raise error("the reason")

    monkeypatch.setattr(Store, "run", lambda *_: "a run")
    monkeypatch.setattr(Store, "tag_run", fail)
    assert tag(client, "r").status_code == 503
    assert audit(client)[0]["outcome"] == f"{outcome}: the reason"


def test_a_cleared_partition_is_no_longer_listed(client, plane):
    assert act(client, "clear").status_code == 200
    assert plane.inspector.list_partitions() == []
    until(lambda: client.get("/api/v1/partition", params={"id": "train"}).status_code == 404)


def test_leased_samples_are_cleared_by_force_only(client, plane):
    plane.claim_meta("train", "t", ["a"], 2, blocking=False)
    refused = act(client, "clear", sample_ids=["s0"])
    assert refused.status_code == 409
    assert act(client, "clear", sample_ids=["s0"], force=True).status_code == 200
    done, failed = audit(client)
    assert failed["outcome"] == f"failed: {refused.json()['detail']}"
    assert done["outcome"].startswith("done: ")


def test_consumption_is_reset_for_the_named_samples(client, plane):
    plane.acknowledge(plane.claim_meta("train", "t", ["a"], 3, blocking=False))
    answer = act(client, "redeliver", task="t", sample_ids=["s0", "s2", "s3", "nothing"])
    assert (answer.status_code, answer.json()["samples"]) == (200, 2)
    assert plane.claim_meta("train", "t", ["a"], 4, blocking=False).sample_ids == ["s0", "s2", "s3"]


def test_an_unexpired_claim_is_ended_on_request_only(client, plane):
    plane.claim_meta("train", "t", ["a"], 3, blocking=False)
    [claim] = client.get("/api/v1/partition/claims", params={"id": "train"}).json()
    refused = act(client, "end-claim", claim=claim["claim"])
    assert refused.status_code == 409
    answer = act(client, "end-claim", claim=claim["claim"], expired_only=False)
    assert (answer.status_code, answer.json()["samples"]) == (200, 3)
    assert act(client, "end-claim", claim=claim["claim"]).status_code == 404
    assert len(audit(client)) == 3


@pytest.mark.parametrize(
    ("action", "change", "status"),
    [
        ("clear", {"confirm": "Train"}, 422),
        ("clear", {"confirm": ""}, 422),
        ("clear", {"partition": "other", "confirm": "other"}, 404),
        ("redeliver", {"task": "other", "sample_ids": ["s0"]}, 404),
    ],
)
def test_a_refused_action_is_recorded(client, plane, action, change, status):
    answer = act(client, action, **change)
    assert answer.status_code == status
    assert len(plane.inspector.list_samples("train")) == 4
    [entry] = audit(client)
    assert entry["outcome"] == f"failed: {answer.json()['detail']}"


@pytest.mark.parametrize(
    "change",
    [
        {"confirm": None},
        {"sample_ids": []},
        {"sample_ids": "s0"},
        {"sample_ids": [""]},
        {"sample_ids": ["x"] * 10_001},
        {"sample_ids": ["\ud800"]},
        {"force": "yes please"},
        {"partition": "x" * 4097},
        {"extra": 1},
    ],
)
def test_an_invalid_action_is_refused_unrecorded(client, plane, change):
    assert act(client, "clear", **change).status_code == 422
    assert len(plane.inspector.list_samples("train")) == 4
    assert audit(client) == []


def tag(client, run, *tags):
    return client.post("/api/v1/actions/tag-run", json={"run": run, "tags": list(tags)})


def test_tags_replace_those_of_the_run_and_are_recorded(client, otlp):
    client.post(
        "/v1/logs",
        content=otlp.run("started").SerializeToString(),
        headers={"content-type": "application/x-protobuf"},
    )
    for tags in (("old",), ("good", "größe 😀", "good")):
        answer = tag(client, "run", *tags)
        assert answer.status_code == 200, answer.text
    assert answer.json()["tags"] == ["good", "größe 😀"]
    assert client.get("/api/v1/run", params={"run": "run"}).json()["tags"] == ["good", "größe 😀"]
    [done, _] = audit(client)
    assert (done["action"], done["target"]) == ("tag-run", "run")
    assert done["outcome"] == "done: run 'run' has the tags good, größe 😀"
    assert done["parameters"] == {"tags": ["good", "größe 😀"]}
    assert done["actor"] == "token from testclient"


def test_tags_of_an_unknown_run_are_refused_and_recorded(client):
    answer = tag(client, "no such run", "good")
    assert answer.status_code == 404
    [entry] = audit(client)
    assert entry["outcome"] == f"failed: {answer.json()['detail']}"


@pytest.mark.parametrize(
    "tags",
    [[""], [" a"], ["a "], ["a,b"], ["a\nb"], ["x" * 65], [f"t{number}" for number in range(21)]],
)
def test_invalid_tags_are_refused_unrecorded(client, tags):
    assert tag(client, "run", *tags).status_code == 422
    assert audit(client) == []


def test_disabled_actions_have_no_routes(make_app, plane):
    app = make_app(inspector=plane.inspector, token=TOKEN)
    headers = {"authorization": f"Bearer {TOKEN}"}
    client = TestClient(app, base_url="http://localhost", headers=headers)
    for action in ("clear", "redeliver", "end-claim", "tag-run"):
        assert act(client, action).status_code == 404
    assert len(plane.inspector.list_samples("train")) == 4


def test_the_audit_log_is_read_page_by_page(client):
    for _ in range(3):
        act(client, "clear", sample_ids=["s0"])
    first = client.get("/api/v1/audit", params={"limit": 3}).json()
    second = client.get("/api/v1/audit", params={"limit": 3, "cursor": first["next"]}).json()
    ids = [entry["id"] for entry in [*first["entries"], *second["entries"]]]
    assert len(ids) == 6
    assert ids == sorted(ids, reverse=True)
    assert second["next"] is None
