"""The partition page shows one snapshot, also while samples change.

Imports internals: samples change between two of its reads.
"""

import re
import threading

import pytest
import torch
from fastapi.testclient import TestClient
from tensordict import TensorDict
from waiting import until

from dataplane_admin import Settings, create_app
from dataplane_admin.live import read_moment
from dataplane_core import InMemoryDataPlaneClient, PartitionNotFoundError, UnavailableError

SIZE = 64


@pytest.fixture
def plane():
    cfg = {"enabled": True, "impl": "in_memory", "claim_lease_s": 60.0}
    with InMemoryDataPlaneClient(cfg) as client:
        client.register_partition("train", ["x", "y"], SIZE, ["train"])
        yield client


def put(plane, ids, *fields):
    columns = {name: torch.zeros(len(ids), 4) for name in fields}
    plane.put_samples(ids, "train", TensorDict(columns, [len(ids)]))


@pytest.fixture
def moving(plane):
    """Put, complete, claim and clear samples without a pause."""
    ending = threading.Event()

    def move():
        turn = 0
        while not ending.is_set():
            ids = [f"{turn}_{place}" for place in range(4)]
            put(plane, ids, "x")
            put(plane, ids, "y")
            plane.acknowledge(plane.claim_meta("train", "train", ["x", "y"], 4))
            plane.clear_samples(ids, "train")
            turn += 1

    thread = threading.Thread(target=move)
    thread.start()
    yield plane
    ending.set()
    thread.join()


def check(moment):
    """Check that all parts agree about the partition."""
    summary, scan = moment.summary, moment.scan
    assert scan.total == scan.rows == summary.present == len(moment.samples)
    for field in summary.fields:
        written = int((~scan.lacking(field.name)).sum())
        listed = sum(field.name in sample.fields for sample in moment.samples)
        assert field.written == written == listed
    [task] = summary.tasks
    assert task.leased == int(scan.leased("train").sum())
    assert task.leased == sum(claim.samples for claim in moment.claims)
    assert task.leased == sum(sample.tasks["train"] == "leased" for sample in moment.samples)


def test_parts_of_one_snapshot_agree(moving):
    exact = 0
    for _ in range(2_000):
        moment = read_moment(moving.inspector, "train", start=0, limit=100)
        if moment.spread_s == 0.0:
            check(moment)
            exact += 1
        if exact >= 25:
            return
    raise AssertionError(f"only {exact} of 2,000 reads were of one moment")


def test_an_inconsistent_read_reports_its_duration(plane):
    put(plane, ["a"], "x")

    class Busy:
        """A data plane with a write after each query."""

        def __getattr__(self, name):
            def write_after(*args, **kwargs):
                answer = getattr(plane.inspector, name)(*args, **kwargs)
                put(plane, ["a"], "x")
                return answer

            return write_after

    assert read_moment(Busy(), "train", start=0, limit=1).spread_s > 0.0
    moment = read_moment(plane.inspector, "train", start=0, limit=1)
    assert moment.spread_s == 0.0
    check(moment)


def test_a_missing_partition_is_named(plane):
    with pytest.raises(PartitionNotFoundError, match="'gone'"):
        read_moment(plane.inspector, "gone", start=0, limit=1)


@pytest.fixture
def client(plane, tmp_path):
    # Polled once, before any put: later data on a page is from its own read.
    settings = Settings(store_url=f"sqlite:///{tmp_path / 'store.sqlite'}", poll_s=3600.0)
    app = create_app(settings, inspector=plane.inspector)
    with TestClient(app, base_url="http://127.0.0.1") as asking:
        until(lambda: asking.get("/api/v1/status").json()["live"]["at_ns"] is not None)
        yield asking


def facts(html):
    return dict(re.findall(r"<dt>([^<]*)</dt><dd>([\d,]+)", html))


def test_all_parts_of_a_partition_page_are_consistent(client, plane):
    put(plane, [f"s{place}" for place in range(SIZE)], "x")
    html = client.get("/partition", params={"id": "train"}).text
    assert facts(html)["Present"] == str(SIZE)
    assert facts(html)["Not put yet"] == "0"
    assert "Samples 0 to 24 <small>of 64" in html
    fields = re.findall(r'<td class="quiet">([^<]*)</td><td class="n">(\d+)</td>', html)
    assert fields == [("torch.float32", str(SIZE)), ("not written", "0")]
    assert re.findall(r'<span class="row-sum">([^<]*)</span>', html) == ["100 %", "0 %"]
    assert re.search(r"As of \d\d:\d\d:\d\d\.\d\d\d", html)


def test_without_an_answer_the_page_shows_the_newest_poll(client, plane, monkeypatch):
    put(plane, ["a"], "x")

    def fails(*_args, **_kwargs):
        raise UnavailableError("the directory is gone")

    monkeypatch.setattr(type(plane.inspector), "list_samples", fails)
    html = client.get("/partition", params={"id": "train"}).text
    assert facts(html)["Present"] == "0"
    assert "Cannot list samples: the directory is gone" in html
