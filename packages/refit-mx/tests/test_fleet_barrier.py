"""All trainer ranks pass every phase with the rank that drives the servers, or all fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed

from refit_mx import Deadline, FleetError, RefitConfigError, RefitTimeoutError
from refit_mx.fleet.barrier import PhaseBarrier, Point, follow

TIMEOUT_S = 60.0


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
            timeout=timedelta(seconds=TIMEOUT_S),
        )


def drive(barrier, deadline, points=tuple(Point)):
    for point in points:
        barrier.meet(point, deadline)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as threads:
        yield threads


def test_all_ranks_pass_all_points_in_every_round(pool):
    ranks = Ranks(3)
    barriers = [ranks.barrier(rank) for rank in range(3)]
    for _ in range(4):
        followers = [pool.submit(follow, b, timeout_s=TIMEOUT_S) for b in barriers[1:]]
        barriers[0].begin()
        drive(barriers[0], Deadline(TIMEOUT_S, "test"))
        for follower in followers:
            follower.result(TIMEOUT_S)
    # Keys older than two rounds are deleted: three ranks, four points, two rounds, and torch's own.
    assert ranks.server.num_keys() <= 3 * 4 * 2 + 3


def test_failed_rank_fails_all_at_once_and_is_named(pool):
    ranks = Ranks(3)
    barriers = [ranks.barrier(rank) for rank in range(3)]
    began = time.monotonic()
    other = pool.submit(follow, barriers[1], timeout_s=TIMEOUT_S)
    broken = pool.submit(follow, barriers[2], timeout_s=TIMEOUT_S, failure="its disk is full")
    barriers[0].begin()
    with pytest.raises(FleetError, match="rank 2: its disk is full") as caught:
        barriers[0].meet(Point.RECEIVED, Deadline(TIMEOUT_S, "test"))
    assert list(caught.value.failed) == ["rank 2"]
    for follower in (other, broken):
        with pytest.raises(FleetError):
            follower.result(TIMEOUT_S)
    assert time.monotonic() - began < TIMEOUT_S / 2
    # The next round begins clean.
    followers = [pool.submit(follow, b, timeout_s=TIMEOUT_S) for b in barriers[1:]]
    barriers[0].begin()
    drive(barriers[0], Deadline(TIMEOUT_S, "test"))
    for follower in followers:
        follower.result(TIMEOUT_S)


def test_missing_rank_is_named_at_the_deadline():
    ranks = Ranks(3)
    barrier = ranks.barrier(1)
    barrier.begin()
    ranks.store().set("refit/1/received/0", b"ok")
    began = time.monotonic()
    with pytest.raises(RefitTimeoutError, match="'received' for ranks 2"):
        barrier.meet(Point.RECEIVED, Deadline(0.5, "test"))
    assert time.monotonic() - began < 30


def test_failed_rank_is_named_although_another_is_missing():
    ranks = Ranks(3)
    driver, broken = ranks.barrier(1), ranks.barrier(2)
    driver.begin()
    broken.begin()
    broken.fail(Point.RECEIVED, "its disk is full")
    with pytest.raises(FleetError, match="rank 2: its disk is full"):
        driver.meet(Point.RECEIVED, Deadline(0.5, "test"))


class FaultyStore:
    """A store with replaced calls."""

    def __init__(self, store, **calls):
        self._store = store
        vars(self).update(calls)

    def __getattr__(self, name):
        return getattr(self._store, name)


def test_failure_reported_just_after_a_timeout_is_raised():
    ranks = Ranks(2)
    other = ranks.barrier(1)
    other.begin()

    def wait(keys, timeout):
        other.fail(Point.RECEIVED, "its disk is full")
        raise RuntimeError("wait timeout")

    barrier = PhaseBarrier(FaultyStore(ranks.store(), wait=wait), rank=0, world_size=2)
    barrier.begin()
    with pytest.raises(FleetError, match="rank 1: its disk is full"):
        barrier.meet(Point.RECEIVED, Deadline(TIMEOUT_S, "test"))


def test_failed_rank_is_named_although_the_store_is_lost_later():
    def check(keys):
        raise RuntimeError("connection reset")

    ranks = Ranks(3)
    broken = ranks.barrier(0)
    broken.begin()
    broken.fail(Point.RECEIVED, "its disk is full")
    barrier = PhaseBarrier(FaultyStore(ranks.store(), check=check), rank=2, world_size=3)
    barrier.begin()
    with pytest.raises(FleetError, match="rank 0: its disk is full"):
        barrier.meet(Point.RECEIVED, Deadline(0.5, "test"))


def test_failure_reaches_ranks_at_a_later_point(pool):
    ranks = Ranks(2)
    driver, follower = ranks.barrier(0), ranks.barrier(1)
    waiting = pool.submit(follow, follower, timeout_s=TIMEOUT_S)
    driver.begin()
    drive(driver, Deadline(TIMEOUT_S, "test"), [Point.RECEIVED])
    driver.fail(Point.PAUSED, "a server was lost")
    with pytest.raises(FleetError, match="a server was lost"):
        waiting.result(TIMEOUT_S)


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_rank_outside_of_the_world_is_refused(rank, world_size):
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
def remote_store():
    """Yield a store whose server is in a separate process, and that process."""
    process = subprocess.Popen(
        [sys.executable, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    port = int(process.stdout.readline())
    store = torch.distributed.TCPStore(
        "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S)
    )
    yield store, process
    process.kill()
    process.communicate()


def stop(process):
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


@pytest.mark.parametrize("call", ["meet", "arrive", "fail", "follow"])
def test_stopped_store_times_out_within_the_deadline(remote_store, call, pool):
    store, process = remote_store
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
            pool.submit(calls[call]).result(TIMEOUT_S / 2)
    assert sum(each.name == "refit-barrier" for each in threading.enumerate()) == 1
    # When the store continues, the barrier works again.
    process.send_signal(signal.SIGCONT)
    other = PhaseBarrier(store.clone(), rank=1, world_size=2)
    barrier._round = other._round = 7
    following = pool.submit(follow, other, timeout_s=TIMEOUT_S)
    barrier.begin()
    drive(barrier, Deadline(TIMEOUT_S, "test"))
    following.result(TIMEOUT_S)


def test_store_with_a_dead_server_is_a_typed_error(remote_store):
    store, process = remote_store
    barrier = PhaseBarrier(store, rank=0, world_size=2)
    barrier.begin()
    process.kill()
    process.wait(TIMEOUT_S)
    for call in (
        lambda: barrier.meet(Point.PAUSED, Deadline(5.0, "test")),
        lambda: barrier.fail(Point.PAUSED, "why"),
        lambda: follow(barrier, timeout_s=5.0, failure=None),
    ):
        with pytest.raises(FleetError, match="store of the barrier"):
            call()
