"""Contract tests of two capabilities: leases and backpressure."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from dataplane_core import (
    CapacityExceeded,
    DataPlaneClient,
    InvalidRequestError,
    LeaseLostError,
    MissingDataError,
    SamplesLeasedError,
)
from dataplane_core.testing.claims import put
from dataplane_core.testing.lease_waits import (
    LeaseWaitContract,
    MakeClient,
    MakeClientFixtures,
    filled,
)
from dataplane_core.testing.storage import batch


class LeaseContract(LeaseWaitContract):
    """Contract of clients with ``capabilities.leases``.

    A subclass provides the fixture ``make_client``: ``make_client(**config)`` returns a client with
    this configuration, whose store has no partition 'train'.
    """

    short_lease_s = 0.05

    def test_put_that_acknowledges_ends_the_lease_of_its_samples(
        self, leasing: DataPlaneClient
    ) -> None:
        claim = leasing.claim_meta("train", "train", ["x"], 2)
        leasing.put_samples(["a"], "train", batch(1), claim=claim, acknowledge=True)
        assert not leasing.check_consumption_status("train", ["train"])
        leasing.clear_samples(["a"], "train")
        with pytest.raises(SamplesLeasedError, match="'b'"):
            leasing.clear_samples(["b"], "train")
        leasing.acknowledge(claim.subset([1]))
        assert leasing.check_consumption_status("train", ["train"])

    def test_refused_put_acknowledges_nothing(self, leasing: DataPlaneClient) -> None:
        claim = leasing.claim_meta("train", "train", ["x"], 1)
        leasing.release(claim)
        with pytest.raises(LeaseLostError):
            leasing.put_samples(["a"], "train", batch(1), claim=claim, acknowledge=True)
        assert leasing.claim_meta("train", "train", ["x"], 2).size == 2

    def test_put_that_acknowledges_needs_a_claim(self, leasing: DataPlaneClient) -> None:
        with pytest.raises(InvalidRequestError, match="acknowledge=True"):
            leasing.put_samples(["a"], "train", batch(1), acknowledge=True)

    def test_unclaimed_assignment_opens_when_its_lease_expires(
        self, make_client: MakeClient
    ) -> None:
        client = filled(make_client(claim_lease_s=self.short_lease_s), ["a", "b", "c", "d"], 5)
        drawn = client.claim_meta("train", "train", ["x"], 2, dp_rank=0, dp_world=2)
        assert drawn.size == 2
        both = client.claim_meta("train", "train", ["x"], 4, timeout_s=self.max_wait_s)
        assert sorted(both.sample_ids) == ["a", "b", "c", "d"]

    def test_blocked_rank_gets_its_part_once_another_rank_draws_it(
        self, make_client: MakeClient
    ) -> None:
        client = make_client()  # without leases, only the claim itself can wake the other rank
        with ThreadPoolExecutor(1) as pool:
            for _ in range(3):  # in case the other rank was first
                client.clear_samples(["a", "b"], "train")
                filled(client, ["a", "b"], 4)
                started = time.monotonic()
                blocked = pool.submit(
                    client.claim_meta,
                    *("train", "train", ["x"], 2),
                    dp_rank=1,
                    dp_world=2,
                    timeout_s=self.max_wait_s,
                )
                client.get_samples(["a"], "train", ["x"])  # gives the claim time to block
                rank0 = client.claim_meta(
                    "train", "train", ["x"], 2, dp_rank=0, dp_world=2, blocking=False
                )
                rank1 = blocked.result(2 * self.max_wait_s)
                assert sorted(rank0.sample_ids + rank1.sample_ids) == ["a", "b"]
                assert (rank0.size, rank1.size) == (1, 1)
                assert time.monotonic() - started < self.max_wait_s / 2

    def test_expired_assignment_opens_if_its_rank_got_nothing(
        self, make_client: MakeClient
    ) -> None:
        client = filled(make_client(claim_lease_s=0.5), ["a"], 4)
        drew = client.claim_meta("train", "train", ["x"], 2, dp_rank=1, dp_world=2, blocking=False)
        started = time.monotonic()
        got = client.claim_meta("train", "train", ["x"], 1, timeout_s=self.max_wait_s)
        assert (drew.sample_ids, got.sample_ids) == ([], ["a"])
        assert time.monotonic() - started < self.max_wait_s / 2

    def test_claim_of_an_assignment_is_limited_to_its_batch_size(
        self, make_client: MakeClient
    ) -> None:
        client = filled(make_client(), ["a", "b", "c", "d"])
        got = client.claim_meta("train", "train", ["x"], 2, dp_rank=0, dp_world=2).sample_ids
        for _ in range(2):
            more = client.claim_meta("train", "train", ["x"], 1, dp_rank=1, dp_world=2)
            assert more.size == 1
            got += more.sample_ids
        assert sorted(got) == ["a", "b", "c", "d"]

    @pytest.mark.parametrize("acknowledged", [False, True])
    def test_put_under_a_claim_cannot_write_what_another_claim_has(
        self, leasing: DataPlaneClient, acknowledged: bool
    ) -> None:
        first = leasing.claim_meta("train", "train", ["x"], 2)
        leasing.release(first.subset([first.sample_ids.index("b")]))
        second = leasing.claim_meta("train", "train", ["x"], 1)
        assert second.sample_ids == ["b"]
        leasing.put_samples(["b"], "train", batch(1, x=torch.full((1,), 2.0)), claim=second)
        if acknowledged:
            leasing.acknowledge(second)
        late = batch(2, x=torch.zeros(2))
        with pytest.raises(LeaseLostError, match="'b'"):
            leasing.put_samples(["a", "b"], "train", late, claim=first)
        assert leasing.get_samples(["a", "b"], "train", ["x"])["x"].tolist() == [1.0, 2.0]
        leasing.put_samples(["a"], "train", batch(1, x=torch.zeros(1)), claim=first)

    def test_an_acknowledged_claim_never_returns(self, leasing: DataPlaneClient) -> None:
        meta = leasing.claim_meta("train", "train", ["x"], 2)
        leasing.acknowledge(meta)
        assert leasing.claim_meta("train", "train", ["x"], 2, blocking=False).size == 0
        with pytest.raises(LeaseLostError):
            leasing.acknowledge(meta)

    def test_acknowledging_a_claim_without_a_lease_is_refused(
        self, make_client: MakeClient
    ) -> None:
        client = filled(make_client(), ["a"])
        with pytest.raises(InvalidRequestError, match="claim_lease_s"):
            client.acknowledge(client.claim_meta("train", "train", ["x"], 1))

    def test_meta_that_names_another_task_than_its_lease_is_refused(
        self, leasing: DataPlaneClient
    ) -> None:
        meta = leasing.claim_meta("train", "train", ["x"], 2)
        other = replace(meta, task_name="other")
        for method in (leasing.acknowledge, leasing.release, leasing.renew):
            with pytest.raises(InvalidRequestError, match=r"names task 'other'.* task 'train'"):
                method(other)
        assert leasing.inspector.count_samples("train", "train", ["x"]).leased == 2
        leasing.acknowledge(meta)

    def test_clearing_leased_samples_is_refused_unless_forced(
        self, leasing: DataPlaneClient
    ) -> None:
        meta = leasing.claim_meta("train", "train", ["x"], 1)
        for ids in (meta.sample_ids, ["a", "b"], None):
            with pytest.raises(SamplesLeasedError, match="leased by 'train'"):
                leasing.clear_samples(ids, "train")
        assert leasing.get_samples(["a", "b"], "train", ["x"]).batch_size == (2,)
        leasing.clear_samples(["a", "b"], "train", force=True)
        with pytest.raises(MissingDataError):
            leasing.get_samples(["a"], "train", ["x"])

    def test_withdrawn_sample_is_removed_from_its_lease(self, leasing: DataPlaneClient) -> None:
        meta = leasing.claim_meta("train", "train", ["x"], 2)
        leasing.withdraw_samples(["a"], "train")
        with pytest.raises(MissingDataError, match="'a'"):
            leasing.get_data(meta)
        with pytest.raises(LeaseLostError) as caught:
            leasing.acknowledge(meta)
        assert caught.value.sample_ids == ["a"]
        with pytest.raises(LeaseLostError) as caught:
            leasing.renew(meta)
        assert caught.value.sample_ids == ["a"]
        leasing.acknowledge(meta.subset([meta.sample_ids.index("b")]))

    def test_every_sample_is_counted_in_exactly_one_state(self, leasing: DataPlaneClient) -> None:
        leasing.register_partition("train", ["x"], 6, ["train"])
        put(leasing, "train", ["c", "d", "e"])
        put(leasing, "train", ["f"], "other")
        leasing.acknowledge(leasing.claim_meta("train", "train", ["x"], 1))
        leasing.claim_meta("train", "train", ["x"], 2)
        leasing.clear_samples(["f"], "train")
        counts = leasing.inspector.count_samples("train", "train", ["x"])
        assert (counts.acknowledged, counts.leased, counts.ready) == (1, 2, 2)
        assert (counts.not_ready, counts.cleared, counts.put) == (0, 1, 6)

    def test_totals_count_each_operation(self, leasing: DataPlaneClient) -> None:
        before = leasing.inspector.read_totals()
        put(leasing, "train", ["c", "d", "e"])
        put(leasing, "train", ["c"], "other")
        meta = leasing.claim_meta("train", "train", ["x"], 3)
        leasing.acknowledge(meta.subset([0, 0]))  # a repeated id counts once
        leasing.release(meta.subset([1, 2, 1]))
        leasing.clear_samples(["c", "nothing"], "train", force=True)
        after = leasing.inspector.read_totals()
        assert {name: after[name] - before[name] for name in after} == {
            "puts": 2,
            "puts_aborted": 0,
            "samples_put": 3,
            "claims": 1,
            "samples_claimed": 3,
            "leases_expired": 0,
            "samples_expired": 0,
            "samples_acknowledged": 1,
            "samples_released": 2,
            "clears": 1,
            "samples_cleared": 1,
        }


class BackpressureContract(MakeClientFixtures):
    """Contract of clients with ``capabilities.backpressure``.

    A subclass provides the fixture ``make_client``, as for `LeaseContract`.
    """

    def test_put_past_capacity_raises_and_stores_nothing(self, make_client: MakeClient) -> None:
        client = filled(make_client(storage_capacity=2, ack_timeout_ms=50), ["a"], 4)
        with pytest.raises(CapacityExceeded, match="2 new samples, 1 of 2 held"):
            put(client, "train", ["b", "c"])
        assert client.claim_meta("train", "train", ["x"], 4, blocking=False).sample_ids == ["a"]

    def test_blocked_put_continues_when_capacity_is_freed(self, make_client: MakeClient) -> None:
        config = {"storage_capacity": 2, "ack_timeout_ms": int(self.max_wait_s * 1000)}
        client = filled(make_client(**config), ["a", "b"], 3)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(put, client, "train", ["c"])
            client.clear_samples(["a"], "train")
            waiting.result(self.max_wait_s)
        assert client.get_samples(["b", "c"], "train", ["x"]).batch_size == (2,)

    def test_overwriting_in_a_full_store_needs_no_capacity(self, make_client: MakeClient) -> None:
        client = filled(make_client(storage_capacity=1, ack_timeout_ms=50), ["a"])
        client.put_samples(["a"], "train", batch(1, x=torch.zeros(1)))
        assert client.get_samples(["a"], "train", ["x"])["x"].tolist() == [0.0]
