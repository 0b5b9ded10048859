"""Contract tests of inspection, and of changes by an operator."""

from __future__ import annotations

import os
from typing import Any  # Any: values of tags

import pytest
import torch

from dataplane_core import (
    ClaimTimeoutError,
    DataPlaneClient,
    InvalidRequestError,
    LeaseLostError,
    PartitionNotFoundError,
    PartitionSummary,
    SamplesLeasedError,
    StoreInspector,
    TaskSummary,
    UnknownTaskError,
)
from dataplane_core.meta import lease_token
from dataplane_core.testing.claims import put
from dataplane_core.testing.machine import StateMachineContract
from dataplane_core.testing.storage import batch, jagged

STATES = ("unclaimed", "assigned", "leased", "acknowledged")


def summary(client: DataPlaneClient, partition: str) -> PartitionSummary:
    """Return the summary of a partition."""
    [match] = [
        each for each in client.inspector.list_partitions() if each.partition_id == partition
    ]
    return match


def task(client: DataPlaneClient, partition: str, name: str = "train") -> TaskSummary:
    """Return the summary of a task."""
    [match] = [each for each in summary(client, partition).tasks if each.name == name]
    return match


def age(client: DataPlaneClient, partition: str, sample_id: str) -> float:
    """Return a sample's age in seconds."""
    state = client.inspector.read_sample(partition, sample_id)
    assert state is not None
    assert state.age_s is not None
    return state.age_s


class InspectionContract(StateMachineContract):
    """Contract of clients with ``capabilities.inspection``.

    In addition to ``client`` and ``peer``, a subclass provides ``leasing``: a client of the same
    store, in this process, with leases of 1000 s.
    """

    @pytest.fixture
    def leasing(self, client: DataPlaneClient) -> DataPlaneClient:
        raise NotImplementedError("override the fixture 'leasing'")

    @pytest.fixture
    def reports_bytes(self) -> bool:
        """Return whether the store reports the bytes of its fields."""
        return True

    def test_client_has_an_inspector_and_declares_inspection(self, client: DataPlaneClient) -> None:
        assert client.capabilities.inspection
        assert isinstance(client.inspector, StoreInspector)

    def test_inspector_clears_as_the_client_does(
        self, client: DataPlaneClient, leasing: DataPlaneClient, partition: str
    ) -> None:
        put(client, partition, ["a", "b", "c"])
        leasing.claim_meta(partition, "train", ["x"], 1)
        with pytest.raises(SamplesLeasedError):
            client.inspector.clear_samples(["a", "b"], partition)
        client.inspector.clear_samples(["a", "b"], partition, force=True)
        assert [each.sample_id for each in client.inspector.list_samples(partition)] == ["c"]

    def test_bytes_of_fields_follow_puts_overwrites_and_clears(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str, reports_bytes: bool
    ) -> None:
        def held() -> tuple[int | None, int | None, int | None]:
            current = summary(peer, partition)
            by_name = {each.name: each.nbytes for each in current.fields}
            return by_name["x"], by_name["y"], current.nbytes

        def expected(x: int, y: int) -> tuple[int | None, int | None, int | None]:
            return (x, y, x + y) if reports_bytes else (None, None, None)

        assert held() == expected(0, 0)
        y = jagged(*(torch.arange(n) for n in (3, 0, 2)))
        client.put_samples(list("abc"), partition, batch(3, x=torch.ones(3), y=y))
        assert held() == expected(12, 40)
        client.put_samples(["a"], partition, batch(1, y=jagged(torch.arange(1))))
        assert held() == expected(12, 24)
        x = torch.ones(2, 5)
        client.put_columns(["d", "e"], partition, {"y": x.long()}, lengths=[5, 1], ragged=["y"])
        assert held() == expected(12, 72)
        client.clear_samples(["c", "d"], partition)
        assert held() == expected(8, 16)
        client.clear_samples(list("abe"), partition)
        assert held() == expected(0, 0)

    def test_revision_grows_with_each_change_only(
        self,
        client: DataPlaneClient,
        peer: DataPlaneClient,
        leasing: DataPlaneClient,
        partition: str,
    ) -> None:
        seen = [summary(peer, partition).revision]

        def changed() -> bool:
            seen.append(summary(peer, partition).revision)
            assert seen[-1] >= seen[-2]
            return seen[-1] > seen[-2]

        put(client, partition, list("abcd"))
        assert changed()
        claimed = client.claim_meta(partition, "train", ["x"], 1)
        assert changed()
        held = leasing.claim_meta(partition, "train", ["x"], 2)
        assert changed()
        leasing.renew(held)
        assert changed()
        leasing.acknowledge(held.slice(0, 1))
        assert changed()
        leasing.release(held.slice(1, 2))
        assert changed()
        client.inspector.reset_consumption(partition, "train", claimed.sample_ids)
        assert changed()
        client.clear_samples(["d"], partition)
        assert changed()
        client.get_samples(["a"], partition, ["x"])
        client.inspector.list_samples(partition)
        client.inspector.scan_states(partition)
        client.inspector.count_samples(partition, "train", ["x"])
        assert not changed()
        client.clear_samples(None, partition)
        client.register_partition(partition, ["x"], 1, ["train"])
        assert changed()

    def test_the_oldest_unclaimed_sample_is_the_one_put_first(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        def is_oldest(sample_id: str) -> bool:
            before = age(peer, partition, sample_id)
            oldest = task(peer, partition).oldest_unclaimed_s
            assert oldest is not None
            return before <= oldest <= age(peer, partition, sample_id)

        assert task(peer, partition).oldest_unclaimed_s is None
        for sample_id in "abc":
            put(client, partition, [sample_id])
        put(client, partition, ["a"], "y")
        assert is_oldest("a")
        client.claim_meta(partition, "train", ["x"], 2)
        assert is_oldest("c")
        assert client.inspector.reset_consumption(partition, "train", ["b"]) == 1
        assert is_oldest("b")
        client.clear_samples(["b"], partition)
        assert is_oldest("c")
        client.claim_meta(partition, "train", ["x"], 1)
        assert task(peer, partition).oldest_unclaimed_s is None
        assert task(peer, partition, "logprob").oldest_unclaimed_s is not None

    def test_sample_drawn_for_another_rank_is_assigned(
        self,
        client: DataPlaneClient,
        leasing: DataPlaneClient,
        peer: DataPlaneClient,
        partition: str,
    ) -> None:
        put(client, partition, list("abcd"))
        claimed = client.claim_meta(partition, "train", ["x"], 2, dp_rank=0, dp_world=2)
        assert (task(peer, partition).unclaimed, task(peer, partition).assigned) == (0, 2)
        [assigned] = peer.inspector.list_assignments(partition)
        assert (assigned.task, assigned.rank) == ("train", 1)
        assert (assigned.world, assigned.samples) == (2, 2)
        assert (assigned.expires_in_s, assigned.seen_s) == (None, None)
        assert task(peer, partition).oldest_unclaimed_s is not None
        states = peer.inspector.scan_states(partition)
        column = dict(zip("abcd", states.states[states.tasks.index("train") :: 2], strict=True))
        assert column == {each: 3 if each in claimed.sample_ids else 1 for each in "abcd"}
        client.claim_meta(partition, "train", ["x"], 2, dp_rank=1, dp_world=2)
        assert task(peer, partition).oldest_unclaimed_s is None
        assert task(peer, partition).assigned == 0
        assert peer.inspector.list_assignments(partition) == []
        for rank in (1, 1, 0):
            leasing.claim_meta(partition, "logprob", ["x"], 1, dp_rank=rank, dp_world=2)
        [assigned] = peer.inspector.list_assignments(partition)
        assert (assigned.task, assigned.rank, assigned.samples) == ("logprob", 0, 1)
        assert assigned.expires_in_s is not None
        assert 900 < assigned.expires_in_s <= 1000
        assert assigned.seen_s is not None
        assert 0 <= assigned.seen_s < 100
        assert [each.rank for each in peer.inspector.list_claims(partition)] == [1, 1, 0]

    def test_claim_summary_has_owner_samples_and_ages(
        self, leasing: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        put(leasing, partition, list("abc"))
        first = leasing.claim_meta(partition, "train", ["x"], 2)
        second = leasing.claim_meta(partition, "train", ["x"], 1)
        listed = peer.inspector.list_claims(partition)
        assert [(each.task, each.samples) for each in listed] == [("train", 2), ("train", 1)]
        assert listed[0].owner.endswith(f":{os.getpid()}")
        assert listed[0].age_s >= listed[1].age_s >= 0
        assert 900 < listed[0].expires_in_s <= 1000
        oldest = task(peer, partition).oldest_claim
        assert oldest is not None
        assert (oldest.claim, oldest.samples) == (listed[0].claim, 2)
        state = peer.inspector.read_sample(partition, second.sample_ids[0])
        assert state is not None
        assert state.claims == {"train": listed[1].claim}
        leasing.acknowledge(first.slice(0, 1))
        assert [each.samples for each in peer.inspector.list_claims(partition)] == [1, 1]
        leasing.acknowledge(first.slice(1, 2))
        leasing.release(second)
        assert peer.inspector.list_claims(partition) == []
        assert task(peer, partition).oldest_claim is None

    def test_blocked_claim_of_another_process_names_the_holder(
        self, leasing: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        leasing.register_partition(partition, ["x"], 3, ["train"])
        put(leasing, partition, list("abc"))
        leasing.acknowledge(leasing.claim_meta(partition, "train", ["x"], 1))
        leasing.claim_meta(partition, "train", ["x"], 2)
        holders = task(peer, partition).holders
        assert list(holders.values()) == [2]
        assert next(iter(holders)).endswith(f":{os.getpid()}")
        with pytest.raises(ClaimTimeoutError) as caught:
            peer.claim_meta(partition, "train", ["x"], 1, timeout_s=0.05)
        assert caught.value.holders == holders
        assert not peer.check_consumption_status(partition, ["train"])
        assert peer.claim_meta(partition, "train", ["x"], 1, blocking=False).size == 0

    def test_name_of_a_claim_does_not_reveal_its_token(
        self, leasing: DataPlaneClient, partition: str
    ) -> None:
        put(leasing, partition, ["a"])
        meta = leasing.claim_meta(partition, "train", ["x"], 1)
        secret = lease_token(meta).partition(".")[2]
        shown = [
            *leasing.inspector.list_claims(partition),
            leasing.inspector.read_sample(partition, "a"),
        ]
        assert len(secret) >= 16
        assert secret not in repr(shown)

    def test_one_sample_is_read_by_its_id(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        client.put_samples(["a"], partition, batch(1, x=torch.ones(1)), [{"v": 1}])
        client.claim_meta(partition, "train", ["x"], 1)
        state = peer.inspector.read_sample(partition, "a")
        assert state is not None
        assert (state.sample_id, state.fields, state.tags) == ("a", ("x",), {"v": 1})
        assert state.tasks == {"logprob": "unclaimed", "train": "acknowledged"}
        assert peer.inspector.read_sample(partition, "b") is None

    def test_samples_are_found_by_an_equal_tag_in_the_order_of_puts(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        tags: list[dict[str, Any]] = [
            {"v": 1},
            {"v": 2},
            {"other": 1},
            {"v": 1},
            {"v": "1"},
            {"v": None},
        ]
        client.put_samples(list("abcdef"), partition, batch(6, x=torch.ones(6)), tags)

        def find(value: object, limit: int = 100) -> str:
            states = peer.inspector.find_samples(partition, tag="v", value=value, limit=limit)
            return "".join(state.sample_id for state in states)

        assert find(1) == "ad"
        assert find(1, 1) == "a"
        assert find(1, 0) == ""
        assert find("1") == "e"
        assert find(None) == "f"
        assert find(3) == ""
        assert peer.inspector.find_samples(partition, tag="unknown", value=1) == []
        with pytest.raises(InvalidRequestError, match="'v'"):
            peer.inspector.find_samples(partition, tag="v", value=[1])
        with pytest.raises(InvalidRequestError, match="limit"):
            peer.inspector.find_samples(partition, tag="v", value=1, limit=-1)

    def test_scan_has_the_same_states_as_the_listing(
        self,
        client: DataPlaneClient,
        peer: DataPlaneClient,
        leasing: DataPlaneClient,
        partition: str,
    ) -> None:
        ids = [f"s{i}" for i in range(20)]
        put(client, partition, ids)
        put(client, partition, ids[5:9], "y", "z")
        client.claim_meta(partition, "train", ["x"], 6)
        leasing.claim_meta(partition, "train", ["x"], 4)
        client.claim_meta(partition, "train", ["x"], 2, dp_rank=1, dp_world=2)
        listed = peer.inspector.list_samples(partition, limit=20)
        for start, limit in ((0, 10_000), (0, 7), (7, 7), (14, 7), (20, 7)):
            page = peer.inspector.scan_states(partition, start=start, limit=limit)
            rows = listed[start : start + limit]
            assert (page.total, page.start) == (20, start)
            assert sorted(page.fields) == ["x", "y", "z"]
            assert sorted(page.tasks) == ["logprob", "train"]
            assert page.written == bytes(name in row.fields for row in rows for name in page.fields)
            words = [STATES[code] for code in page.states]
            assert words == [row.tasks[name] for row in rows for name in page.tasks]
        assert {row.tasks["train"] for row in listed} == set(STATES)

    def test_large_page_is_complete(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        ids = [f"s{i}" for i in range(2_500)]
        client.put_samples(ids, partition, tags=[{"v": 1}] * len(ids))

        def listed(start: int, limit: int) -> list[str]:
            return [
                each.sample_id
                for each in peer.inspector.list_samples(partition, start=start, limit=limit)
            ]

        assert listed(0, 10_000) == ids
        assert listed(100, 2_000) == ids[100:2_100]
        assert listed(0, 1_000) == ids[:1_000]
        assert listed(2_500, 10) == []
        client.clear_samples(None, partition)

    def test_pages_are_limited(self, client: DataPlaneClient, partition: str) -> None:
        for start, limit in ((0, 10_001), (-1, 5), (0, -1)):
            with pytest.raises(InvalidRequestError, match=r"start is -1|limit is"):
                client.inspector.scan_states(partition, start=start, limit=limit)
            with pytest.raises(InvalidRequestError, match=r"start is -1|limit is"):
                client.inspector.list_samples(partition, start=start, limit=limit)
        empty = client.inspector.scan_states(partition)
        assert (empty.total, empty.written, empty.states) == (0, b"", b"")

    def test_acknowledged_samples_can_be_made_claimable_again(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        put(client, partition, list("abcd"))
        client.claim_meta(partition, "train", ["x"], 3)
        client.claim_meta(partition, "logprob", ["x"], 4)
        ids = ["a", "b", "a", "d", "unknown"]
        assert peer.inspector.reset_consumption(partition, "train", ids) == 2
        counts = client.inspector.count_samples(partition, "train", ["x"])
        assert (counts.put, counts.ready, counts.acknowledged) == (4, 3, 1)
        assert not client.check_consumption_status(partition, ["train"])
        assert client.check_consumption_status(partition, ["logprob"])
        again = client.claim_meta(partition, "train", ["x"], 8, blocking=False)
        assert sorted(again.sample_ids) == ["a", "b", "d"]
        assert client.claim_meta(partition, "train", ["x"], 8, blocking=False).size == 0
        assert client.check_consumption_status(partition, ["train"])

    def test_a_refused_reset_of_leased_samples_changes_nothing(
        self, client: DataPlaneClient, leasing: DataPlaneClient, partition: str
    ) -> None:
        put(client, partition, ["a", "b"])
        client.claim_meta(partition, "train", ["x"], 1)
        held = leasing.claim_meta(partition, "train", ["x"], 1)
        with pytest.raises(SamplesLeasedError, match=r"1 samples are leased: 'b'"):
            client.inspector.reset_consumption(partition, "train", ["a", "b"])
        assert client.claim_meta(partition, "train", ["x"], 2, blocking=False).size == 0
        leasing.acknowledge(held)
        assert client.inspector.reset_consumption(partition, "train", ["a", "b"]) == 2

    def test_a_blocked_claim_wakes_at_a_reset(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        put(client, partition, ["a"])
        client.claim_meta(partition, "train", ["x"], 1)
        with self.blocked_claim(client, partition, ["x"], 1) as blocked:
            assert peer.inspector.reset_consumption(partition, "train", ["a"]) == 1
            assert blocked.result(self.max_wait_s).sample_ids == ["a"]

    def test_ended_claim_has_the_effects_of_an_expired_lease(
        self,
        client: DataPlaneClient,
        peer: DataPlaneClient,
        leasing: DataPlaneClient,
        partition: str,
    ) -> None:
        put(leasing, partition, ["a", "b"])
        meta = leasing.claim_meta(partition, "train", ["x"], 2)
        leasing.acknowledge(meta.subset([1]))
        [claim] = peer.inspector.list_claims(partition)
        with pytest.raises(SamplesLeasedError, match="expired_only=False"):
            peer.inspector.end_claim(partition, claim.claim)
        leasing.renew(meta.subset([0]))
        before = client.inspector.read_totals()
        assert peer.inspector.end_claim(partition, claim.claim, expired_only=False) == 1
        after = client.inspector.read_totals()
        assert after["leases_expired"] - before["leases_expired"] == 1
        assert after["samples_expired"] - before["samples_expired"] == 1
        with pytest.raises(LeaseLostError):
            leasing.acknowledge(meta.subset([0]))
        with pytest.raises(LeaseLostError):
            leasing.put_samples(["a"], partition, batch(1, y=torch.ones(1)), claim=meta)
        assert client.claim_meta(partition, "train", ["x"], 2, blocking=False).size == 1
        assert peer.inspector.end_claim(partition, claim.claim) == 0
        assert peer.inspector.end_claim(partition, "no such claim", expired_only=False) == 0

    def test_a_blocked_claim_wakes_when_another_is_ended(
        self,
        client: DataPlaneClient,
        peer: DataPlaneClient,
        leasing: DataPlaneClient,
        partition: str,
    ) -> None:
        put(client, partition, ["a"])
        leasing.claim_meta(partition, "train", ["x"], 1)
        [claim] = client.inspector.list_claims(partition)
        with self.blocked_claim(client, partition, ["x"], 1) as blocked:
            assert peer.inspector.end_claim(partition, claim.claim, expired_only=False) == 1
            assert blocked.result(self.max_wait_s).sample_ids == ["a"]

    def test_unknown_names_are_refused_and_named(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        for call in (
            lambda: client.inspector.list_samples("nowhere"),
            lambda: client.inspector.read_sample("nowhere", "a"),
            lambda: client.inspector.find_samples("nowhere", tag="v", value=1),
            lambda: client.inspector.list_claims("nowhere"),
            lambda: client.inspector.list_assignments("nowhere"),
            lambda: client.inspector.scan_states("nowhere"),
            lambda: client.inspector.reset_consumption("nowhere", "train", ["a"]),
            lambda: client.inspector.end_claim("nowhere", "claim"),
        ):
            with pytest.raises(PartitionNotFoundError, match="'nowhere'"):
                call()
        with pytest.raises(UnknownTaskError, match="'trian'"):
            client.inspector.reset_consumption(partition, "trian", ["a"])

    def test_any_operations_with_leases_agree_with_the_model(
        self, client: DataPlaneClient, peer: DataPlaneClient, leasing: DataPlaneClient
    ) -> None:
        self.walk(peer, leasing)
