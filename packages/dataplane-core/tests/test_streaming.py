"""Every sample reaches the training loop, which decides when it is acknowledged."""

import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from streaming_parts import (
    ATTACH,
    SETUP,
    TIMEOUT_S,
    commit_all,
    committing,
    counts,
    dataset,
    ids,
    leased,
    put,
    store,
)

from dataplane_core import (
    ClaimTimeoutError,
    InMemoryDataPlaneClient,
    InvalidRequestError,
    LeaseLostError,
    StreamingDataLoader,
    TagFilter,
    UnavailableError,
)


@pytest.mark.parametrize("make_client", [ATTACH, leased()])
def test_every_sample_of_the_partition_is_delivered_once(make_client):
    client = store()
    with StreamingDataLoader(dataset(make_client)) as loader:
        batches = [(batch["x"].tolist(), meta.sample_ids) for batch, meta in loader]
    assert [len(ids) for _, ids in batches] == [4, 4, 2]
    assert [x for values, _ in batches for x in values] == list(range(10))
    assert counts(client) == (0, 0, 10)


def test_batch_is_acknowledged_when_the_next_is_requested():
    client = store()
    with StreamingDataLoader(dataset(leased())) as loader:
        batches = iter(loader)
        _, first = next(batches)
        assert counts(client) == (6, 4, 0)
        _, second = next(batches)
        assert counts(client) == (2, 4, 4)
        loader.ack(second)
        assert counts(client) == (2, 0, 8)
        loader.ack(first)
        next(batches)
        assert counts(client) == (0, 2, 8)
    assert counts(client) == (2, 0, 8)


def test_error_in_the_loop_releases_the_current_batch():
    client = store()

    def train() -> None:
        with StreamingDataLoader(dataset(leased())) as loader:
            for number, _ in enumerate(loader):
                1 / (1 - number)

    with pytest.raises(ZeroDivisionError):
        train()
    assert counts(client) == (6, 0, 4)


def test_a_batch_held_longer_than_its_lease_is_renewed():
    client = store(4)
    with StreamingDataLoader(dataset(leased(0.2)), renew_every_s=0.02) as loader:
        for _, meta in loader:
            time.sleep(0.6)  # not a wait for a state: three times the lease passes
            assert counts(client) == (0, 4, 0)
            loader.ack(meta)


def test_lost_lease_raises_at_the_acknowledgment():
    client = store(4)
    with StreamingDataLoader(dataset(leased())) as loader:
        batches = iter(loader)
        _, meta = next(batches)
        client.release(meta)
        with pytest.raises(LeaseLostError):
            next(batches)


def test_loader_waits_for_samples_of_a_dead_consumer():
    client = store(6)
    leased(0.3)().claim_meta("p", "a", ["x"], 4)
    with StreamingDataLoader(dataset(leased())) as loader:
        got = ids(loader)
    assert sorted(got) == [f"s{i:02d}" for i in range(6)]
    assert counts(client) == (0, 0, 6)


def test_dataset_delivers_what_a_crashed_consumer_held():
    client = store(6)
    leased(0.3)().claim_meta("p", "a", ["x"], 4)
    consumer, got = leased()(), []
    for batch, meta in dataset(leased()):
        assert batch["x"].tolist() == [float(each[1:]) for each in meta.sample_ids]
        got += meta.sample_ids
        consumer.acknowledge(meta)
    assert sorted(got) == [f"s{i:02d}" for i in range(6)]
    assert client.check_consumption_status("p", ["a"])


def test_dataset_without_acknowledgment_times_out():
    store(4)
    batches = iter(dataset(leased(), timeout_s=0.1))
    next(batches)
    with pytest.raises(ClaimTimeoutError, match=r"4 are leased: 4 by '.*' \(this process\)"):
        next(batches)


def test_loader_waits_for_others_until_the_deadline():
    store(4)
    leased()().claim_meta("p", "a", ["x"], 1)
    with StreamingDataLoader(dataset(leased(), timeout_s=0.1)) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(ClaimTimeoutError, match="1 are leased: 1 by") as caught:
            next(batches)
    assert list(caught.value.holders.values()) == [1]


def test_claim_timeout_keeps_the_attributes_of_the_error():
    client = store(2)
    client.register_partition("p", ["x"], 9, ["a"])
    with StreamingDataLoader(dataset(timeout_s=0.02)) as loader:
        with pytest.raises(ClaimTimeoutError) as caught:
            next(iter(loader))
        assert caught.value.ready == 2


def test_filter_and_collate_apply_to_every_partition():
    client = store()
    client.register_partition("second", ["x"], 3, ["a"])
    put(client, "second", 3)
    odd = dataset(where=[TagFilter("odd", "==", 1)], seed=3)
    with StreamingDataLoader(odd, collate=lambda batch, meta: batch["x"].tolist()) as loader:
        assert sorted(x for values in loader for x in values) == [1, 3, 5, 7, 9]
        loader.next_partition("second")
        assert sorted(x for values in loader for x in values) == [1]


def test_state_of_another_task_is_refused():
    store()
    with StreamingDataLoader(dataset()) as loader:
        with pytest.raises(InvalidRequestError, match="task 'logprob'"):
            loader.load_state_dict({**loader.state_dict(), "task_name": "logprob"})
        batches = iter(loader)
        next(batches)
        with pytest.raises(InvalidRequestError, match="end the iteration"):
            loader.next_partition("other")
        with pytest.raises(InvalidRequestError, match="end the iteration"):
            loader.load_state_dict(loader.state_dict())
        batches.close()
        loader.load_state_dict(loader.state_dict())


def test_done_samples_are_acknowledged_but_not_delivered_again():
    client = store(8)
    with committing(dataset(leased())) as loader:
        batches = iter(loader)
        next(batches)
        next(batches)  # the first is done now
        state = json.loads(json.dumps(loader.state_dict()))
        assert counts(client) == (0, 8, 0)
    assert counts(client) == (8, 0, 0)  # closed without a commit: all are claimable again
    with committing(dataset(leased())) as loader:
        loader.load_state_dict(state)
        got = ids(loader)
        assert got == ["s04", "s05", "s06", "s07"]
        assert len(loader.state_dict()["done"]) == 8
        loader.commit()
    assert counts(client) == (0, 0, 8)


def test_ranks_that_commit_after_their_loops_all_end():
    client = store(12)
    claimed, ended = threading.Barrier(3), threading.Barrier(3)

    def train(loader: StreamingDataLoader, first: bool) -> list[str]:
        trained = []
        for _, meta in loader:
            trained += meta.sample_ids
            if first:  # each trained before any loop ends
                claimed.wait(TIMEOUT_S)
                first = False
        ended.wait(TIMEOUT_S)  # they save together: none commits before all loops are finished
        commit_all(loader)
        return trained

    with contextlib.ExitStack() as stack:
        loaders = [
            stack.enter_context(committing(dataset(leased()), renew_every_s=0.05)) for _ in range(3)
        ]
        threads = stack.enter_context(ThreadPoolExecutor(3))
        ranks = [threads.submit(train, loader, True) for loader in loaders]
        trained = [rank.result() for rank in ranks]
        assert all(trained)
        assert sorted(itertools.chain(*trained)) == sorted(f"s{i:02d}" for i in range(12))
        assert counts(client) == (0, 0, 12)
        assert [list(loader) for loader in loaders] == [[], [], []]


def test_rank_without_samples_ends_before_others_commit():
    client = store(4)
    with (
        committing(dataset(leased()), renew_every_s=0.05) as live,
        committing(dataset(leased()), renew_every_s=0.05) as other,
    ):
        assert [meta.size for _, meta in live] == [4]
        assert list(other) == []
        assert counts(client) == (0, 4, 0)


def test_samples_of_a_dead_rank_reach_live_ranks():
    client = store(12)
    with (
        committing(dataset(leased()), renew_every_s=0.05) as alive,
        committing(dataset(leased()), renew_every_s=0.05) as loader,
    ):
        batches = iter(alive)
        _, held = next(batches)
        dead = leased(1.0)().claim_meta("p", "a", ["x"], 4)
        got = ids(loader)
        assert sorted(got) == sorted(["s08", "s09", "s10", "s11", *dead.sample_ids])
        commit_all(loader)
        alive.ack(held)
        commit_all(alive)
        assert list(batches) == []
    assert counts(client) == (0, 0, 12)


class KillableClient(InMemoryDataPlaneClient):
    """Client that stops renewing once it is ``dead``."""

    dead = False

    def renew(self, meta):
        if self.dead:
            raise UnavailableError("dead")
        super().renew(meta)


def test_samples_of_a_dead_rank_reach_a_second_iteration():
    client = store(8)
    config = {**SETUP, "claim_lease_s": 1.0}
    killable = KillableClient(config, bootstrap=False)
    with (
        committing(dataset(lambda: killable), renew_every_s=0.05) as killed,
        committing(dataset(leased()), renew_every_s=0.05) as loader,
    ):
        batches = iter(killed)
        _, held = next(batches)
        killed.ack(held)
        assert [meta.size for _, meta in loader] == [4]
        commit_all(loader)
        killable.dead = True
        assert [meta.sample_ids for _, meta in loader] == [held.sample_ids]
        commit_all(loader)
    assert counts(client) == (0, 0, 8)


class WithoutInspection(InMemoryDataPlaneClient):
    """Client without inspection."""

    capabilities = dataclasses.replace(InMemoryDataPlaneClient.capabilities, inspection=False)

    @property
    def inspector(self):
        return SimpleNamespace(count_samples=super().inspector.count_samples)


def test_without_inspection_every_lease_is_waited_for():
    client = store(8)
    attach = functools.partial(
        WithoutInspection,
        {**SETUP, "claim_lease_s": 1000.0},
        bootstrap=False,
    )
    with (
        committing(dataset(attach)) as holder,
        committing(dataset(attach, timeout_s=0.2)) as other,
    ):
        held_batches, batches = iter(holder), iter(other)
        _, held = next(held_batches)
        next(batches)
        with pytest.raises(ClaimTimeoutError, match="4 samples are still leased by other"):
            next(batches)
        holder.ack(held)
        commit_all(holder)
        assert list(other) == []
        commit_all(other)
    assert counts(client) == (0, 0, 8)


@given(lost=st.sets(st.integers(0, 4)))
def test_commit_names_lost_samples_and_acknowledges_the_others(lost):
    client = store(20)
    with committing(dataset(leased())) as loader:
        metas = [meta for _, meta in loader]
        loader.state_dict()
        for place in lost:
            client.release(metas[place])
        gone = [sample_id for place in sorted(lost) for sample_id in metas[place].sample_ids]
        if lost:
            with pytest.raises(LeaseLostError, match=f"{len(gone)} of 20 samples") as caught:
                loader.commit()
            assert all(repr(each) in str(caught.value) for each in gone[:10])
        loader.commit()
        assert counts(client) == (len(gone), 0, 20 - len(gone))
        commit_all(loader)  # lost samples are not retried
        loader.next_partition("p")
    client.close()


def test_failed_commit_can_be_retried(monkeypatch):
    client = store(12)
    with committing(dataset(leased(0.5)), renew_every_s=0.05) as loader:
        metas = [meta for _, meta in loader]
        loader.state_dict()
        client.release(metas[0])
        acknowledge = InMemoryDataPlaneClient.acknowledge

        def away(self, meta):
            if meta is metas[1]:
                raise UnavailableError("away")
            acknowledge(self, meta)

        with monkeypatch.context() as patched:
            patched.setattr(InMemoryDataPlaneClient, "acknowledge", away)
            with pytest.raises(UnavailableError, match="away") as caught:
                loader.commit()
        assert "'s00', 's01', 's02', 's03'" in caught.value.__notes__[0]
        with pytest.raises(InvalidRequestError, match="commit the done samples"):
            loader.next_partition("p")
        time.sleep(1.0)  # not a wait for a state: what was not acknowledged is still renewed
        loader.commit()
        assert counts(client) == (4, 0, 8)


def test_acknowledged_claims_are_neither_kept_nor_renewed(monkeypatch):
    store(40)
    with committing(dataset(leased()), renew_every_s=1000.0) as loader:
        claims = [weakref.ref(meta) for _, meta in loader]
        assert all(claim() is not None for claim in claims)
        commit_all(loader)
        renewed = []
        monkeypatch.setattr(
            InMemoryDataPlaneClient, "renew", lambda client, meta: renewed.append(meta)
        )
        assert list(loader) == []
        assert renewed == []
        gc.collect()
        assert all(claim() is None for claim in claims)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"acknowledge_on": "comit"}, "acknowledge_on is 'comit' .*expected 'next' or 'commit'"),
        ({"renew_every_s": 0}, "renew_every_s is 0; expected more than 0"),
        ({"renew_every_s": "5"}, "renew_every_s is '5' .*expected a number of seconds"),
        ({"num_workers": -1}, "num_workers is -1; expected"),
        ({"prefetch_factor": 0}, "prefetch_factor is 0; expected"),
        ({"batch_timeout_s": "5"}, "batch_timeout_s is '5' .*expected a number of seconds"),
        ({"multiprocessing_context": "clone"}, "multiprocessing_context is 'clone' .*'spawn'"),
    ],
)
def test_wrong_argument_of_the_loader_is_refused_by_name(argument, message):
    with pytest.raises(InvalidRequestError, match=f"StreamingDataLoader: {message}"):
        StreamingDataLoader(dataset(), **argument)
