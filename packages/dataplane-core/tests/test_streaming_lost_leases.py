"""Despite lost leases, samples are delivered once, and acknowledged only from saved states."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from streaming_parts import SETUP, commit_all, counts, dataset, ids, leased, store
from tensordict import TensorDict

from dataplane_core import (
    InMemoryDataPlaneClient,
    LeaseLostError,
    StreamingDataLoader,
    StreamingDataset,
    UnavailableError,
)


def loader(make_client=None, *, size=2, acknowledge_on="commit", **options):
    own = {name: options.pop(name) for name in ("kind", "timeout_s") if name in options}
    return StreamingDataLoader(
        dataset(make_client or leased(), size, **own),
        acknowledge_on=acknowledge_on,
        renew_every_s=1000.0,
        **options,
    )


def lose(client, place=0):
    """End a claim, by default the oldest, as if its lease had expired."""
    claims = client.inspector.list_claims("p")
    if claims:
        client.inspector.end_claim("p", claims[place % len(claims)].claim, expired_only=False)


def test_unsaved_done_samples_are_not_acknowledged():
    client = store(4)
    with loader() as trained:
        assert len(ids(trained)) == 4
        lose(client)
        assert ids(trained) == []
        assert counts(client) == (0, 4, 0)
    with loader() as restarted:  # without a saved state
        assert len(ids(restarted)) == 4
    assert counts(client) == (4, 0, 0)


@pytest.mark.parametrize("saved", ["before", "after"])
def test_reclaimed_samples_are_acknowledged_by_their_commit(saved):
    client = store(4)
    with loader() as trained:
        assert len(ids(trained)) == 4
        if saved == "before":
            trained.state_dict()
        lose(client)
        assert ids(trained) == []
        if saved == "after":
            trained.commit()
            assert counts(client) == (0, 4, 0)
            trained.state_dict()
        trained.commit()
        assert counts(client) == (0, 0, 4)


def test_commit_acknowledges_only_samples_of_its_state():
    client = store(4)
    with loader(leased(1.0)) as trained:
        batches = iter(trained)
        _, first = next(batches)
        trained.ack(first)
        trained.state_dict()
        assert len(ids(batches)) == 2
        lose(client)
        lose(client)
        trained.dataset.batch_size = 4
        assert ids(trained) == []
        trained.commit()
        assert counts(client) == (0, 2, 2)
        [claim] = client.inspector.list_claims("p")
        assert claim.samples == 2
        commit_all(trained)
        assert counts(client) == (0, 0, 4)


def test_commit_acknowledges_nothing_in_the_next_partition():
    client = store(2)
    client.register_partition("q", ["x"], 2, ["a"])
    fields = TensorDict({"x": torch.zeros(2)}, [2])
    client.put_samples(["s00", "s01"], "q", fields)
    with loader() as trained:
        ids(trained)
        commit_all(trained)
        trained.next_partition("q")
        assert len(ids(trained)) == 2
        trained.commit()  # no saved state has them
        assert client.inspector.count_samples("q", "a", ["x"]).acknowledged == 0


def test_done_sample_is_not_delivered_again():
    client = store(6)
    with loader() as trained:
        batches = iter(trained)
        seen = []
        for number, (_, meta) in enumerate(batches):
            seen += meta.sample_ids
            if number == 1:
                trained.state_dict()
                lose(client)
                with pytest.raises(LeaseLostError, match="2 of 2 samples"):
                    trained.commit()
        assert sorted(seen) == [f"s{i:02d}" for i in range(6)]
        assert counts(client) == (0, 4, 2)


@pytest.mark.parametrize("collated", [False, True])
def test_partly_done_batch_delivers_the_rest(collated):
    client = store(5)
    collate = (lambda batch, meta: (batch, meta)) if collated else None
    with loader(collate=collate) as trained:
        batches = iter(trained)
        _, first = next(batches)
        trained.ack(first)
        lose(client)
        trained.dataset.batch_size = 3
        batch, rest = next(batches)
        assert (rest.sample_ids, batch["x"].tolist()) == (["s02"], [2.0])
        batches.close()
        assert counts(client) == (3, 2, 0)  # the current batch was released, done samples were not
        assert ids(trained) == ["s02", "s03", "s04"]


def test_a_part_of_a_batch_can_be_acknowledged_before_the_rest():
    client = store(4)
    with loader(acknowledge_on="next") as trained:
        batches = iter(trained)
        _, first = next(batches)
        trained.ack(first.slice(0, 1))
        assert counts(client) == (2, 1, 1)
        next(batches)
        assert counts(client) == (0, 2, 2)


def test_older_state_delivers_later_samples_again():
    client = store(4)
    with loader() as trained:
        batches = iter(trained)
        _, first = next(batches)
        trained.ack(first)
        state = trained.state_dict()
        _, second = next(batches)
        trained.ack(second)
        batches.close()
        trained.load_state_dict(state)
        assert ids(trained) == second.sample_ids
        commit_all(trained)
    assert counts(client) == (0, 0, 4)


class Losing(StreamingDataset):
    """Dataset that loses the first lease of a round after the fetch."""

    def batches(self, client, on_claim, **options):
        for number, (batch, meta) in enumerate(super().batches(client, on_claim, **options)):
            if number == 0:
                client.release(meta)
            yield batch, meta


def test_lost_done_samples_are_acknowledged_when_reclaimed():
    client = store(4)
    with loader() as trained:
        batches = iter(trained)
        trained.ack(next(batches)[1])
        state = trained.state_dict()
    with loader(kind=Losing) as resumed:
        resumed.load_state_dict(state)
        assert ids(resumed) == ["s02", "s03"]
        assert counts(client) == (0, 2, 2)


class Overtaken(StreamingDataset):
    """Dataset whose batches another consumer trains on before their turn."""

    def batches(self, client, on_claim, **options):
        for batch, meta in super().batches(client, on_claim, **options):
            client.release(meta)
            other = leased()()
            other.acknowledge(other.claim_meta("p", "a", ["x"], meta.size))
            yield batch, meta


@pytest.mark.parametrize("acknowledge_on", ["next", "commit"])
def test_batch_that_lost_its_lease_is_not_delivered(acknowledge_on):
    client = store(4)
    with loader(kind=Overtaken, acknowledge_on=acknowledge_on) as trained:
        assert ids(trained) == []
        assert trained.state_dict()["done"] == []
    assert counts(client) == (0, 0, 4)


class Interrupted(StreamingDataset):
    """Dataset that stops at its first claim, which is lost, and continues at the next call."""

    stopped = False

    def batches(self, client, on_claim, **options):
        for batch, meta in super().batches(client, on_claim, **options):
            if not self.stopped:
                self.stopped = True
                client.release(meta)
                yield batch, meta
                return
            yield batch, meta


@pytest.mark.parametrize("acknowledge_on", ["next", "commit"])
def test_batch_lost_before_its_turn_is_claimed_again(acknowledge_on):
    client = store(4)
    with loader(kind=Interrupted, acknowledge_on=acknowledge_on, size=4) as trained:
        assert ids(trained) == ["s00", "s01", "s02", "s03"]
        commit_all(trained)
    assert counts(client) == (0, 0, 4)


class LosingAll(StreamingDataset):
    """Dataset that loses every lease."""

    def batches(self, client, on_claim, **options):
        for batch, meta in super().batches(client, on_claim, **options):
            client.release(meta)
            yield batch, meta


def test_loader_that_loses_every_batch_raises():
    client = store(4)
    with (
        loader(kind=LosingAll, timeout_s=0.1) as trained,
        pytest.raises(LeaseLostError, match="each batch lost its lease before it could be"),
    ):
        ids(trained)
    assert counts(client) == (4, 0, 0)


class Clearing(StreamingDataset):
    """Dataset of which a sample per batch is cleared before its turn."""

    def batches(self, client, on_claim, **options):
        for batch, meta in super().batches(client, on_claim, **options):
            client.clear_samples(meta.sample_ids[:1], "p", force=True)
            yield batch, meta


def test_batch_with_a_cleared_sample_delivers_the_rest():
    client = store(4)
    with loader(kind=Clearing) as trained:
        delivered = [(batch["x"].tolist(), meta.sample_ids) for batch, meta in trained]
        assert delivered == [([1.0], ["s01"]), ([3.0], ["s03"])]
        commit_all(trained)
    assert counts(client) == (0, 0, 2)


class Away(InMemoryDataPlaneClient):
    """Client that is unavailable for renewals."""

    def renew(self, meta):
        raise UnavailableError("away")


def test_batch_is_delivered_while_the_store_is_unavailable():
    client = store(4)
    away = functools.partial(Away, {**SETUP, "claim_lease_s": 1000.0}, bootstrap=False)
    with loader(away, acknowledge_on="next") as trained:
        assert ids(trained) == ["s00", "s01", "s02", "s03"]
    assert counts(client) == (0, 0, 4)


def test_commit_after_a_withdrawal_acknowledges_the_others():
    client = store(8)
    with loader(leased(1.0), size=4) as trained:
        assert len(ids(trained)) == 8
        client.withdraw_samples(["s00"], "p")
        trained.state_dict()
        with pytest.raises(LeaseLostError, match=r"1 of 8 samples .*: 's00'$"):
            trained.commit()
        assert counts(client) == (0, 0, 7)
        trained.commit()


@pytest.mark.parametrize("acknowledge_on", ["next", "commit"])
def test_rest_of_a_batch_is_done_after_a_withdrawal(acknowledge_on):
    client = store(4)
    with loader(acknowledge_on=acknowledge_on, size=4) as trained:
        batches = iter(trained)
        _, meta = next(batches)
        client.withdraw_samples(["s01"], "p")
        with pytest.raises(LeaseLostError, match="'s01'") as caught:
            trained.ack(meta)
        assert caught.value.sample_ids == ["s01"]
        assert trained.state_dict()["done"] == ["s00", "s02", "s03"]
        trained.commit()
        assert counts(client) == (0, 0, 3)


class Late(StreamingDataset):
    """Dataset that reports claims again after they ended, like a late worker's report."""

    def batches(self, client, on_claim, **options):
        metas = []
        for batch, meta in super().batches(client, on_claim, **options):
            metas.append(meta)
            yield batch, meta
        for meta in metas:
            on_claim(meta)


def test_late_report_hides_no_dead_consumer():
    client = store(8)
    dead = leased(1.0)().claim_meta("p", "a", ["x"], 4)
    with loader(acknowledge_on="next", kind=Late) as alive:
        got = ids(alive)
    assert sorted(got) == [f"s{i:02d}" for i in range(8)]
    assert set(got[-4:]) == {*dead.sample_ids}
    assert counts(client) == (0, 0, 8)


def test_lease_taken_by_another_is_not_counted():
    client = store(4)
    with loader() as trained:
        batches = iter(trained)
        _, first = next(batches)
        trained.ack(first)
        lose(client)
        dead = leased(1.0)().claim_meta("p", "a", ["x"], 2)
        assert dead.sample_ids == first.sample_ids
        assert len(ids(batches)) == 2
        assert counts(client) == (0, 4, 0)
        commit_all(trained)  # also samples of the dead consumer
    assert counts(client) == (0, 0, 4)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["train", "train", "train", "save", "commit", "lose", "iterate", "size"]),
        st.integers(1, 4),
    ),
    max_size=30,
)


@given(steps=STEPS)
def test_saved_steps_saw_every_sample_once_despite_losses(steps):
    client = store(12)
    first = loader(size=3)
    batches, trained, saved = iter(first), [], ([], first.state_dict())
    for step, number in steps:
        if step == "train":
            for _, meta in batches:
                first.ack(meta)
                trained += meta.sample_ids
                break
        elif step == "save":
            saved = list(trained), first.state_dict()
        elif step == "commit":
            # The lost samples are in a saved state: they are claimed here and acknowledged.
            with contextlib.suppress(LeaseLostError):
                first.commit()
        elif step == "lose":
            lose(client, number)
        elif step == "iterate":
            batches.close()
            batches = iter(first)
        else:
            first.dataset.batch_size = number
        assert len(trained) == len(set(trained))
    while client.inspector.list_claims("p"):  # it is killed
        lose(client)
    with loader(size=3) as second:
        second.load_state_dict(saved[1])
        resumed = saved[0] + ids(second)
        assert sorted(resumed) == [f"s{i:02d}" for i in range(12)]
        commit_all(second)
    assert counts(client) == (0, 0, 12)
    batches.close()
    first.close()
