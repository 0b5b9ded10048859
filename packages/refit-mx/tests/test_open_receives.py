"""A version is held for as long as somebody may use it, whatever became of what was received."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from refit_fixtures import MODEL
from refit_processes import same, targets_of, weights

from refit_mx.errors import PhaseError, RefitTimeoutError
from refit_mx.received import ReceivedWeights
from refit_mx.receiver import MxV2RefitReceiver
from refit_mx.settings import ReceiverSettings

SHORT = ReceiverSettings(lease_ttl_s=1, scratch_copies=1)


@pytest.fixture
def publisher(world):
    publisher = world.publisher()
    world.publish([publisher], "v1", 1)
    return publisher


def leases(world) -> int:
    return world.server.plane.counts().leases


def drop(received: ReceivedWeights) -> dict[str, torch.Tensor]:
    """Its tensors; the caller has nothing to close it with."""
    kept = dict(received)
    del received
    gc.collect()
    return kept


def test_what_was_dropped_is_told_and_its_lease_lapses(world, publisher):
    receiver = world.receiver(settings=SHORT)
    with pytest.warns(ResourceWarning, match="version v1 were not closed"):
        drop(receiver.receive_weights_scratch("v1"))
    assert leases(world) == 1
    publisher.release("v1", timeout_s=20)
    assert publisher.versions == ()


def test_what_was_dropped_is_in_nobodys_way(world, publisher):
    receiver = world.receiver(settings=SHORT)
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            drop(receiver.receive_weights_scratch("v1"))
    with receiver.receive_weights_scratch("v1", timeout_s=20) as received:
        assert leases(world) == 1
        assert same(received, weights(1))


def test_tensors_of_what_was_dropped_stay_as_they_are(world, publisher):
    world.publish([publisher], "v2", 2)
    receiver = world.receiver(settings=SHORT)
    with pytest.warns(ResourceWarning):
        kept = drop(receiver.receive_weights_scratch("v1"))
    with receiver.receive_weights_scratch("v2", timeout_s=20) as received:
        assert same(received, weights(2))
    assert same(kept, weights(1))


def test_nothing_is_told_of_what_was_closed(world, publisher):
    receiver = world.receiver()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        with receiver.receive_weights_scratch("v1"):
            pass
        gc.collect()
    assert leases(world) == 0


def test_a_receiver_that_is_closed_holds_no_version(world, publisher):
    receiver = MxV2RefitReceiver(
        MODEL,
        control=world.control,
        targets=targets_of(),
        transport="tcp",
    )
    received = receiver.receive_weights_scratch("v1")
    assert leases(world) == 1
    receiver.close()
    assert leases(world) == 0
    assert same(received, weights(1))
    publisher.release("v1", timeout_s=5)
    received.close()
    with pytest.raises(PhaseError, match="given back"):
        received["norm"]


def test_a_version_that_is_held_and_used_stays_leased(world, publisher):
    receiver = world.receiver(settings=SHORT)
    with (
        receiver.receive_weights_scratch("v1"),
        pytest.raises(RefitTimeoutError, match="leased by"),
    ):
        publisher.release("v1", timeout_s=2.5)  # longer than the lease lives unrenewed
    assert leases(world) == 0
