"""Contract tests of claims: which samples a claim gets, and how blocked claims end."""

from __future__ import annotations

import enum
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any  # Any: invalid tags

import numpy as np
import pytest
import torch

from dataplane_core import (
    ClaimTimeoutError,
    DataPlaneClient,
    InvalidRequestError,
    MissingDataError,
    UnknownTaskError,
    UnsupportedError,
)
from dataplane_core.testing.storage import StoreFixtures, batch


def put(client: DataPlaneClient, partition: str, ids: list[str], *fields: str) -> None:
    """Put a tensor of ones in each of the given fields, or in 'x' if none are given."""
    names = fields or ("x",)
    client.put_samples(
        ids, partition, batch(len(ids), **{name: torch.ones(len(ids)) for name in names})
    )


class Stage(enum.IntEnum):
    EASY = 4


class ClaimContract(StoreFixtures):
    """Contract: each task claims a ready sample once; blocked claims end with a reason."""

    def test_a_task_claims_each_sample_once(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        put(client, partition, list("abcd"))
        first = client.claim_meta(partition, "train", ["x"], 3)
        rest = peer.claim_meta(partition, "train", ["x"], 3, blocking=False)
        assert (first.size, rest.size) == (3, 1)
        assert sorted(first.sample_ids + rest.sample_ids) == list("abcd")
        assert client.claim_meta(partition, "train", ["x"], 3, blocking=False).sample_ids == []

    def test_a_claim_carries_task_fields_and_partition(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        put(client, partition, ["a"], "x", "y")
        meta = client.claim_meta(partition, "train", ["x"], 1)
        assert (meta.partition_id, meta.task_name, meta.fields) == (partition, "train", ["x"])
        assert meta.sequence_lengths is None
        assert set(client.get_data(meta).keys()) == {"x"}

    def test_tags_travel_with_claims_and_fill_sequence_lengths(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        tags = [{"input_lengths": 3, "v": 1}, {"input_lengths": 5, "v": 2}]
        client.put_samples(["a", "b"], partition, batch(2, x=torch.ones(2)), tags)
        meta = peer.claim_meta(partition, "train", ["x"], 2)
        assert meta.tags is not None
        assert dict(zip(meta.sample_ids, meta.tags, strict=True)) == {"a": tags[0], "b": tags[1]}
        assert meta.sequence_lengths == [tag["input_lengths"] for tag in meta.tags]

    @pytest.mark.parametrize(
        ("tag", "value"),
        [
            ("input_lengths", None),
            ("input_lengths", "3"),
            ("input_lengths", -1),
            ("input_lengths", 3.0),
            ("input_lengths", True),
            ("input_lengths", float("nan")),
            ("seed", 2**70),
            ("rewards", [1.0]),
            ("answer", "\ud800"),
            ("reward", torch.ones(2)),
            (7, "a number as its name"),
        ],
        ids=str,
    )
    def test_invalid_tag_is_refused_and_nothing_is_stored(
        self, client: DataPlaneClient, partition: str, tag: str, value: object
    ) -> None:
        tags: list[Any] = [{"input_lengths": 3}, {"input_lengths": 5, tag: value}]
        named = f"put_samples.*'{partition}'.*sample 'b', tag {tag!r}"
        with pytest.raises(InvalidRequestError, match=named):
            client.put_samples(["a", "b"], partition, batch(2, x=torch.ones(2)), tags)
        assert client.claim_meta(partition, "train", ["x"], 2, blocking=False).size == 0

    def test_numpy_and_torch_scalars_are_stored_as_primitives(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        given = {
            "input_lengths": np.int32(3),
            "reward": np.float32(0.5),
            "mean": np.float64(0.25),
            "kept": np.bool_(True),
            "task": np.str_("math"),
            "version": torch.tensor(7),
            "stage": Stage.EASY,
            "nothing": None,
        }
        expected = [3, 0.5, 0.25, True, "math", 7, 4, None]
        put_meta = client.put_samples(["a"], partition, batch(1, x=torch.ones(1)), [given])
        meta = client.claim_meta(partition, "train", ["x"], 1, blocking=False)
        assert meta.tags is not None
        assert put_meta.tags == meta.tags
        assert list(meta.tags[0]) == list(given)
        values = list(meta.tags[0].values())
        assert values == expected
        assert list(map(type, values)) == list(map(type, expected))
        assert meta.sequence_lengths == [3]

    def test_put_replaces_tags_only_if_it_has_tags(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        client.put_samples(["a", "b"], partition, tags=[{"v": 1, "old": 1}, {"v": 2}])
        peer.put_samples(["a"], partition, tags=[{"v": 3}])
        put(client, partition, ["a", "b"])
        meta = peer.claim_meta(partition, "train", ["x"], 2)
        assert meta.tags is not None
        assert dict(zip(meta.sample_ids, meta.tags, strict=True)) == {"a": {"v": 3}, "b": {"v": 2}}

    def test_tags_alone_make_no_sample_ready(self, client: DataPlaneClient, partition: str) -> None:
        client.put_samples(["a"], partition, tags=[{"v": 1}])
        assert client.claim_meta(partition, "train", ["x"], 1, blocking=False).size == 0

    def test_tasks_have_separate_cursors(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        put(client, partition, ["a", "b"])
        assert client.claim_meta(partition, "train", ["x"], 2).size == 2
        assert peer.claim_meta(partition, "logprob", ["x"], 2).size == 2

    def test_only_samples_with_every_required_field_are_claimed(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        put(client, partition, ["a", "b", "c"])
        put(peer, partition, ["b"], "y")
        claimed = client.claim_meta(partition, "train", ["x", "y"], 8, blocking=False)
        assert claimed.sample_ids == ["b"]

    def test_claimed_samples_stay_readable(self, client: DataPlaneClient, partition: str) -> None:
        put(client, partition, ["a"])
        meta = client.claim_meta(partition, "train", ["x"], 1)
        assert client.get_data(meta)["x"].tolist() == [1.0]

    def test_cleared_samples_are_not_claimed(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        put(client, partition, ["a", "b"])
        peer.clear_samples(["a"], partition)
        claimed = client.claim_meta(partition, "train", ["x"], 8, blocking=False)
        assert claimed.sample_ids == ["b"]

    def test_put_does_not_make_a_claimed_sample_claimable(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        put(client, partition, ["a"])
        client.claim_meta(partition, "train", ["x"], 1)
        put(client, partition, ["a"])
        assert client.claim_meta(partition, "train", ["x"], 1, blocking=False).size == 0

    def test_unknown_task_error_names_the_registered_ones(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        with pytest.raises(KeyError, match="'logprob', 'train'") as caught:
            peer.claim_meta(partition, "trian", ["x"], 1, blocking=False)
        assert isinstance(caught.value, UnknownTaskError)
        assert "'trian'" in str(caught.value)

    def test_a_batch_size_below_one_is_refused(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        with pytest.raises(InvalidRequestError, match="batch_size"):
            client.claim_meta(partition, "train", ["x"], 0, blocking=False)

    def test_blocking_claim_returns_the_remainder_at_the_end(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        put(client, partition, [f"s{i}" for i in range(8)])
        assert client.claim_meta(partition, "train", ["x"], 5).size == 5
        assert peer.claim_meta(partition, "train", ["x"], 5, timeout_s=self.max_wait_s).size == 3
        assert client.claim_meta(partition, "train", ["x"], 5, timeout_s=self.max_wait_s).size == 0

    def test_claim_waits_for_replacements_of_withdrawn_samples(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        client.register_partition(partition, ["x"], 3, ["train"])
        put(client, partition, ["a", "b", "c"])
        peer.withdraw_samples(["a", "b", "never-put"], partition)
        with pytest.raises(MissingDataError, match="'a', 'b'"):
            client.get_samples(["a", "b", "c"], partition, ["x"])
        if client.capabilities.withdrawal:
            with pytest.raises(ClaimTimeoutError, match="2 of 3 declared"):
                client.claim_meta(partition, "train", ["x"], 3, timeout_s=0.05)
            put(peer, partition, ["again-a", "again-b"])
        claim = client.claim_meta(partition, "train", ["x"], 3, timeout_s=self.max_wait_s)
        assert claim.size == (3 if client.capabilities.withdrawal else 1)

    def test_claim_concurrent_with_a_put_is_never_short(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        for start in range(0, 60, 2):
            client.register_partition(partition, ["x"], 2, ["train"])
            with self.blocked_claim(client, partition, ["x"], 2) as claim:
                put(peer, partition, [f"s{start}", f"s{start + 1}"])
                assert claim.result(self.max_wait_s).size == 2
            client.clear_samples(None, partition)

    def test_timed_out_claim_reports_what_is_missing(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        put(client, partition, [f"s{i}" for i in range(5)])
        put(client, partition, ["s0", "s1"], "y")
        with pytest.raises(TimeoutError) as caught:
            client.claim_meta(partition, "train", ["x", "y"], 8, timeout_s=0.05)
        error = caught.value
        assert isinstance(error, ClaimTimeoutError)
        assert (error.ready, error.missing, error.missing_fields) == (2, 6, {"y": 3})
        for expected_text in ("2 of 8", "0.05 s", "3 lack 'y'", "3 of 8 declared"):
            assert expected_text in str(error)
        assert client.claim_meta(partition, "train", ["x", "y"], 8, blocking=False).size == 2

    def test_blocked_claim_wakes_when_another_client_puts(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        put(client, partition, ["a"])
        with self.blocked_claim(client, partition, ["x"], 2) as claim:
            put(peer, partition, ["b"])
            assert sorted(claim.result(self.max_wait_s).sample_ids) == ["a", "b"]

    def test_blocked_claim_wakes_with_the_last_missing_field(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        put(client, partition, ["a", "b"])
        with self.blocked_claim(client, partition, ["x", "y"], 2) as claim:
            put(peer, partition, ["a"], "y")
            put(peer, partition, ["b"], "y")
            assert sorted(claim.result(self.max_wait_s).sample_ids) == ["a", "b"]

    def test_blocked_claim_ends_when_another_takes_its_samples(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        """A claim without a lease must wake blocked claims, because no acknowledgment follows."""
        for _ in range(3):  # in case the other claim was first
            client.register_partition(partition, ["x", "y"], 2, ["train"])
            put(client, partition, ["a", "b"])
            put(client, partition, ["a"], "y")
            started = time.monotonic()
            with self.blocked_claim(client, partition, ["x", "y"], 2) as claim:
                client.get_samples(["a"], partition, ["x"])  # gives the claim time to block
                assert peer.claim_meta(partition, "train", ["x"], 2, blocking=False).size == 2
                assert claim.result(2 * self.max_wait_s).sample_ids == []
            assert time.monotonic() - started < self.max_wait_s / 2
            client.clear_samples(None, partition)

    def test_concurrent_claimers_share_no_sample_and_miss_none(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        ids = [f"s{i}" for i in range(60)]
        client.register_partition(partition, ["x"], len(ids), ["train"])
        claimed: list[str] = []
        lock = threading.Lock()

        def consume(consumer: DataPlaneClient) -> None:
            deadline = time.monotonic() + self.max_wait_s
            while time.monotonic() < deadline:
                meta = consumer.claim_meta(partition, "train", ["x"], 7, timeout_s=self.max_wait_s)
                if not meta.size:
                    return
                consumer.get_data(meta)
                with lock:
                    claimed.extend(meta.sample_ids)

        with ThreadPoolExecutor(4) as pool:
            consumers = [pool.submit(consume, who) for who in (client, peer, client, peer)]
            for start in range(0, len(ids), 12):
                put(client, partition, ids[start : start + 12])
            for consumer in consumers:
                consumer.result(self.max_wait_s)
        assert sorted(claimed) == sorted(ids)

    def test_consumption_is_complete_once_all_tasks_claimed_all(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        both = ["logprob", "train"]
        assert not client.check_consumption_status(partition, both)
        put(client, partition, ["a", "b"])
        assert not client.check_consumption_status(partition, both)
        client.claim_meta(partition, "train", ["x"], 2)
        assert client.check_consumption_status(partition, ["train"])
        assert not peer.check_consumption_status(partition, both)
        peer.claim_meta(partition, "logprob", ["x"], 2)
        assert client.check_consumption_status(partition, both)
        put(client, partition, ["c"])
        assert not client.check_consumption_status(partition, ["train"])

    def test_consumption_of_unknown_tasks_is_incomplete(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        put(client, partition, ["a"])
        client.claim_meta(partition, "train", ["x"], 1)
        assert not client.check_consumption_status(partition, ["train", "unknown"])
        assert not client.check_consumption_status("nowhere", ["train"])

    def test_operation_without_its_capability_is_refused(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        put(client, partition, ["a"])
        meta = client.claim_meta(partition, "train", ["x"], 1)
        if not client.capabilities.leases:
            for method in (client.acknowledge, client.renew, client.release):
                with pytest.raises(UnsupportedError, match="leases"):
                    method(meta)
        if client.capabilities.conservation:
            counts = client.inspector.count_samples(partition, "train", ["x"])
            assert (counts.put, counts.ready, counts.not_ready) == (1, 0, 0)
        else:
            with pytest.raises(UnsupportedError, match="conservation"):
                client.inspector.count_samples(partition, "train", ["x"])
