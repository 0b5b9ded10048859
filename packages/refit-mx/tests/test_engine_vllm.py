"""`MxWeightTransferEngine` behind both forms of vLLM's interface, with real publishers over TCP."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
import stand_in_vllm
import torch
from stand_in_model import TinyConfig, TinyForCausalLM, checkpoint, dense_forward, forward
from stand_in_vllm import digest_of, provide
from torch import nn

from refit_mx.compile.base import allocate_outputs, compile_pass
from refit_mx.control.client import ControlClient
from refit_mx.control.embedded import EmbeddedControlServer
from refit_mx.engine.phases import Phase
from refit_mx.engine.registration import register
from refit_mx.errors import (
    CompileError,
    CompileTargetError,
    FencedError,
    LayoutError,
    PhaseError,
    RefitConfigError,
    SourceLostError,
    VersionNotFoundError,
)
from refit_mx.manifest import Registry
from refit_mx.publisher import HF_RAW, MxV2TrainingPublisher
from refit_mx.shard_sources import LocalShard
from refit_mx.tensor_types import Box, TensorSpec

CONFIG = TinyConfig()
MODEL = "tiny"


@pytest.fixture(autouse=True)
def no_vllm_is_left_behind():
    """Other tests of this process must not find the stand-in."""
    yield
    for name in [n for n in sys.modules if n.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.modules.pop("refit_mx.engine.vllm", None)


class Trainer:
    """Two ranks that publish versions of a model in halves, as FSDP does."""

    def __init__(self, registry=HF_RAW, ranks=2):
        self.server = EmbeddedControlServer(retention=3)
        self.control = ControlClient(self.server.address)
        self.publishers = [
            MxV2TrainingPublisher(
                MODEL,
                f"fsdp-{rank}",
                control=self.control,
                registry=registry,
                transports=("tcp",),
                timeout_s=30,
            )
            for rank in range(ranks)
        ]

    def publish(self, version_id, tensors):
        slots = [f"fsdp-{rank}" for rank in range(len(self.publishers))]
        self.control.create_version(MODEL, slots, idempotency_key=version_id, version_id=version_id)
        for rank, publisher in enumerate(self.publishers):
            publisher.publish(
                version_id, [part_of(n, t, rank, len(slots)) for n, t in tensors.items()]
            )

    def close(self):
        for publisher in self.publishers:
            publisher.close()
        self.control.close()
        self.server.close()


def part_of(name, tensor, rank, ranks):
    """A rank's rows; of what has none, all."""
    if not tensor.ndim:
        return LocalShard.whole(name, tensor)
    rows = -(-tensor.shape[0] // ranks)
    first, stop = min(rank * rows, tensor.shape[0]), min((rank + 1) * rows, tensor.shape[0])
    shape = tuple(tensor.shape)
    box = Box((first, *(0,) * (len(shape) - 1)), (stop - first, *shape[1:]))
    return LocalShard(name, shape, box, tensor[first:stop])


@pytest.fixture
def trainer():
    made = Trainer()
    yield made
    made.close()


class Workers:
    """The engines of one server of the newest form, one a rank."""

    def __init__(self, config=CONFIG, tp_size=2, models=None):
        factory = provide("new")
        assert register()
        self.models = models or [TinyForCausalLM(config, tp_size, r) for r in range(tp_size)]
        self.engines = [
            factory.create_engine(
                SimpleNamespace(backend="mx"),
                SimpleNamespace(
                    model_config=SimpleNamespace(model=MODEL),
                    parallel_config=SimpleNamespace(rank=rank),
                ),
                torch.device("cpu"),
                model,
            )
            for rank, model in enumerate(self.models)
        ]

    def init(self, trainer, **info):
        for engine in self.engines:
            engine.init_transfer_engine(
                engine.parse_init_info(
                    {"control_address": trainer.server.address, "transport": "tcp", **info}
                )
            )

    def receive(self, **info):
        for engine in self.engines:
            engine.start_weight_update()
        for engine in self.engines:
            engine.update_weights(info)

    def finish(self):
        for engine in self.engines:
            engine.finish_weight_update()

    def update(self, version_id, **info):
        self.receive(version_id=version_id, **info)
        self.finish()

    @property
    def digests(self):
        return [digest_of(model) for model in self.models]

    def close(self):
        for engine in self.engines:
            engine.shutdown()


@pytest.fixture
def workers():
    made = Workers()
    yield made
    made.close()


def loaded(tensors, config=CONFIG, tp_size=2):
    """Digests of ranks that loaded whole tensors."""
    made = []
    for rank in range(tp_size):
        model = TinyForCausalLM(config, tp_size, rank)
        model.load_weights(tensors.items())
        made.append(digest_of(model))
    return made


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


@pytest.mark.parametrize(
    ("parse", "info"),
    [
        ("parse_init_info", {"colour": "red"}),
        ("parse_init_info", {}),
        ("parse_init_info", {"control_address": "a:1", "timeout_s": 0}),
        ("parse_init_info", {"control_address": "a:1", "rank_offset": -1}),
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


# ---- compile targets ----


def fp8_model(compiler, rank, tp_size=2):
    """A rank whose linear layers have float8 weights and scales."""
    model = TinyForCausalLM(CONFIG, tp_size, rank)
    for name, module in list(model.named_modules()):
        for leaf, weight in list(module.named_parameters(recurse=False)):
            made = compiler.output_specs(
                [TensorSpec(f"{name}.{leaf}", "bfloat16", tuple(weight.shape))]
            )
            if len(made) == 2:
                zeros = torch.zeros(made[0].shape).to(torch.float8_e4m3fn)
                setattr(module, leaf, nn.Parameter(zeros, requires_grad=False))
                module.register_parameter(
                    made[1].name.rpartition(".")[2],
                    nn.Parameter(torch.zeros(made[1].shape), requires_grad=False),
                )
    return model


def compiled(compiler, tensors, rank):
    """What a rank's own tensors are compiled to."""
    model = TinyForCausalLM(CONFIG, 2, rank)
    model.load_weights(tensors.items())
    raw = {name: p.detach() for name, p in model.named_parameters()}
    specs = [TensorSpec(n, "bfloat16", tuple(t.shape)) for n, t in raw.items()]
    out = allocate_outputs(compiler, specs)
    compiler.run(raw, out)
    return {**raw, **out}


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("deep_gemm_fp8", {"scale_format": "ue8m0"}),
        ("cutlass_fp8", {"scales": "per_channel"}),
    ],
)
def test_raw_weights_are_compiled_in_scratch_for_the_models_kernels(trainer, target, options):
    compiler = compile_pass(target, **options)
    workers = Workers(models=[fp8_model(compiler, rank) for rank in range(2)])
    try:
        workers.init(trainer, compile_target=target, compile_options=options)
        for seed in (1, 2):
            tensors = checkpoint(CONFIG, seed)
            trainer.publish(f"v{seed}", tensors)
            workers.update(f"v{seed}")
            for rank, model in enumerate(workers.models):
                expected = compiled(compiler, tensors, rank)
                live = dict(model.named_parameters())
                assert set(live) == set(expected)
                for name in live:
                    assert torch.equal(live[name].float(), expected[name].float())
    finally:
        workers.close()


def test_a_nan_is_refused_by_an_fp8_pass_and_the_old_version_stays(trainer):
    compiler = compile_pass("deep_gemm_fp8")
    workers = Workers(models=[fp8_model(compiler, rank) for rank in range(2)])
    try:
        workers.init(trainer, compile_target="deep_gemm_fp8")
        trainer.publish("v1", checkpoint(CONFIG, 1))
        workers.update("v1")
        before = workers.digests
        tensors = checkpoint(CONFIG, 2)
        tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = math.nan
        trainer.publish("v2", tensors)
        with pytest.raises(CompileError, match=r"layers\.0\.mlp\.gate_up_proj\.weight"):
            workers.receive(version_id="v2")
        assert workers.digests == before
    finally:
        workers.close()


@pytest.mark.parametrize("registry", [None, Registry("vllm_fused"), Registry("cutlass_fp8")])
def test_invariant_8_another_compile_target_is_refused_before_any_byte_moves(registry):
    trainer, workers = Trainer(registry), Workers()
    try:
        trainer.publish("v1", checkpoint(CONFIG, 1))
        workers.init(trainer)
        with pytest.raises(CompileTargetError, match="hf_raw"):
            workers.receive(version_id="v1")
        assert workers.engines[0].transfer.stats is None
    finally:
        workers.close()
        trainer.close()


def test_bytes_that_the_trainer_compiled_are_taken_as_they_are_if_the_metadata_match():
    compiler = compile_pass("cutlass_fp8", scales="per_channel")
    tensors = {
        name: tensor
        for name, tensor in compiled(compiler, checkpoint(CONFIG, 1), 0).items()
        if name.startswith("model.layers.0.self_attn.o_proj")
    }
    trainer = Trainer(Registry("cutlass_fp8", dict(compiler.metadata)), ranks=1)
    model = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList([nn.Module()])
    model.model.layers[0].self_attn = nn.Module()
    # As a layer of a server without tensor parallelism.
    layer = nn.Module()
    for name, tensor in tensors.items():
        layer.register_parameter(
            name.rpartition(".")[2], nn.Parameter(torch.zeros_like(tensor), requires_grad=False)
        )
    model.model.layers[0].self_attn.o_proj = layer
    workers = Workers(models=[model])
    others = Workers(models=[model])
    try:
        trainer.publish("v1", tensors)
        same = {"compile_target": "cutlass_fp8", "source_target": "cutlass_fp8"}
        workers.init(trainer, **same, compile_options={"scales": "per_channel"})
        workers.update("v1")
        for name, tensor in tensors.items():
            assert torch.equal(model.get_parameter(name).float(), tensor.float())
        others.init(trainer, **same, compile_options={"scales": "per_tensor"})
        with pytest.raises(CompileTargetError, match="per_channel"):
            others.receive(version_id="v1")
    finally:
        workers.close()
        others.close()
        trainer.close()


@pytest.mark.parametrize(
    "info",
    [
        {"compile_target": "marlin"},
        {"compile_target": "deep_gemm_fp8", "source_target": "cutlass_fp8"},
        {"compile_options": {"colour": "red"}},
    ],
)
def test_a_wrong_configuration_is_refused_and_can_be_corrected(trainer, workers, info):
    with pytest.raises(RefitConfigError):
        workers.init(trainer, **info)
    workers.init(trainer)
    trainer.publish("v1", checkpoint(CONFIG, 1))
    workers.update("v1")


# ---- fences ----


def test_an_install_that_fails_half_way_fences_until_a_whole_update_succeeds(trainer):
    """A layer of MLA whose derived weights do not fit fails after all copies were made."""
    model = TinyForCausalLM(CONFIG)
    layer = model.model.layers[0].self_attn
    layer.kv_b_proj = layer.o_proj
    layer.W_UV, layer.W_UK_T = torch.zeros(1, 2, 3), torch.zeros(1, 2, 3)
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


# ---- the older form ----


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
