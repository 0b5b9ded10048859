"""Received weights are installed completely, compiled or not, or the old weights stay."""

from __future__ import annotations

import pytest
import torch
from refit_fixtures import Meddling, new_transport, zeros
from refit_processes import SHAPES, same, targets_of, weights

from refit_mx import (
    CompileError,
    CompilePass,
    CompileTargetError,
    LayoutError,
    Registry,
    TensorSpec,
    compile_pass,
)

# Installing


def test_install_function_gets_the_tensors(world, published):
    taken = {}

    def install(tensors):
        taken.update({name: tensor.clone() for name, tensor in tensors.items()})

    stats = world.receiver().refit("v1", install)
    assert same(taken, published[1])
    assert stats.seconds["install"] > 0
    assert stats.total_seconds >= sum(stats.seconds.values())


def test_wider_live_dtype_holds_the_values_exactly(world):
    world.publish_state("v1", weights(1), wire_dtype="bfloat16")
    live = zeros()
    shapes = {name: ("bfloat16", shape) for name, (_, shape) in SHAPES.items()}
    world.receiver(targets_of(shapes)).refit("v1", live)
    assert same(live, {name: each.bfloat16().float() for name, each in weights(1).items()})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda live: live.pop("embed"), "have no live weight: embed"),
        (lambda live: live.update(embed=torch.zeros(96, 41)), "the live weight has the shape"),
        (lambda live: live.update(embed=torch.zeros(96, 40).half()), "cannot hold every float32"),
    ],
)
def test_mismatched_live_weights_move_no_byte(world, published, change, says):
    transport = Meddling(new_transport("tcp"))
    live = zeros()
    change(live)
    with pytest.raises(LayoutError, match=says):
        world.receiver(transport=transport).refit("v1", live)
    assert transport.fetched == []
    assert not live["scale"].any()


def test_failure_before_the_install_does_not_fence(world, published):
    def fail(phase):
        if phase == "install":
            raise RuntimeError

    receiver = world.receiver(on_phase=fail)
    live = zeros()
    with pytest.raises(RuntimeError):
        receiver.refit("v1", live)
    assert not receiver.fenced
    assert same(live, zeros())


# Compiling

LINEAR = {"layers.0.mlp.weight": ("float32", (256, 128)), "norm": ("float32", (256,))}


def compiled_zeros(compiler: CompilePass) -> dict[str, torch.Tensor]:
    """Return live weights before the first refit, as a pass would make them."""
    specs = [TensorSpec(name, dtype, shape) for name, (dtype, shape) in LINEAR.items()]
    return zeros({spec.name: (spec.dtype, spec.shape) for spec in compiler.output_specs(specs)})


def test_compile_pass_runs_before_anything_live_changes(world):
    world.publish_state("v1", weights(3, LINEAR))
    compiler = compile_pass("deep_gemm_fp8")
    live, expected = compiled_zeros(compiler), compiled_zeros(compiler)
    stats = world.receiver(targets_of(LINEAR)).refit("v1", live, compiler)
    compiler.run(weights(3, LINEAR), expected)
    assert same(live, expected)
    assert stats.seconds["compile"] > 0


def test_failed_compile_leaves_the_old_weights(world):
    state = weights(3, LINEAR)
    state["layers.0.mlp.weight"][5, 5] = float("nan")
    world.publish_state("v1", state)
    compiler = compile_pass("deep_gemm_fp8")
    live = compiled_zeros(compiler)
    receiver = world.receiver(targets_of(LINEAR))
    with pytest.raises(CompileError):
        receiver.refit("v1", live, compiler)
    assert not receiver.fenced
    assert not any(tensor.to(torch.float32).any() for tensor in live.values())


def test_pass_refuses_sources_that_it_does_not_accept(world):
    world.publish_state("v1", weights(3, LINEAR), registry=Registry("cutlass_fp8"))
    transport = Meddling(new_transport("tcp"))
    receiver = world.receiver(targets_of(LINEAR), transport=transport)
    with pytest.raises(
        CompileTargetError, match=r"no source has hf_raw; \d+ sources publish cutlass_fp8"
    ):
        receiver.refit("v1", lambda tensors: None, compile_pass("deep_gemm_fp8"))
    assert transport.fetched == []
