"""`MxWeightTransferEngine` behind the older form of vLLM's interface."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from engine_workers import CONFIG, MODEL, loaded
from stand_in_model import TinyForCausalLM, checkpoint, digest_of
from stand_in_vllm import provide

from refit_mx.engine.registration import register
from refit_mx.errors import (
    FencedError,
    RefitConfigError,
    VersionNotFoundError,
)

pytestmark = pytest.mark.usefixtures("no_vllm_is_left_behind")


@pytest.fixture
def old_engine(trainer):
    factory = provide("old")
    register()
    engine = factory.create_engine(SimpleNamespace(backend="mx"), SimpleNamespace(rank=0))
    engine.init_transfer_engine(
        engine.parse_init_info(
            {
                "control_address": trainer.server.address,
                "model_name": MODEL,
                "transport": "tcp",
                "timeout_s": 20,
            }
        )
    )
    yield engine
    engine.shutdown()


def receive(engine, load_weights, **info):
    engine.receive_weights(engine.parse_update_info(info), load_weights=load_weights)


def test_the_older_form_loads_whole_tensors_in_one_call(trainer, old_engine):
    model = TinyForCausalLM(CONFIG, 2, 1)
    for seed in (1, 2):
        trainer.publish(f"v{seed}", checkpoint(CONFIG, seed))
        receive(old_engine, model.load_weights, version_id=f"v{seed}", is_checkpoint_format=True)
        assert digest_of(model) == loaded(checkpoint(CONFIG, seed))[1]
        assert old_engine.transfer.version_id == f"v{seed}"


def test_the_older_form_loads_nothing_when_receiving_fails(trainer, old_engine):
    called = []
    with pytest.raises(VersionNotFoundError):
        receive(old_engine, called.append, version_id="v9")
    assert not called
    assert old_engine.transfer.fenced is None
    trainer.publish("v1", checkpoint(CONFIG, 1))
    receive(old_engine, called.append, version_id="v1")
    assert sorted(name for name, _ in called[0]) == sorted(checkpoint(CONFIG, 1))


def test_the_older_form_is_fenced_when_loading_fails_half_way(trainer, old_engine):
    model = TinyForCausalLM(CONFIG)
    trainer.publish("v1", checkpoint(CONFIG, 1))

    def load_half(weights):
        model.load_weights(weights[: len(weights) // 2])
        raise OSError("the other half of a test")

    with pytest.raises(FencedError, match="the other half"):
        receive(old_engine, load_half, version_id="v1")
    assert old_engine.transfer.fenced
    receive(old_engine, model.load_weights, version_id="v1")
    assert old_engine.transfer.fenced is None
    assert [digest_of(model)] == loaded(checkpoint(CONFIG, 1), CONFIG, 1)


def test_the_older_form_needs_its_function(old_engine):
    with pytest.raises(RefitConfigError, match="load_weights"):
        old_engine.receive_weights(old_engine.parse_update_info({"version_id": "v1"}))
