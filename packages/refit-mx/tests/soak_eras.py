"""What a soak is made of: eras of a model, its publishers and its receivers; see `test_soak`."""

from __future__ import annotations

import gc
import os
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch
from refit_fixtures import Halfway, Hook, new_transport
from refit_processes import Process
from soak_model import (
    HEAD_DIM,
    LAYOUTS,
    Drawn,
    Slice,
    draw_held,
    draw_model,
    draw_slices,
    held_places,
    picked,
    places,
    published,
    widened,
)
from soak_processes import Control, Host, Hosts, Relay, open_files

from refit_mx import scratch
from refit_mx.compile.base import allocate_outputs
from refit_mx.compile.deep_gemm_fp8 import DeepGemmFp8
from refit_mx.compile.quantising import RAW_DTYPES
from refit_mx.control.client import ControlClient
from refit_mx.errors import (
    RefitError,
)
from refit_mx.layout import TargetTPLayout
from refit_mx.plan.targets import (
    TargetTensor,
    expert_targets,
    fused_gate_up_target,
    fused_qkv_target,
    mesh_target,
    replicated_target,
    tp_target,
)
from refit_mx.receiver import MxV2RefitReceiver
from refit_mx.settings import ReceiverSettings
from refit_mx.slice_range import SliceRange
from refit_mx.tensor_types import ITEM_SIZES, TensorSpec

SEED = int(os.environ.get("REFIT_SOAK_SEED", "20261122"))
PLENTY_S = 30.0
"""For what must succeed, on a machine that does other things."""
SLACK_S = 6.0
"""For giving up after a deadline, on such a machine."""
LEASE_S = 3.0
"""After which a lease lapses that could not be given back, since the control plane was killed."""
WARM_ERAS = 3
"""After which a process has all the files open that it keeps."""


def spec_of(name: str, drawn: Drawn) -> TensorSpec:
    return TensorSpec(name, drawn.wire, drawn.shape)


def target_of(wanted: Slice, model: dict[str, Drawn]) -> TargetTensor:
    """The same slice in the package's terms."""
    specs = [spec_of(name, model[name]) for name in wanted.of]
    name, args = wanted.name, wanted.args
    if wanted.kind == "tp":
        return tp_target(specs[0], TargetTPLayout(*args), name=name)
    if wanted.kind == "range":
        axis, first, stop = args
        rows = SliceRange(first, stop)
        return tp_target(specs[0], TargetTPLayout(1, 0, axis, target_range=rows), name=name)
    if wanted.kind == "mesh":
        return mesh_target(specs[0], args, name=name)
    if wanted.kind == "experts":
        return expert_targets(name, specs[0], args)
    if wanted.kind == "qkv":
        return fused_qkv_target(
            name,
            *specs,
            num_heads=specs[0].shape[0] // HEAD_DIM,
            num_kv_heads=specs[1].shape[0] // HEAD_DIM,
            head_dim=HEAD_DIM,
            tp_size=args[0],
            tp_rank=args[1],
        )
    if wanted.kind == "gate_up":
        return fused_gate_up_target(name, *specs, *args)
    return replicated_target(specs[0], name=name)


@dataclass
class Tally:
    """What a soak did, for its summary."""

    seconds: Counter[str] = field(default_factory=Counter)
    refits: int = 0
    installs: int = 0
    compared: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    drawn: Counter[str] = field(default_factory=Counter)

    def lines(self) -> Iterator[str]:
        yield (
            f"{self.refits} refits, {self.installs} installs, {self.compared} bytes of live "
            "tensors compared"
        )
        for title, counts in (
            ("drawn", self.drawn),
            ("faults", self.faults),
            ("errors", self.errors),
            ("seconds", Counter({k: round(v, 1) for k, v in self.seconds.items()})),
        ):
            yield f"{title}: " + ", ".join(
                f"{name} {count}" for name, count in sorted(counts.items())
            )


class Receiving:
    """One receiver, its live tensors, and what they have to be."""

    def __init__(self, era: Era, number: int) -> None:
        rng = era.rng
        self.era = era
        self.slices = {wanted.name: wanted for wanted in draw_slices(rng, era.model)}
        targets = [target_of(wanted, era.model) for wanted in self.slices.values()]
        self.hook = Hook()
        self.halfway = rng.random() < 0.6
        self.transport: Any = era.transport
        if self.halfway:
            self.transport = Halfway(new_transport(era.transport), self.hook)
        self.receiver = MxV2RefitReceiver(
            era.name,
            control=era.relay.address,
            targets=targets,
            transport=self.transport,
            rank=number,
            settings=ReceiverSettings(control_patience_s=1.0, lease_ttl_s=LEASE_S),
            on_phase=self.hook,
        )
        specs = [TensorSpec(target.name, target.dtype, target.shape) for target in targets]
        self.compile_pass = DeepGemmFp8(selection=_is_matrix) if rng.random() < 0.25 else None
        self.outputs = {
            spec.name: self.compile_pass.output_specs([spec]) if self.compile_pass else (spec,)
            for spec in specs
        }
        self._compiled: dict[tuple[str, str], dict[str, bytes]] = {}
        self.dtypes = {target.name: target.dtype for target in targets}
        self.wide = rng.random() < 0.25
        self.live = {
            made.name: torch.zeros(made.shape, dtype=self._live_dtype(made.dtype))
            for outputs in self.outputs.values()
            for made in outputs
        }
        self.serves: dict[str, str | None] = dict.fromkeys(self.slices)
        era.tally.drawn["compile pass"] += self.compile_pass is not None
        for wanted in self.slices.values():
            era.tally.drawn[f"slice {wanted.kind}"] += 1

    def _live_dtype(self, wire: str) -> torch.dtype:
        widens = self.wide and wire in ("bfloat16", "float16")
        found: torch.dtype = torch.float32 if widens else getattr(torch, wire)
        return found

    def expected(self, name: str) -> dict[str, bytes]:
        """Of one target: each live tensor that is made of it."""
        version, outputs = self.serves[name], self.outputs[name]
        if version is None:
            return {made.name: bytes(self.live[made.name].nbytes) for made in outputs}
        if len(outputs) > 1:
            if (name, version) not in self._compiled:
                self._compiled[name, version] = self._compile(name, version)
            return self._compiled[name, version]
        live = self.live[name]
        content = np.ascontiguousarray(picked(self.slices[name], self.era.published(version)))
        if live.element_size() != content.shape[-1]:
            content = widened(content, self.dtypes[name])
        return {name: content.tobytes()}

    def _compile(self, name: str, version: str) -> dict[str, bytes]:
        """By the pass itself, whose arithmetic has a reference in test_compile_passes."""
        assert self.compile_pass is not None
        content = picked(self.slices[name], self.era.published(version))
        raw = torch.frombuffer(bytearray(content.tobytes()), dtype=torch.uint8)
        raw = raw.view(getattr(torch, self.dtypes[name])).view(content.shape[:-1])
        spec = TensorSpec(name, self.dtypes[name], tuple(raw.shape))
        made = allocate_outputs(self.compile_pass, [spec])
        self.compile_pass.run({name: raw}, made)
        return {each: _bytes(tensor) for each, tensor in made.items()}

    def compare(self) -> None:
        """Every live tensor, byte for byte, with what is served."""
        for target, version in self.serves.items():
            for name, expected in self.expected(target).items():
                found = _bytes(self.live[name])
                assert found == expected, f"{name} is not that of {version}"
                self.era.tally.compared += len(found)

    def refit(
        self, version: str, names: Sequence[str] | None, timeout_s: float
    ) -> RefitError | None:
        """Refit; the error if there was one. What is served changed wholly or not at all."""
        started = time.monotonic()
        error = None
        try:
            made = [each.name for name in names or self.slices for each in self.outputs[name]]
            live = {name: self.live[name] for name in made}
            stats = self.receiver.refit(
                version, live, self.compile_pass, names=names, timeout_s=timeout_s
            )
        except RefitError as raised:
            error = raised
        assert time.monotonic() - started < timeout_s + SLACK_S
        assert not self.receiver.fenced
        if error is None:
            self.serves.update(dict.fromkeys(names or self.slices, version))
            self.era.tally.installs += 1
            assert stats.version_id == version
        else:
            self.era.tally.errors[type(error).__name__] += 1
        self.compare()
        return error

    def places(self, names: Sequence[str] | None) -> Any:
        """Of every element that is wanted, in the numbers of `soak_model.places`."""
        parts = [picked(self.slices[name], self.era.places) for name in names or self.slices]
        return np.unique(np.concatenate([part.reshape(-1) for part in parts]))

    def counts(self) -> list[scratch.ScratchCounts]:
        return [pool.counts() for pool in self.receiver._receiving._transports._pools.values()]

    def close(self) -> None:
        """End it; its scratch memory is all given back, and none of it is in quarantine."""
        kept = len(scratch._NEVER_FREED)
        pools = list(self.receiver._receiving._transports._pools.values())
        until = time.monotonic() + PLENTY_S
        while any(counts.quarantined for counts in self.counts()):
            assert time.monotonic() < until, self.counts()
            assert self.refit(self.era.versions[-1], None, PLENTY_S) is None
        assert all(counts.in_use == 0 for counts in self.counts())
        self.receiver.close()
        assert all(
            pool.counts() == scratch.ScratchCounts(0, 0, 0, pool.counts().quarantines)
            for pool in pools
        )
        assert len(scratch._NEVER_FREED) == kept
        if self.halfway:
            self.transport.close()


def _is_matrix(spec: TensorSpec) -> bool:
    return len(spec.shape) == 2 and min(spec.shape) > 0 and spec.dtype in RAW_DTYPES


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@dataclass
class Source:
    """A publisher process and what it publishes."""

    host: Host
    slot: int
    held: list[Any]
    mask: Any


class Era:
    """A model, its publishers and its receivers."""

    def __init__(self, soak: Soak, number: int, transport: str) -> None:
        self.soak = soak
        self.tally = soak.tally
        self.number = number
        self.rng = rng = Random(f"{SEED} {transport} {number}")
        self.transport = transport
        self.name = f"era-{number}"
        self.model = draw_model(rng)
        self.places = places(self.model)
        self.server, self.relay = soak.servers[rng.randrange(len(soak.servers))]
        self.control = ControlClient(self.server.address)
        # In turn, so that a soak has all of them.
        self.layout = LAYOUTS[(SEED + number) % len(LAYOUTS)]
        count = rng.randint(1, 4)
        slots = (
            rng.randint(max(1, count - 1), count) if rng.random() < 0.7 else rng.randint(1, count)
        )
        held = draw_held(rng, self.layout, self.model, slots)
        self.slots = [f"{self.layout}-{slot}" for slot in range(slots)]
        self.all_ways = rng.random() < 0.3
        self.uniform = rng.random() < 0.5
        self.versions: list[str] = []
        self.gone: list[str] = []
        self._last = 0
        self._others: list[Process] = []
        self._content: dict[str, dict[str, Any]] = {}
        self.sources: list[Source] = []
        for index in range(count):
            slot = index % slots
            mask = held_places(self.model, held[slot], self.places)
            source = Source(soak.host(), slot, held[slot], mask)
            self.sources.append(source)
            self.open(source)
        self.publish()
        self.receivers = [Receiving(self, rank) for rank in range(rng.randint(1, 3))]
        wires = {drawn.wire for drawn in self.model.values() if drawn.dtype == "float32"}
        for what in (
            f"layout {self.layout}",
            f"sources {count}",
            f"replicas {count - slots}",
            f"wire {wires.pop() if len(wires) == 1 else 'mixed'}",
        ):
            self.tally.drawn[what] += 1

    def open(self, source: Source, token: str | None = None) -> None:
        """Let a process become the publisher of its slot."""
        names = {name for name, _ in source.held}
        wires = {
            name: drawn.wire
            for name, drawn in self.model.items()
            if name in names and drawn.dtype == "float32"
        }
        one = len(set(wires.values())) == 1 and self.uniform
        answer = source.host.ask(
            do="open",
            settings={
                "model": self.name,
                "slot": self.slots[source.slot],
                "control": self.server.address,
                "transports": ["nixl", "shm", "tcp"] if self.all_ways else [self.transport],
                "wire": next(iter(wires.values())) if one else wires,
                "token": token,
                "seed": SEED,
                "held": source.held,
                "tensors": {
                    name: (drawn.dtype, drawn.shape, drawn.wire)
                    for name, drawn in self.model.items()
                },
                "item_sizes": {name: ITEM_SIZES[drawn.wire] for name, drawn in self.model.items()},
            },
        )
        assert "done" in answer, answer
        source.host.worker_id = answer["worker"]

    def published(self, version: str) -> dict[str, Any]:
        """The bytes of a version, from the reference."""
        if version not in self._content:
            self._content[version] = published(SEED, version, self.model)
        return self._content[version]

    def new_version(self) -> str:
        self._last += 1
        version = f"{self.name}-v{self._last}"
        self.control.create_version(
            self.name, self.slots, idempotency_key=version, version_id=version
        )
        return version

    def publish(self, version: str | None = None) -> str:
        """All sources publish a version; it and perhaps the one before can be had then."""
        version = version or self.new_version()
        for answer in self.asked_to_publish(version, PLENTY_S):
            assert "done" in answer, answer
        self.published_is(version)
        return version

    def published_is(self, version: str) -> None:
        self.versions.append(version)
        ready = [each for each in self.versions if self.state(each) == "READY"]
        assert ready[-1:] == [version], f"{version} is {self.state(version)}"
        self.gone += [each for each in self.versions if each not in ready]
        self.versions = ready

    def asked_to_publish(self, version: str, timeout_s: float) -> list[dict[str, Any]]:
        for source in self.sources:
            source.host.send(do="publish", version=version, timeout_s=timeout_s)
        return [source.host.answer() for source in self.sources]

    def state(self, version: str) -> str:
        return self.control.get_version(version).state.name

    def replace(self, source: Source) -> None:
        """A new process, under a new id, that publishes what can still be had of its slot."""
        source.host = self.soak.host()
        self.open(source)
        for version in self.versions:
            answer = source.host.ask(do="publish", version=version, timeout_s=PLENTY_S)
            assert "done" in answer, answer

    def other_receiver(self, version: str, phase: str) -> Process:
        """A receiver of the whole model, in a process of its own, that is in a phase of a refit."""
        process = Process(
            "receiver",
            model=self.name,
            control=self.server.address,
            transport=self.transport,
            shapes={name: (drawn.wire, drawn.shape) for name, drawn in self.model.items()},
            settings={"lease_ttl_s": 1, "heartbeat_ttl_s": 2},
        )
        self._others.append(process)
        process.send(do="refit", version=version, pause=[phase], timeout_s=PLENTY_S)
        assert process.answer() == {"phase": phase}
        return process

    def is_of(self, process: Process, version: str | None) -> bool:
        """Whether another receiver's live tensors are those of a version, or still zeros."""
        sums = {
            name: zlib.crc32(bytes(content.nbytes) if version is None else content.tobytes())
            for name, content in self.published(version or self.versions[-1]).items()
        }
        return bool(process.ask(do="sums")["sums"] == sums)

    def ends(self, process: Process) -> None:
        """Another receiver; what it leased can be had by publishers again."""
        process.close()
        self._others.remove(process)
        self.leases_end()

    def leases_end(self) -> None:
        """Return once nobody holds a lease."""
        until = time.monotonic() + PLENTY_S
        while self.server.leases:
            assert time.monotonic() < until
            time.sleep(0.01)

    def close(self) -> None:
        for receiving in self.receivers:
            receiving.close()
        for process in list(self._others):
            self.ends(process)
        assert self.server.leases == 0
        for source in self.sources:
            self.soak.take_back(source.host)
        self.control.close()


class Soak:
    """What outlives the eras: control planes, processes, and the count."""

    def __init__(self, stack: ExitStack, hosts: Hosts) -> None:
        self.hosts = hosts
        self.tally = Tally()
        self.servers = []
        for retention in (1, 2, 3):
            server = Control(stack, hosts.folder, retention=retention)
            relay = Relay(server.address)
            stack.callback(relay.close)
            self.servers.append((server, relay))
        self._idle: list[Host] = []
        self._descriptors: dict[int, list[list[str]]] = {}

    def host(self) -> Host:
        return self._idle.pop() if self._idle else self.hosts.start()

    def take_back(self, host: Host) -> None:
        """A process that is no publisher any more; the next one is made of it."""
        answer = host.ask(do="close")
        self._descriptors.setdefault(host.pid, []).append(answer["descriptors"])
        self._idle.append(host)

    def open_files(self) -> list[str]:
        """What each open file is, between two eras; but for what garbage has open, and for the
        publisher processes, of which a later era may have more."""
        gc.collect()
        return open_files(fd for host in self._idle for fd in host.descriptors)

    def close(self) -> None:
        """The processes end by themselves, and without having kept a file open."""
        for host in self._idle:
            assert self.hosts.end(host) == 0
        for pid, counts in self._descriptors.items():
            half = max(WARM_ERAS, len(counts) // 2)
            most = max(len(files) for files in counts[:half])
            assert all(len(files) <= most + 4 for files in counts[half:]), f"{pid}: {counts}"
