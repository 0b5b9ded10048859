"""A version is leased while received weights are in use, even if they are dropped unclosed.

Imports internals: an interrupt right after the lease was taken has no public hook.
"""

from __future__ import annotations

import gc
import warnings
from contextlib import contextmanager

import pytest
import torch
from refit_fixtures import MODEL
from refit_processes import same, targets_of, weights

from refit_mx import (
    MxV2RefitReceiver,
    PhaseError,
    ReceivedWeights,
    ReceiverSettings,
)
from refit_mx.receive import receiver as receiver_module

SHORT = ReceiverSettings(lease_ttl_s=3, scratch_copies=1)


@pytest.fixture
def publisher(world):
    publisher = world.publisher()
    world.publish([publisher], "v1", 1)
    return publisher


def leases(world) -> int:
    return world.server.plane.counts().leases


def drop(received: ReceivedWeights) -> dict[str, torch.Tensor]:
    """Drop received weights without closing them, and return their tensors."""
    tensors = dict(received)
    del received
    gc.collect()
    return tensors


def test_dropped_weights_are_reported_and_their_lease_expires(world, publisher):
    receiver = world.receiver(settings=SHORT)
    with pytest.warns(ResourceWarning, match="version v1 were not closed"):
        drop(receiver.receive_weights_scratch("v1"))
    assert leases(world) == 1
    publisher.release("v1", timeout_s=20)
    assert publisher.versions == ()


def test_dropped_weights_do_not_block_later_receives(world, publisher):
    receiver = world.receiver(settings=SHORT)
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            drop(receiver.receive_weights_scratch("v1"))
    with receiver.receive_weights_scratch("v1", timeout_s=20) as received:
        assert leases(world) == 1
        assert same(received, weights(1))


def test_tensors_of_dropped_weights_do_not_change(world, publisher):
    world.publish([publisher], "v2", 2)
    receiver = world.receiver(settings=SHORT)
    with pytest.warns(ResourceWarning):
        tensors = drop(receiver.receive_weights_scratch("v1"))
    with receiver.receive_weights_scratch("v2", timeout_s=20) as received:
        assert same(received, weights(2))
    assert same(tensors, weights(1))


def test_closed_weights_are_not_reported(world, publisher):
    receiver = world.receiver()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        with receiver.receive_weights_scratch("v1"):
            pass
        gc.collect()
    assert leases(world) == 0


def test_interrupt_after_the_lease_was_taken_ends_it(world, publisher, monkeypatch):
    @contextmanager
    def interrupted(stats, stage):
        yield
        raise KeyboardInterrupt

    receiver = world.receiver(settings=SHORT)
    monkeypatch.setattr(receiver_module, "timed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        receiver.receive_weights_scratch("v1")
    assert leases(world) == 0


def test_closed_receiver_holds_no_lease(world, publisher):
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
    with pytest.raises(PhaseError, match="released"):
        received["norm"]
