"""Parts of a soak test: eras with a model, publishers and receivers; see `test_soak`.

Imports internals: the scratch memory of a receiver is counted.
"""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from control_clients import until
from plan_reference import picked
from refit_fixtures import Halfway, Hook, new_transport
from refit_processes import Process
from soak_model import (
    LAYOUTS,
    draw_held,
    draw_model,
    draw_targets,
    held_places,
    places,
    published,
    widened,
)
from soak_processes import Control, open_files

from refit_mx import (
    ControlClient,
    MxV2RefitReceiver,
    ReceiverSettings,
    RefitError,
    TensorSpec,
    compile_pass,
)
from refit_mx.compile.base import allocate_outputs
from refit_mx.receive import scratch

SEED = int(os.environ.get("REFIT_SOAK_SEED", "20261122"))
PLENTY_S = 30.0
"""Timeout of calls that must succeed, on a loaded machine."""
SLACK_S = 6.0
"""Time that a call may take beyond its deadline, on such a machine."""
LEASE_S = 3.0
"""Term of a lease, which expires if a killed control plane prevented its release."""
WARM_ERAS = 3
"""Eras after which a process opens no further permanent files."""


class Receiving:
    """A receiver, its live tensors, and their expected content."""

    def __init__(self, era: Era, number: int) -> None:
        rng = era.rng
        self.era = era
        self.targets = draw_targets(rng, era.model)
        targets = list(self.targets.values())
        self.hook = Hook()
        self.halfway = rng.random() < 0.6
        self.transport: Any = era.transport
        if self.halfway:
            self.transport = Halfway(new_transport(era.transport), self.hook)
        self.receiver = MxV2RefitReceiver(
            era.name,
            control=era.server.address,
            targets=targets,
            transport=self.transport,
            rank=number,
            settings=ReceiverSettings(control_retry_s=1.0, lease_ttl_s=LEASE_S),
            on_phase=self.hook,
        )
        specs = [TensorSpec(target.name, target.dtype, target.shape) for target in targets]
        self.compile_pass = None
        if rng.random() < 0.25:
            self.compile_pass = compile_pass("deep_gemm_fp8", selection=_is_matrix)
        self.outputs = {
            spec.name: self.compile_pass.output_specs([spec]) if self.compile_pass else (spec,)
            for spec in specs
        }
        self._compiled: dict[tuple[str, str], dict[str, bytes]] = {}
        self.dtypes = {target.name: target.dtype for target in targets}
        self.wide = rng.random() < 0.25
        self.live = {
            output.name: torch.zeros(output.shape, dtype=self._live_dtype(output.dtype))
            for outputs in self.outputs.values()
            for output in outputs
        }
        self.serves: dict[str, str | None] = dict.fromkeys(self.targets)

    def _live_dtype(self, wire: str) -> torch.dtype:
        widens = self.wide and wire in ("bfloat16", "float16")
        dtype: torch.dtype = torch.float32 if widens else getattr(torch, wire)
        return dtype

    def expected(self, name: str) -> dict[str, bytes]:
        """Return the expected bytes of each live tensor made from a target."""
        version, outputs = self.serves[name], self.outputs[name]
        if version is None:
            return {output.name: bytes(self.live[output.name].nbytes) for output in outputs}
        if len(outputs) > 1:
            if (name, version) not in self._compiled:
                self._compiled[name, version] = self._compile(name, version)
            return self._compiled[name, version]
        live = self.live[name]
        content = np.ascontiguousarray(picked(self.targets[name], self.era.published(version)))
        if live.element_size() != content.shape[-1]:
            content = widened(content, self.dtypes[name])
        return {name: content.tobytes()}

    def _compile(self, name: str, version: str) -> dict[str, bytes]:
        """Compile with the pass itself; test_compile_passes checks its arithmetic."""
        assert self.compile_pass is not None
        content = picked(self.targets[name], self.era.published(version))
        raw = torch.frombuffer(bytearray(content.tobytes()), dtype=torch.uint8)
        raw = raw.view(getattr(torch, self.dtypes[name])).view(content.shape[:-1])
        spec = TensorSpec(name, self.dtypes[name], tuple(raw.shape))
        outputs = allocate_outputs(self.compile_pass, [spec])
        self.compile_pass.run({name: raw}, outputs)
        return {output: _bytes(tensor) for output, tensor in outputs.items()}

    def compare(self) -> None:
        """Check every live tensor, byte for byte, against the version that is served."""
        for target, version in self.serves.items():
            for name, expected in self.expected(target).items():
                assert _bytes(self.live[name]) == expected, f"{name} is not that of {version}"

    def refit(
        self, version: str, names: Sequence[str] | None, timeout_s: float
    ) -> RefitError | None:
        """Refit and return the error, if any; check that all live tensors changed or none did."""
        started = time.monotonic()
        error = None
        try:
            outputs = [each.name for name in names or self.targets for each in self.outputs[name]]
            live = {name: self.live[name] for name in outputs}
            stats = self.receiver.refit(
                version, live, self.compile_pass, names=names, timeout_s=timeout_s
            )
        except RefitError as raised:
            error = raised
        assert time.monotonic() - started < timeout_s + SLACK_S
        assert not self.receiver.fenced
        if error is None:
            self.serves.update(dict.fromkeys(names or self.targets, version))
            self.era.tally["installs"] += 1
            assert stats.version_id == version
        else:
            self.era.tally[type(error).__name__] += 1
        self.compare()
        return error

    def places(self, names: Sequence[str] | None) -> Any:
        """Return the places (see `soak_model.places`) of all wanted elements."""
        parts = [picked(self.targets[name], self.era.places) for name in names or self.targets]
        return np.unique(np.concatenate([part.reshape(-1) for part in parts]))

    def pools(self) -> list[scratch.ScratchPool]:
        return list(self.receiver._receiving._transports._pools.values())

    def close(self) -> None:
        """Close it; check that its scratch memory is released and none is in quarantine."""
        never_freed = len(scratch._NEVER_FREED)
        pools = self.pools()
        deadline = time.monotonic() + PLENTY_S
        while any(pool.has_quarantined for pool in self.pools()):
            assert time.monotonic() < deadline
            assert self.refit(self.era.versions[-1], None, PLENTY_S) is None
        assert not any(pool._in_use for pool in self.pools())
        self.receiver.close()
        assert not any(pool._in_use or pool._idle or pool._quarantined for pool in pools)
        assert len(scratch._NEVER_FREED) == never_freed
        if self.halfway:
            self.transport.close()


def _is_matrix(spec: TensorSpec) -> bool:
    return (
        len(spec.shape) == 2
        and min(spec.shape) > 0
        and spec.dtype in ("float32", "bfloat16", "float16")
    )


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@dataclass
class Source:
    """A publisher process and the boxes that it publishes."""

    host: Process
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
        self.server = rng.choice(soak.servers)
        self.control = ControlClient(self.server.address)
        # Layouts rotate, so that a soak covers all of them.
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
        self._last = 0
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
        self.tally[f"layout {self.layout}"] += 1

    def open(self, source: Source) -> None:
        """Make a process the publisher of its slot."""
        names = {name for name, _ in source.held}
        wires = {
            name: drawn.wire
            for name, drawn in self.model.items()
            if name in names and drawn.dtype == "float32"
        }
        uniform = len(set(wires.values())) == 1 and self.uniform
        answer = source.host.ask(
            do="open",
            settings={
                "model": self.name,
                "slot": self.slots[source.slot],
                "control": self.server.address,
                "transports": ["nixl", "shm", "tcp"] if self.all_ways else [self.transport],
                "wire": next(iter(wires.values())) if uniform else wires,
                "seed": SEED,
                "held": source.held,
                "tensors": {
                    name: (drawn.dtype, drawn.shape, drawn.wire)
                    for name, drawn in self.model.items()
                },
                "item_sizes": {
                    name: TensorSpec(name, drawn.wire, ()).nbytes
                    for name, drawn in self.model.items()
                },
            },
        )
        assert "done" in answer, answer

    def published(self, version: str) -> dict[str, Any]:
        """Return the bytes of a version, from the reference."""
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
        """Publish a version from all sources, and update the list of ready versions."""
        version = version or self.new_version()
        for answer in self.publish_answers(version, PLENTY_S):
            assert "done" in answer, answer
        self.update_versions(version)
        return version

    def update_versions(self, version: str) -> None:
        """Drop released versions from the list, and check that ``version`` is ready."""
        self.versions.append(version)
        ready = [each for each in self.versions if self.state(each) == "READY"]
        assert ready[-1:] == [version], f"{version} is {self.state(version)}"
        self.versions = ready

    def publish_answers(self, version: str, timeout_s: float) -> list[dict[str, Any]]:
        """Make all sources publish a version, and return their answers."""
        for source in self.sources:
            source.host.send(do="publish", version=version, timeout_s=timeout_s)
        return [source.host.answer() for source in self.sources]

    def state(self, version: str) -> str:
        return self.control.get_version(version).state.name

    def replace(self, source: Source) -> None:
        """Start a new process with a new id that publishes the ready versions of its slot."""
        source.host = self.soak.host()
        self.open(source)
        for version in self.versions:
            source.host.send(do="publish", version=version, timeout_s=PLENTY_S)
            answer = source.host.answer()
            assert "done" in answer, answer

    def wait_for_leases(self) -> None:
        """Wait until no leases are held."""
        until(lambda: not self.server.leases)

    def close(self) -> None:
        for receiving in self.receivers:
            receiving.close()
        assert self.server.leases == 0
        for source in self.sources:
            self.soak.release(source.host)
        self.control.close()


class Soak:
    """State that outlives the eras: control planes, processes, and counters."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self.started = 0
        self.tally: Counter[str] = Counter()
        self.servers = []
        for retention in (1, 2, 3):
            self.servers.append(Control(stack, folder, retention=retention))
        self._idle: list[Process] = []
        self._descriptors: dict[int, list[list[str]]] = {}

    def host(self) -> Process:
        if self._idle:
            return self._idle.pop()
        self.started += 1
        host = Process("soak")
        self._stack.callback(host.close)
        return host

    def release(self, host: Process) -> None:
        """Close a process's publisher, and keep the process for the next publisher."""
        answer = host.ask(do="close")
        self._descriptors.setdefault(host.pid, []).append(answer["descriptors"])
        self._idle.append(host)

    def open_files(self) -> list[str]:
        """Return the target of each open file, without pipes to publisher processes.

        Later eras may have more of these processes. Garbage is collected first.
        """
        gc.collect()
        return open_files(fd for host in self._idle for fd in host.descriptors)

    def close(self) -> None:
        """Check that the processes exit with 0 and that eras left no files open in them."""
        for host in self._idle:
            assert host.end() == 0
        for pid, counts in self._descriptors.items():
            half = max(WARM_ERAS, len(counts) // 2)
            maximum = max(len(files) for files in counts[:half])
            assert all(len(files) <= maximum + 4 for files in counts[half:]), f"{pid}: {counts}"
