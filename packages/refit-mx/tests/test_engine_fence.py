"""A worker whose weights are a mixture refuses to compute until an update succeeds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from refit_mx.engine.fence import ModelFence
from refit_mx.engine.infos import MxInitInfo, MxUpdateInfo
from refit_mx.engine.phases import Step
from refit_mx.engine.weight_transfer import MxWeightTransfer
from refit_mx.errors import FencedError, PhaseError


class Model(nn.Module):
    """Counts what is computed."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2))
        self.computed = 0

    def forward(self, x):
        self.computed += 1
        return x

    def compute_logits(self, hidden):
        self.computed += 1
        return hidden


@pytest.fixture
def model():
    return Model()


def assert_refuses(model, why):
    before = model.computed
    for call in (model, model.compute_logits):
        with pytest.raises(FencedError, match=why):
            call(torch.ones(1))
    assert model.computed == before


def assert_computes(model):
    before = model.computed
    model(torch.ones(1))
    model.compute_logits(torch.ones(1))
    assert model.computed == before + 2


def test_a_closed_fence_refuses_and_says_why(model):
    fence = ModelFence(model, lambda: "torn by a test")
    assert_computes(model)
    fence.close()
    fence.close()
    assert_refuses(model, "torn by a test; the weights are a mixture")
    fence.open()
    fence.open()
    assert_computes(model)


def test_what_was_there_before_is_put_back(model):
    calls = []
    model.compute_logits = mine = calls.append
    fence = ModelFence(model, lambda: "torn")
    fence.close()
    with pytest.raises(FencedError):
        model.compute_logits(1)
    fence.open()
    assert model.compute_logits is mine
    assert not model._forward_pre_hooks


def test_a_model_without_logits_is_fenced_by_its_call():
    model = nn.Linear(2, 2)
    fence = ModelFence(model, lambda: "torn")
    fence.close()
    with pytest.raises(FencedError, match="torn"):
        model(torch.ones(1, 2))
    assert not hasattr(model, "compute_logits")
    fence.open()
    model(torch.ones(1, 2))


class Transfer(MxWeightTransfer):
    """Receives without a network: what it stages is given."""

    def __init__(self, model, install):
        super().__init__(model=model, model_name="m")
        self.install = install

    def _receive(self, info):
        from types import SimpleNamespace

        return SimpleNamespace(
            version_id=info.version_id,
            received=SimpleNamespace(close=lambda: None),
            tensors={"weight": torch.ones(2, 2)},
        )

    def _install_into_model(self, tensors):
        self.install(tensors)


def update(transfer, version_id):
    transfer.start()
    transfer.receive(MxUpdateInfo(version_id))
    transfer.finish()


def test_a_torn_worker_neither_computes_nor_passes_the_check_until_an_update_succeeds(model):
    fails = [OSError("half way, of a test")]
    seen = []

    def install(tensors):
        with pytest.raises(FencedError, match="the weights are a mixture"):
            model(torch.ones(1))
        with torch.no_grad():
            model.weight.copy_(tensors["weight"])
        seen.append("installed")
        if fails:
            raise fails.pop()

    transfer = Transfer(model, install)
    transfer.init(MxInitInfo(control_address="127.0.0.1:9"))
    with pytest.raises(FencedError, match="half way, of a test"):
        update(transfer, "v1")
    assert_refuses(model, "half way, of a test")
    for version_id in ("", "v1"):
        with pytest.raises(FencedError, match="must not serve"):
            transfer.check(version_id)
    # Neither an update that is given up nor one that fails before the install opens it.
    transfer.start()
    transfer.abort()
    assert_refuses(model, "half way")
    update(transfer, "v1")
    assert_computes(model)
    transfer.check("v1")
    assert seen == ["installed"] * 2
    transfer.shutdown()


def test_the_check_says_which_version_a_worker_holds(model):
    transfer = Transfer(model, lambda tensors: None)
    transfer.check("")
    with pytest.raises(PhaseError, match="holds the weights of its launch; expected version v1"):
        transfer.check("v1")
    transfer.init(MxInitInfo(control_address="127.0.0.1:9"))
    update(transfer, "v1")
    transfer.receive(MxUpdateInfo("v1", check=True))
    with pytest.raises(PhaseError, match="holds version v1; expected version v2"):
        transfer.check("v2")
    with pytest.raises(PhaseError, match="expected the weights of its launch"):
        transfer.receive(MxUpdateInfo(check=True))
    # It changes nothing: the next update starts as before.
    update(transfer, "v2")
    transfer.check("v2")
    transfer.shutdown()
    with pytest.raises(PhaseError, match="check: the worker is closed"):
        transfer.check("v2")


def test_the_check_is_refused_beside_a_step(model):
    transfer = Transfer(model, lambda tensors: transfer.check(""))
    transfer.init(MxInitInfo(control_address="127.0.0.1:9"))
    with pytest.raises(FencedError, match=f"check: the worker is in {Step.FINISH.value}"):
        update(transfer, "v1")
    transfer.shutdown()


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"abort": True, "check": True},
        {"abort": True, "version_id": "v1"},
        {"check": True, "version_id": "v1", "names": ["w"]},
    ],
)
def test_infos_that_ask_for_two_things_are_refused(info):
    with pytest.raises(ValueError, match="update_info"):
        MxUpdateInfo(**info)
