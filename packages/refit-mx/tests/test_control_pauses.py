"""A control plane that was paused does not treat workers and leases as expired at once.

These tests use internals: the rules, under a clock that stops and jumps.
"""

import signal
import subprocess
import sys
import threading

import pytest
from control_clients import until
from control_states import READY, RELEASING, TRAINER, Clock, publish, shard
from hypothesis import given
from hypothesis import strategies as st

from refit_mx import ControlClient
from refit_mx.control import Heartbeat, Shard
from refit_mx.control.plane import ControlPlane
from refit_mx.control.sources import READY as SOURCE_READY
from refit_mx.control.sources import SILENT_AFTER_MS, Source
from refit_mx.control.state import ControlState

GRACE_S = 5.0


# The rules


def test_live_records_get_time_to_renew_after_a_pause(state):
    version = publish(state, ttl_s=10)
    state.register_lease(version.uid, "g", ttl_s=4, now_ms=0)
    state.expiry.extend_grace(3_000, 1_000_000, grace_s=GRACE_S)
    state.expiry.expire_until(1_003_999)
    assert state.ledger.leases[version.uid]
    state.expiry.expire_until(1_004_000)
    assert not state.ledger.leases[version.uid]
    # The worker had seven seconds left, more than the grace period.
    assert state.get_version(version.uid, now_ms=1_006_999).state is READY
    assert state.get_version(version.uid, now_ms=1_007_000).state is RELEASING


def test_dead_worker_gets_no_grace_after_a_pause(state):
    version = publish(state, ttl_s=60)
    for worker, ttl_s in (("expired", 1), ("stale", 60)):
        state.register_worker(worker, TRAINER, "m", ttl_s=ttl_s, now_ms=0)
        state.create_shard(shard(version, worker=worker), now_ms=0)
    state.mark_stale("stale", now_ms=0)
    state.expiry.extend_grace(1_000, 1_000_000, grace_s=GRACE_S)
    shards = state.list_shards(version.uid, now_ms=1_000_000)
    assert [each.worker_id for each in shards] == ["w"]


def test_repeated_pauses_keep_no_dead_worker_alive(state):
    version = publish(state, ttl_s=10)
    ran_ms = now_ms = 0
    while state.get_version(version.uid, now_ms=now_ms).state is READY:
        # Two seconds of every ten.
        ran_ms += 2_000
        now_ms += 2_000
        state.expiry.extend_grace(now_ms, now_ms + 8_000, grace_s=GRACE_S)
        now_ms += 8_000
        assert ran_ms <= 20_000


def test_changes_of_a_pause_are_stored(state):
    version = publish(state, ttl_s=10)
    state.register_lease(version.uid, "g", ttl_s=4, now_ms=0)
    state.ledger.take_changes()
    state.expiry.extend_grace(1_000, 9_000, grace_s=GRACE_S)
    assert {kind for kind, _ in state.ledger.take_changes()} == {"worker", "lease"}


@given(
    beats=st.lists(st.tuples(st.integers(1, 3_000), st.integers(0, 100_000)), max_size=12),
    grace_s=st.sampled_from([0.0, 1.0, 30.0]),
)
def test_no_pause_expires_a_worker_that_renews_in_time(beats, grace_s):
    state = ControlState()
    version = publish(state, ttl_s=4)
    lease_id = state.register_lease(version.uid, "g", ttl_s=4, now_ms=0).lease_id
    now_ms = end_ms = 0
    for ran_ms, paused_ms in beats:
        now_ms += ran_ms
        state.expiry.extend_grace(now_ms, now_ms + paused_ms, grace_s=grace_s)
        now_ms += paused_ms
        state.expiry.expire_until(now_ms)
        leases = state.ledger.leases[version.uid]
        # No pause shortens a lease or a registration.
        assert all(record.expires_at_ms >= end_ms for record in (leases["g"], worker_of(state)))
        state.register_worker("w", TRAINER, "m", ttl_s=4, now_ms=now_ms)
        assert state.register_lease(version.uid, "g", ttl_s=4, now_ms=now_ms).lease_id == lease_id
        end_ms = now_ms + 4_000
    assert state.get_version(version.uid, now_ms=now_ms).state is READY


def worker_of(state):
    return state.ledger.workers["w"]


# The plane, and real processes


@pytest.mark.parametrize("first", ["a call", "a reading of the clock", "the sweep"])
def test_clock_jump_expires_nothing(first):
    clock = Clock()
    plane = ControlPlane(clock=clock, restart_grace_s=GRACE_S)
    version = plane.call(lambda state, now_ms: publish(state, now_ms=now_ms, ttl_s=10))
    plane.sources.publish(
        Source("s", "w", "m", 0, b"", b"", SOURCE_READY, updated_at_ms=clock.now_ms)
    )
    clock.now_ms += 10 * SILENT_AFTER_MS
    if first == "a call":
        assert plane.counts().workers == {"trainer": 1}
    elif first == "a reading of the clock":
        assert plane.now_ms() == clock.now_ms
    else:
        until(lambda: worker_of(plane._state).expires_at_ms > clock.now_ms)
    got = plane.call(lambda state, now_ms: state.get_version(version.uid, now_ms=now_ms))
    assert got.state is READY
    assert plane.counts().sources == 1
    clock.run(plane, 10_000)
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


def test_stopped_server_keeps_its_versions(stoppable):
    process, address = stoppable
    ttl_s = 2
    with (
        ControlClient(address, rpc_timeout_s=1.0) as client,
        Heartbeat(client, "lives", TRAINER, "m", ttl_s=ttl_s, on_sigterm=False),
        ControlClient(address) as other,
    ):
        other.register_worker("dies", TRAINER, "m", ttl_s=ttl_s)
        for worker in ("lives", "dies"):
            version = other.create_version("m", ["a"], idempotency_key=worker, version_id=worker)
            assert other.create_shard(Shard(version.version_id, "a", worker, 1, 2, "d", "h:1"))
        process.send_signal(signal.SIGSTOP)
        threading.Event().wait(2 * ttl_s)
        process.send_signal(signal.SIGCONT)
        assert other.get_version("lives").state is READY
        # The dead worker expires; the other one has renewed by then.
        until(lambda: other.get_version("dies").state is RELEASING)
        assert other.get_version("lives").state is READY
