"""Each held sample is renewed until it is acknowledged, released or lost.

Imports internals: tests force interleavings of renewals and acknowledgments that occur only by
chance in a loader.
"""

from __future__ import annotations

import pytest
from streaming_parts import SETUP, counts, leased, store

from dataplane_core import InMemoryDataPlaneClient, LeaseLostError, UnavailableError
from dataplane_core.streaming.held_claims import HeldClaims, release


class Disturbed(InMemoryDataPlaneClient):
    """Client that runs a function once, before or after a call on a claim."""

    def __init__(self):
        super().__init__({**SETUP, "claim_lease_s": 1000.0}, bootstrap=False)
        self.before = self.after = lambda: None

    def _disturbed(self, operation, meta):
        before, self.before = self.before, lambda: None
        before()
        operation(meta)
        after, self.after = self.after, lambda: None
        after()

    def renew(self, meta):
        self._disturbed(super().renew, meta)

    def acknowledge(self, meta):
        self._disturbed(super().acknowledge, meta)


class Silent(Disturbed):
    """Client that does not report which samples of a claim were lost."""

    def renew(self, meta):
        try:
            super().renew(meta)
        except LeaseLostError as error:
            raise LeaseLostError(str(error)) from None


@pytest.fixture(params=[Disturbed, Silent])
def holder(request):
    """Yield two clients of a store, and the second one's `HeldClaims` and claim of all samples."""
    with store(4) as client:
        holder = request.param()
        held = HeldClaims(holder)
        meta = holder.claim_meta("p", "a", ["x"], 4)
        held.add(meta)
        yield client, holder, held, meta


def renewed_samples(client, held):
    """Return the claim's number of samples in the store, after checking that its renewal works."""
    [claim] = client.inspector.list_claims("p")
    reach = claim.age_s + claim.expires_in_s
    held.renew_all()
    [claim] = client.inspector.list_claims("p")
    assert claim.age_s + claim.expires_in_s > reach
    return claim.samples


def test_rest_is_held_if_renewed_after_the_acknowledgment(holder):
    client, store_client, held, meta = holder
    store_client.after = held.renew_all
    held.acknowledge(meta.slice(0, 1))
    assert held.samples == renewed_samples(client, held) == 3


def test_rest_is_held_if_acknowledged_during_a_renewal(holder):
    client, store_client, held, meta = holder
    store_client.before = lambda: held.acknowledge(meta.slice(0, 1))
    held.renew_all()
    assert held.samples == renewed_samples(client, held) == 3


def away():
    raise UnavailableError("away")


@pytest.mark.parametrize("stop", [1, 4])
def test_unacknowledged_samples_stay_held(holder, stop):
    client, store_client, held, meta = holder

    def late():
        held.add(meta)
        away()

    store_client.before = late
    with pytest.raises(UnavailableError):
        held.acknowledge(meta.slice(0, stop))
    assert held.samples == renewed_samples(client, held) == 4


@pytest.mark.parametrize("holder", [Disturbed], indirect=True)
def test_withdrawn_sample_does_not_end_the_lease_of_others(holder):
    client, holder_client, held, meta = holder
    client.withdraw_samples([meta.sample_ids[0]], "p")
    held.renew_all()
    assert held.samples == renewed_samples(client, held) == 3
    client.withdraw_samples([meta.sample_ids[1]], "p")
    left, lost = held.renew_claim(meta)
    assert (left.sample_ids, lost.sample_ids) == (meta.sample_ids[2:], meta.sample_ids[:2])
    left, lost = held.acknowledge(meta.slice(0, 3))
    assert (left.sample_ids, lost.sample_ids) == (meta.sample_ids[2:3], meta.sample_ids[:2])
    release(holder_client, meta)
    assert counts(client) == (1, 0, 1)


@pytest.mark.parametrize("holder", [Silent], indirect=True)
def test_claim_is_forgotten_if_lost_samples_are_unknown(holder):
    client, _, held, meta = holder
    client.withdraw_samples([meta.sample_ids[0]], "p")
    assert held.renew_claim(meta)[0] is None
    assert held.samples == 0


def test_cleared_partition_differs_from_unavailable_store(holder):
    client, store_client, held, _ = holder
    store_client.before = away
    held.renew_all()
    assert held.samples == 4
    client.clear_samples(None, "p", force=True)
    held.renew_all()
    assert held.samples == 0


def test_samples_known_to_be_lost_are_not_held():
    client = store(2)
    maker = leased()()
    held = HeldClaims(maker)
    meta = maker.claim_meta("p", "a", ["x"], 2)
    held.add(meta)
    client.inspector.end_claim("p", client.inspector.list_claims("p")[0].claim, expired_only=False)
    assert held.renew_claim(meta)[0] is None
    assert held.samples == 0


def test_rest_of_a_claim_is_renewed_despite_late_reports():
    client = store(4)
    holder = leased()()
    meta = holder.claim_meta("p", "a", ["x"], 3)
    held = HeldClaims(holder)
    held.add(meta)
    holder.acknowledge(meta.slice(0, 1))
    held.forget(meta.slice(0, 1))
    held.add(meta)
    held.renew_all()
    assert held.samples == 2
    [claim] = client.inspector.list_claims("p")
    assert claim.age_s + claim.expires_in_s > 1000.0 + 1e-6
    held.release(kept=meta.sample_ids[1:2])
    assert counts(client) == (2, 1, 1)
    client.inspector.end_claim("p", client.inspector.list_claims("p")[0].claim, expired_only=False)
    held.renew_all()
    assert held.samples == 0
