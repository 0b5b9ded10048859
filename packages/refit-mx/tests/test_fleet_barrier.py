"""Ranks that drive no server pass every phase with the one that does, or all of them fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch.distributed
from vllm_servers import StandIn

from refit_mx.deadline import Deadline
from refit_mx.errors import FleetError, RefitConfigError, RefitTimeoutError
from refit_mx.fleet.barrier import PhaseBarrier, Point, follow
from refit_mx.fleet.client import RefitFleet

PATIENCE_S = 60.0


class Ranks:
    """A store that threads or processes share, and a client of it for each."""

    def __init__(self, world_size):
        self.world_size = world_size
        self.server = torch.distributed.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )

    def barrier(self, rank):
        return PhaseBarrier(self.store(), rank=rank, world_size=self.world_size)

    def store(self):
        return torch.distributed.TCPStore(
            "127.0.0.1",
            self.server.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=PATIENCE_S),
        )


def drive(barrier, deadline, points=tuple(Point)):
    for point in points:
        barrier.meet(point, deadline)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as made:
        yield made


def test_all_ranks_pass_all_points_round_after_round(pool):
    ranks = Ranks(3)
    barriers = [ranks.barrier(rank) for rank in range(3)]
    for _ in range(4):
        followers = [pool.submit(follow, b, timeout_s=PATIENCE_S) for b in barriers[1:]]
        barriers[0].begin()
        drive(barriers[0], Deadline(PATIENCE_S, "test"))
        for follower in followers:
            follower.result(PATIENCE_S)
    # What is two rounds old is forgotten: three ranks, four points, two rounds, and torch's own.
    assert ranks.server.num_keys() <= 3 * 4 * 2 + 3


def test_a_rank_that_fails_fails_all_at_once_and_is_named(pool):
    ranks = Ranks(3)
    barriers = [ranks.barrier(rank) for rank in range(3)]
    began = time.monotonic()
    other = pool.submit(follow, barriers[1], timeout_s=PATIENCE_S)
    broken = pool.submit(follow, barriers[2], timeout_s=PATIENCE_S, failure="its disk is full")
    barriers[0].begin()
    with pytest.raises(FleetError, match="rank 2: its disk is full") as caught:
        barriers[0].meet(Point.PAUSED, Deadline(PATIENCE_S, "test"))
    assert list(caught.value.failed) == ["rank 2"]
    for follower in (other, broken):
        with pytest.raises(FleetError):
            follower.result(PATIENCE_S)
    assert time.monotonic() - began < PATIENCE_S / 2
    # The next round begins clean.
    followers = [pool.submit(follow, b, timeout_s=PATIENCE_S) for b in barriers[1:]]
    barriers[0].begin()
    drive(barriers[0], Deadline(PATIENCE_S, "test"))
    for follower in followers:
        follower.result(PATIENCE_S)


def test_a_rank_that_does_not_come_is_named_at_the_deadline():
    ranks = Ranks(3)
    barrier = ranks.barrier(1)
    barrier.begin()
    ranks.store().set("refit/1/paused/0", b"ok")
    began = time.monotonic()
    with pytest.raises(RefitTimeoutError, match="'paused' for ranks 2"):
        barrier.meet(Point.PAUSED, Deadline(0.5, "test"))
    assert time.monotonic() - began < 30


def test_a_failure_in_the_middle_reaches_those_who_wait_for_a_later_point(pool):
    ranks = Ranks(2)
    driver, follower = ranks.barrier(0), ranks.barrier(1)
    waiting = pool.submit(follow, follower, timeout_s=PATIENCE_S)
    driver.begin()
    drive(driver, Deadline(PATIENCE_S, "test"), [Point.PAUSED])
    driver.fail(Point.RECEIVED, "a server was lost")
    with pytest.raises(FleetError, match="a server was lost"):
        waiting.result(PATIENCE_S)


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_of_the_world_is_refused(rank, world_size):
    with pytest.raises(RefitConfigError, match="PhaseBarrier"):
        PhaseBarrier(Ranks(1).server, rank=rank, world_size=world_size)


STORE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def elsewhere():
    """A store whose server is a process of its own, and that process."""
    process = subprocess.Popen(
        [sys.executable, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    port = int(process.stdout.readline())
    store = torch.distributed.TCPStore(
        "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=PATIENCE_S)
    )
    yield store, process
    process.kill()
    process.communicate()


def stop(process):
    process.send_signal(signal.SIGSTOP)
    until = time.monotonic() + PATIENCE_S
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("call", ["meet", "arrive", "fail", "follow"])
def test_a_store_that_is_stopped_is_a_time_out_within_the_deadline(elsewhere, call, pool):
    store, process = elsewhere
    barrier = PhaseBarrier(store, rank=0, world_size=2)
    barrier.begin()
    stop(process)
    calls = {
        "meet": lambda: barrier.meet(Point.PAUSED, Deadline(1.0, "test")),
        "arrive": lambda: barrier.arrive(Point.RESUMED, timeout_s=1.0),
        "fail": lambda: barrier.fail(Point.PAUSED, "why", timeout_s=1.0),
        "follow": lambda: follow(barrier, timeout_s=1.0),
    }
    for _ in range(2):
        with pytest.raises(RefitTimeoutError, match="store"):
            pool.submit(calls[call]).result(PATIENCE_S / 2)
    assert sum(each.name == "refit-barrier" for each in threading.enumerate()) == 1
    # It goes on, and so does whoever uses the barrier.
    process.send_signal(signal.SIGCONT)
    other = PhaseBarrier(store.clone(), rank=1, world_size=2)
    barrier._round = other._round = 7
    following = pool.submit(follow, other, timeout_s=PATIENCE_S)
    barrier.begin()
    drive(barrier, Deadline(PATIENCE_S, "test"))
    following.result(PATIENCE_S)


def test_a_store_whose_server_is_gone_is_a_typed_error(elsewhere):
    store, process = elsewhere
    barrier = PhaseBarrier(store, rank=0, world_size=2)
    barrier.begin()
    process.kill()
    process.wait(PATIENCE_S)
    for call in (
        lambda: barrier.meet(Point.PAUSED, Deadline(5.0, "test")),
        lambda: barrier.fail(Point.PAUSED, "why"),
        lambda: follow(barrier, timeout_s=5.0, failure=None),
    ):
        with pytest.raises(FleetError, match="store of the barrier"):
            call()


FOLLOWER = """
import os, signal, sys
from datetime import timedelta
from torch.distributed import TCPStore
from refit_mx.deadline import Deadline
from refit_mx.fleet.barrier import PhaseBarrier, Point, follow

port, rank, world_size, stop_at = (int(a) for a in sys.argv[1:])
store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False,
                 timeout=timedelta(seconds=60))
barrier = PhaseBarrier(store, rank=rank, world_size=world_size)
if stop_at < 0:
    follow(barrier, timeout_s=60)
else:
    deadline = Deadline(60, "a follower that dies")
    barrier.begin()
    for point in list(Point)[:stop_at]:
        barrier.meet(point, deadline)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def start_follower(ranks, rank, stop_at):
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            FOLLOWER,
            str(ranks.server.port),
            str(rank),
            str(ranks.world_size),
            str(stop_at),
        ],
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def server():
    made = StandIn("--config", '{"layers": 1}')
    try:
        yield made.ready()
    finally:
        made.kill()


@pytest.mark.slow
def test_ranks_in_processes_of_their_own_pass_a_refit_of_real_servers(server):
    ranks = Ranks(3)
    followers = [start_follower(ranks, rank, -1) for rank in (1, 2)]
    try:
        RefitFleet([server.url], timeout_s=PATIENCE_S).refit("v1", barrier=ranks.barrier(0))
        for follower in followers:
            _, said = follower.communicate(timeout=PATIENCE_S)
            assert follower.returncode == 0, said
        assert server.state["version"] == "v1"
        assert not server.state["is_paused"]
    finally:
        for follower in followers:
            follower.kill()
            follower.wait(PATIENCE_S)


@pytest.mark.slow
def test_a_rank_killed_before_all_have_received_leaves_every_server_at_the_old_version(server):
    RefitFleet([server.url], timeout_s=PATIENCE_S).refit("v2")
    before = server.state["digests"]
    ranks = Ranks(2)
    follower = start_follower(ranks, 1, 1)
    fleet = RefitFleet([server.url], timeout_s=20, holds="v2")
    try:
        with pytest.raises(RefitTimeoutError, match="'received' for ranks 1"):
            fleet.refit("v3", barrier=ranks.barrier(0))
        assert follower.wait(PATIENCE_S) == -signal.SIGKILL
        state = server.state
        assert state["digests"] == before
        assert state["is_paused"]
        assert state["version"] == "v2"
        fleet.resume()
        assert not server.state["is_paused"]
        fleet.refit("v3")
        assert server.state["version"] == "v3"
    finally:
        follower.kill()
        follower.wait(PATIENCE_S)


def test_a_store_that_is_stopped_does_not_outlast_the_time_of_a_refit(server, elsewhere):
    RefitFleet([server.url], timeout_s=PATIENCE_S).refit("v4")
    store, process = elsewhere
    fleet = RefitFleet([server.url], timeout_s=10, cleanup_timeout_s=2, holds="v4")
    stop(process)
    began = time.monotonic()
    with pytest.raises(RefitTimeoutError, match="store of the barrier"):
        fleet.refit("v5", barrier=PhaseBarrier(store, rank=0, world_size=2))
    # Some 13 s where two cores have little else to do; without a limit it would never end.
    assert time.monotonic() - began < PATIENCE_S
    assert (server.state["version"], server.state["is_paused"]) == ("v4", True)
    fleet.resume()
