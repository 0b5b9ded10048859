"""The client over TransferQueue's key-value backends, from two processes."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from dataplane_core import LeaseLostError, MissingDataError, SchemaMismatchError
from dataplane_tq import transfer_queue_rows
from dataplane_tq.seal import seal, unseal
from dataplane_tq.storage import BACKENDS

pytestmark = pytest.mark.slow

IDS = ["a", "b", "c"]


@pytest.fixture(scope="module", params=["ray", "mooncake_cpu", "yuanrong"])
def backend(request, require_backend):
    return require_backend(request.param)


@pytest.fixture
def client(owner):
    owner.register_partition("train", ["x"], 3, ["train"])
    yield owner
    owner.clear_samples(None, "train")


def everything():
    ragged = [torch.arange(n) for n in (3, 0, 5)]
    return TensorDict(
        {
            "ids": torch.nested.nested_tensor(ragged, layout=torch.jagged),
            "half": torch.tensor([[1.5, -2.0]] * 3, dtype=torch.bfloat16),
            "scalar": torch.tensor([0.1, 0.2, 0.3]),
            "column": torch.tensor([[1], [2], [3]], dtype=torch.int8),
            "flag": torch.tensor([True, False, True]),
            "text": NonTensorStack("é", None, {"turns": [1, 2]}),
        },
        batch_size=[3],
    )


def test_every_kind_of_column_comes_back_in_another_process_bit_for_bit(client, other_process):
    put = everything()
    client.put_samples(IDS, "train", put)
    got = other_process.get_samples(["c", "a", "b"], "train", list(put.keys()))
    order = [2, 0, 1]
    for name in ("half", "scalar", "column", "flag"):
        assert got[name].dtype == put[name].dtype
        assert torch.equal(got[name], put[name][order]), name
    rows = put["ids"].unbind()
    assert [row.tolist() for row in got["ids"].unbind()] == [rows[i].tolist() for i in order]
    assert got.get("text").tolist() == [{"turns": [1, 2]}, "é", None]


def test_a_step_of_put_claim_write_back_and_clear(client, other_process):
    client.put_samples(IDS, "train", TensorDict({"x": torch.ones(3, 2)}, [3]))
    meta = other_process.claim_meta("train", "train", ["x"], 3, timeout_s=30)
    assert sorted(meta.sample_ids) == IDS
    doubled = TensorDict({"y": 2 * other_process.get_data(meta)["x"]}, [3])
    other_process.put_samples(meta.sample_ids, "train", doubled)
    client.put_samples(["a"], "train", TensorDict({"x": torch.zeros(1, 2)}, [1]))
    assert client.get_samples(["a", "b"], "train", ["x", "y"])["x"].tolist() == [[0, 0], [1, 1]]
    with pytest.raises(SchemaMismatchError):
        client.put_samples(["a"], "train", TensorDict({"x": torch.zeros(1, 2).int()}, [1]))
    client.clear_samples(["a"], "train")
    with pytest.raises(MissingDataError):
        other_process.get_samples(["a"], "train", ["x"])
    client.put_samples(["a"], "train", TensorDict({"x": torch.full((1, 2), 7.0)}, [1]))
    assert other_process.get_samples(["a"], "train", ["x"])["x"].tolist() == [[7, 7]]


def test_a_put_whose_lease_ended_before_its_values_are_written_overwrites_nothing(
    client, attach, monkeypatch
):
    def results(value):
        return TensorDict({"y": torch.full((3, 2), value)}, [3])

    client.put_samples(IDS, "train", TensorDict({"x": torch.ones(3, 2), **results(0.0)}, [3]))
    with attach(claim_lease_s=0.5) as paused, attach(claim_lease_s=60.0) as successor:
        claim = paused.claim_meta("train", "train", ["x"], 3, timeout_s=30)
        register = transfer_queue_rows.register
        again = []

        def succeed():
            deadline = time.monotonic() + 20
            while not (meta := successor.claim_meta("train", "train", ["x"], 3)).size:
                assert time.monotonic() < deadline, "the lease does not end"
            again.append(meta)
            successor.put_samples(IDS, "train", results(2.0), claim=meta)

        async def register_late(*args):
            monkeypatch.setattr(transfer_queue_rows, "register", register)
            rows = await register(*args)
            await asyncio.to_thread(succeed)
            return rows

        monkeypatch.setattr(transfer_queue_rows, "register", register_late)
        with pytest.raises(LeaseLostError):
            paused.put_samples(IDS, "train", results(1.0), claim=claim)
        assert client.get_samples(IDS, "train", ["y"])["y"].tolist() == [[2, 2]] * 3
        successor.acknowledge(again[0])


def test_bytes_that_a_backend_mixed_up_are_noticed():
    assert unseal("x", seal(b"data")) == b"data"
    for changed in (seal(b"data")[:-1] + b"?", b"", None, b"abc"):
        with pytest.raises(RuntimeError, match="other bytes"):
            unseal("x", changed)


def test_a_backend_with_a_daemon_does_not_promise_to_notice_its_death(owner, backend):
    assert owner.capabilities.survivable == (backend == "ray")
    assert set(BACKENDS) == {"packed", "simple", "ray", "mooncake_cpu", "yuanrong"}
