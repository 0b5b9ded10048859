"""Refits with layouts, dtypes and faults drawn from one seed, every installed tensor compared.

A soak is a row of eras. An era draws a model, wire dtypes, how one to four publisher processes hold
it, and receivers with slices of their own; then it publishes, refits and breaks things. Whatever
happens, after each call every live tensor has the bytes of the version that its receiver serves.

``REFIT_SOAK_SEED`` and ``REFIT_SOAK_REFITS`` replace seed and number, and ``REFIT_SOAK_ERA`` runs
one era alone: what an era draws depends on the seed and its own number, not on those before.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import psutil
import pytest
from machine_pauses import MachinePauses, watch_pauses
from refit_fixtures import TRANSPORTS, small_batches
from soak_eras import PLENTY_S, SEED, WARM_ERAS, Era, Soak, Source
from soak_processes import Hosts

from refit_mx.errors import (
    ControlUnavailableError,
    DigestMismatchError,
    RefitError,
    RefitTimeoutError,
    SourceLostError,
    VersionNotReadyError,
)
from refit_mx.tensor_types import ITEM_SIZES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REFITS = int(os.environ.get("REFIT_SOAK_REFITS", "200"))
ERA = os.environ.get("REFIT_SOAK_ERA")
FAULTS = {
    "none": 40,
    "deadline": 8,
    "kill": 8,
    "stop": 8,
    "restart": 5,
    "flip": 10,
    "control": 6,
    "server": 5,
    "newer": 9,
    "receiver_kill": 4,
    "receiver_stop": 4,
    "released": 3,
}
PHASES = ("before", "lease", "discover", "plan", "transfer", "part", "verify", "compile", "install")
EARLY = PHASES[: PHASES.index("plan")]


class Refit:
    """One draw: which version, into which receiver, and what goes wrong meanwhile."""

    def __init__(self, era: Era) -> None:
        self.era = era
        self.rng = rng = era.rng
        self.receiving = rng.choice(era.receivers)
        self.fault = rng.choices(list(FAULTS), list(FAULTS.values()))[0]
        self.phase = rng.choice(PHASES)
        self.victim = rng.choice(era.sources)
        names = list(self.receiving.slices)
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
            f"{len(self.names)} of {len(self.receiving.slices)} targets" if self.names else "all"
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
        if self.phase == "compile" and self.receiving.compile_pass is None:
            self.phase = "install"
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
        # Of a version that nobody has any more not even an empty slice can be had.
        self.may_fail = needed or len(self.era.sources) == 1

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
        if self.phase in ("part", "verify", "compile", "install"):
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

    # It dies and comes back with its state, or stops and goes on

    def _prepare_server(self) -> None:
        self._prepare_control()
        self.signal = self.rng.choice((signal.SIGKILL, signal.SIGSTOP))

    def _server(self) -> None:
        self.era.server.signal(self.signal)

    def _mend_server(self) -> None:
        self.era.server.mend(self.signal)
        self.era.leases_end()

    # Newer versions come

    def _prepare_newer(self) -> None:
        self.may_fail = self.phase in ("before", "lease")

    def _newer(self) -> None:
        """Publish one; where that needs the arena of the version that is read it has to wait."""
        era = self.era
        waits = self.phase not in ("before", "lease") and self.version != era.versions[-1]
        version = era.new_version()
        answers = era.asked_to_publish(version, 0.3 if waits else PLENTY_S)
        if not waits:
            assert all("done" in answer for answer in answers), answers
            self.then = version
            return
        for answer in answers:
            if "done" not in answer:
                assert answer["error"] == "RefitTimeoutError", answer
                # A slow machine may be out of time with an arena that was free, too.
                message = answer["message"]
                assert self.version in message or "copying" in message, answer
        self._left.append(version)

    def _mend_newer(self) -> None:
        for version in self._left:
            self.then = self.era.publish(version)
        if not self._left:
            self.era.published_is(self.then)

    # Another receiver dies in a phase of its own, or stops and goes on

    def _prepare_other(self) -> None:
        self.may_fail = False
        self.others_phase = self.rng.choice([*EARLY[1:], "plan", "transfer", "verify", "install"])

    _prepare_receiver_kill = _prepare_receiver_stop = _prepare_other

    def _receiver_kill(self) -> None:
        self.other = self.era.other_receiver(self.version, self.others_phase)
        self.other.signal(signal.SIGKILL)

    def _mend_receiver_kill(self) -> None:
        self.era.ends(self.other)

    def _receiver_stop(self) -> None:
        self.other = self.era.other_receiver(self.version, self.others_phase)
        self.other.signal(signal.SIGSTOP)

    def _mend_receiver_stop(self) -> None:
        self.other.signal(signal.SIGCONT)
        answer = self.other.ask(do="go")
        assert "done" in answer or answer["retryable"], answer
        assert self.era.is_of(self.other, self.version if "done" in answer else None)
        self.era.ends(self.other)

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


def settled(soak: Soak, most: int) -> list[str]:
    """Open files, as soon as there are no more than that; gRPC closes its own a while after its
    channels."""
    until = time.monotonic() + PLENTY_S
    while len(found := soak.open_files()) > most and time.monotonic() < until:
        time.sleep(0.05)
    return found


def one_era(soak: Soak, number: int, transport: str, pauses: MachinePauses) -> None:
    era = Era(soak, number, transport)
    for _ in range(era.rng.randint(5, 11)):
        refit = Refit(era)
        started = time.monotonic()
        try:
            refit.run()
        except BaseException as error:
            error.add_note(
                f"soak: REFIT_SOAK_SEED={SEED} REFIT_SOAK_ERA={number} by {transport}, refit "
                f"{soak.tally.refits}: {refit}; the machine kept a thread waiting for up to "
                f"{pauses.longest_s:.2f} s"
            )
            raise
        soak.tally.seconds[refit.fault] += time.monotonic() - started
    era.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_refits_drawn_from_a_seed_install_exactly_their_version_or_nothing(
    hosts, monkeypatch, transport
):
    """Afterwards there is no lease, no process and no open file more than before."""
    # So that tensors of a soak's size come in several parts.
    small_batches(monkeypatch, 1 << 14)
    sys.stdout.write(f"\nsoak: REFIT_SOAK_SEED={SEED} by {transport}\n")
    started = time.monotonic()
    processes = hosts.started
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    with ExitStack() as stack:
        soak = Soak(stack, hosts)
        pauses = stack.enter_context(watch_pauses())
        warm = soak.open_files()
        number = int(ERA or 0)
        while soak.tally.refits < -(-REFITS // len(TRANSPORTS)):
            one_era(soak, number, transport, pauses)
            number += 1
            if number == WARM_ERAS:
                warm = soak.open_files()
            if ERA:
                break
        if number > WARM_ERAS and not ERA:
            # A file kept by each era would be more than these.
            found = settled(soak, len(warm) + 4)
            assert len(found) <= len(warm) + 4, f"{sorted(set(found) - set(warm))}; before {warm}"
        assert sum(server.leases for server, _ in soak.servers) == 0
        soak.close()
    left = {child.pid for child in psutil.Process().children(recursive=True)} - children
    assert not left, left
    seconds = time.monotonic() - started
    sys.stdout.write(
        "\n".join(
            [*soak.tally.lines(), f"{hosts.started - processes} processes, {seconds:.1f} s\n"]
        )
    )
