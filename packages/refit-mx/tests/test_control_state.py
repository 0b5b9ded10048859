"""The rules of the control plane, and a random walk through them beside a plain model."""

import copy

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from refit_mx.control.limits import Limits
from refit_mx.control.records import (
    Code,
    ObjectStorage,
    PayloadFormat,
    Refusal,
    Shard,
    VersionBody,
    VersionState,
    WorkerRole,
)
from refit_mx.control.state import ControlState, layout_signature
from refit_mx.control.store import KINDS
from refit_mx.errors import RefitConfigError

STAGING, READY, RELEASING = VersionState.STAGING, VersionState.READY, VersionState.RELEASING
TRAINER = WorkerRole.TRAINER


def body(key="k", slots=("a",), *, model="m", uid=None, state=STAGING, storage=None):
    return VersionBody(
        model_name=model,
        idempotency_key=key,
        payload_format=PayloadFormat.FULL_TENSOR,
        base_version_id=None,
        expected_source_slots=tuple(slots),
        object_storage=storage,
        state=state,
        uid=uid,
    )


def shard(version, slot="a", worker="w", digest="d"):
    return Shard(version.uid, slot, worker, 1, 2, digest, "127.0.0.1:1")


@pytest.fixture
def state():
    return ControlState(Limits(retention=0))


def publish(state, key="k", slots=("a",), *, worker="w", now_ms=0, ttl_s=10, model="m"):
    state.register_worker(worker, TRAINER, model, ttl_s=ttl_s, now_ms=now_ms)
    version = state.create_version(body(key, slots, model=model), now_ms=now_ms)
    for slot in slots:
        state.create_shard(shard(version, slot, worker), now_ms=now_ms)
    assert version.state is READY
    return version


def refused(code, call, match=None):
    with pytest.raises(Refusal, match=match) as refusal:
        call()
    assert refusal.value.code is code


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
    state.expire(now_ms=200_000)
    assert half.state is RELEASING


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


# Loading


def reload(records, *, now_ms, grace_s, limits=None):
    state = ControlState(limits or Limits(retention=0))
    state.load(copy.deepcopy(records), now_ms=now_ms, grace_s=grace_s)
    return state


def records_of(state):
    ledger = state.ledger
    return [
        *ledger.versions.values(),
        *ledger.workers.values(),
        *(shard for shards in ledger.shards.values() for shard in shards.values()),
        *(lease for leases in ledger.leases.values() for lease in leases.values()),
    ]


def test_what_was_live_gets_time_to_renew_after_a_restart(state):
    version = publish(state, ttl_s=10)
    state.register_lease(version.uid, "g", ttl_s=4, now_ms=0)
    after = reload(records_of(state), now_ms=1_000_000, grace_s=5)
    assert after.get_version(version.uid, now_ms=1_003_999).state is READY
    assert after.ledger.leases[version.uid]
    after.expire(now_ms=1_004_000)
    assert not after.ledger.leases[version.uid]
    assert after.get_version(version.uid, now_ms=1_004_999).state is READY
    assert after.get_version(version.uid, now_ms=1_005_000).state is RELEASING


def test_a_clock_that_was_set_back_makes_nothing_live_longer(state):
    version = publish(state, ttl_s=10, now_ms=1_000_000)
    after = reload(records_of(state), now_ms=0, grace_s=1)
    assert after.get_version(version.uid, now_ms=9_999).state is READY
    assert after.get_version(version.uid, now_ms=10_000).state is RELEASING


def test_a_worker_that_lapsed_before_the_restart_gets_no_grace(state):
    version = publish(state, ttl_s=10)
    state.register_worker("v", TRAINER, "m", ttl_s=60, now_ms=0)
    state.create_shard(shard(version, worker="v"), now_ms=0)
    state.expire(now_ms=10_000)
    after = reload(records_of(state), now_ms=10_001, grace_s=100)
    assert [each.worker_id for each in after.list_shards(version.uid, now_ms=10_001)] == ["v"]


def test_a_stale_worker_gets_no_grace(state):
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
    """Every call in every order, with a plain model of what must never happen."""

    @initialize(retention=st.sampled_from([1, 2, 0]))
    def begin(self, retention):
        self.limits = Limits(
            retention=retention,
            forget_after_s=20,
            abandon_after_s=30,
            most_released=2,
            most_replicas=2,
        )
        self.state = ControlState(self.limits)
        self.now_ms = 0
        self.left_ready = set()
        self.was_ready = set()
        self.kept = {}
        self.versions = {}
        # (version, receiver) to when its lease ends; version to what it held when it was leased.
        self.leases = {}
        self.held = {}
        self.stale = set()

    def do(self, call, *arguments, **options):
        """The call's result, or None if it was refused; keep what the store would."""
        try:
            return call(*arguments, now_ms=self.now_ms, **options)
        except Refusal:
            return None
        finally:
            for (kind, key), record in self.state.take_changes().items():
                if record is None:
                    # Every change that undoes a record undoes one that the store has or had.
                    self.kept.pop((kind, key), None)
                else:
                    self.kept[kind, key] = msgspec.msgpack.encode(record)

    @rule(seconds=st.sampled_from([0.1, 1, 3, 8, 25]))
    def time_passes(self, seconds):
        self.now_ms += int(seconds * 1000)
        self.leases = {key: end for key, end in self.leases.items() if end > self.now_ms}
        self.do(self.state.expire)

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
    def publish_whole(self, uid, worker, slots, ttl_s, leased):
        # So that the walk is often where leases, deaths and retention meet.
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
        again.load(records, now_ms=self.now_ms, grace_s=0.0)
        # The store had all of it, and what follows from it follows again.
        assert sorted(map(repr, records_of(again))) == before
        self.state = again
        self.state.take_changes()
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
    def what_left_ready_never_comes_back(self):
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
        found = {
            (uid, receiver): lease.expires_at_ms
            for uid, leases in self.state.ledger.leases.items()
            for receiver, lease in leases.items()
        }
        assert found == self.leases

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
            # A version that is released takes no new lease, so this one would have been there.
            if version.reason.endswith("newer ones are READY"):
                assert not self.state.ledger.leases.get(version.uid)

    @invariant()
    def nothing_lives_in_a_version_that_is_forgotten(self):
        ledger = self.state.ledger
        for table in (ledger.shards, ledger.leases):
            assert {uid for uid, rows in table.items() if rows} <= set(ledger.versions)
        assert set(ledger.by_idempotency.values()) == set(ledger.versions)
        assert len(ledger.emptied) <= self.limits.most_released
        for worker, keys in ledger.shards_of.items():
            assert keys == {
                key for rows in ledger.shards.values() for key in rows if key[2] == worker
            }


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
