"""`MxWeightTransferEngine` with compile passes: what it asks for, makes and refuses."""

from __future__ import annotations

import math

import pytest
import torch
from engine_workers import CONFIG, Trainer, Workers
from stand_in_model import TinyForCausalLM, checkpoint
from torch import nn

from refit_mx.compile.base import allocate_outputs, compile_pass
from refit_mx.errors import (
    CompileError,
    CompileTargetError,
    RefitConfigError,
)
from refit_mx.manifest import Registry
from refit_mx.tensor_types import TensorSpec

pytestmark = pytest.mark.usefixtures("no_vllm_is_left_behind")


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
