"""Each process is killed or stopped in each phase of a refit of real servers.

After each fault, no server serves a mixture of versions, the client's report is correct, and the
next refit works.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager

import pytest
import torch.distributed
from integration.vllm.fleet_rig import at_point, is_paused, on_workers, statuses
from integration.vllm.publisher_process import publish_from_processes
from integration.waiting import wait_until

from refit_mx import FleetError
from refit_mx.fleet.barrier import PhaseBarrier, Point

TIMEOUT_S, ANSWER_S, CLEANUP_S = 20.0, 6.0, 3.0
SLACK_S = 20.0
"""Time beyond the client's own limits, for a loaded machine."""
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
PHASES = ("prepare", "fetch", "pause", "install", "resume")
POINTS = {"pause": Point.PAUSED, "resume": Point.FINISHED}
QUICK = {("server", "install", KILL), ("worker", "pause", STOP)}
"""Faults of servers and workers that are not marked `long`; a test takes half a minute."""
LONG = pytest.mark.long
NUMBERS = [pytest.param(KILL, id="killed"), pytest.param(STOP, id="stopped", marks=LONG)]


@pytest.fixture
def old(rig):
    """Refit all servers to seed 0, and return the version."""
    version_id = rig.publish(0)
    rig.fleet().refit(version_id)
    return version_id


def client(rig, **init_info):
    return rig.fleet(
        timeout_s=TIMEOUT_S,
        max_answer_s=ANSWER_S,
        cleanup_timeout_s=CLEANUP_S,
        init_info={"receiver_settings": {"stall_timeout_s": 2.0}, "attempts": 2, **init_info},
    )


@contextmanager
def faulty(rig, phase, act):
    """Signal a process in a phase of the next refit; yield the barrier to refit with."""
    if phase not in POINTS:
        pid, number = act
        on_workers(rig.servers[0], f"signal_in_next_{phase}", 0, pid, int(number))
        yield None
        return

    def act_when_paused():
        wait_until(lambda: all(map(is_paused, rig.servers)))
        os.kill(*act)

    with at_point(POINTS[phase], act_when_paused) as barrier:
        yield barrier


def refit_with_fault(rig, fleet, version_id, phase, pid, number):
    """Refit while a process is signalled, and return the error."""
    began = time.monotonic()
    with faulty(rig, phase, (pid, number)) as barrier, pytest.raises(FleetError) as caught:
        fleet.refit(version_id, barrier=barrier)
    assert time.monotonic() - began < TIMEOUT_S + 2 * CLEANUP_S + SLACK_S
    return caught.value


FAULTS = [
    pytest.param(
        part,
        phase,
        number,
        id=f"{part}-{phase}-{number.name}",
        marks=() if (part, phase, number) in QUICK else LONG,
    )
    for part in ("server", "worker")
    for phase in PHASES
    for number in (KILL, STOP)
]


@pytest.mark.parametrize(("part", "phase", "number"), FAULTS)
def test_failed_server_part_leaves_no_mixture_served(rig, old, part, phase, number):
    broken, other = rig.servers
    pid = broken.process.pid if part == "server" else broken.workers()[0].pid
    version_id = rig.publish(1)
    fleet = client(rig)
    error = refit_with_fault(rig, fleet, version_id, phase, pid, number)
    assert broken.address in error.failed
    assert broken.address not in fleet.server_versions
    if phase in ("prepare", "fetch"):
        rig.assert_serve(0, old, servers=[other])
    else:
        assert is_paused(other)
        with pytest.raises(FleetError):
            client(rig).resume()
        assert is_paused(other)
    (status,) = statuses(other)
    assert status["version_id"] in {"install": (old, version_id), "resume": (version_id,)}.get(
        phase, (old,)
    )
    assert fleet.server_versions == {other.address: status["version_id"]}
    if number is STOP:
        os.kill(pid, signal.SIGCONT)
    else:
        broken.kill()
        rig.revive()
    rig.fleet().refit(version_id)
    rig.assert_serve(1, version_id)


@pytest.fixture
def publishers(rig, tmp_path):
    """Publish seed 1 with one process for each slot; yield the version and the processes."""
    version_id = rig.name(1)
    log = tmp_path / "publishers.log"
    processes = publish_from_processes(rig.trainer, version_id, rig.models(1), log)
    yield version_id, processes
    for process in processes:
        process.kill()


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("phase", [pytest.param("prepare", marks=LONG), "fetch"])
def test_publisher_failure_before_the_pause_pauses_no_server(rig, old, publishers, phase, number):
    version_id, processes = publishers
    fleet = client(rig, transport="nixl")
    error = refit_with_fault(rig, fleet, version_id, phase, processes[2].pid, number)
    # Servers notice at different times; the first one fails the refit.
    assert error.failed
    assert set(fleet.server_versions.values()) == {old}
    rig.assert_serve(0, old)
    if number is STOP:
        os.kill(processes[2].pid, signal.SIGCONT)
        fleet.refit(version_id)
        rig.assert_serve(1, version_id)
    rig.refit(2, fleet)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    "phase", [pytest.param("pause", marks=LONG), "install", pytest.param("resume", marks=LONG)]
)
def test_publisher_failure_after_the_fetch_has_no_effect(rig, old, publishers, phase, number):
    version_id, processes = publishers
    fleet = rig.fleet()
    with faulty(rig, phase, (processes[2].pid, number)) as barrier:
        fleet.refit(version_id, barrier=barrier)
    rig.assert_serve(1, version_id)
    rig.refit(2, fleet)


@LONG  # the barrier is tested without vLLM too
def test_missing_trainer_rank_pauses_no_server(rig, old):
    fleet = client(rig)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    barrier = PhaseBarrier(store, rank=0, world_size=2)
    with pytest.raises(TimeoutError, match="'received' for ranks 1"):
        fleet.refit(rig.publish(1), barrier=barrier)
    assert set(fleet.server_versions.values()) == {old}
    rig.assert_serve(0, old)
    rig.refit(1, fleet)
