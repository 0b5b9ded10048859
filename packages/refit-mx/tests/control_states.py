"""Helpers for tests of the control plane's rules.

Imports internals: rules are tested on the state, whose clock a test can set.
"""

import copy

import pytest

from refit_mx.control import Limits, PayloadFormat, Shard, VersionState, WorkerRole
from refit_mx.control.records import Refusal, VersionBody
from refit_mx.control.state import ControlState

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


def reload(records, *, now_ms, grace_s, limits=None):
    state = ControlState(limits or Limits(retention=0))
    state.expiry.load(copy.deepcopy(records), now_ms=now_ms, grace_s=grace_s)
    return state


def records_of(state):
    ledger = state.ledger
    return [
        *ledger.versions.values(),
        *ledger.workers.values(),
        *(shard for shards in ledger.shards.values() for shard in shards.values()),
        *(lease for leases in ledger.leases.values() for lease in leases.values()),
    ]


class Clock:
    """A clock of the control plane, set by a test."""

    def __init__(self):
        self.now_ms = 1_000_000

    def __call__(self):
        return self.now_ms

    def run(self, plane, ms):
        """Advance the clock while the plane reads it every 500 ms."""
        for _ in range(0, ms, 500):
            self.now_ms += 500
            plane.now_ms()
