"""A control plane that did not run for a while does not take for dead whoever could not renew."""

import signal
import subprocess
import sys
import threading
import time

import pytest
from control_states import READY, RELEASING, TRAINER, publish, shard
from hypothesis import given
from hypothesis import strategies as st

from refit_mx.control import ControlClient, Heartbeat
from refit_mx.control.plane import ControlPlane
from refit_mx.control.records import Shard
from refit_mx.control.sources import READY as SOURCE_READY
from refit_mx.control.sources import SILENT_AFTER_MS, Source
from refit_mx.control.state import ControlState

PATIENCE_S = 60.0
GRACE_S = 5.0


def wait_until(found, what):
    until = time.monotonic() + PATIENCE_S
    while not found():
        assert time.monotonic() < until, f"not within {PATIENCE_S:g} s: {what}"
        threading.Event().wait(0.02)


# The rules


def test_what_was_live_at_a_pause_gets_time_to_renew(state):
    version = publish(state, ttl_s=10)
    state.register_lease(version.uid, "g", ttl_s=4, now_ms=0)
    state.excuse(3_000, now_ms=1_000_000, grace_s=GRACE_S)
    state.expire(now_ms=1_003_999)
    assert state.ledger.leases[version.uid]
    state.expire(now_ms=1_004_000)
    assert not state.ledger.leases[version.uid]
    # It had seven seconds left, more than the grace.
    assert state.get_version(version.uid, now_ms=1_006_999).state is READY
    assert state.get_version(version.uid, now_ms=1_007_000).state is RELEASING


def test_a_worker_that_renews_after_a_pause_goes_on_as_before(state):
    version = publish(state, ttl_s=10)
    state.excuse(9_000, now_ms=60_000, grace_s=GRACE_S)
    state.register_worker("w", TRAINER, "m", ttl_s=10, now_ms=64_000)
    assert state.get_version(version.uid, now_ms=73_999).state is READY
    assert state.get_version(version.uid, now_ms=74_000).state is RELEASING


def test_a_worker_that_lapsed_or_said_stale_before_the_pause_gets_no_time(state):
    version = publish(state, ttl_s=60)
    for worker, ttl_s in (("lapsed", 1), ("stale", 60)):
        state.register_worker(worker, TRAINER, "m", ttl_s=ttl_s, now_ms=0)
        state.create_shard(shard(version, worker=worker), now_ms=0)
    state.mark_stale("stale", now_ms=0)
    state.excuse(1_000, now_ms=1_000_000, grace_s=GRACE_S)
    shards = state.list_shards(version.uid, now_ms=1_000_000)
    assert [each.worker_id for each in shards] == ["w"]


def test_pauses_again_and_again_keep_no_dead_worker_alive(state):
    version = publish(state, ttl_s=10)
    ran_ms = now_ms = 0
    while state.get_version(version.uid, now_ms=now_ms).state is READY:
        # Two seconds of every ten.
        ran_ms += 2_000
        now_ms += 2_000
        state.excuse(now_ms, now_ms=now_ms + 8_000, grace_s=GRACE_S)
        now_ms += 8_000
        assert ran_ms <= 20_000


def test_what_a_pause_changed_is_kept(state):
    version = publish(state, ttl_s=10)
    state.register_lease(version.uid, "g", ttl_s=4, now_ms=0)
    state.take_changes()
    state.excuse(1_000, now_ms=9_000, grace_s=GRACE_S)
    assert {kind for kind, _ in state.take_changes()} == {"worker", "lease"}


@given(
    beats=st.lists(st.tuples(st.integers(1, 3_000), st.integers(0, 100_000)), max_size=12),
    grace_s=st.sampled_from([0.0, 1.0, 30.0]),
)
def test_no_pause_at_any_moment_ends_what_renews_in_time(beats, grace_s):
    state = ControlState()
    version = publish(state, ttl_s=4)
    lease_id = state.register_lease(version.uid, "g", ttl_s=4, now_ms=0).lease_id
    now_ms = end_ms = 0
    for ran_ms, paused_ms in beats:
        now_ms += ran_ms
        state.excuse(now_ms, now_ms=now_ms + paused_ms, grace_s=grace_s)
        now_ms += paused_ms
        state.expire(now_ms=now_ms)
        leases = state.ledger.leases[version.uid]
        # A lease is never shortened, and neither is anything else.
        assert all(record.expires_at_ms >= end_ms for record in (leases["g"], worker_of(state)))
        state.register_worker("w", TRAINER, "m", ttl_s=4, now_ms=now_ms)
        assert state.register_lease(version.uid, "g", ttl_s=4, now_ms=now_ms).lease_id == lease_id
        end_ms = now_ms + 4_000
    assert state.get_version(version.uid, now_ms=now_ms).state is READY


def worker_of(state):
    return state.ledger.workers["w"]


# The plane, and real processes


class Clock:
    def __init__(self):
        self.now_ms = 1_000_000

    def __call__(self):
        return self.now_ms


@pytest.mark.parametrize("first", ["a call", "a look at the time", "the sweep"])
def test_whoever_comes_first_after_a_jump_of_the_clock_lets_nothing_lapse(first):
    clock = Clock()
    plane = ControlPlane(clock=clock, restart_grace_s=GRACE_S)
    version = plane.call(lambda state, now_ms: publish(state, now_ms=now_ms, ttl_s=10))
    plane.sources.publish(
        Source("s", "w", "m", 0, b"", b"", SOURCE_READY, updated_at_ms=clock.now_ms)
    )
    clock.now_ms += 10 * SILENT_AFTER_MS
    if first == "a call":
        assert plane.counts().workers == {"trainer": 1}
    elif first == "a look at the time":
        assert plane.now_ms() == clock.now_ms
    else:
        wait_until(lambda: worker_of(plane._state).expires_at_ms > clock.now_ms, "excused")
    got = plane.call(lambda state, now_ms: state.get_version(version.uid, now_ms=now_ms))
    assert got.state is READY
    assert plane.counts().sources == 1
    for _ in range(10):
        clock.now_ms += 1_000
        plane.now_ms()
    got = plane.call(lambda state, now_ms: state.get_version(version.uid, now_ms=now_ms))
    assert got.state is RELEASING
    plane.close()


SERVER = """
import sys
from refit_mx.control import EmbeddedControlServer
server = EmbeddedControlServer()
print(server.address, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def stoppable():
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process, process.stdout.readline().strip()
    process.kill()
    process.communicate()


def test_a_server_that_was_stopped_for_longer_than_the_time_to_live_keeps_its_versions(stoppable):
    process, address = stoppable
    ttl_s = 2
    with (
        ControlClient(address, rpc_timeout_s=1.0) as client,
        Heartbeat(client, "lives", TRAINER, "m", ttl_s=ttl_s, on_sigterm=False),
        ControlClient(address) as patient,
    ):
        patient.register_worker("dies", TRAINER, "m", ttl_s=ttl_s)
        for worker in ("lives", "dies"):
            made = patient.create_version("m", ["a"], idempotency_key=worker, version_id=worker)
            assert patient.create_shard(Shard(made.version_id, "a", worker, 1, 2, "d", "h:1"))
        process.send_signal(signal.SIGSTOP)
        threading.Event().wait(2 * ttl_s)
        process.send_signal(signal.SIGCONT)
        assert patient.get_version("lives").state is READY
        # One that died meanwhile is found out; by then the other has been heard again.
        wait_until(lambda: patient.get_version("dies").state is RELEASING, "lapsed")
        assert patient.get_version("lives").state is READY
