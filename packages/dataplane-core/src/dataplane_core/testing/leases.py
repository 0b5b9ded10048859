"""Contract tests of the promises that a client may declare: leases and backpressure."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

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
from dataplane_core.testing.lease_waits import LeaseWaitContract, MakeClient
from dataplane_core.testing.storage import batch


class LeaseContract(LeaseWaitContract):
    """For clients with ``capabilities.leases``; ``make_client(**config)`` builds a fresh store."""

    patience_s = 20.0
    short_lease_s = 0.05

    @pytest.fixture
    def make_client(self) -> MakeClient:
        raise NotImplementedError("override the fixture 'make_client'")

    @pytest.fixture
    def held(self, make_client: MakeClient) -> DataPlaneClient:
        """A client whose leases outlast the test, with the samples a and b put."""
        client = make_client(claim_lease_s=1000.0)
        client.register_partition("train", ["x"], 2, ["train"])
        put(client, "train", ["a", "b"])
        return client

    def test_an_expired_claim_is_handed_out_again_and_its_holder_is_refused(
        self, make_client: MakeClient
    ) -> None:
        client = make_client(claim_lease_s=self.short_lease_s)
        client.register_partition("train", ["x"], 3, ["train"])
        put(client, "train", ["a", "b"])
        first = client.claim_meta("train", "train", ["x"], 2)
        second = client.claim_meta("train", "train", ["x"], 2, timeout_s=self.patience_s)
        assert sorted(second.sample_ids) == ["a", "b"]
        with pytest.raises(LeaseLostError, match="expired"):
            client.acknowledge(first)

    def test_a_share_that_its_rank_never_asks_for_is_handed_out_when_the_lease_ends(
        self, make_client: MakeClient
    ) -> None:
        client = make_client(claim_lease_s=self.short_lease_s)
        client.register_partition("train", ["x"], 5, ["train"])
        put(client, "train", ["a", "b", "c", "d"])
        mine = client.claim_meta("train", "train", ["x"], 2, dp_rank=0, dp_world=2)
        assert mine.size == 2
        both = client.claim_meta("train", "train", ["x"], 4, timeout_s=self.patience_s)
        assert sorted(both.sample_ids) == ["a", "b", "c", "d"]

    def test_a_rank_that_waits_gets_its_share_as_soon_as_another_rank_draws_it(
        self, make_client: MakeClient
    ) -> None:
        client = make_client()  # final claims: nobody settles them, so nothing else tells of them
        with ThreadPoolExecutor(1) as pool:
            for _ in range(3):  # in case the other rank was first
                client.clear_samples(["a", "b"], "train")
                client.register_partition("train", ["x"], 4, ["train"])
                put(client, "train", ["a", "b"])
                started = time.monotonic()
                waiting = pool.submit(
                    client.claim_meta,
                    *("train", "train", ["x"], 2),
                    dp_rank=1,
                    dp_world=2,
                    timeout_s=self.patience_s,
                )
                client.get_samples(["a"], "train", ["x"])  # meanwhile it begins to wait
                mine = client.claim_meta(
                    "train", "train", ["x"], 2, dp_rank=0, dp_world=2, blocking=False
                )
                theirs = waiting.result(2 * self.patience_s)
                assert sorted(mine.sample_ids + theirs.sample_ids) == ["a", "b"]
                assert (mine.size, theirs.size) == (1, 1)
                assert time.monotonic() - started < self.patience_s / 2

    def test_a_share_is_open_when_its_time_is_over_also_if_whoever_drew_it_got_nothing(
        self, make_client: MakeClient
    ) -> None:
        client = make_client(claim_lease_s=0.5)
        client.register_partition("train", ["x"], 4, ["train"])
        put(client, "train", ["a"])
        drew = client.claim_meta("train", "train", ["x"], 2, dp_rank=1, dp_world=2, blocking=False)
        started = time.monotonic()
        got = client.claim_meta("train", "train", ["x"], 1, timeout_s=self.patience_s)
        assert (drew.sample_ids, got.sample_ids) == ([], ["a"])
        assert time.monotonic() - started < self.patience_s / 2

    def test_a_claim_of_a_waiting_share_hands_out_at_most_its_batch_size(
        self, make_client: MakeClient
    ) -> None:
        client = make_client()
        client.register_partition("train", ["x"], 4, ["train"])
        put(client, "train", ["a", "b", "c", "d"])
        got = client.claim_meta("train", "train", ["x"], 2, dp_rank=0, dp_world=2).sample_ids
        for _ in range(2):
            more = client.claim_meta("train", "train", ["x"], 1, dp_rank=1, dp_world=2)
            assert more.size == 1
            got += more.sample_ids
        assert sorted(got) == ["a", "b", "c", "d"]

    def test_a_put_under_a_claim_cannot_write_what_another_claim_holds(
        self, held: DataPlaneClient
    ) -> None:
        first = held.claim_meta("train", "train", ["x"], 2)
        held.release(first.subset([first.sample_ids.index("b")]))
        second = held.claim_meta("train", "train", ["x"], 1)
        assert second.sample_ids == ["b"]
        late = batch(2, x=torch.zeros(2))
        with pytest.raises(LeaseLostError, match="'b'"):
            held.put_samples(["a", "b"], "train", late, claim=first)
        assert held.get_samples(["a", "b"], "train", ["x"])["x"].tolist() == [1.0, 1.0]
        held.put_samples(["a"], "train", batch(1, x=torch.zeros(1)), claim=first)

    def test_a_put_under_a_claim_cannot_write_what_another_claim_has_acknowledged(
        self, held: DataPlaneClient
    ) -> None:
        first = held.claim_meta("train", "train", ["x"], 2)
        held.release(first.subset([first.sample_ids.index("b")]))
        second = held.claim_meta("train", "train", ["x"], 1)
        held.put_samples(["b"], "train", batch(1, x=torch.full((1,), 2.0)), claim=second)
        held.acknowledge(second)
        with pytest.raises(LeaseLostError, match="'b'"):
            held.put_samples(["a", "b"], "train", batch(2, x=torch.zeros(2)), claim=first)
        assert held.get_samples(["a", "b"], "train", ["x"])["x"].tolist() == [1.0, 2.0]

    def test_an_acknowledged_claim_never_returns(self, held: DataPlaneClient) -> None:
        meta = held.claim_meta("train", "train", ["x"], 2)
        held.acknowledge(meta)
        assert held.claim_meta("train", "train", ["x"], 2, blocking=False).size == 0
        with pytest.raises(LeaseLostError):
            held.acknowledge(meta)

    def test_a_released_claim_is_handed_out_at_once(self, held: DataPlaneClient) -> None:
        held.release(held.claim_meta("train", "train", ["x"], 2))
        assert held.claim_meta("train", "train", ["x"], 2, blocking=False).size == 2

    def test_a_renewed_lease_still_belongs_to_its_holder(self, held: DataPlaneClient) -> None:
        meta = held.claim_meta("train", "train", ["x"], 2)
        held.renew(meta)
        held.acknowledge(meta)

    def test_settling_a_claim_without_a_lease_is_refused(self, make_client: MakeClient) -> None:
        client = make_client()
        client.register_partition("train", ["x"], 1, ["train"])
        put(client, "train", ["a"])
        with pytest.raises(InvalidRequestError, match="claim_lease_s"):
            client.acknowledge(client.claim_meta("train", "train", ["x"], 1))

    def test_clearing_leased_samples_is_refused_unless_forced(self, held: DataPlaneClient) -> None:
        meta = held.claim_meta("train", "train", ["x"], 1)
        for asked in (meta.sample_ids, ["a", "b"], None):
            with pytest.raises(SamplesLeasedError, match="leased by 'train'"):
                held.clear_samples(asked, "train")
        assert held.get_samples(["a", "b"], "train", ["x"]).batch_size == (2,)
        held.clear_samples(["a", "b"], "train", force=True)
        with pytest.raises(MissingDataError):
            held.get_samples(["a"], "train", ["x"])

    def test_withdrawing_takes_samples_from_under_a_lease(self, held: DataPlaneClient) -> None:
        meta = held.claim_meta("train", "train", ["x"], 2)
        held.withdraw_samples(["a"], "train")
        with pytest.raises(MissingDataError, match="'a'"):
            held.get_data(meta)
        with pytest.raises(LeaseLostError) as caught:
            held.acknowledge(meta)
        assert caught.value.sample_ids == ["a"]
        with pytest.raises(LeaseLostError) as caught:
            held.renew(meta)
        assert caught.value.sample_ids == ["a"]
        held.acknowledge(meta.subset([meta.sample_ids.index("b")]))

    def test_every_sample_put_is_counted_in_exactly_one_place(self, held: DataPlaneClient) -> None:
        held.register_partition("train", ["x"], 6, ["train"])
        put(held, "train", ["c", "d", "e"])
        put(held, "train", ["f"], "other")
        held.acknowledge(held.claim_meta("train", "train", ["x"], 1))
        held.claim_meta("train", "train", ["x"], 2)
        held.clear_samples(["f"], "train")
        counts = held.count_samples("train", "train", ["x"])
        assert (counts.acknowledged, counts.leased, counts.ready) == (1, 2, 2)
        assert (counts.not_ready, counts.cleared, counts.put) == (0, 1, 6)

    def test_the_totals_of_the_store_count_what_happened(self, held: DataPlaneClient) -> None:
        before = held.read_totals()
        put(held, "train", ["c", "d", "e"])
        put(held, "train", ["c"], "other")
        meta = held.claim_meta("train", "train", ["x"], 3)
        held.acknowledge(meta.slice(0, 1))
        held.release(meta.slice(1, 3))
        held.clear_samples(["c", "nothing"], "train", force=True)
        after = held.read_totals()
        assert {name: after[name] - before[name] for name in after} == {
            "puts": 2,
            "puts_aborted": 0,
            "samples_put": 3,
            "claims": 1,
            "samples_claimed": 3,
            "leases_expired": 0,
            "samples_redelivered": 0,
            "samples_acknowledged": 1,
            "samples_released": 2,
            "clears": 1,
            "samples_cleared": 1,
        }


class BackpressureContract:
    """For clients with ``capabilities.backpressure``."""

    patience_s = 20.0

    @pytest.fixture
    def make_client(self) -> MakeClient:
        raise NotImplementedError("override the fixture 'make_client'")

    def test_a_put_past_capacity_raises_at_its_deadline_and_stores_nothing(
        self, make_client: MakeClient
    ) -> None:
        client = make_client(storage_capacity=2, ack_timeout_ms=50)
        client.register_partition("train", ["x"], 4, ["train"])
        put(client, "train", ["a"])
        with pytest.raises(CapacityExceeded, match="2 new samples, 1 of 2 held"):
            put(client, "train", ["b", "c"])
        assert client.claim_meta("train", "train", ["x"], 4, blocking=False).sample_ids == ["a"]

    def test_a_waiting_put_goes_on_when_room_is_made(self, make_client: MakeClient) -> None:
        client = make_client(storage_capacity=2, ack_timeout_ms=int(self.patience_s * 1000))
        client.register_partition("train", ["x"], 3, ["train"])
        put(client, "train", ["a", "b"])
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(put, client, "train", ["c"])
            client.clear_samples(["a"], "train")
            waiting.result(self.patience_s)
        assert client.get_samples(["b", "c"], "train", ["x"]).batch_size == (2,)

    def test_overwriting_in_a_full_store_needs_no_room(self, make_client: MakeClient) -> None:
        client = make_client(storage_capacity=1, ack_timeout_ms=50)
        client.register_partition("train", ["x"], 1, ["train"])
        put(client, "train", ["a"])
        client.put_samples(["a"], "train", batch(1, x=torch.zeros(1)))
        assert client.get_samples(["a"], "train", ["x"])["x"].tolist() == [0.0]
