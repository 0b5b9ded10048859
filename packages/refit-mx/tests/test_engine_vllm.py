"""`MxWeightTransferEngine` behind vLLM's interface, with real publishers over TCP."""

from __future__ import annotations

import logging
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import stand_in_vllm
import torch
from engine_workers import CONFIG, Workers, loaded
from stand_in_model import (
    TinyConfig,
    TinyForCausalLM,
    checkpoint,
    dense_forward,
    digest_of,
    forward,
)
from stand_in_vllm import provide
from torch import nn

from refit_mx.engine.phases import Phase
from refit_mx.engine.registration import register
from refit_mx.errors import (
    FencedError,
    LayoutError,
    PhaseError,
    RefitConfigError,
    SourceLostError,
    VersionNotFoundError,
)
from refit_mx.settings import ReceiverSettings

pytestmark = pytest.mark.usefixtures("no_vllm_is_left_behind")


# ---- the form ----


@pytest.mark.parametrize("generation", ["new", "old"])
def test_the_factory_makes_our_engine_and_registering_twice_does_no_harm(generation):
    factory = provide(generation)
    assert register()
    assert not register()
    engine_class = factory._registry["mx"]()
    base = sys.modules["vllm.distributed.weight_transfer.base"].WeightTransferEngine
    assert issubclass(engine_class, base)
    assert engine_class.__name__ == "MxWeightTransferEngine"
    assert engine_class.supports_draft_weight_update is True
    assert engine_class.defers_processing is False


def test_a_name_that_another_engine_has_is_refused():
    factory = provide("new")
    factory.register_engine("mx", stand_in_vllm.seeded_engine())
    with pytest.raises(RefitConfigError, match="another weight transfer engine"):
        register()
    assert register("mx-of-refit")


def test_without_vllm_registering_says_so(monkeypatch):
    for name in [n for n in sys.modules if n.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match="vllm"):
        register()


@pytest.fixture
def plugin():
    """What vLLM calls in each of its processes, by the name that the distribution gives it."""
    path = Path(__file__).parents[1] / "pyproject.toml"
    group = "vllm.general_plugins"
    found = tomllib.loads(path.read_text())["project"]["entry-points"][group]
    assert list(found) == ["refit_mx"]
    return EntryPoint("refit_mx", found["refit_mx"], group).load()


def test_vllm_has_the_engine_by_the_entry_point_alone(plugin, caplog):
    factory = provide("new")
    plugin()
    plugin()
    assert factory._registry["mx"]().__name__ == "MxWeightTransferEngine"
    assert not caplog.records


def test_the_entry_point_ends_no_vllm(plugin, caplog, monkeypatch):
    # None is there, as in a process that only looks at its plugins.
    for name in [n for n in sys.modules if n.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    plugin()
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    # Another engine has the name.
    factory = provide("new")
    factory.register_engine("mx", stand_in_vllm.seeded_engine())
    plugin()
    assert "another weight transfer engine" in caplog.text
    # A factory of another generation.
    caplog.clear()
    factory = provide("new")
    factory.register_engine = lambda name: None
    plugin()
    assert "'mx' is not registered: TypeError" in caplog.text


@pytest.mark.parametrize(
    ("parse", "info"),
    [
        ("parse_init_info", {"colour": "red"}),
        ("parse_init_info", {}),
        ("parse_init_info", {"control_address": "a:1", "timeout_s": 0}),
        ("parse_init_info", {"control_address": "a:1", "rank_offset": -1}),
        ("parse_init_info", {"control_address": "a:1", "receiver_settings": {"colour": 1}}),
        ("parse_init_info", {"control_address": "a:1", "receiver_settings": {"lease_ttl_s": "1"}}),
        ("parse_init_info", {"control_address": "a:1", "receiver_settings": {"lease_ttl_s": 0}}),
        ("parse_update_info", {"colour": "red"}),
        ("parse_update_info", {}),
        ("parse_update_info", {"version_id": "v1", "abort": True}),
        ("parse_update_info", {"version_id": "v1", "timeout_s": -1}),
    ],
)
@pytest.mark.parametrize("generation", ["new", "old"])
def test_wrong_infos_are_value_errors(generation, parse, info):
    provide(generation)
    register()
    from refit_mx.engine.vllm import MxWeightTransferEngine

    arguments = ("config", None, None, None) if generation == "new" else ("config", None)
    engine = MxWeightTransferEngine(*arguments)
    with pytest.raises(ValueError, match="info"):
        getattr(engine, parse)(info)


def test_a_trainer_that_wants_to_send_is_told_to_publish():
    provide("old")
    from refit_mx.engine.vllm import MxWeightTransferEngine

    with pytest.raises(RefitConfigError, match="MxV2TrainingPublisher"):
        MxWeightTransferEngine.trainer_send_weights(iter(()), {})


# ---- updates of the newest form ----


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("config", [CONFIG, TinyConfig(experts=4, tied=True)], ids=["dense", "moe"])
def test_an_update_installs_the_version_byte_for_byte(trainer, config, tp_size):
    workers = Workers(config, tp_size)
    try:
        workers.init(trainer)
        for seed in (1, 2):
            tensors = checkpoint(config, seed)
            trainer.publish(f"v{seed}", tensors)
            workers.update(f"v{seed}")
            assert workers.digests == loaded(tensors, config, tp_size)
            served = forward(workers.models, [1, 2, 3])
            torch.testing.assert_close(served, dense_forward(config, tensors, [1, 2, 3]))
            for engine in workers.engines:
                assert engine.transfer.version_id == f"v{seed}"
                assert engine.transfer.stats.nbytes > 0
    finally:
        workers.close()


def test_receiving_changes_nothing_that_is_live_and_finishing_needs_no_publisher(trainer, workers):
    before = workers.digests
    tensors = checkpoint(CONFIG, 1)
    trainer.publish("v1", tensors)
    workers.init(trainer)
    workers.receive(version_id="v1")
    assert workers.digests == before
    for publisher in trainer.publishers:
        publisher.close()
    workers.finish()
    assert workers.digests == loaded(tensors)


def test_hole_8_a_call_in_the_wrong_phase_raises_and_changes_nothing(trainer, workers):
    engine = workers.engines[0]
    before = workers.digests
    with pytest.raises(PhaseError, match="start_weight_update: the worker is idle"):
        engine.start_weight_update()
    with pytest.raises(PhaseError, match="abort"):
        engine.update_weights({"abort": True})
    workers.init(trainer)
    with pytest.raises(PhaseError, match="receive_weights: the worker is initialised"):
        engine.update_weights({"version_id": "v1"})
    with pytest.raises(PhaseError, match="finish_weight_update: the worker is initialised"):
        engine.finish_weight_update()
    trainer.publish("v1", checkpoint(CONFIG, 1))
    workers.receive(version_id="v1")
    with pytest.raises(PhaseError, match="start_weight_update: the worker is received"):
        engine.start_weight_update()
    with pytest.raises(PhaseError, match="receive_weights: the worker is received"):
        engine.update_weights({"version_id": "v1"})
    assert workers.digests == before
    workers.finish()
    assert workers.digests == loaded(checkpoint(CONFIG, 1))


def test_initialising_again_is_allowed_with_the_same_info_alone(trainer, workers):
    workers.init(trainer)
    trainer.publish("v1", checkpoint(CONFIG, 1))
    workers.receive(version_id="v1")
    workers.init(trainer)
    with pytest.raises(PhaseError, match="init_transfer_engine"):
        workers.init(trainer, rank_offset=8)
    workers.finish()
    assert workers.digests == loaded(checkpoint(CONFIG, 1))


def test_an_update_that_fails_keeps_the_old_version_and_the_next_one_works(trainer, workers):
    workers.init(trainer, timeout_s=20)
    trainer.publish("v1", checkpoint(CONFIG, 1))
    workers.update("v1")
    with pytest.raises(VersionNotFoundError):
        workers.receive(version_id="v2")
    assert workers.digests == loaded(checkpoint(CONFIG, 1))
    for engine in workers.engines:
        engine.update_weights({"abort": True})
    trainer.publish("v2", checkpoint(CONFIG, 2))
    workers.update("v2")
    assert workers.digests == loaded(checkpoint(CONFIG, 2))


def test_an_update_that_is_aborted_gives_the_version_back(trainer, workers):
    workers.init(trainer)
    trainer.publish("v1", checkpoint(CONFIG, 1))
    before = workers.digests
    for _ in range(4):
        workers.receive(version_id="v1")
        for engine in workers.engines:
            engine.update_weights({"abort": True})
            engine.update_weights({"abort": True})
    assert workers.digests == before
    # No lease is left, so the publishers can let it go.
    trainer.control.delete_version("v1")
    for publisher in trainer.publishers:
        publisher.release("v1")


def test_only_the_named_parameters_are_updated(trainer, workers):
    workers.init(trainer)
    trainer.publish("v1", checkpoint(CONFIG, 1))
    trainer.publish("v2", checkpoint(CONFIG, 2))
    workers.update("v1")
    name = "model.layers.1.self_attn.qkv_proj.weight"
    workers.update("v2", names=[name, "model.norm.weight"])
    for rank, model in enumerate(workers.models):
        for seed in (1, 2):
            whole = TinyForCausalLM(CONFIG, 2, rank)
            whole.load_weights(checkpoint(CONFIG, seed).items())
            for other, value in whole.named_parameters():
                if (other in (name, "model.norm.weight")) == (seed == 2):
                    assert torch.equal(model.get_parameter(other), value)


def test_a_rank_without_weights_joins_every_phase(trainer):
    workers = Workers(models=[TinyForCausalLM(CONFIG), nn.Module()])
    try:
        workers.init(trainer)
        trainer.publish("v1", checkpoint(CONFIG, 1))
        workers.update("v1")
        assert digest_of(workers.models[0]) == loaded(checkpoint(CONFIG, 1), CONFIG, 1)[0]
        assert [engine.transfer.phase for engine in workers.engines] == [Phase.INITIALISED] * 2
    finally:
        workers.close()


def test_versions_of_another_dtype_are_followed_when_a_pass_casts(trainer, workers):
    workers.init(trainer, compile_options={"dtype": "bfloat16"})
    for seed, dtype in ((1, torch.float32), (2, torch.bfloat16), (3, torch.float32)):
        tensors = checkpoint(CONFIG, seed)
        trainer.publish(f"v{seed}", {name: t.to(dtype) for name, t in tensors.items()})
        workers.update(f"v{seed}")
        assert workers.digests == loaded(tensors)


def test_a_version_that_lacks_a_tensor_is_refused_and_named(trainer, workers):
    workers.init(trainer)
    tensors = checkpoint(CONFIG, 1)
    del tensors["model.norm.weight"]
    trainer.publish("v1", tensors)
    before = workers.digests
    with pytest.raises(LayoutError, match=r"model\.norm\.weight"):
        workers.receive(version_id="v1")
    assert workers.digests == before


def test_publishers_that_are_gone_are_a_typed_error_in_time(trainer, workers):
    workers.init(trainer, timeout_s=20)
    trainer.publish("v1", checkpoint(CONFIG, 1))
    workers.update("v1")
    trainer.publish("v2", checkpoint(CONFIG, 2))
    for publisher in trainer.publishers:
        publisher._server.close()
        publisher._manifests.close()
    with pytest.raises(SourceLostError):
        workers.receive(version_id="v2")
    assert workers.digests == loaded(checkpoint(CONFIG, 1))


def test_settings_of_the_receiver_come_with_init(trainer, workers):
    workers.init(trainer, receiver_settings={"stall_timeout_s": 2, "scratch_copies": 1})
    trainer.publish("v1", checkpoint(CONFIG, 1))
    workers.update("v1")
    for engine in workers.engines:
        settings = engine.transfer._receiver._settings
        assert (settings.stall_timeout_s, settings.scratch_copies) == (2, 1)
        assert settings.lease_ttl_s == ReceiverSettings().lease_ttl_s


# ---- fences ----


def test_an_install_that_fails_half_way_fences_until_a_whole_update_succeeds(trainer):
    """A layer of MLA whose derived weights cannot be written fails after all copies were made."""
    model = TinyForCausalLM(CONFIG)
    layer = model.model.layers[0].self_attn
    layer.kv_b_proj = layer.o_proj
    both, rank = layer.o_proj.weight.shape
    dtype = layer.o_proj.weight.dtype
    layer.W_UK_T = torch.zeros(1, 1, rank, dtype=dtype)
    layer.W_UV = torch.zeros(1, 1, 1, dtype=dtype).expand(1, rank, both - 1)
    workers = Workers(models=[model])
    transfer = workers.engines[0].transfer
    try:
        workers.init(trainer)
        trainer.publish("v1", checkpoint(CONFIG, 1))
        with pytest.raises(FencedError, match="half way"):
            workers.update("v1")
        assert "half way" in transfer.fenced
        assert transfer.version_id is None
        workers.engines[0].start_weight_update()
        with pytest.raises(FencedError, match="only an update of all weights"):
            workers.engines[0].update_weights({"version_id": "v1", "names": ["model.norm.weight"]})
        del layer.W_UV, layer.W_UK_T, layer.kv_b_proj
        workers.update("v1")
        assert transfer.fenced is None
        assert workers.digests == loaded(checkpoint(CONFIG, 1), CONFIG, 1)
    finally:
        workers.close()


def test_absorbed_weights_that_could_not_be_made_are_refused_before_any_byte_moves(trainer):
    model = TinyForCausalLM(CONFIG)
    layer = model.model.layers[0].self_attn
    layer.kv_b_proj = layer.o_proj
    layer.W_UV = torch.zeros(1, 2, 3, dtype=torch.float8_e4m3fn)
    before = digest_of(model)
    workers = Workers(models=[model])
    try:
        workers.init(trainer)
        trainer.publish("v1", checkpoint(CONFIG, 1))
        with pytest.raises(LayoutError, match=r"kv_b_proj\.weight is"):
            workers.update("v1")
        assert workers.engines[0].transfer.fenced is None
        assert digest_of(model) == before
    finally:
        workers.close()


def test_shutting_down_gives_everything_back_and_may_be_repeated(trainer, workers):
    workers.init(trainer)
    trainer.publish("v1", checkpoint(CONFIG, 1))
    workers.receive(version_id="v1")
    for engine in workers.engines:
        engine.shutdown()
        engine.shutdown()
        with pytest.raises(PhaseError, match="closed"):
            engine.start_weight_update()
        with pytest.raises(PhaseError, match="closed"):
            engine.finish_weight_update()
    trainer.control.delete_version("v1")
    for publisher in trainer.publishers:
        publisher.release("v1")
