"""The rules of the control plane: versions, workers, shards, leases, and retention.

These tests use internals: the rules to the millisecond, under a clock that the test sets.
"""

import pytest
from control_states import READY, RELEASING, STAGING, TRAINER, body, publish, refused, shard

from refit_mx import RefitConfigError
from refit_mx.control import Limits, WorkerRole
from refit_mx.control.records import Code, ObjectStorage
from refit_mx.control.state import ControlState

# Versions


def test_same_key_and_body_give_the_same_version(state):
    version = state.create_version(body(), now_ms=0)
    assert state.create_version(body(), now_ms=5) is version
    assert state.create_version(body(model="n"), now_ms=5) is not version


@pytest.mark.parametrize("other", [{"slots": ("b",)}, {"uid": "u"}])
def test_same_key_with_another_body_already_exists(state, other):
    state.create_version(body(), now_ms=0)
    refused(Code.ALREADY_EXISTS, lambda: state.create_version(body(**other), now_ms=0), "different")


@pytest.mark.parametrize(
    "wrong",
    [
        body(slots=()),
        body(slots=("a", "a")),
        body(state=READY),
        body(state=RELEASING),
        body(slots=("a",), storage=ObjectStorage("s3://x", 1)),
    ],
)
def test_invalid_body_is_an_invalid_argument(state, wrong):
    refused(Code.INVALID_ARGUMENT, lambda: state.create_version(wrong, now_ms=0))
    assert not state.ledger.versions


def test_version_in_object_storage_outlives_retention():
    state = ControlState(Limits(retention=1))
    versions = [
        state.create_version(
            body(str(n), (), state=READY, storage=ObjectStorage(f"s3://{n}", 1)), now_ms=0
        )
        for n in range(3)
    ]
    publish(state)
    publish(state, "l")
    assert [version.state for version in versions] == [READY] * 3


def test_version_state_moves_only_forward(state):
    version = state.create_version(body(), now_ms=0)

    def move(to):
        return state.update_version_state(version.uid, to, now_ms=0)

    refused(Code.FAILED_PRECONDITION, lambda: move(READY), "'a'")
    assert move(STAGING).state is STAGING
    assert move(RELEASING).state is RELEASING
    for back in (STAGING, READY):
        refused(Code.FAILED_PRECONDITION, lambda back=back: move(back), "cannot go back")
    assert state.delete_version(version.uid, now_ms=0).state is RELEASING


# Workers


def test_version_stays_ready_while_each_slot_has_a_live_replica(state):
    version = publish(state, slots=("a", "b"), worker="w", ttl_s=10)
    state.register_worker("v", TRAINER, "m", ttl_s=30, now_ms=0)
    state.create_shard(shard(version, "a", "v"), now_ms=0)
    state.create_shard(shard(version, "b", "v"), now_ms=0)
    assert state.get_version(version.uid, now_ms=20_000).state is READY
    assert {each.worker_id for each in state.list_shards(version.uid, now_ms=20_000)} == {"v"}
    assert state.get_version(version.uid, now_ms=30_000).state is RELEASING


def test_worker_id_has_one_role_and_model(state):
    state.register_worker("w", TRAINER, "m", ttl_s=1, now_ms=0)
    for role, model in ((WorkerRole.GENERATOR, "m"), (TRAINER, "n")):
        refused(
            Code.ALREADY_EXISTS,
            lambda role=role, model=model: state.register_worker(
                "w", role, model, ttl_s=1, now_ms=0
            ),
        )


@pytest.mark.parametrize("ttl_s", [0, -1, 86_401, float("nan"), float("inf")])
def test_time_to_live_has_bounds(state, ttl_s):
    refused(
        Code.INVALID_ARGUMENT,
        lambda: state.register_worker("w", TRAINER, "m", ttl_s=ttl_s, now_ms=0),
    )


# Shards


def test_shard_needs_a_live_worker_of_the_model(state):
    version = state.create_version(body(), now_ms=0)
    refused(
        Code.FAILED_PRECONDITION,
        lambda: state.create_shard(shard(version), now_ms=0),
        "is not registered",
    )
    state.register_worker("w", TRAINER, "m", ttl_s=1, now_ms=0)
    refused(
        Code.FAILED_PRECONDITION,
        lambda: state.create_shard(shard(version), now_ms=1000),
        "has expired",
    )
    state.register_worker("v", TRAINER, "n", ttl_s=1, now_ms=0)
    refused(
        Code.FAILED_PRECONDITION,
        lambda: state.create_shard(shard(version, worker="v"), now_ms=0),
        "is of model 'n'",
    )
    assert version.state is STAGING


def test_shard_needs_an_expected_slot_of_a_live_version(state):
    version = publish(state)
    refused(Code.INVALID_ARGUMENT, lambda: state.create_shard(shard(version, "b"), now_ms=0), "'b'")
    state.register_worker("v", TRAINER, "m", ttl_s=1, now_ms=0)
    state.delete_version(version.uid, now_ms=0)
    refused(
        Code.FAILED_PRECONDITION,
        lambda: state.create_shard(shard(version, worker="v"), now_ms=0),
        "RELEASING",
    )


def test_worker_publishes_a_slot_once(state):
    version = publish(state)
    again, same = state.create_shard(shard(version), now_ms=0)
    assert (again, same) == (shard(version), version)
    refused(Code.ALREADY_EXISTS, lambda: state.create_shard(shard(version, digest="e"), now_ms=0))


def test_shards_are_listed_with_the_freshest_worker_first(state):
    version = publish(state, worker="w", now_ms=0)
    state.register_worker("v", TRAINER, "m", ttl_s=5, now_ms=500)
    state.create_shard(shard(version, worker="v"), now_ms=500)

    def workers(now_ms):
        return [each.worker_id for each in state.list_shards(version.uid, now_ms=now_ms)]

    assert workers(600) == ["v", "w"]
    state.register_worker("w", TRAINER, "m", ttl_s=10, now_ms=700)
    assert workers(800) == ["w", "v"]


def test_leased_shard_of_a_dead_worker_is_retained(state):
    # The worker may only be disconnected: it must not reuse this memory yet.
    version = publish(state, ttl_s=1)
    state.register_lease(version.uid, "g", ttl_s=60, now_ms=0)
    assert state.get_version(version.uid, now_ms=1_000).state is RELEASING
    state.register_worker("w", TRAINER, "m", ttl_s=60, now_ms=2_000)
    refused(
        Code.FAILED_PRECONDITION,
        lambda: state.delete_shard(version.uid, "a", "w", now_ms=2_000),
        "leased",
    )
    assert state.delete_shard(version.uid, "a", "w", now_ms=60_000)


def test_shard_of_a_dead_worker_is_dropped_with_its_last_lease():
    # Otherwise the shard would never be deleted, and its version never forgotten.
    state = ControlState(Limits(retention=0, forget_after_s=100))
    version = publish(state, ttl_s=1)
    lease = state.register_lease(version.uid, "g", ttl_s=60, now_ms=0)
    state.expiry.expire_until(2_000)
    assert state.ledger.shards[version.uid]
    state.delete_lease(version.uid, lease.lease_id, "g", now_ms=3_000)
    assert not state.ledger.shards[version.uid]
    state.expiry.expire_until(102_000)
    assert version.uid not in state.ledger.versions


# Leases


def test_lease_after_expiry_has_a_new_id(state):
    version = publish(state)
    first = state.register_lease(version.uid, "g", ttl_s=1, now_ms=0).lease_id
    assert state.register_lease(version.uid, "g", ttl_s=1, now_ms=1_000).lease_id != first


def test_only_the_holder_releases_a_lease(state):
    version = publish(state)
    lease = state.register_lease(version.uid, "g", ttl_s=9, now_ms=0)
    assert not state.delete_lease(version.uid, lease.lease_id, "h", now_ms=0)
    assert not state.delete_lease(version.uid, "other", "g", now_ms=0)
    assert state.delete_lease(version.uid, lease.lease_id, "g", now_ms=0)
    assert not state.delete_lease(version.uid, lease.lease_id, "g", now_ms=0)


# Retention and forgetting


def test_retention_keeps_the_newest_of_each_model():
    state = ControlState(Limits(retention=2))
    versions = [publish(state, str(n)) for n in range(4)]
    other = publish(state, "k", worker="v", model="n")
    assert [version.state for version in versions] == [RELEASING, RELEASING, READY, READY]
    assert other.state is READY


def test_released_version_is_forgotten_after_a_while():
    state = ControlState(Limits(retention=0, forget_after_s=100))
    version = publish(state, ttl_s=86_400)
    state.register_lease(version.uid, "g", ttl_s=500, now_ms=0)
    state.delete_version(version.uid, now_ms=0)
    state.get_version(version.uid, now_ms=200_000)
    assert state.ledger.take_changes()["version", (version.uid,)] is not None
    state.get_version(version.uid, now_ms=500_000)
    assert state.delete_shard(version.uid, "a", "w", now_ms=500_000)
    refused(Code.NOT_FOUND, lambda: state.get_version(version.uid, now_ms=500_000))
    assert state.create_version(body(), now_ms=500_000) is not version


def test_leased_version_without_shards_is_not_forgotten():
    state = ControlState(Limits(forget_after_s=100))
    stored = body(slots=(), state=READY, storage=ObjectStorage("s3://x", 1))
    version = state.create_version(stored, now_ms=0)
    lease = state.register_lease(version.uid, "g", ttl_s=500, now_ms=0)
    state.delete_version(version.uid, now_ms=0)
    assert state.get_version(version.uid, now_ms=200_000) is version
    assert state.delete_lease(version.uid, lease.lease_id, "g", now_ms=200_000)
    assert version.uid not in state.ledger.versions


def test_number_of_released_versions_is_bounded():
    state = ControlState(Limits(max_released=2))
    versions = [state.create_version(body(str(n)), now_ms=n) for n in range(4)]
    for version in versions:
        state.delete_version(version.uid, now_ms=10)
    assert list(state.ledger.versions) == [version.uid for version in versions[2:]]


def test_dead_worker_is_forgotten_after_a_while():
    state = ControlState(Limits(forget_after_s=100))
    state.register_worker("w", TRAINER, "m", ttl_s=1, now_ms=0)
    state.expiry.expire_until(100_999)
    assert "w" in state.ledger.workers
    state.expiry.expire_until(101_000)
    assert "w" not in state.ledger.workers


def test_unfilled_version_is_released_in_the_end():
    state = ControlState(Limits(abandon_after_s=100))
    state.register_worker("w", TRAINER, "m", ttl_s=150, now_ms=0)
    empty = state.create_version(body("1"), now_ms=0)
    half = state.create_version(body("2", ("a", "b")), now_ms=0)
    state.create_shard(shard(half), now_ms=0)
    state.expiry.expire_until(100_000)
    assert (empty.state, half.state) == (RELEASING, STAGING)
    assert empty.reason == "it was abandoned while STAGING"
    state.expiry.expire_until(149_999)
    assert half.state is STAGING
    state.expiry.expire_until(150_000)
    assert half.state is RELEASING


def test_overdue_version_is_abandoned_when_its_last_worker_ends():
    # The time limit has passed already, so the version is released at once.
    state = ControlState(Limits(abandon_after_s=100))
    state.register_worker("w", TRAINER, "m", ttl_s=1_000, now_ms=0)
    half = state.create_version(body("1", ("a", "b")), now_ms=0)
    state.create_shard(shard(half), now_ms=0)
    state.expiry.expire_until(150_000)
    state.mark_stale("w", now_ms=150_000)
    assert (half.state, state.ledger.shards[half.uid]) == (RELEASING, {})


@pytest.mark.parametrize(
    ("limit", "call"),
    [
        ("max_versions", lambda state, n: state.create_version(body(str(n)), now_ms=0)),
        (
            "max_workers",
            lambda state, n: state.register_worker(f"x{n}", TRAINER, "m", ttl_s=9, now_ms=0),
        ),
    ],
)
def test_numbers_of_records_are_bounded(limit, call):
    state = ControlState(Limits(**{limit: 2}))
    for n in range(2):
        call(state, n)
    refused(Code.RESOURCE_EXHAUSTED, lambda: call(state, 2))


def test_leases_and_replicas_have_limits():
    state = ControlState(Limits(max_leases=1, max_replicas=1))
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


@pytest.mark.parametrize("wrong", [{"retention": -1}, {"max_ttl_s": 0}, {"max_leases": -1}])
def test_invalid_limits_are_refused(wrong):
    with pytest.raises(RefitConfigError):
        Limits(**wrong)
