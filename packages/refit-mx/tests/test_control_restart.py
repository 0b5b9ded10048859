"""The control plane after a restart, and a random walk through its rules against a simple model.

These tests use internals: every transition of the rules, under a clock that the test sets.
"""

import msgspec
from control_states import (
    READY,
    RELEASING,
    STAGING,
    TRAINER,
    body,
    publish,
    records_of,
    reload,
    shard,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from refit_mx.control import Limits, Shard, VersionState
from refit_mx.control.records import Refusal
from refit_mx.control.state import ControlState
from refit_mx.control.store import KINDS


def test_live_records_get_time_to_renew_after_a_restart(state):
    version = publish(state, ttl_s=10)
    state.register_lease(version.uid, "g", ttl_s=4, now_ms=0)
    after = reload(records_of(state), now_ms=1_000_000, grace_s=5)
    assert after.get_version(version.uid, now_ms=1_003_999).state is READY
    assert after.ledger.leases[version.uid]
    after.expiry.expire_until(1_004_000)
    assert not after.ledger.leases[version.uid]
    assert after.get_version(version.uid, now_ms=1_004_999).state is READY
    assert after.get_version(version.uid, now_ms=1_005_000).state is RELEASING


def test_clock_set_back_does_not_extend_a_time_to_live(state):
    version = publish(state, ttl_s=10, now_ms=1_000_000)
    after = reload(records_of(state), now_ms=0, grace_s=1)
    assert after.get_version(version.uid, now_ms=9_999).state is READY
    assert after.get_version(version.uid, now_ms=10_000).state is RELEASING


def test_worker_that_expired_before_the_restart_gets_no_grace(state):
    version = publish(state, ttl_s=10)
    state.register_worker("v", TRAINER, "m", ttl_s=60, now_ms=0)
    state.create_shard(shard(version, worker="v"), now_ms=0)
    state.expiry.expire_until(10_000)
    after = reload(records_of(state), now_ms=10_001, grace_s=100)
    assert [each.worker_id for each in after.list_shards(version.uid, now_ms=10_001)] == ["v"]


def test_stale_worker_gets_no_grace(state):
    version = publish(state, ttl_s=10)
    state.register_lease(version.uid, "g", ttl_s=100, now_ms=0)
    state.mark_stale("w", now_ms=0)
    after = reload(records_of(state), now_ms=1, grace_s=100)
    assert after.list_shards(version.uid, now_ms=1) == []


# A random walk

UIDS = ["v0", "v1", "v2", "v3"]
SLOTS = ["a", "b"]
WORKERS = ["w0", "w1", "w2"]
RECEIVERS = ["g0", "g1"]


class Walk(RuleBasedStateMachine):
    """A state machine that makes calls in any order, with a model of the invariants."""

    @initialize(retention=st.sampled_from([1, 2, 0]))
    def begin(self, retention):
        self.limits = Limits(
            retention=retention,
            forget_after_s=20,
            abandon_after_s=30,
            max_released=2,
            max_replicas=2,
        )
        self.state = ControlState(self.limits)
        self.now_ms = 0
        self.left_ready = set()
        self.was_ready = set()
        self.kept = {}
        self.versions = {}
        # End of each lease, by (version, receiver); then shards when leased, by version.
        self.leases = {}
        self.held = {}
        self.stale = set()

    def do(self, call, *arguments, **options):
        """Call, and apply the changes to a model of the store; return None if refused."""
        try:
            return call(*arguments, now_ms=self.now_ms, **options)
        except Refusal:
            return None
        finally:
            for (kind, key), record in self.state.ledger.take_changes().items():
                if record is None:
                    # A deleted record may already be missing from the store.
                    self.kept.pop((kind, key), None)
                else:
                    self.kept[kind, key] = msgspec.msgpack.encode(record)

    @rule(seconds=st.sampled_from([0.1, 1, 3, 8, 25]))
    def time_passes(self, seconds):
        self.now_ms += int(seconds * 1000)
        self.leases = {key: end for key, end in self.leases.items() if end > self.now_ms}
        self.do(self.state.expiry.expire_until)

    @rule(uid=st.sampled_from(UIDS), slots=st.sampled_from([("a",), ("b",), ("a", "b")]))
    def create_version(self, uid, slots):
        version = self.do(self.state.create_version, body(f"key-{uid}", slots, uid=uid))
        if version is not None:
            if self.versions.get(uid) is not version:
                self.left_ready.discard(uid)
                self.was_ready.discard(uid)
            self.versions[uid] = version

    @rule(worker=st.sampled_from(WORKERS), ttl_s=st.sampled_from([1, 5, 60]))
    def register(self, worker, ttl_s):
        done = self.do(self.state.register_worker, worker, TRAINER, "m", ttl_s=ttl_s)
        if worker in self.stale and worker in self.state.ledger.workers:
            assert done is None or not done.stale
        if done is not None:
            self.stale.discard(worker)  # it had been forgotten

    @rule(worker=st.sampled_from(WORKERS))
    def mark_stale(self, worker):
        if self.do(self.state.mark_stale, worker) is not None:
            self.stale.add(worker)

    @rule(uid=st.sampled_from(UIDS), slot=st.sampled_from(SLOTS), worker=st.sampled_from(WORKERS))
    def create_shard(self, uid, slot, worker):
        done = self.do(self.state.create_shard, Shard(uid, slot, worker, 1, 1, "d", "h:1"))
        if done is not None:
            assert self.state.ledger.is_live(worker, self.now_ms)

    @rule(uid=st.sampled_from(UIDS), slot=st.sampled_from(SLOTS), worker=st.sampled_from(WORKERS))
    def delete_shard(self, uid, slot, worker):
        if self.do(self.state.delete_shard, uid, slot, worker):
            assert not [key for key in self.leases if key[0] == uid]

    @rule(
        uid=st.sampled_from(UIDS),
        worker=st.sampled_from(WORKERS),
        slots=st.sampled_from([("a",), ("a", "b")]),
        ttl_s=st.sampled_from([1, 5, 60]),
        leased=st.booleans(),
    )
    def publish_complete_version(self, uid, worker, slots, ttl_s, leased):
        # One combined rule, so that leases, dead workers and retention often occur together.
        self.register(worker, ttl_s)
        self.create_version(uid, slots)
        for slot in slots:
            self.create_shard(uid, slot, worker)
        if leased:
            self.lease(uid, "g0", 60)

    @rule(uid=st.sampled_from(UIDS))
    def delete_version(self, uid):
        self.do(self.state.delete_version, uid)

    @rule(uid=st.sampled_from(UIDS), to=st.sampled_from(list(VersionState)))
    def update(self, uid, to):
        self.do(self.state.update_version_state, uid, to)

    @rule(
        uid=st.sampled_from(UIDS),
        receiver=st.sampled_from(RECEIVERS),
        ttl_s=st.sampled_from([1, 5, 60]),
    )
    def lease(self, uid, receiver, ttl_s):
        before = self.state.ledger.versions.get(uid)
        was = before.state if before is not None else None
        held = (uid, receiver) in self.leases
        lease = self.do(self.state.register_lease, uid, receiver, ttl_s=ttl_s)
        assert (lease is not None) == (was is READY or (was is RELEASING and held))
        if lease is not None:
            end = max(self.leases.get((uid, receiver), 0), self.now_ms + ttl_s * 1000)
            self.leases[uid, receiver] = end
            self.held[uid] = dict(self.state.ledger.shards.get(uid, {}))

    @rule(uid=st.sampled_from(UIDS), receiver=st.sampled_from(RECEIVERS))
    def unlease(self, uid, receiver):
        lease = self.state.ledger.leases.get(uid, {}).get(receiver)
        assert (lease is not None) == ((uid, receiver) in self.leases)
        if lease is not None:
            assert self.do(self.state.delete_lease, uid, lease.lease_id, receiver)
            del self.leases[uid, receiver]

    @rule()
    @precondition(lambda self: self.kept)
    def restart(self):
        records = [
            msgspec.msgpack.decode(encoded, type=KINDS[kind])
            for (kind, _), encoded in self.kept.items()
        ]
        before = sorted(map(repr, records_of(self.state)))
        again = ControlState(self.limits)
        again.expiry.load(records, now_ms=self.now_ms, grace_s=0.0)
        # The store has all records, and loading them restores the same state.
        assert sorted(map(repr, records_of(again))) == before
        self.state = again
        self.state.ledger.take_changes()
        self.versions = {uid: again.ledger.versions.get(uid) for uid in self.versions}

    @invariant()
    def a_ready_version_has_a_live_shard_in_each_slot(self):
        for version in self.state.ledger.versions.values():
            if version.state is READY:
                assert not self.state.ledger.missing_slots(version, self.now_ms)

    @invariant()
    def a_complete_version_is_not_left_staging(self):
        for version in self.state.ledger.versions.values():
            if version.state is STAGING:
                assert self.state.ledger.missing_slots(version, self.now_ms)

    @invariant()
    def a_version_that_left_ready_never_returns(self):
        for uid, version in self.state.ledger.versions.items():
            if version.state is READY:
                self.was_ready.add(uid)
                assert uid not in self.left_ready
            elif uid in self.was_ready:
                assert version.state is RELEASING
                self.left_ready.add(uid)

    @invariant()
    def a_leased_version_keeps_its_shards(self):
        for uid in {key[0] for key in self.leases}:
            assert uid in self.state.ledger.versions
            assert self.held[uid].items() <= self.state.ledger.shards[uid].items()

    @invariant()
    def leases_are_those_of_the_model(self):
        leases = {
            (uid, receiver): lease.expires_at_ms
            for uid, leases in self.state.ledger.leases.items()
            for receiver, lease in leases.items()
        }
        assert leases == self.leases

    @invariant()
    def retention_holds(self):
        ready = sorted(
            (each for each in self.state.ledger.versions.values() if each.state is READY),
            key=lambda each: each.order,
        )
        if self.limits.retention:
            for version in ready[: -self.limits.retention]:
                assert self.state.ledger.leases.get(version.uid)
        for version in self.state.ledger.versions.values():
            # A released version gets no new lease, so such a lease would predate the release.
            if version.reason.endswith("newer versions are READY"):
                assert not self.state.ledger.leases.get(version.uid)

    @invariant()
    def nothing_lives_in_a_version_that_is_forgotten(self):
        ledger = self.state.ledger
        for table in (ledger.shards, ledger.leases):
            assert {uid for uid, rows in table.items() if rows} <= set(ledger.versions)
        assert set(ledger.by_idempotency.values()) == set(ledger.versions)
        assert len(ledger.emptied) <= self.limits.max_released
        for worker, keys in ledger.shards_of.items():
            assert keys == {
                key for rows in ledger.shards.values() for key in rows if key[2] == worker
            }


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=200, stateful_step_count=50)
