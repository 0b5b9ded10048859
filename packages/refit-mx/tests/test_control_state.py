"""The rules of the control plane: versions, workers and shards."""

import pytest
from control_states import READY, RELEASING, STAGING, TRAINER, body, publish, refused, shard

from refit_mx.control.limits import Limits
from refit_mx.control.records import (
    Code,
    ObjectStorage,
    Refusal,
    WorkerRole,
)
from refit_mx.control.state import ControlState, layout_signature

# Versions


def test_a_version_is_ready_when_its_last_slot_is_filled(state):
    state.register_worker("w", TRAINER, "m", ttl_s=10, now_ms=0)
    version = state.create_version(body(slots=("a", "b")), now_ms=0)
    state.create_shard(shard(version, "a"), now_ms=1)
    assert version.state is STAGING
    state.create_shard(shard(version, "b"), now_ms=2)
    assert version.state is READY


def test_the_shard_of_a_dead_worker_fills_no_slot(state):
    state.register_worker("w", TRAINER, "m", ttl_s=1, now_ms=0)
    state.register_worker("v", TRAINER, "m", ttl_s=10, now_ms=0)
    version = state.create_version(body(slots=("a", "b")), now_ms=0)
    state.create_shard(shard(version, "a", "w"), now_ms=1)
    state.create_shard(shard(version, "b", "v"), now_ms=1000)
    assert version.state is STAGING
    # It was only cut off: when it is back the version is complete.
    state.register_worker("w", TRAINER, "m", ttl_s=1, now_ms=1500)
    assert version.state is READY


def test_the_same_key_and_body_give_the_same_version(state):
    version = state.create_version(body(), now_ms=0)
    assert state.create_version(body(), now_ms=5) is version
    assert state.create_version(body(model="n"), now_ms=5) is not version


@pytest.mark.parametrize("other", [{"slots": ("b",)}, {"uid": "u"}])
def test_the_same_key_with_another_body_already_exists(state, other):
    state.create_version(body(), now_ms=0)
    refused(Code.ALREADY_EXISTS, lambda: state.create_version(body(**other), now_ms=0), "another")


def test_a_chosen_id_is_taken_once(state):
    assert state.create_version(body(uid="u"), now_ms=0).uid == "u"
    refused(Code.ALREADY_EXISTS, lambda: state.create_version(body("l", uid="u"), now_ms=0))


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
def test_a_body_without_sense_is_an_invalid_argument(state, wrong):
    refused(Code.INVALID_ARGUMENT, lambda: state.create_version(wrong, now_ms=0))
    assert not state.ledger.versions


def test_a_version_in_object_storage_may_be_ready_at_once_and_retention_leaves_it():
    state = ControlState(Limits(retention=1))
    made = [
        state.create_version(
            body(str(n), (), state=READY, storage=ObjectStorage(f"s3://{n}", 1)), now_ms=0
        )
        for n in range(3)
    ]
    publish(state)
    publish(state, "l")
    assert [version.state for version in made] == [READY] * 3


def test_a_version_moves_forward_alone(state):
    version = state.create_version(body(), now_ms=0)

    def move(to):
        return state.update_version_state(version.uid, to, now_ms=0)

    refused(Code.FAILED_PRECONDITION, lambda: move(READY), "'a'")
    assert move(STAGING).state is STAGING
    assert move(RELEASING).state is RELEASING
    for back in (STAGING, READY):
        refused(Code.FAILED_PRECONDITION, lambda back=back: move(back), "cannot go back")
    assert state.delete_version(version.uid, now_ms=0).state is RELEASING


def test_what_is_not_there_is_not_found(state):
    for call in (
        lambda: state.get_version("x", now_ms=0),
        lambda: state.delete_version("x", now_ms=0),
        lambda: state.list_shards("x", now_ms=0),
        lambda: state.delete_shard("x", "a", "w", now_ms=0),
        lambda: state.register_lease("x", "w", ttl_s=1, now_ms=0),
        lambda: state.mark_stale("x", now_ms=0),
    ):
        refused(Code.NOT_FOUND, call, "'x'")
    assert not state.delete_lease("x", "l", "w", now_ms=0)


def test_the_signature_of_a_layout_is_of_model_and_slots():
    assert layout_signature(body("1", ("a", "b"))) == layout_signature(body("2", ("b", "a")))
    assert layout_signature(body(slots=("a",))) != layout_signature(body(slots=("b",)))
    assert layout_signature(body(model="m")) != layout_signature(body(model="n"))


# Workers


@pytest.mark.parametrize("how", ["expired", "stale"])
def test_a_version_whose_publishers_died_leaves_ready_for_good(state, how):
    version = publish(state, ttl_s=10)
    if how == "stale":
        state.mark_stale("w", now_ms=5)
    else:
        assert state.get_version(version.uid, now_ms=9_999).state is READY
    assert state.get_version(version.uid, now_ms=10_000).state is RELEASING
    assert "slots lost their last live shard: 'a'" in version.reason
    if how == "expired":
        state.register_worker("w", TRAINER, "m", ttl_s=10, now_ms=10_001)
    assert state.get_version(version.uid, now_ms=10_002).state is RELEASING


def test_a_version_stays_ready_while_each_slot_has_a_live_replica(state):
    version = publish(state, slots=("a", "b"), worker="w", ttl_s=10)
    state.register_worker("v", TRAINER, "m", ttl_s=30, now_ms=0)
    state.create_shard(shard(version, "a", "v"), now_ms=0)
    state.create_shard(shard(version, "b", "v"), now_ms=0)
    assert state.get_version(version.uid, now_ms=20_000).state is READY
    assert {each.worker_id for each in state.list_shards(version.uid, now_ms=20_000)} == {"v"}
    assert state.get_version(version.uid, now_ms=30_000).state is RELEASING


def test_a_worker_that_said_stale_does_not_come_back(state):
    publish(state)
    state.mark_stale("w", now_ms=1)
    refused(
        Code.FAILED_PRECONDITION,
        lambda: state.register_worker("w", TRAINER, "m", ttl_s=10, now_ms=2),
        "said STALE",
    )


def test_a_heartbeat_that_was_under_way_does_not_undo_stale(state):
    version = publish(state)
    state.mark_stale("w", now_ms=1)
    with pytest.raises(Refusal):
        state.register_worker("w", TRAINER, "m", ttl_s=10, now_ms=1)
    assert version.state is RELEASING


def test_a_worker_id_has_one_role_and_model(state):
    state.register_worker("w", TRAINER, "m", ttl_s=1, now_ms=0)
    for role, model in ((WorkerRole.GENERATOR, "m"), (TRAINER, "n")):
        refused(
            Code.ALREADY_EXISTS,
            lambda role=role, model=model: state.register_worker(
                "w", role, model, ttl_s=1, now_ms=0
            ),
        )


@pytest.mark.parametrize("ttl_s", [0, -1, 86_401, float("nan"), float("inf")])
def test_a_time_to_live_has_bounds(state, ttl_s):
    refused(
        Code.INVALID_ARGUMENT,
        lambda: state.register_worker("w", TRAINER, "m", ttl_s=ttl_s, now_ms=0),
    )


# Shards


def test_a_shard_needs_a_live_worker_of_the_model(state):
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
        "has not registered again in time",
    )
    state.register_worker("v", TRAINER, "n", ttl_s=1, now_ms=0)
    refused(
        Code.FAILED_PRECONDITION,
        lambda: state.create_shard(shard(version, worker="v"), now_ms=0),
        "is of model 'n'",
    )
    assert version.state is STAGING


def test_a_shard_goes_to_an_expected_slot_of_a_version_that_is_not_released(state):
    version = publish(state)
    refused(Code.INVALID_ARGUMENT, lambda: state.create_shard(shard(version, "b"), now_ms=0), "'b'")
    state.register_worker("v", TRAINER, "m", ttl_s=1, now_ms=0)
    state.delete_version(version.uid, now_ms=0)
    refused(
        Code.FAILED_PRECONDITION,
        lambda: state.create_shard(shard(version, worker="v"), now_ms=0),
        "RELEASING",
    )


def test_a_worker_publishes_a_slot_once(state):
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


def test_a_shard_is_deleted_only_from_a_released_version_that_nobody_leases(state):
    version = publish(state)

    def delete(now_ms):
        return state.delete_shard(version.uid, "a", "w", now_ms=now_ms)

    refused(Code.FAILED_PRECONDITION, lambda: delete(0), "is READY")
    state.register_lease(version.uid, "g", ttl_s=2, now_ms=0)
    state.delete_version(version.uid, now_ms=0)
    refused(Code.FAILED_PRECONDITION, lambda: delete(1_999), "leased by 'g'")
    assert delete(2_000)
    assert not delete(2_001)


def test_under_a_lease_even_the_shard_of_a_dead_worker_stays(state):
    # A worker that was only cut off must not be told that its memory is free.
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


def test_the_shard_of_a_dead_worker_goes_with_the_last_lease():
    # Nobody else would ever delete it, and its version would never be forgotten.
    state = ControlState(Limits(retention=0, forget_after_s=100))
    version = publish(state, ttl_s=1)
    lease = state.register_lease(version.uid, "g", ttl_s=60, now_ms=0)
    state.expire(now_ms=2_000)
    assert state.ledger.shards[version.uid]
    state.delete_lease(version.uid, lease.lease_id, "g", now_ms=3_000)
    assert not state.ledger.shards[version.uid]
    state.expire(now_ms=102_000)
    assert version.uid not in state.ledger.versions
