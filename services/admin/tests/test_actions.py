"""What changes the data plane: only if allowed, confirmed, and written down however it ends."""

import json
import threading
import time

import pytest
import torch
from fastapi.testclient import TestClient
from tensordict import TensorDict

from dataplane_admin.store import Store, StoreUnavailable
from dataplane_core import InMemoryDataPlaneClient

TOKEN = "3f2b8c0d9e7a6b5c"
PATIENCE_S = 20.0
IDS = [f"s{place}" for place in range(4)]


@pytest.fixture
def plane():
    cfg = {"enabled": True, "impl": "in_memory", "claim_lease_s": 60.0}
    with InMemoryDataPlaneClient(cfg) as client:
        client.register_partition("train", ["a"], 4, ["t"])
        client.put_samples(IDS, "train", TensorDict({"a": torch.zeros(4)}, [4]))
        yield client


@pytest.fixture
def client(make_app, plane):
    app = make_app(inspector=plane, token=TOKEN, allow_actions=True, poll_s=0.02)
    headers = {"authorization": f"Bearer {TOKEN}"}
    with TestClient(app, base_url="http://localhost", headers=headers) as client:
        until(lambda: client.get("/readyz").json()["live"] == "attached")
        yield client


def until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"not within {PATIENCE_S:g} s")


def act(client, action, **asked):
    asked = {"partition": "train", "confirm": "train", **asked}
    headers = {"content-type": "application/json"}
    # Lone surrogates included, which json= would not encode.
    return client.post(f"/api/v1/actions/{action}", content=json.dumps(asked), headers=headers)


def entries(client):
    return client.get("/api/v1/audit").json()["entries"]


def audit(client):
    """The entries of what came of actions."""
    return [one for one in entries(client) if one["outcome"] != "asked for"]


def test_clearing_samples_drops_them_and_is_written_down(client, plane):
    answer = act(client, "clear", sample_ids=["s0", "s1"])
    assert answer.status_code == 200, answer.text
    assert [one.sample_id for one in plane.list_samples("train")] == ["s2", "s3"]
    [entry] = audit(client)
    assert (entry["action"], entry["target"]) == ("clear", "train")
    assert entry["actor"] == "token from testclient"
    assert entry["outcome"] == "done: 2 samples of partition 'train' cleared"
    assert entry["parameters"]["samples"] == {"count": 2, "first": ["s0", "s1"]}
    assert TOKEN not in str(entry)


def test_that_an_action_was_asked_for_is_written_down_before_it_is_done(client, plane, monkeypatch):
    clear, seen = plane.clear_samples, []

    def look(*args, **kwargs):
        seen.extend(entries(client))
        clear(*args, **kwargs)

    monkeypatch.setattr(plane, "clear_samples", look)
    assert act(client, "clear", sample_ids=["s0"]).status_code == 200
    assert [one["outcome"] for one in seen] == ["asked for"]
    done, asked = entries(client)
    assert done["outcome"] == "done: 1 samples of partition 'train' cleared"
    alike = ("actor", "action", "target", "parameters")
    assert [done[name] for name in alike] == [asked[name] for name in alike]


def test_nothing_is_done_that_cannot_be_written_down(client, plane, monkeypatch):
    def full(self, entry):
        raise StoreUnavailable("the disk is full")

    monkeypatch.setattr(Store, "record_action", full)
    answer = act(client, "clear", sample_ids=["s0"])
    assert answer.status_code == 503
    assert "nothing was changed" in answer.json()["detail"]
    assert "the disk is full" in answer.json()["detail"]
    assert len(plane.list_samples("train")) == 4


@pytest.mark.parametrize(("asked", "status"), [(["s0"], 200), (["s1"], 409)])
def test_what_was_done_is_answered_though_its_outcome_cannot_be_written_down(
    client, plane, monkeypatch, asked, status
):
    plane.register_partition("train", ["a"], 4, ["t"])
    record = Store.record_action

    def full(self, entry):
        if entry.outcome != "asked for":
            raise StoreUnavailable("the disk is full")
        record(self, entry)

    monkeypatch.setattr(Store, "record_action", full)
    if status == 409:
        plane.claim_meta("train", "t", ["a"], 4, blocking=False)
    answer = act(client, "clear", sample_ids=asked)
    assert answer.status_code == status
    assert [one["outcome"] for one in entries(client)] == ["asked for"]
    if status == 200:
        told = answer.json()["sentence"]
        assert told.startswith("1 samples of partition 'train' cleared; the audit record has only")
        assert len(plane.list_samples("train")) == 3
    else:
        assert "are leased" in answer.json()["detail"]


def test_clearing_a_partition_forgets_it(client, plane):
    assert act(client, "clear").status_code == 200
    assert plane.list_partitions() == []
    until(lambda: client.get("/api/v1/partition", params={"id": "train"}).status_code == 404)


def test_what_is_leased_is_cleared_by_force_only(client, plane):
    plane.claim_meta("train", "t", ["a"], 2, blocking=False)
    refused = act(client, "clear", sample_ids=["s0"])
    assert refused.status_code == 409
    assert act(client, "clear", sample_ids=["s0"], force=True).status_code == 200
    done, failed = audit(client)
    assert failed["outcome"] == f"failed: {refused.json()['detail']}"
    assert done["outcome"].startswith("done: ")


def test_consumption_is_reset_for_the_samples_named(client, plane):
    plane.acknowledge(plane.claim_meta("train", "t", ["a"], 3, blocking=False))
    answer = act(client, "reset-consumption", task="t", sample_ids=["s0", "s2", "s3", "nothing"])
    assert (answer.status_code, answer.json()["samples"]) == (200, 2)
    assert plane.claim_meta("train", "t", ["a"], 4, blocking=False).sample_ids == ["s0", "s2", "s3"]


def test_a_claim_that_still_runs_is_ended_only_if_that_is_asked_for(client, plane):
    plane.claim_meta("train", "t", ["a"], 3, blocking=False)
    [claim] = client.get("/api/v1/partition/claims", params={"id": "train"}).json()
    refused = act(client, "end-claim", claim=claim["claim"])
    assert refused.status_code == 409
    answer = act(client, "end-claim", claim=claim["claim"], expired_only=False)
    assert (answer.status_code, answer.json()["samples"]) == (200, 3)
    assert act(client, "end-claim", claim=claim["claim"]).status_code == 404
    assert len(audit(client)) == 3


@pytest.mark.parametrize(
    ("action", "asked", "status"),
    [
        ("clear", {"confirm": "Train"}, 422),
        ("clear", {"confirm": ""}, 422),
        ("clear", {"partition": "other", "confirm": "other"}, 404),
        ("reset-consumption", {"task": "other", "sample_ids": ["s0"]}, 404),
    ],
)
def test_what_is_refused_changes_nothing_and_is_written_down(client, plane, action, asked, status):
    answer = act(client, action, **asked)
    assert answer.status_code == status
    assert len(plane.list_samples("train")) == 4
    [entry] = audit(client)
    assert entry["outcome"] == f"failed: {answer.json()['detail']}"


@pytest.mark.parametrize(
    "asked",
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
def test_what_is_no_question_is_refused_at_the_door(client, plane, asked):
    assert act(client, "clear", **asked).status_code == 422
    assert len(plane.list_samples("train")) == 4
    assert audit(client) == []


def test_without_the_permission_there_is_nothing_at_these_paths(make_app, plane):
    app = make_app(inspector=plane, token=TOKEN)
    headers = {"authorization": f"Bearer {TOKEN}"}
    client = TestClient(app, base_url="http://localhost", headers=headers)
    for action in ("clear", "reset-consumption", "end-claim"):
        assert act(client, action).status_code == 404
    assert len(plane.list_samples("train")) == 4


def test_the_audit_record_is_read_page_by_page(client):
    for _ in range(3):
        act(client, "clear", sample_ids=["s0"])
    first = client.get("/api/v1/audit", params={"limit": 3}).json()
    second = client.get("/api/v1/audit", params={"limit": 3, "cursor": first["next"]}).json()
    ids = [one["id"] for one in [*first["entries"], *second["entries"]]]
    assert len(ids) == 6
    assert ids == sorted(ids, reverse=True)
    assert second["next"] is None
