"""Contract tests of claims that are blocked on leased samples."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any  # Any: keywords of a claim

import pytest
import torch

from dataplane_core import (
    ClaimTimeoutError,
    DataPlaneClient,
    InvalidRequestError,
    KVBatchMeta,
    LeaseLostError,
    TagFilter,
)
from dataplane_core.process import process_name
from dataplane_core.testing.claims import put
from dataplane_core.testing.storage import batch

MakeClient = Callable[..., DataPlaneClient]

SOON_S = 0.05
"""Timeout of claims that are expected to time out, in seconds."""


def claim(client: DataPlaneClient, size: int = 2, **options: Any) -> KVBatchMeta:
    """Claim from the partition 'train', for the task 'train' unless ``options`` name another."""
    task_name = options.pop("task_name", "train")
    return client.claim_meta("train", task_name, ["x"], size, **options)


def filled(
    client: DataPlaneClient,
    ids: list[str],
    declared: int | None = None,
    *,
    tasks: tuple[str, ...] = ("train",),
    group_size: int | None = None,
) -> DataPlaneClient:
    """Return ``client`` after it registered the partition 'train' and put ``ids`` into it.

    ``declared`` is the declared number of samples; None means the number of ``ids``.
    """
    count = len(ids) if declared is None else declared
    client.register_partition("train", ["x"], count, list(tasks), group_size)
    put(client, "train", ids)
    return client


class MakeClientFixtures:
    """Fixture that a subclass overrides: ``make_client``, see `LeaseContract`."""

    max_wait_s = 20.0

    @pytest.fixture
    def make_client(self) -> MakeClient:
        raise NotImplementedError("override the fixture 'make_client'")


class LeaseWaitContract(MakeClientFixtures):
    """Contract: a leased sample is neither ready nor acknowledged."""

    @pytest.fixture
    def leasing(self, make_client: MakeClient) -> DataPlaneClient:
        """Return a client with 1000 s leases, after it put the declared samples a and b."""
        return filled(make_client(claim_lease_s=1000.0), ["a", "b"], tasks=("train", "logprob"))

    def wakes(
        self,
        client: DataPlaneClient,
        held: KVBatchMeta,
        change: Callable[[], object],
        **options: Any,
    ) -> KVBatchMeta:
        """Return the result of a claim that is blocked on ``held`` while ``change`` runs."""
        with ThreadPoolExecutor(1) as pool:
            started = time.monotonic()
            blocked = pool.submit(claim, client, timeout_s=self.max_wait_s, **options)
            client.get_samples(held.sample_ids, "train", ["x"])  # gives the claim time to block
            change()
            answer = blocked.result(2 * self.max_wait_s)
            assert time.monotonic() - started < self.max_wait_s / 2
        return answer

    def test_consumer_loop_processes_what_a_crashed_one_held(self, make_client: MakeClient) -> None:
        client = filled(make_client(claim_lease_s=1.0), ["a", "b"])
        crashed = claim(client, 1)
        acknowledged: list[str] = []
        while (meta := claim(client, 1, timeout_s=self.max_wait_s)).size:
            assert not client.check_consumption_status("train", ["train"])
            try:
                client.acknowledge(meta)
            except LeaseLostError:
                continue  # the machine was too slow; the sample is claimed again
            acknowledged += meta.sample_ids
        assert sorted(acknowledged) == ["a", "b"]
        assert acknowledged[-1:] == crashed.sample_ids
        assert client.check_consumption_status("train", ["train"])

    def test_claim_blocked_on_a_lease_wakes_when_it_expires(self, make_client: MakeClient) -> None:
        client = filled(make_client(claim_lease_s=1.5), ["a", "b"])
        held = claim(client)
        again = self.wakes(client, held, lambda: None)
        assert sorted(again.sample_ids) == ["a", "b"]
        with pytest.raises(LeaseLostError, match="expired"):
            client.acknowledge(held)
        client.acknowledge(again)

    def test_claim_blocked_on_a_renewed_lease_wakes_when_it_expires(
        self, make_client: MakeClient
    ) -> None:
        client = filled(make_client(claim_lease_s=1.0), ["a", "b"])
        held = claim(client)

        def renew() -> None:
            with suppress(LeaseLostError):  # the machine was too slow; the claim still wakes
                client.renew(held)

        assert sorted(self.wakes(client, held, renew).sample_ids) == ["a", "b"]

    def test_claim_blocked_on_a_lease_wakes_when_it_is_released(
        self, leasing: DataPlaneClient
    ) -> None:
        for _ in range(3):
            held = claim(leasing)
            again = self.wakes(leasing, held, partial(leasing.release, held))
            assert sorted(again.sample_ids) == ["a", "b"]
            leasing.release(again)

    def test_claim_blocked_on_a_lease_ends_when_all_is_acknowledged(
        self, leasing: DataPlaneClient
    ) -> None:
        for _ in range(3):
            held = claim(leasing)
            leasing.acknowledge(held.slice(0, 1))
            rest = held.slice(1, 2)
            assert self.wakes(leasing, rest, partial(leasing.acknowledge, rest)).size == 0
            leasing.clear_samples(["a", "b"], "train")
            leasing.register_partition("train", ["x"], 2, ["train", "logprob"])
            put(leasing, "train", ["a", "b"])

    def test_renewed_lease_keeps_others_waiting(self, leasing: DataPlaneClient) -> None:
        held = claim(leasing)
        leasing.renew(held)
        with pytest.raises(ClaimTimeoutError):
            claim(leasing, timeout_s=SOON_S)
        leasing.acknowledge(held)
        assert claim(leasing, timeout_s=self.max_wait_s).size == 0

    def test_timed_out_claim_names_holders_and_first_expiry(self, leasing: DataPlaneClient) -> None:
        held = [claim(leasing, 1), claim(leasing, 1)]
        with pytest.raises(TimeoutError) as caught:
            claim(leasing, 8, timeout_s=SOON_S)
        error = caught.value
        assert isinstance(error, ClaimTimeoutError)
        assert (error.ready, error.leased, error.missing) == (0, 2, 2)
        assert error.holders == {process_name(): 2}
        assert error.first_expiry_s is not None
        assert 900 < error.first_expiry_s <= 1000
        for expected_text in (
            f"2 are leased: 2 by '{process_name()}' (this process)",
            "the first lease expires in",
            "acknowledge or release",
        ):
            assert expected_text in str(error)
        for meta in held:
            leasing.acknowledge(meta)  # the claim that timed out took nothing

    def test_claim_that_does_not_block_does_not_wait_for_leases(
        self, leasing: DataPlaneClient
    ) -> None:
        claim(leasing)
        started = time.monotonic()
        assert claim(leasing, blocking=False, timeout_s=self.max_wait_s).size == 0
        assert claim(leasing, wait_for_leased=False, timeout_s=self.max_wait_s).size == 0
        assert time.monotonic() - started < self.max_wait_s / 2

    def test_ready_remainder_is_returned_while_others_are_leased(
        self, leasing: DataPlaneClient
    ) -> None:
        held = claim(leasing, 1)
        rest = claim(leasing, 2, timeout_s=self.max_wait_s)
        assert sorted(held.sample_ids + rest.sample_ids) == ["a", "b"]

    def test_leases_of_one_task_do_not_block_another(self, leasing: DataPlaneClient) -> None:
        claim(leasing)
        other = claim(leasing, task_name="logprob")
        assert not leasing.check_consumption_status("train", ["logprob"])
        leasing.acknowledge(other)
        assert leasing.check_consumption_status("train", ["logprob"])
        assert not leasing.check_consumption_status("train", ["logprob", "train"])
        assert claim(leasing, task_name="logprob", timeout_s=self.max_wait_s).size == 0
        with pytest.raises(ClaimTimeoutError):
            claim(leasing, timeout_s=SOON_S)

    def test_consumption_is_complete_when_acknowledged(self, leasing: DataPlaneClient) -> None:
        held = claim(leasing)
        assert not leasing.check_consumption_status("train", ["train"])
        leasing.acknowledge(held.slice(0, 1))
        assert not leasing.check_consumption_status("train", ["train"])
        leasing.acknowledge(held.slice(1, 2))
        assert leasing.check_consumption_status("train", ["train"])

    def test_cleared_lease_is_no_longer_waited_for(self, leasing: DataPlaneClient) -> None:
        held = claim(leasing)
        clear = partial(leasing.clear_samples, held.sample_ids, "train", force=True)
        assert self.wakes(leasing, held, clear).size == 0

    def test_released_group_is_claimed_completely(self, make_client: MakeClient) -> None:
        client = filled(
            make_client(claim_lease_s=1000.0),
            ["p0_g0", "p0_g1", "p1_g0", "p1_g1"],
            group_size=2,
        )
        held, other = claim(client), claim(client)
        with pytest.raises(ClaimTimeoutError) as caught:
            claim(client, timeout_s=SOON_S)
        assert caught.value.leased == 4
        client.acknowledge(other)
        again = self.wakes(client, held, partial(client.release, held))
        assert sorted(again.sample_ids) == sorted(held.sample_ids)

    def test_group_larger_than_the_batch_is_named(self, make_client: MakeClient) -> None:
        client = filled(
            make_client(claim_lease_s=1000.0), ["p0_g0", "p0_g1", "p0_g2"], group_size=2
        )
        for blocking in (True, False):
            with pytest.raises(InvalidRequestError, match=r"group 'p0' has 3 .* batch_size is 2"):
                claim(client, blocking=blocking)
        client.register_partition("train", ["x"], 9, ["train"], grpo_group_size=2)
        with pytest.raises(ClaimTimeoutError, match=r"group 'p0' has 3 .* batch_size is 2"):
            claim(client, timeout_s=SOON_S)
        assert claim(client, 4, blocking=False).size == 3

    def test_only_leases_that_match_the_filter_are_waited_for(
        self, make_client: MakeClient
    ) -> None:
        client = make_client(claim_lease_s=1000.0)
        client.register_partition("train", ["x"], 2, ["train"])
        tags = [{"version": 1}, {"version": 2}]
        client.put_samples(["a", "b"], "train", batch(2, x=torch.ones(2)), tags)
        claim(client)
        newer = TagFilter("version", ">=", 3)
        assert claim(client, where=[newer], timeout_s=self.max_wait_s).size == 0
        with pytest.raises(ClaimTimeoutError):
            claim(client, where=[TagFilter("version", ">=", 2)], timeout_s=SOON_S)

    def test_rank_waits_for_what_another_rank_holds(self, leasing: DataPlaneClient) -> None:
        ranks = [{"dp_rank": rank, "dp_world": 2} for rank in (0, 1)]
        first, second = claim(leasing, 1, **ranks[0]), claim(leasing, 1, **ranks[1])
        leasing.acknowledge(first)
        with pytest.raises(ClaimTimeoutError) as caught:
            claim(leasing, 1, **ranks[0], timeout_s=SOON_S)
        assert (caught.value.leased, caught.value.missing) == (1, 1)
        leasing.acknowledge(second)
        assert claim(leasing, 1, **ranks[0], timeout_s=self.max_wait_s).size == 0

    def test_rank_gets_the_samples_of_a_dead_rank(self, make_client: MakeClient) -> None:
        client = filled(make_client(claim_lease_s=0.5), ["a", "b", "c"])
        acknowledged: list[str] = []
        options: dict[str, Any] = {"dp_rank": 1, "dp_world": 2, "timeout_s": self.max_wait_s}
        while (meta := claim(client, 1, **options)).size:
            try:
                client.acknowledge(meta)
            except LeaseLostError:
                continue
            acknowledged += meta.sample_ids
        assert sorted(acknowledged) == ["a", "b", "c"]

    def test_concurrent_consumer_loops_acknowledge_each_sample_once(
        self, make_client: MakeClient
    ) -> None:
        client = make_client(claim_lease_s=1000.0)
        ids = [f"s{i}" for i in range(30)]
        client.register_partition("train", ["x"], len(ids), ["train"])
        abandoned = 5

        def consume(number: int) -> list[str]:
            done: list[str] = []
            while (meta := claim(client, 4, timeout_s=self.max_wait_s)).size:
                if number == 0 and not done:
                    client.release(meta.slice(0, 1))  # release one sample, process the others
                    meta = meta.drop([0]) or meta.slice(0, 0)
                client.acknowledge(meta)
                done += meta.sample_ids
            return done

        with ThreadPoolExecutor(3) as pool:
            put(client, "train", ids[:abandoned])
            held = claim(client, abandoned)
            loops: list[Future[list[str]]] = [pool.submit(consume, number) for number in range(3)]
            put(client, "train", ids[abandoned:])
            client.release(held)
            done = [each for loop in loops for each in loop.result(2 * self.max_wait_s)]
        assert sorted(done) == sorted(ids)
        assert client.check_consumption_status("train", ["train"])


class NamedClaimContract(LeaseWaitContract):
    """Contract of clients with ``capabilities.named_claims`` and leases.

    A subclass provides the fixture ``make_client``, as for `LeaseContract`.
    """

    def test_claim_of_named_samples_waits_for_their_holder(self, leasing: DataPlaneClient) -> None:
        held = claim(leasing, sample_ids=["b", "a"], dp_rank=1)
        assert held.sample_ids == ["b", "a"]
        named: dict[str, Any] = {"sample_ids": ["a"], "size": 1}
        with pytest.raises(ClaimTimeoutError, match="1 are leased") as caught:
            claim(leasing, timeout_s=SOON_S, **named)
        assert (caught.value.missing, caught.value.leased) == (1, 1)
        with pytest.raises(ClaimTimeoutError, match="1 of the named samples are not in the"):
            claim(leasing, timeout_s=SOON_S, sample_ids=["a", "c"])
        again = self.wakes(leasing, held, partial(leasing.release, held), **named)
        assert again.sample_ids == ["a"]
        leasing.acknowledge(again)
        with pytest.raises(InvalidRequestError, match="acknowledged 1 of the 1 named samples: 'a'"):
            claim(leasing, **named)

    @pytest.mark.parametrize(
        "wrong",
        [
            {"sample_ids": ["a"]},
            {"sample_ids": ["a", "a"]},
            {"sample_ids": ["a", "b"], "seed": 1},
            {"sample_ids": ["a", "b"], "dp_rank": 0, "dp_world": 2},
            {"sample_ids": ["a", "b"], "where": [TagFilter("v", "==", 1)]},
        ],
        ids=str,
    )
    def test_claim_of_named_samples_refuses_contradictions(
        self, leasing: DataPlaneClient, wrong: dict[str, Any]
    ) -> None:
        with pytest.raises(InvalidRequestError, match=r"sample_ids|more than once"):
            claim(leasing, **wrong)
        assert claim(leasing).size == 2
