"""The invariants of a refit, each by its number.

These tests run complete refits; test_plan* test layouts against a reference. The ninth invariant is
about fleets and needs servers: integration/vllm tests it.
"""

from __future__ import annotations

import signal
import time

import pytest
import torch
from control_clients import until
from refit_fixtures import (
    TRANSPORTS,
    Halfway,
    Hook,
    Meddling,
    World,
    a_world,
    new_transport,
    small_batches,
    zeros,
)
from refit_processes import SHAPES, Process, fsdp_shards, same, slice_of, targets_of, weights

from refit_mx import (
    CompileTargetError,
    DigestMismatchError,
    FencedError,
    ReceiverSettings,
    RefitError,
    RefitTimeoutError,
    Registry,
    SourceLostError,
    TargetTPLayout,
    TensorSpec,
    Transport,
    VersionNotReadyError,
    fused_gate_up_target,
    fused_qkv_target,
    mesh_target,
    replicated_target,
    stacked_experts_target,
    tp_target,
)


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


# 1. Byte-exact for every pair of layouts


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_invariant_1_every_layout_is_byte_exact(world, transport):
    heads, kv_heads, head_dim, hidden, tp = 8, 2, 4, 24, 4
    state = {
        "q": torch.randn(heads * head_dim, hidden).bfloat16(),
        "k": torch.randn(kv_heads * head_dim, hidden).bfloat16(),
        "v": torch.randn(kv_heads * head_dim, hidden).bfloat16(),
        "gate": torch.randn(20, hidden).half(),
        "up": torch.randn(20, hidden).half(),
        "down": torch.randn(13, 7),  # uneven both ways
        "experts": torch.randn(6, 5, 3).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3, dtype=torch.int64),
    }
    world.version("v1", [f"fsdp-{rank}" for rank in range(3)])
    for rank in range(3):
        publisher = world.publisher(f"fsdp-{rank}", transports=[transport])
        publisher.publish("v1", fsdp_shards(state, 3, rank))
    specs = {name: spec_of(name, tensor) for name, tensor in state.items()}
    rows = {name: tensor.chunk(tp) for name, tensor in state.items() if name in ("q", "gate", "up")}
    kv = {name: state[name].chunk(kv_heads) for name in ("k", "v")}
    down_rows, down_columns = state["down"].split(4), 2
    for rank in range(tp):
        targets = [
            fused_qkv_target(
                "qkv",
                specs["q"],
                specs["k"],
                specs["v"],
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                tp_size=tp,
                tp_rank=rank,
            ),
            fused_gate_up_target("gate_up", specs["gate"], specs["up"], tp_size=tp, tp_rank=rank),
            mesh_target(specs["down"], [(0, 4, rank), (1, down_columns, rank % 2)]),
            replicated_target(specs["scalar"]),
            tp_target(specs["up"], TargetTPLayout(tp, rank, 1), name="up_columns"),
            stacked_experts_target("experts", specs["experts"], [rank, 5]),
        ]
        with (
            world.receiver(targets, transport=transport, rank=rank) as receiver,
            receiver.receive_weights_scratch("v1") as got,
        ):
            head = rank * kv_heads // tp
            expected = {
                "qkv": torch.cat([rows["q"][rank], kv["k"][head], kv["v"][head]]),
                "gate_up": torch.cat([rows["gate"][rank], rows["up"][rank]]),
                "down": down_rows[rank][:, 4:] if rank % 2 else down_rows[rank][:, :4],
                "scalar": state["scalar"],
                "up_columns": state["up"][:, rank * 6 : rank * 6 + 6],
                "experts": torch.stack([state["experts"][rank], state["experts"][5]]),
            }
            for name, tensor in expected.items():
                assert same({name: got[name]}, {name: tensor}), name
            assert got.keys() == expected.keys()
            assert got.stats.nbytes == sum(tensor.nbytes for tensor in got.values())


# 2. refit(v) installs v or raises; no buffer of a leased version is reused


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_invariant_2_a_refit_installs_the_version_it_names(world, transport):
    """Show what ModelExpress broke: a refit to v1 after v2 was published gave v2's bytes."""
    publisher = world.publisher(transports=[transport])
    for number in (1, 2):
        world.publish([publisher], f"v{number}", number)
    receiver = world.receiver(transport=transport)
    for number in (1, 2, 1):
        live = zeros()
        receiver.refit(f"v{number}", live)
        assert same(live, weights(number))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_invariant_2_a_leased_buffer_is_not_reused(world, transport):
    """ModelExpress accepted v2 while v1 was leased, into the same buffer."""
    publisher = world.publisher(transports=[transport])
    for number in (1, 2):
        world.publish([publisher], f"v{number}", number)
    world.version("v3")

    def publish_v3(phase):
        if phase == "transfer":
            with pytest.raises(RefitTimeoutError, match=r"v1.*leased by"):
                publisher.publish("v3", weights(3), timeout_s=0.3)

    live = zeros()
    world.receiver(transport=transport, on_phase=publish_v3).refit("v1", live)
    assert same(live, weights(1))
    publisher.publish("v3", weights(3))


def test_invariant_2_a_version_that_is_released_is_refused(world):
    publisher = world.publisher()
    world.publish([publisher], "v1", 1)
    publisher.release("v1")
    live = zeros()
    with pytest.raises(VersionNotReadyError):
        world.receiver().refit("v1", live)
    assert same(live, zeros())


# 3. A torn update is impossible


def overwrite_during(world: World, transport: str, publisher, phase_of_it: str):
    """Return a receiver whose source's arena is overwritten at the start of a phase."""
    arena = publisher._held["v1"].arena

    def overwrite(phase):
        if phase == phase_of_it:
            arena.memory[: arena.nbytes // 2].random_(0, 256)

    return world.receiver(transport=transport, on_phase=overwrite)


@pytest.mark.parametrize("phase", ["discover", "plan", "transfer"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_invariant_3_torn_bytes_never_reach_live_weights(world, transport, phase):
    publisher = world.publisher(transports=[transport])
    world.publish([publisher], "v1", 1)
    live = weights(7)
    receiver = overwrite_during(world, transport, publisher, phase)
    with pytest.raises(DigestMismatchError):
        receiver.refit("v1", live)
    assert same(live, weights(7))
    assert not receiver.fenced


def test_invariant_3_a_failed_install_fences_the_worker(world):
    world.publish([world.publisher()], "v1", 1)
    live = weights(7)

    class Broken(dict):
        def __getitem__(self, name):
            if name == "layers.0.norm" and installing:
                raise RuntimeError("device lost")
            return super().__getitem__(name)

    installing = []
    receiver = world.receiver(
        on_phase=lambda phase: installing.append(1) if phase == "install" else None
    )
    with pytest.raises(FencedError, match=r"version v1 failed part way.*device lost"):
        receiver.refit("v1", Broken(live))
    assert receiver.fenced
    assert same({"embed": live["embed"]}, {"embed": weights(1)["embed"]})
    with pytest.raises(FencedError, match="only a refit of all 4 targets"):
        receiver.refit("v1", live, names=["embed"])
    receiver.refit("v1", live)
    assert not receiver.fenced
    assert same(live, weights(1))


# 4. A buffer whose read was abandoned is quarantined until its agent is gone


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_invariant_4_late_bytes_never_reach_a_reused_buffer(monkeypatch, transport):
    # UCX as between two hosts; with shm it reads a stopped process's memory itself.
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    small_batches(monkeypatch, 1 << 20)
    shapes = {"w": ("float32", (4000, 3000))}  # more than sockets hold
    with a_world() as world:
        world.version("v1")
        stopped = Process(
            "publisher",
            model="tiny",
            control=world.server.address,
            transports=[transport],
            shapes=shapes,
            ttl_s=60,
        )
        try:
            assert "done" in stopped.ask(do="publish", version="v1", seed=1)
            inner, hook = new_transport(transport), Hook()
            hook.at("part", lambda: stopped.signal(signal.SIGSTOP))
            receiver = world.receiver(
                targets_of(shapes),
                transport=Halfway(inner, hook),
                settings=ReceiverSettings(
                    scratch_copies=4, manifest_timeout_s=0.5, stall_timeout_s=1.0
                ),
            )
            live = zeros(shapes)
            with pytest.raises(RefitError):
                receiver.refit("v1", live, timeout_s=30, attempts=1)
            assert same(live, zeros(shapes))
            # Another source serves v2 into another buffer, while v1's bytes may still come.
            other = world.publisher(transports=[transport])
            world.version("v2")
            other.publish("v2", weights(2, shapes))
            with receiver.receive_weights_scratch("v2", timeout_s=20) as got:
                assert same(dict(got), weights(2, shapes))
                (pool,) = receiver._receiving._transports._pools.values()
                # TCP and shared memory leave no read behind.
                assert pool.has_quarantined == (transport == "nixl")
                stopped.signal(signal.SIGCONT)
                assert "error" in stopped.ask(do="publish", version="none", seed=1)
                let_late_bytes_in(inner)
                assert same(dict(got), weights(2, shapes))
        finally:
            stopped.close()


def let_late_bytes_in(transport: Transport) -> None:
    """Wait until all abandoned reads are complete; NIXL makes progress only when polled."""
    for lane in getattr(transport, "_lanes", []):
        until(lane.is_drained)


# 5. A publisher that stopped, died or restarted is never read from as if it were alive


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_invariant_5_a_restarted_publisher_is_a_new_source(world, transport):
    """Restart a slot's publisher while a receiver reads from the old one."""
    first = world.publisher(transports=[transport])
    world.publish([first], "v1", 1)

    def restart(phase):
        if phase == "transfer" and not lives:
            lives.append(phase)
            first.close()
            second = world.publisher(transports=[transport])
            world.version("v2")
            second.publish("v2", weights(2))

    lives: list[str] = []
    live = zeros()
    receiver = world.receiver(transport=transport, on_phase=restart)
    with pytest.raises(SourceLostError):
        receiver.refit("v1", live, timeout_s=20)
    assert same(live, zeros())
    receiver.refit("v2", live)
    assert same(live, weights(2))


def test_invariant_5_version_of_a_dead_publisher_leaves_ready():
    """Show what ModelExpress broke: a version stayed READY after its publishers had died."""
    with a_world() as world:
        world.version("v1")
        process = Process(
            "publisher", model="tiny", control=world.server.address, transports=["tcp"], ttl_s=1
        )
        try:
            assert "done" in process.ask(do="publish", version="v1", seed=1)
            assert world.state("v1") == "READY"
            process.signal(signal.SIGKILL)
            until(lambda: world.state("v1") == "RELEASING")
            with pytest.raises(VersionNotReadyError):
                world.receiver().refit("v1", zeros())
        finally:
            process.close()


# 6. SIGKILL or SIGSTOP of any process in any phase: see test_refit_faults.py. Some cases
# over NIXL and shared memory are marked long, and `make test-refit` leaves them out.


def test_invariant_6_all_attempts_share_one_deadline(world):
    world.publish([world.publisher()], "v1", 1)

    def wrong(scratch, source_reads):
        scratch.zero_()
        until = time.monotonic() + 0.4
        while time.monotonic() < until:
            pass

    receiver = world.receiver(transport=Meddling(new_transport("tcp"), after=wrong))
    started = time.monotonic()
    with pytest.raises((DigestMismatchError, RefitTimeoutError)):
        receiver.refit("v1", zeros(), timeout_s=1, attempts=1000)
    assert time.monotonic() - started < 10


# 7. A digest notices any changed, moved or swapped byte: test_receiver_verify.py has more


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", ["changed", "moved", "swapped"])
def test_invariant_7_changed_or_moved_bytes_are_noticed(world, transport, kind):
    """ModelExpress's digest did not notice two rows swapped within 4 KiB."""
    shapes = {"w": ("float32", (16, 16))}
    world.publish_state("v1", weights(1, shapes), transports=[transport])

    def meddle(scratch, source_reads):
        rows = scratch[: 16 * 64].view(16, 64)
        if kind == "changed":
            rows[3, 5] ^= 1
        elif kind == "moved":
            rows[:] = rows.roll(1, 0)
        else:
            rows[[4, 5]] = rows[[5, 4]]

    inner = new_transport(transport)
    receiver = world.receiver(targets_of(shapes), transport=Meddling(inner, after=meddle))
    live = zeros(shapes)
    with pytest.raises(DigestMismatchError, match="w: bytes from worker"):
        receiver.refit("v1", live)
    assert same(live, zeros(shapes))
    receiver.close()
    inner.close()


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_invariant_7_a_bit_changed_in_an_arena_is_noticed(world, transport, axis):
    """A digest computed from the changed memory would confirm the changed bit."""
    publisher = world.publisher(transports=[transport])
    world.publish([publisher], "v1", 1)
    wanted = {"axis": axis, "ranks": 2, "rank": 0}
    receiver = world.receiver(targets_of(**wanted), transport=transport)
    live = zeros(
        {
            name: (dtype, tuple(slice_of(weights(1), **wanted)[name].shape))
            for name, (dtype, _) in SHAPES.items()
        }
    )
    before = {name: tensor.clone() for name, tensor in live.items()}
    memory = publisher._held["v1"].arena.memory
    memory[5] ^= 1
    with pytest.raises(DigestMismatchError):
        receiver.refit("v1", live)
    assert same(live, before)
    memory[5] ^= 1
    receiver.refit("v1", live)
    assert same(live, slice_of(weights(1), **wanted))


# 8. A compile target that does not match is refused before any byte moves


@pytest.mark.parametrize(
    ("registry", "settings"),
    [
        (None, {"compile_target_filter": {"hf_raw"}}),
        (Registry("cutlass_fp8"), {"compile_target_filter": {"hf_raw", "deep_gemm_fp8"}}),
        (
            Registry("deep_gemm_fp8", {"block": 64}),
            {
                "compile_target_filter": {"deep_gemm_fp8"},
                "required_compile_metadata": {"block": 128},
            },
        ),
    ],
)
def test_invariant_8_a_wrong_compile_target_moves_no_byte(world, registry, settings):
    world.publish_state("v1", weights(1), registry=registry)
    transport = Meddling(new_transport("tcp"))
    live = zeros()
    with pytest.raises(CompileTargetError, match="no source has"):
        world.receiver(transport=transport).refit("v1", live, **settings)
    assert transport.fetched == []
    assert transport.nbytes == 0
    assert same(live, zeros())
