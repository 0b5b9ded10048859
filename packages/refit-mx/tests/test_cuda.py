"""Weights in a GPU's memory, at the trainer, at the receiver or at both.

Imports internals: a skip asks whether the machine has RDMA.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from refit_fixtures import MODEL, needs_nixl
from refit_processes import Process, same, targets_of, weights

from refit_mx import TensorSpec, compile_pass
from refit_mx.compile.base import allocate_outputs
from refit_mx.transports.nixl_library import has_rdma

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SHAPES = {
    "large": ("float32", (3000, 2001)),
    "half": ("bfloat16", (257, 129)),
    "norm": ("float32", (333,)),
    "scale": ("float32", ()),
}
COLUMNS = {"axis": 1, "ranks": 2, "rank": 1}
OVER = ["tcp", pytest.param("nixl", marks=needs_nixl)]
PLACES = [
    ("shm", "cpu", "cuda"),
    *[
        pytest.param(*case, marks=[needs_nixl] * (case[0] == "nixl"))
        for transport in ("tcp", "nixl")
        for case in [
            (transport, "cuda", "cuda"),
            (transport, "cuda", "cpu"),
            (transport, "cpu", "cuda"),
        ]
    ],
]
QUEUED_CYCLES = 8_000_000_000
"""Clock cycles of a kernel that runs for seconds."""


def a_process(kind, stack, world, **settings):
    process = Process(kind, model=MODEL, control=world.server.address, shapes=SHAPES, **settings)
    stack.callback(process.close)
    return process


a_publisher, a_receiver = partial(a_process, "publisher"), partial(a_process, "receiver")


@pytest.mark.parametrize("layout", [{}, COLUMNS], ids=["complete", "columns"])
@pytest.mark.parametrize(("transport", "source", "target"), PLACES)
def test_weights_arrive_from_another_process(stack, world, transport, source, target, layout):
    publisher = a_publisher(stack, world, device=source, transports=[transport])
    receiver = a_receiver(stack, world, device=target, transport=transport, **layout)
    for seed in (1, 2, 3):
        world.version(f"v{seed}")
        assert "done" in publisher.ask(do="publish", version=f"v{seed}", seed=seed)
        assert receiver.ask(do="refit", version=f"v{seed}")["transport"] == transport
        assert receiver.ask(do="holds", seed=seed)["same"]


@pytest.mark.parametrize(
    ("source", "expected"), [("cpu", "shm"), ("cuda", "nixl" if has_rdma() else "tcp")]
)
def test_automatic_choice_follows_the_trainers_memory(stack, world, source, expected):
    publisher = a_publisher(stack, world, device=source)
    receiver = a_receiver(stack, world, device="cuda", transport="auto")
    world.version("v1")
    publisher.ask(do="publish", version="v1", seed=1)
    assert receiver.ask(do="refit", version="v1")["transport"] == expected
    assert receiver.ask(do="holds", seed=1)["same"]


@pytest.mark.parametrize("transport", OVER)
@pytest.mark.parametrize("phase", ["discover", "transfer", "part", "verify"])
def test_receiver_survives_the_death_of_its_source(stack, world, transport, phase):
    publisher = a_publisher(stack, world, device="cuda", transports=[transport], ttl_s=60)
    world.version("v1")
    publisher.ask(do="publish", version="v1", seed=1)
    receiver = a_receiver(stack, world, device="cuda", transport=transport, halfway=True)
    paused = receiver.ask(do="refit", version="v1", pause=[phase], timeout_s=20)
    assert paused == {"phase": phase}
    publisher.signal(signal.SIGKILL)
    answer = receiver.ask(do="go")
    holds = receiver.ask(do="holds", seed=1)["same"]
    assert holds == ("done" in answer)
    assert holds or answer["retryable"]

    replacement = a_publisher(stack, world, device="cuda", transports=[transport])
    world.version("v2")
    replacement.ask(do="publish", version="v2", seed=2)
    assert "done" in receiver.ask(do="refit", version="v2")
    assert receiver.ask(do="holds", seed=2)["same"]


def test_version_contains_updates_that_were_still_queued(world):
    publisher, receiver = world.publisher(device="cuda"), world.receiver(targets_of(SHAPES))
    tensors = {name: tensor.cuda() for name, tensor in weights(1, SHAPES).items()}
    expected = {name: tensor * 2 for name, tensor in weights(1, SHAPES).items()}
    world.version("v1")
    torch.cuda._sleep(QUEUED_CYCLES // 4)
    for tensor in tensors.values():
        tensor.mul_(2)
    publisher.publish("v1", tensors)
    live = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    receiver.refit("v1", live)
    assert same(live, expected)


def test_reads_do_not_wait_for_the_trainers_next_step(world):
    publisher, receiver = world.publisher(device="cuda"), world.receiver(targets_of(SHAPES))
    world.version("v1")
    tensors = weights(1, SHAPES)
    publisher.publish("v1", {name: tensor.cuda() for name, tensor in tensors.items()})
    step = torch.cuda.Event()
    torch.cuda._sleep(QUEUED_CYCLES)
    step.record()
    live = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    started = time.monotonic()
    stats = receiver.refit("v1", live)
    assert not step.query(), (time.monotonic() - started, stats)
    assert same(live, tensors)
    step.synchronize()


def test_install_is_complete_when_refit_returns(world):
    publisher, receiver = world.publisher(), world.receiver(targets_of(SHAPES), device="cuda")
    tensors = weights(1, SHAPES)
    world.version("v1")
    publisher.publish("v1", tensors)
    live = {name: torch.zeros_like(tensor, device="cuda") for name, tensor in tensors.items()}
    receiver.refit("v1", live)
    with torch.cuda.stream(torch.cuda.Stream()):  # it is not ordered after the install
        held = {name: tensor.cpu() for name, tensor in live.items()}
    assert same(held, tensors)


@needs_nixl
def test_expandable_segments_are_refused():
    program = f"""
import torch
from refit_mx import EmbeddedControlServer, MxV2TrainingPublisher, RefitConfigError
with EmbeddedControlServer() as server, MxV2TrainingPublisher(
    "m", "fsdp-0", control=server.address, transports=["nixl"], device="cuda"
) as publisher:
    from refit_mx import ControlClient
    with ControlClient(server.address) as control:
        control.create_version("m", ["fsdp-0"], idempotency_key="v1", version_id="v1")
    try:
        publisher.publish("v1", {{"w": torch.ones({1 << 20}, device="cuda")}})
    except RefitConfigError as error:
        print(error)
"""
    name = "PYTORCH_CUDA_ALLOC_CONF"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, name: "expandable_segments:True"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert f"{name} has expandable_segments:True" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("target", ["cutlass_fp8", "deep_gemm_fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compile_pass_rounds_as_on_a_cpu_but_for_the_last_bit(target, dtype):
    shapes = {"layers.0.up.weight": (dtype, (384, 640)), "layers.0.norm.weight": (dtype, (640,))}
    tensors = weights(1, shapes)
    compiler = compile_pass(target)
    specs = [TensorSpec(name, dtype, shape) for name, (dtype, shape) in shapes.items()]
    compiled = {}
    for device in ("cpu", "cuda"):
        outputs = allocate_outputs(compiler, specs, device)
        compiler.run({name: tensor.to(device) for name, tensor in tensors.items()}, outputs)
        compiled[device] = {name: tensor.cpu().float() for name, tensor in outputs.items()}
    for name, on_cpu in compiled["cpu"].items():
        on_gpu = compiled["cuda"][name]
        # CUDA divides by a constant as a product with its reciprocal: scales differ in their last
        # bit. A value between two of fp8's may then become the other one.
        is_scale = "scale" in name
        torch.testing.assert_close(on_gpu, on_cpu, rtol=2**-22 if is_scale else 2**-3, atol=0)
        assert is_scale or (on_gpu != on_cpu).float().mean() < 1e-3
