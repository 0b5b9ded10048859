"""What was received is installed whole, compiled or not, or the old weights stay."""

from __future__ import annotations

import pytest
import torch
from refit_fixtures import (
    Meddling,
    zeros,
)
from refit_processes import SHAPES, same, targets_of, weights

from refit_mx.compile.base import compile_pass
from refit_mx.errors import (
    CompileError,
    CompileTargetError,
    FencedError,
    LayoutError,
)
from refit_mx.manifest import Registry
from refit_mx.tensor_types import TensorSpec
from refit_mx.transports.tcp import TcpTransport

# Installing


def test_a_function_installs_what_it_is_given(world, published):
    taken = {}

    def install(tensors):
        taken.update({name: tensor.clone() for name, tensor in tensors.items()})

    stats = world.receiver().refit("v1", install)
    assert same(taken, published[1])
    assert stats.seconds["install"] > 0
    assert stats.total_seconds >= sum(stats.seconds.values())


def test_a_wider_live_dtype_takes_the_values_without_loss(world):
    publisher = world.publisher(wire_dtype="bfloat16")
    world.version("v1")
    publisher.publish("v1", weights(1))
    live = zeros()
    shapes = {name: ("bfloat16", shape) for name, (_, shape) in SHAPES.items()}
    world.receiver(targets_of(shapes)).refit("v1", live)
    assert same(live, {name: each.bfloat16().float() for name, each in weights(1).items()})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda live: live.pop("embed"), "have no live weight to go to: embed"),
        (lambda live: live.update(embed=torch.zeros(96, 41)), "the live weight has the shape"),
        (lambda live: live.update(embed=torch.zeros(96, 40).half()), "cannot hold every float32"),
    ],
)
def test_live_weights_that_do_not_fit_are_refused_before_any_byte_moves(
    world, published, change, says
):
    transport = Meddling(TcpTransport())
    live = zeros()
    change(live)
    with pytest.raises(LayoutError, match=says):
        world.receiver(transport=transport).refit("v1", live)
    assert transport.fetched == []
    assert not live["scale"].any()


def test_an_install_that_fails_fences_the_worker_until_a_full_refit(world, published):
    receiver = world.receiver()

    def fail(tensors):
        raise RuntimeError("the engine is gone")

    with pytest.raises(FencedError, match=r"version v1 failed half way.*engine is gone"):
        receiver.refit("v1", fail)
    assert receiver.fenced
    live = zeros()
    with pytest.raises(FencedError, match="only a refit of all 4 targets"):
        receiver.refit("v1", live, names=["embed"])
    assert same(live, zeros())
    receiver.refit("v1", live)
    assert not receiver.fenced
    assert same(live, published[1])


def test_a_failure_before_the_install_does_not_fence(world, published):
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


@pytest.fixture
def linear(world):
    publisher = world.publisher()
    world.version("v1")
    publisher.publish("v1", weights(3, LINEAR))
    return weights(3, LINEAR)


def test_a_compile_pass_runs_before_anything_live_changes(world, linear):
    compiler = compile_pass("deep_gemm_fp8")
    targets = targets_of(LINEAR)
    specs = [TensorSpec(target.name, target.dtype, target.shape) for target in targets]
    live = {
        spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
        for spec in compiler.output_specs(specs)
    }
    stats = world.receiver(targets).refit("v1", live, compiler)
    expected = {name: torch.zeros_like(tensor) for name, tensor in live.items()}
    compiler.run(linear, expected)
    assert same(live, expected)
    assert stats.seconds["compile"] > 0


def test_a_value_that_the_pass_cannot_represent_leaves_the_old_weights(world):
    state = weights(3, LINEAR)
    state["layers.0.mlp.weight"][5, 5] = float("nan")
    publisher = world.publisher()
    world.version("v1")
    publisher.publish("v1", state)
    compiler = compile_pass("deep_gemm_fp8")
    targets = targets_of(LINEAR)
    specs = [TensorSpec(target.name, target.dtype, target.shape) for target in targets]
    live = {
        spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
        for spec in compiler.output_specs(specs)
    }
    receiver = world.receiver(targets)
    with pytest.raises(CompileError):
        receiver.refit("v1", live, compiler)
    assert not receiver.fenced
    assert not any(tensor.to(torch.float32).any() for tensor in live.values())


def test_a_pass_takes_only_what_it_accepts(world):
    publisher = world.publisher(registry=Registry("cutlass_fp8"))
    world.version("v1")
    publisher.publish("v1", weights(3, LINEAR))
    transport = Meddling(TcpTransport())
    receiver = world.receiver(targets_of(LINEAR), transport=transport)
    with pytest.raises(CompileTargetError, match="asked for hf_raw; published is cutlass_fp8"):
        receiver.refit("v1", lambda tensors: None, compile_pass("deep_gemm_fp8"))
    assert transport.fetched == []
