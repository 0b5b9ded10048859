"""Leases, retention and limits: what the control plane keeps, and for how long."""

import pytest
from control_states import (
    READY,
    RELEASING,
    STAGING,
    TRAINER,
    body,
    publish,
    records_of,
    refused,
    reload,
    shard,
)

from refit_mx.control.limits import Limits
from refit_mx.control.records import (
    Code,
    ObjectStorage,
)
from refit_mx.control.state import ControlState
from refit_mx.errors import RefitConfigError

# Leases


def test_a_lease_needs_ready_and_is_renewed_also_while_releasing(state):
    version = state.create_version(body(), now_ms=0)

    def lease(worker, now_ms):
        return state.register_lease(version.uid, worker, ttl_s=1, now_ms=now_ms)

    refused(Code.FAILED_PRECONDITION, lambda: lease("g", 0), "slots without a live shard: 'a'")
    publish(state)
    first = lease("g", 0).lease_id
    assert lease("g", 500).lease_id == first
    state.delete_version(version.uid, now_ms=600)
    assert lease("g", 1_400).lease_id == first
    refused(Code.FAILED_PRECONDITION, lambda: lease("h", 1_400), "it was asked for")
    refused(Code.FAILED_PRECONDITION, lambda: lease("g", 2_400), "RELEASING")


def test_a_lapsed_lease_comes_back_under_another_id(state):
    version = publish(state)
    first = state.register_lease(version.uid, "g", ttl_s=1, now_ms=0).lease_id
    assert state.register_lease(version.uid, "g", ttl_s=1, now_ms=1_000).lease_id != first


def test_a_renewal_never_shortens_a_lease(state):
    version = publish(state)
    state.register_lease(version.uid, "g", ttl_s=60, now_ms=0)
    assert state.register_lease(version.uid, "g", ttl_s=1, now_ms=0).expires_at_ms == 60_000
    after = reload(records_of(state), now_ms=1, grace_s=0)
    assert after.ledger.leases[version.uid]["g"].expires_at_ms == 60_000


def test_a_lease_is_given_back_by_its_holder_alone(state):
    version = publish(state)
    lease = state.register_lease(version.uid, "g", ttl_s=9, now_ms=0)
    assert not state.delete_lease(version.uid, lease.lease_id, "h", now_ms=0)
    assert not state.delete_lease(version.uid, "other", "g", now_ms=0)
    assert state.delete_lease(version.uid, lease.lease_id, "g", now_ms=0)
    assert not state.delete_lease(version.uid, lease.lease_id, "g", now_ms=0)


# Retention and forgetting


def test_retention_keeps_the_newest_of_each_model():
    state = ControlState(Limits(retention=2))
    made = [publish(state, str(n)) for n in range(4)]
    other = publish(state, "k", worker="v", model="n")
    assert [version.state for version in made] == [RELEASING, RELEASING, READY, READY]
    assert other.state is READY


def test_retention_waits_for_the_last_lease():
    state = ControlState(Limits(retention=1))
    old = publish(state, "1", ttl_s=60)
    lease = state.register_lease(old.uid, "g", ttl_s=9, now_ms=0)
    state.register_lease(old.uid, "h", ttl_s=5, now_ms=0)
    publish(state, "2", ttl_s=60)
    assert old.state is READY
    state.delete_lease(old.uid, lease.lease_id, "g", now_ms=1)
    assert state.get_version(old.uid, now_ms=4_999).state is READY
    assert state.get_version(old.uid, now_ms=5_000).state is RELEASING
    assert old.reason == "1 newer ones are READY"


def test_a_released_version_is_forgotten_after_a_while_without_shards_and_leases():
    state = ControlState(Limits(retention=0, forget_after_s=100))
    version = publish(state, ttl_s=86_400)
    state.register_lease(version.uid, "g", ttl_s=500, now_ms=0)
    state.delete_version(version.uid, now_ms=0)
    state.get_version(version.uid, now_ms=200_000)
    assert state.take_changes()["version", (version.uid,)] is not None
    state.get_version(version.uid, now_ms=500_000)
    assert state.delete_shard(version.uid, "a", "w", now_ms=500_000)
    refused(Code.NOT_FOUND, lambda: state.get_version(version.uid, now_ms=500_000))
    assert state.create_version(body(), now_ms=500_000) is not version


def test_a_leased_version_without_shards_is_not_forgotten():
    state = ControlState(Limits(forget_after_s=100))
    stored = body(slots=(), state=READY, storage=ObjectStorage("s3://x", 1))
    version = state.create_version(stored, now_ms=0)
    lease = state.register_lease(version.uid, "g", ttl_s=500, now_ms=0)
    state.delete_version(version.uid, now_ms=0)
    assert state.get_version(version.uid, now_ms=200_000) is version
    assert state.delete_lease(version.uid, lease.lease_id, "g", now_ms=200_000)
    assert version.uid not in state.ledger.versions


def test_no_more_released_versions_are_remembered_than_allowed():
    state = ControlState(Limits(most_released=2))
    made = [state.create_version(body(str(n)), now_ms=n) for n in range(4)]
    for version in made:
        state.delete_version(version.uid, now_ms=10)
    assert list(state.ledger.versions) == [version.uid for version in made[2:]]


def test_a_dead_worker_is_forgotten_after_a_while():
    state = ControlState(Limits(forget_after_s=100))
    state.register_worker("w", TRAINER, "m", ttl_s=1, now_ms=0)
    state.expire(now_ms=100_999)
    assert "w" in state.ledger.workers
    state.expire(now_ms=101_000)
    assert "w" not in state.ledger.workers


def test_a_version_that_nobody_fills_is_released_in_the_end():
    state = ControlState(Limits(abandon_after_s=100))
    state.register_worker("w", TRAINER, "m", ttl_s=150, now_ms=0)
    empty = state.create_version(body("1"), now_ms=0)
    half = state.create_version(body("2", ("a", "b")), now_ms=0)
    state.create_shard(shard(half), now_ms=0)
    state.expire(now_ms=100_000)
    assert (empty.state, half.state) == (RELEASING, STAGING)
    assert empty.reason == "it was abandoned while STAGING"
    state.expire(now_ms=149_999)
    assert half.state is STAGING
    state.expire(now_ms=150_000)
    assert half.state is RELEASING


def test_a_server_that_was_restarted_abandons_what_the_other_did():
    # Older than it may be, and held only by a worker that ends now: gone at once, restarted or not.
    state = ControlState(Limits(abandon_after_s=100))
    state.register_worker("w", TRAINER, "m", ttl_s=1_000, now_ms=0)
    half = state.create_version(body("1", ("a", "b")), now_ms=0)
    state.create_shard(shard(half), now_ms=0)
    state.expire(now_ms=150_000)
    state.mark_stale("w", now_ms=150_000)
    assert (half.state, state.ledger.shards[half.uid]) == (RELEASING, {})


@pytest.mark.parametrize(
    ("limit", "call"),
    [
        ("most_versions", lambda state, n: state.create_version(body(str(n)), now_ms=0)),
        (
            "most_workers",
            lambda state, n: state.register_worker(f"x{n}", TRAINER, "m", ttl_s=9, now_ms=0),
        ),
    ],
)
def test_no_more_is_kept_than_allowed(limit, call):
    state = ControlState(Limits(**{limit: 2}))
    for n in range(2):
        call(state, n)
    refused(Code.RESOURCE_EXHAUSTED, lambda: call(state, 2))


def test_leases_and_replicas_have_limits():
    state = ControlState(Limits(most_leases=1, most_replicas=1))
    version = publish(state)
    state.register_lease(version.uid, "g", ttl_s=1, now_ms=0)
    state.register_lease(version.uid, "g", ttl_s=1, now_ms=0)
    refused(
        Code.RESOURCE_EXHAUSTED,
        lambda: state.register_lease(version.uid, "h", ttl_s=1, now_ms=0),
    )
    state.register_worker("v", TRAINER, "m", ttl_s=9, now_ms=0)
    refused(
        Code.RESOURCE_EXHAUSTED, lambda: state.create_shard(shard(version, worker="v"), now_ms=0)
    )


@pytest.mark.parametrize("wrong", [{"retention": -1}, {"most_ttl_s": 0}, {"most_leases": -1}])
def test_limits_without_sense_are_refused(wrong):
    with pytest.raises(RefitConfigError):
        Limits(**wrong)
