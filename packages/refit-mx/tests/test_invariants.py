"""The nine invariants of a refit, each by its name; holes found in others that are one of them.

The layouts themselves are tested against a reference in test_plan*; here whole refits run. The
ninth, of fleets, needs servers: `test_invariant_9_...` in test_fleet_client.py. Hole 8, of the
order of an engine's phases, is in test_engine_phases.py, and what is no invariant of its own in
test_refit_holes.py.
"""

from __future__ import annotations

import signal
import time

import pytest
import torch
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

from refit_mx.errors import (
    CompileTargetError,
    DigestMismatchError,
    FencedError,
    RefitError,
    RefitTimeoutError,
    SourceLostError,
    VersionNotReadyError,
)
from refit_mx.layout import TargetTPLayout
from refit_mx.manifest import Registry
from refit_mx.plan.targets import (
    expert_targets,
    fused_gate_up_target,
    fused_qkv_target,
    mesh_target,
    replicated_target,
    tp_target,
)
from refit_mx.settings import PublisherSettings, ReceiverSettings
from refit_mx.tensor_types import TensorSpec
from refit_mx.transports.base import Transport
from refit_mx.transports.tcp import TcpTransport


def publish(world: World, transport: str, state, ranks: int) -> None:
    """v1 as FSDP over some ranks has it."""
    world.version("v1", [f"fsdp-{rank}" for rank in range(ranks)])
    for rank in range(ranks):
        publisher = world.publisher(f"fsdp-{rank}", transports=[transport])
        publisher.publish("v1", fsdp_shards(state, ranks, rank))


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


# 1. Byte-exact for every pair of layouts


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_invariant_1_byte_exact_for_layouts_with_replicated_heads_columns_and_uneven_edges(
    world, transport
):
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
    publish(world, transport, state, 3)
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
            expert_targets("experts", specs["experts"], [rank, 5]),
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
    """Hole 1: publish v1, publish v2, refit v1 gave v2's bytes."""
    publisher = world.publisher(transports=[transport])
    for number in (1, 2):
        world.publish([publisher], f"v{number}", number)
    receiver = world.receiver(transport=transport)
    for number in (1, 2, 1):
        live = zeros()
        receiver.refit(f"v{number}", live)
        assert same(live, weights(number))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_invariant_2_the_buffer_of_a_leased_version_is_not_reused(world, transport):
    """Hole 1: publishing v2 while v1 is leased was accepted, into the same buffer."""
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
    """A publisher that breaks the rules: it fills the arena of a version that is being read."""
    arena = publisher._arenas.arena_of("v1")

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


def test_invariant_3_an_install_that_fails_half_way_fences_the_worker(world):
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
    with pytest.raises(FencedError):
        receiver.refit("v1", Broken(live))
    assert receiver.fenced
    assert same({"embed": live["embed"]}, {"embed": weights(1)["embed"]})
    receiver.refit("v1", live)
    assert not receiver.fenced
    assert same(live, weights(1))


# 4. A buffer whose read was abandoned is quarantined until its agent is gone


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_invariant_4_late_bytes_of_an_abandoned_read_meet_nobody(monkeypatch, transport):
    """Hole 6: late bytes came into a buffer that was used again."""
    # As between two hosts; with shm UCX reads a stopped process's memory itself.
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    small_batches(monkeypatch, 1 << 20)
    shapes = {"w": ("float32", (2000, 3000))}
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
                settings=ReceiverSettings(scratch_copies=4, manifest_timeout_s=0.5),
            )
            live = zeros(shapes)
            with pytest.raises(RefitError):
                receiver.refit("v1", live, timeout_s=2, attempts=1)
            assert same(live, zeros(shapes))
            # Another source serves v2 into another buffer, while v1's bytes may still come.
            other = world.publisher(transports=[transport])
            world.version("v2")
            other.publish("v2", weights(2, shapes))
            with receiver.receive_weights_scratch("v2", timeout_s=20) as got:
                assert same(dict(got), weights(2, shapes))
                (pool,) = receiver._receiving._transports._pools.values()
                # TCP and shared memory leave no read behind.
                assert bool(pool.counts().quarantined) == (transport == "nixl")
                stopped.signal(signal.SIGCONT)
                assert "error" in stopped.ask(do="publish", version="none", seed=1)
                let_late_bytes_in(inner)
                assert same(dict(got), weights(2, shapes))
        finally:
            stopped.close()


def let_late_bytes_in(transport: Transport) -> None:
    """Until all abandoned reads are over; NIXL lets none go on unless it is asked about them."""
    until = time.monotonic() + 20
    for lane in getattr(transport, "_lanes", []):
        while not lane.is_drained():
            assert time.monotonic() < until


# 5. A publisher that stopped, died or restarted is never read from as if it were alive


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_invariant_5_a_restarted_publisher_is_another(world, transport):
    """The same slot, in a new life, while a receiver reads from the old one."""
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


def test_invariant_5_a_version_whose_publisher_died_leaves_ready():
    """Hole 4: a version stayed READY after all its publishers had died."""
    with a_world() as world:
        world.version("v1")
        process = Process(
            "publisher", model="tiny", control=world.server.address, transports=["tcp"], ttl_s=1
        )
        try:
            assert "done" in process.ask(do="publish", version="v1", seed=1)
            assert world.state("v1") == "READY"
            process.signal(signal.SIGKILL)
            until = time.monotonic() + 20
            while world.state("v1") != "RELEASING":
                assert time.monotonic() < until
            with pytest.raises(VersionNotReadyError):
                world.receiver().refit("v1", zeros())
        finally:
            process.close()


# 6. SIGKILL or SIGSTOP of any process in any phase: test_refit_faults*.py, over TCP and NIXL; what
# `make test-refit` leaves out of that, where the transport has no part in the phase, is marked long


def test_invariant_6_every_time_limit_can_be_chosen():
    """Hole 5: time-outs were 900 to 1200 s, some of them fixed."""
    for settings in (ReceiverSettings(), PublisherSettings()):
        limits = {
            name: getattr(settings, name)
            for name in settings.__dataclass_fields__
            if name.endswith("_s")
        }
        assert limits
        assert all(value is None or value <= 60 for value in limits.values())
    chosen = ReceiverSettings(lease_ttl_s=1, manifest_timeout_s=0.1, stall_timeout_s=0.2)
    assert (chosen.lease_ttl_s, chosen.manifest_timeout_s, chosen.stall_timeout_s) == (1, 0.1, 0.2)


def test_invariant_6_a_deadline_is_one_for_all_attempts(world):
    world.publish([world.publisher()], "v1", 1)

    def wrong(scratch, fetches):
        scratch.zero_()
        until = time.monotonic() + 0.4
        while time.monotonic() < until:
            pass

    receiver = world.receiver(transport=Meddling(TcpTransport(), after=wrong))
    started = time.monotonic()
    with pytest.raises((DigestMismatchError, RefitTimeoutError)):
        receiver.refit("v1", zeros(), timeout_s=1, attempts=1000)
    assert time.monotonic() - started < 10


# 7. A digest notices any changed, moved or swapped byte: test_receiver_verify.py has more


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", ["changed", "moved", "swapped"])
def test_invariant_7_any_changed_moved_or_swapped_byte_is_noticed(world, transport, kind):
    """Hole 2: two rows swapped within 4 KiB were not noticed."""
    shapes = {"w": ("float32", (16, 16))}
    publisher = world.publisher(transports=[transport])
    world.version("v1")
    publisher.publish("v1", weights(1, shapes))

    def meddle(scratch, fetches):
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
def test_invariant_7_a_bit_that_changes_in_an_arena_is_noticed_in_what_is_read_in_part_too(
    world, transport, axis
):
    """Digests of the part, taken over the changed memory, would vouch for the change."""
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
    memory = publisher._arenas.arena_of("v1").memory
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
def test_invariant_8_a_compile_target_that_does_not_match_moves_no_byte(world, registry, settings):
    publisher = world.publisher(registry=registry)
    world.version("v1")
    publisher.publish("v1", weights(1))
    transport = Meddling(TcpTransport())
    live = zeros()
    with pytest.raises(CompileTargetError, match="asked for"):
        world.receiver(transport=transport).refit("v1", live, **settings)
    assert transport.fetched == []
    assert transport.nbytes == 0
    assert same(live, zeros())
