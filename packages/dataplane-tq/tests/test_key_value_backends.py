"""The client over TransferQueue's key-value backends, from two processes.

Imports internals: patches pause a put between two steps, and corrupt bytes.
"""

from __future__ import annotations

import asyncio
import time

import pytest
import torch
from tensordict import TensorDict

from dataplane_core import DataPlaneError, LeaseLostError
from dataplane_tq import value_stores
from dataplane_tq.mirror import rows as rows_in
from dataplane_tq.storage import BACKENDS

pytestmark = pytest.mark.slow

IDS = ["a", "b", "c"]


@pytest.fixture(
    scope="module",
    params=[
        "mooncake_cpu",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in sorted(BACKENDS.keys() - {"packed", "simple", "mooncake_cpu"})
        ),
    ],
)
def backend(request, require_backend):
    return require_backend(request.param)


@pytest.fixture
def client(owner):
    owner.register_partition("train", ["x"], 3, ["train"])
    yield owner
    owner.clear_samples(None, "train")


def test_put_with_an_expired_lease_overwrites_nothing(client, attach, monkeypatch):
    def results(value):
        return TensorDict({"y": torch.full((3, 2), value)}, [3])

    client.put_samples(IDS, "train", TensorDict({"x": torch.ones(3, 2), **results(0.0)}, [3]))
    with attach(claim_lease_s=0.5) as paused, attach(claim_lease_s=60.0) as successor:
        claim = paused.claim_meta("train", "train", ["x"], 3, timeout_s=30)
        register = rows_in.register
        again = []

        def take_over():
            deadline = time.monotonic() + 20
            while not (meta := successor.claim_meta("train", "train", ["x"], 3)).size:
                assert time.monotonic() < deadline, "the lease does not expire"
            again.append(meta)
            successor.put_samples(IDS, "train", results(2.0), claim=meta)

        async def register_late(*args):
            monkeypatch.setattr(rows_in, "register", register)
            rows = await register(*args)
            await asyncio.to_thread(take_over)
            return rows

        monkeypatch.setattr(rows_in, "register", register_late)
        with pytest.raises(LeaseLostError):
            paused.put_samples(IDS, "train", results(1.0), claim=claim)
        assert client.get_samples(IDS, "train", ["y"])["y"].tolist() == [[2, 2]] * 3
        successor.acknowledge(again[0])


def test_corrupted_bytes_of_a_backend_are_detected():
    stored = value_stores._with_checksum(b"data")
    assert value_stores._without_checksum("x", stored) == b"data"
    for changed in (stored[:-1] + b"?", b"", None, b"abc"):
        with pytest.raises(RuntimeError, match="bytes that differ"):
            value_stores._without_checksum("x", changed)


def test_rows_outlive_their_producer_except_in_rays_store(client, backend, other_process):
    data = TensorDict({"x": torch.arange(6.0).reshape(3, 2)}, [3])
    other_process.put_samples(IDS, "train", data)
    assert client.get_samples(IDS, "train", ["x"])["x"].tolist() == data["x"].tolist()
    other_process.kill()
    if backend == "ray":
        deadline = time.monotonic() + 30
        with pytest.raises(DataPlaneError):  # noqa: PT012  # Ray detects it only after a while
            while time.monotonic() < deadline:
                client.get_samples(IDS, "train", ["x"])
    else:
        assert client.get_samples(IDS, "train", ["x"])["x"].tolist() == data["x"].tolist()


# The other backends are unbounded, or refuse only after a minute.
@pytest.mark.parametrize("backend", ["mooncake_cpu"], indirect=True, scope="module")
def test_full_store_refuses_puts_and_keeps_its_samples(client, config, backend):
    client.put_samples(["a"], "train", TensorDict({"x": torch.ones(1, 2)}, [1]))
    large = torch.zeros(1, config["num_storage_units"] * config["global_segment_size"] // 4)
    with pytest.raises(DataPlaneError, match="-200"):
        client.put_samples(["b"], "train", TensorDict({"x": large}, [1]))
    assert client.get_samples(["a"], "train", ["x"])["x"].tolist() == [[1.0, 1.0]]


def test_capabilities_report_whether_a_backend_is_survivable(owner, backend):
    assert owner.capabilities.survivable == BACKENDS[backend].survivable
