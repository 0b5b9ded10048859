"""Refits with layouts, dtypes and faults drawn from one seed, every installed tensor compared.

A soak is a row of eras. An era draws a model, wire dtypes, how one to four publisher processes hold
it, and receivers with slices of their own; then it publishes, refits and breaks things. Whatever
happens, after each call every live tensor has the bytes of the version that its receiver serves.

``REFIT_SOAK_SEED`` and ``REFIT_SOAK_REFITS`` replace seed and number, and ``REFIT_SOAK_ERA`` runs
one era alone: what an era draws depends on the seed and its own number, not on those before.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from refit_fixtures import BOTH_TRANSPORTS, Halfway, Hook
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
from soak_processes import Host, Hosts, Relay

from refit_mx import scratch
from refit_mx.control.client import ControlClient
from refit_mx.control.embedded import EmbeddedControlServer
from refit_mx.errors import (
    ControlUnavailableError,
    DigestMismatchError,
    RefitError,
    RefitTimeoutError,
    SourceLostError,
    VersionNotReadyError,
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
from refit_mx.transports import nixl, tcp

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SEED = int(os.environ.get("REFIT_SOAK_SEED", "20261122"))
REFITS = int(os.environ.get("REFIT_SOAK_REFITS", "200"))
ERA = os.environ.get("REFIT_SOAK_ERA")
PLENTY_S = 30.0
"""For what must succeed, on a machine that does other things."""
SLACK_S = 6.0
"""For giving up after a deadline, on such a machine."""
WARM_ERAS = 3
"""After which a process has all the files open that it keeps."""
FAULTS = {
    "none": 40,
    "deadline": 8,
    "kill": 8,
    "stop": 8,
    "restart": 5,
    "flip": 10,
    "control": 9,
    "newer": 9,
    "released": 3,
}
PHASES = ("before", "lease", "discover", "plan", "transfer", "part", "verify", "install")
EARLY = PHASES[: PHASES.index("plan")]


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
            made = nixl.NixlTransport(lanes=2) if era.transport == "nixl" else tcp.TcpTransport()
            self.transport = Halfway(made, self.hook)
        self.receiver = MxV2RefitReceiver(
            era.name,
            control=era.relay.address,
            targets=targets,
            transport=self.transport,
            rank=number,
            settings=ReceiverSettings(control_patience_s=1.0),
            on_phase=self.hook,
        )
        self.dtypes = {target.name: target.dtype for target in targets}
        self.wide = rng.random() < 0.25
        self.live = {
            target.name: torch.zeros(target.shape, dtype=self._live_dtype(target.dtype))
            for target in targets
        }
        self.serves: dict[str, str | None] = dict.fromkeys(self.live)
        for wanted in self.slices.values():
            era.tally.drawn[f"slice {wanted.kind}"] += 1

    def _live_dtype(self, wire: str) -> torch.dtype:
        widens = self.wide and wire in ("bfloat16", "float16")
        found: torch.dtype = torch.float32 if widens else getattr(torch, wire)
        return found

    def expected(self, name: str) -> bytes:
        version, live = self.serves[name], self.live[name]
        if version is None:
            return bytes(live.nbytes)
        content = np.ascontiguousarray(picked(self.slices[name], self.era.published(version)))
        if live.element_size() != content.shape[-1]:
            content = widened(content, self.dtypes[name])
        return content.tobytes()

    def compare(self) -> None:
        """Every live tensor, byte for byte, with what is served."""
        for name, live in self.live.items():
            found = live.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            assert found == self.expected(name), f"{name} is not that of {self.serves[name]}"
            self.era.tally.compared += len(found)

    def refit(
        self, version: str, names: Sequence[str] | None, timeout_s: float
    ) -> RefitError | None:
        """Refit; the error if there was one. What is served changed wholly or not at all."""
        started = time.monotonic()
        error = None
        try:
            stats = self.receiver.refit(version, self.live, names=names, timeout_s=timeout_s)
        except RefitError as raised:
            error = raised
        assert time.monotonic() - started < timeout_s + SLACK_S
        assert not self.receiver.fenced
        if error is None:
            self.serves.update(dict.fromkeys(names or self.live, version))
            self.era.tally.installs += 1
            assert stats.version_id == version
        else:
            self.era.tally.errors[type(error).__name__] += 1
        self.compare()
        return error

    def places(self, names: Sequence[str] | None) -> Any:
        """Of every element that is wanted, in the numbers of `soak_model.places`."""
        parts = [picked(self.slices[name], self.era.places) for name in names or self.live]
        return np.unique(np.concatenate([part.reshape(-1) for part in parts]))

    def counts(self) -> list[scratch.ScratchCounts]:
        return [pool.counts() for pool in self.receiver._receiving._pools.values()]

    def close(self) -> None:
        """End it; its scratch memory is all given back, and none of it is in quarantine."""
        kept = len(scratch._NEVER_FREED)
        pools = list(self.receiver._receiving._pools.values())
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
        self.both = rng.random() < 0.3
        self.uniform = rng.random() < 0.5
        self.versions: list[str] = []
        self.gone: list[str] = []
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
                "transports": ["nixl", "tcp"] if self.both else [self.transport],
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

    def close(self) -> None:
        for receiving in self.receivers:
            receiving.close()
        assert self.server.plane.counts().leases == 0
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
            server = stack.enter_context(EmbeddedControlServer(retention=retention))
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

    def close(self) -> None:
        """The processes end by themselves, and without having kept a file open."""
        for host in self._idle:
            assert self.hosts.end(host) == 0
        for pid, counts in self._descriptors.items():
            half = max(WARM_ERAS, len(counts) // 2)
            most = max(len(files) for files in counts[:half])
            assert all(len(files) <= most + 4 for files in counts[half:]), f"{pid}: {counts}"


class Refit:
    """One draw: which version, into which receiver, and what goes wrong meanwhile."""

    def __init__(self, era: Era) -> None:
        self.era = era
        self.rng = rng = era.rng
        self.receiving = rng.choice(era.receivers)
        self.fault = rng.choices(list(FAULTS), list(FAULTS.values()))[0]
        self.phase = rng.choice(PHASES)
        self.victim = rng.choice(era.sources)
        names = list(self.receiving.live)
        some = rng.random() < 0.3
        self.names = rng.sample(names, rng.randint(1, len(names))) if some else None
        self.fresh = rng.random() < 0.5
        self.timeout_s = PLENTY_S
        self.reached = False
        self.must_fail: type[RefitError] | tuple[type[RefitError], ...] | None = None
        self.may_fail = True
        self.then = ""
        self.version = ""
        self._left: list[str] = []

    def __str__(self) -> str:
        partial = (
            f"{len(self.names)} of {len(self.receiving.live)} targets" if self.names else "all"
        )
        return (
            f"{self.fault} at {self.phase}, {partial} of {self.version or 'a version'} by "
            f"{self.era.transport}, layout {self.era.layout} of {len(self.era.sources)} sources "
            f"in {len(self.era.slots)} slots"
        )

    def run(self) -> None:
        era = self.era
        if self.fresh:
            era.publish()
        self.version = self.rng.choice(era.versions)
        apply: Callable[[], None] = getattr(self, f"_{self.fault}")
        mend: Callable[[], None] = getattr(self, f"_mend_{self.fault}", lambda: None)
        prepare: Callable[[], None] = getattr(self, f"_prepare_{self.fault}", lambda: None)
        if self.phase == "part" and not self.receiving.halfway:
            self.phase = "transfer"
        if self.fault in ("none", "deadline", "released"):
            self.phase = "before"
        prepare()

        def reached() -> None:
            self.reached = True
            apply()

        if self.phase == "before":
            reached()
        else:
            self.receiving.hook.at(self.phase, reached)
        error = self.receiving.refit(self.version, self.names, self.timeout_s)
        self.receiving.hook.phase = ""
        if self.must_fail is not None and self.reached:
            assert isinstance(error, self.must_fail), repr(error)
        if error is not None:
            assert self.may_fail, repr(error)
            assert error.retryable, repr(error)
        if self.reached:
            mend()
        era.tally.refits += 1
        era.tally.faults[self.fault if self.reached else f"{self.fault}, not reached"] += 1
        self._retry()

    def _retry(self) -> None:
        """What was mended works again: the same version, or the one that has come in its place."""
        version = self.then or self.version
        if self.fault == "none":
            return
        error = self.receiving.refit(version, None, PLENTY_S)
        assert error is None, repr(error)
        assert all(counts.in_use == 0 for counts in self.receiving.counts())

    def needs(self, victim: Source) -> bool:
        """Whether something that is wanted is in no other source."""
        wanted = self.receiving.places(self.names)
        others = np.zeros(len(victim.mask), np.bool_)
        for source in self.era.sources:
            if source is not victim:
                others |= source.mask
        return bool((~others[wanted]).any())

    # Nothing goes wrong

    def _prepare_none(self) -> None:
        self.may_fail = False

    def _none(self) -> None:
        pass

    # The deadline is too short

    def _prepare_deadline(self) -> None:
        self.timeout_s = math.exp(self.rng.uniform(math.log(1e-4), math.log(5e-2)))

    def _deadline(self) -> None:
        pass

    # SIGKILL

    def _prepare_kill(self) -> None:
        needed = self.needs(self.victim)
        if needed and self.phase in (*EARLY, "plan", "transfer"):
            self.must_fail = SourceLostError
        self.may_fail = needed

    def _kill(self) -> None:
        self.era.soak.hosts.kill(self.victim.host)

    def _mend_kill(self) -> None:
        self.era.replace(self.victim)

    # SIGSTOP and SIGCONT

    def _prepare_stop(self) -> None:
        self.timeout_s = 0.8
        if self.needs(self.victim) and self.phase in EARLY:
            self.must_fail = (SourceLostError, RefitTimeoutError)

    def _stop(self) -> None:
        self.victim.host.signal(signal.SIGSTOP)

    def _mend_stop(self) -> None:
        self.victim.host.signal(signal.SIGCONT)

    # A publisher dies and comes back under its old id, without what it held

    def _prepare_restart(self) -> None:
        self._prepare_kill()

    def _restart(self) -> None:
        self._kill()
        token = self.victim.host.worker_id.rsplit("-", 1)[1]
        self.victim.host = self.era.soak.host()
        self.era.open(self.victim, token)

    def _mend_restart(self) -> None:
        # What its former life offered stays offered, and nobody has it.
        self.era.versions = []
        self.then = self.era.publish()

    # A bit changes in an arena

    def _prepare_flip(self) -> None:
        if self.phase in ("part", "verify", "install"):
            self.phase = self.rng.choice(("before", "lease", "discover", "plan", "transfer"))
        wanted = self.receiving.places(self.names)
        wanted = wanted[self.victim.mask[wanted]]
        if not len(wanted):
            self.flipped = None
            return
        place = int(self.rng.choice(wanted.tolist()))
        name = next(name for name, array in self.era.places.items() if place in (array.reshape(-1)))
        array = self.era.places[name]
        at = [int(axis[0]) for axis in np.nonzero(array[..., 0] == place)] if array.ndim > 1 else []
        item_size = ITEM_SIZES[self.era.model[name].wire]
        self.flipped = {
            "version": self.version,
            "name": name,
            "at": at,
            "byte": self.rng.randrange(item_size),
            "bit": self.rng.randrange(8),
        }
        elsewhere = any(
            source.mask[place] for source in self.era.sources if source is not self.victim
        )
        if not elsewhere:
            self.must_fail = DigestMismatchError
        if not elsewhere:
            self.must_fail = DigestMismatchError

    def _flip(self) -> None:
        if self.flipped is None:
            self.reached = False  # the victim has nothing that is wanted
            return
        answer = self.victim.host.ask(do="flip", **self.flipped)
        assert "done" in answer, answer

    def _mend_flip(self) -> None:
        self._flip()

    # The control plane cannot be reached

    def _prepare_control(self) -> None:
        if self.phase in EARLY:
            self.timeout_s = 0.8
            self.must_fail = (ControlUnavailableError, RefitTimeoutError)
        else:
            # Bytes that are under way need no control plane while the lease is sure to last.
            self.may_fail = False

    def _control(self) -> None:
        self.era.relay.cut()

    def _mend_control(self) -> None:
        self.era.relay.mend()

    # Newer versions come

    def _prepare_newer(self) -> None:
        self.may_fail = self.phase in ("before", "lease")

    def _newer(self) -> None:
        """Publish one; where that needs the arena of the version that is read it has to wait."""
        era = self.era
        version = era.new_version()
        patience_s = PLENTY_S if self.phase in ("before", "lease") else 0.3
        answers = era.asked_to_publish(version, patience_s)
        if patience_s == PLENTY_S or self.version == era.versions[-1]:
            assert all("done" in answer for answer in answers), answers
            self.then = version
            return
        for answer in answers:
            if "done" not in answer:
                assert answer["error"] == "RefitTimeoutError", answer
                assert self.version in answer["message"], answer
        self._left.append(version)

    def _mend_newer(self) -> None:
        for version in self._left:
            self.then = self.era.publish(version)
        if not self._left:
            self.era.published_is(self.then)

    # A version that was released

    def _prepare_released(self) -> None:
        if self.era.gone:
            self.version = self.rng.choice(self.era.gone)
            self.must_fail = VersionNotReadyError
            self.then = self.era.versions[-1]

    def _released(self) -> None:
        pass


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[Hosts]:
    made = Hosts(tmp_path_factory.mktemp("soak"))
    yield made
    made.close()


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def settles_at(most: int) -> bool:
    """Whether no more files than that are open; gRPC closes its own a while after its channels."""
    until = time.monotonic() + PLENTY_S
    while open_files() > most:
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def one_era(soak: Soak, number: int, transport: str) -> None:
    era = Era(soak, number, transport)
    for _ in range(era.rng.randint(5, 11)):
        refit = Refit(era)
        started = time.monotonic()
        try:
            refit.run()
        except BaseException as error:
            error.add_note(
                f"soak: REFIT_SOAK_SEED={SEED} REFIT_SOAK_ERA={number} by {transport}, refit "
                f"{soak.tally.refits}: {refit}"
            )
            raise
        soak.tally.seconds[refit.fault] += time.monotonic() - started
    era.close()


@pytest.mark.parametrize("transport", BOTH_TRANSPORTS)
def test_refits_drawn_from_a_seed_install_exactly_their_version_or_nothing(
    hosts, monkeypatch, transport
):
    """Afterwards there is no lease, no process and no open file more than before."""
    # So that tensors of a soak's size come in several parts.
    monkeypatch.setattr(nixl, "BATCH_BYTES", 1 << 14)
    monkeypatch.setattr(nixl, "LANE_BYTES", 0)
    monkeypatch.setattr(tcp, "BATCH_BYTES", 1 << 14)
    sys.stdout.write(f"\nsoak: REFIT_SOAK_SEED={SEED} by {transport}\n")
    started = time.monotonic()
    processes = hosts.started
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    with ExitStack() as stack:
        soak = Soak(stack, hosts)
        warm = open_files()
        number = int(ERA or 0)
        while soak.tally.refits < REFITS // 2:
            one_era(soak, number, transport)
            number += 1
            if number == WARM_ERAS:
                warm = open_files()
            if ERA:
                break
        if number > WARM_ERAS and not ERA:
            # A file kept by each era would be more than these.
            assert settles_at(warm + 4), (warm, open_files())
        assert sum(server.plane.counts().leases for server, _ in soak.servers) == 0
        soak.close()
    left = {child.pid for child in psutil.Process().children(recursive=True)} - children
    assert not left, left
    seconds = time.monotonic() - started
    sys.stdout.write(
        "\n".join(
            [*soak.tally.lines(), f"{hosts.started - processes} processes, {seconds:.1f} s\n"]
        )
    )
