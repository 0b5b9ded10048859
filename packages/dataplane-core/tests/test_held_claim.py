"""`held_claim` keeps a lease during the work, and ends the claim with it."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from tensordict import TensorDict

from dataplane_core import (
    InMemoryDataPlaneClient,
    InvalidRequestError,
    LeaseLostError,
    UnavailableError,
    held_claim,
)


def client_of(lease_s=None):
    config = {"enabled": True, "impl": "in_memory"}
    client = InMemoryDataPlaneClient(
        config if lease_s is None else {**config, "claim_lease_s": lease_s}
    )
    client.register_partition("train", ["x"], 2, ["score"])
    client.put_samples(["a", "b"], "train", TensorDict({"x": torch.ones(2)}, [2]))
    return client


def test_a_claim_outlives_its_lease_while_it_is_held():
    with client_of(lease_s=1.0) as client:
        claim = client.claim_meta("train", "score", ["x"], 2)
        began = time.monotonic()
        with held_claim(client, claim, renew_every_s=0.05):
            # Another consumer waits for the lease, and does not get it.
            while time.monotonic() < began + 2.0:
                assert client.claim_meta("train", "score", ["x"], 1, blocking=False).size == 0
        assert client.check_consumption_status("train", ["score"])


@pytest.mark.parametrize("error", [UnavailableError("away"), RuntimeError("adapter")])
def test_renewal_continues_after_any_error(monkeypatch, error):
    with client_of(lease_s=1000.0) as client:
        claim = client.claim_meta("train", "score", ["x"], 2)
        calls, renewed = [], threading.Event()

        def renew(meta):
            calls.append(meta)
            if len(calls) == 1:
                raise error
            renewed.set()

        monkeypatch.setattr(client, "renew", renew)
        with held_claim(client, claim, renew_every_s=0.01):
            assert renewed.wait(30.0)


def test_a_failed_block_releases_the_claim():
    with client_of(lease_s=1000.0) as client:
        claim = client.claim_meta("train", "score", ["x"], 2)
        with pytest.raises(OSError, match="disk"), held_claim(client, claim, renew_every_s=300.0):
            raise OSError("disk")
        assert client.claim_meta("train", "score", ["x"], 2).sample_ids == ["a", "b"]


def test_a_lost_lease_is_reported_at_the_end():
    with client_of(lease_s=1000.0) as client:
        claim = client.claim_meta("train", "score", ["x"], 2)
        [held] = client.inspector.list_claims("train")
        with pytest.raises(LeaseLostError), held_claim(client, claim, renew_every_s=300.0):
            client.inspector.end_claim("train", held.claim, expired_only=False)
        assert client.claim_meta("train", "score", ["x"], 2).size == 2


def test_claim_without_a_lease_is_not_renewed():
    with client_of() as client:
        claim = client.claim_meta("train", "score", ["x"], 2)
        with held_claim(client, claim, renew_every_s=300.0):
            names = [thread.name for thread in threading.enumerate()]
            assert "renew claim" not in names


@pytest.mark.parametrize("period", [0, -1.0, float("nan"), "5"])
def test_renewal_period_must_be_positive(period):
    with client_of(lease_s=1000.0) as client:
        claim = client.claim_meta("train", "score", ["x"], 2)
        with (
            pytest.raises(InvalidRequestError, match="held_claim: renew_every_s is"),
            held_claim(client, claim, renew_every_s=period),
        ):
            pass
