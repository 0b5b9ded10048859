"""Clients that stop or die between any two steps of a put, a claim, a get and a clear. No Ray."""

from __future__ import annotations

import threading

import pytest

from dataplane_core import CapacityExceeded, DeadlineExceededError, MissingDataError

SOON_S = 5.0

transports = pytest.mark.parametrize("transport", ["shm", "tcp"])


@transports
def test_a_producer_stopped_at_any_step_of_a_put_shows_nothing_until_it_is_continued(
    stepped, transport
):
    producer = stepped.client("put()", transport)
    for step in ("begun", "half written", "written"):
        producer.go_to(step)
        producer.stop()
        with pytest.raises(MissingDataError):
            stepped.get("a")
        assert stepped.claim(2).sample_ids == []
        stepped.others_go_on()
        assert stepped.counts().put - stepped.counts().cleared == 0
        producer.wake()
        producer.go_on()
    assert producer.finish() == "done"
    assert stepped.get("a") == stepped.get("b") == {1}


@pytest.mark.parametrize("step", ["begun", "half written", "written"])
def test_a_producer_killed_before_its_commit_leaves_neither_rows_nor_bytes(stepped, step):
    producer = stepped.client("put()")
    producer.go_to(step)
    assert stepped.used() == 2 * stepped.row_nbytes
    producer.kill()
    stepped.until(lambda: stepped.used() == 0)
    with pytest.raises(MissingDataError):
        stepped.get("a")
    stepped.others_go_on()


def test_a_put_that_was_committed_outlives_its_producer(stepped):
    producer = stepped.client("put()")
    producer.go_to("committed")
    producer.kill()
    assert stepped.claim(2, timeout_s=SOON_S).sample_ids == ["a", "b"]
    assert stepped.get("a") == stepped.get("b") == {1}


def test_a_producer_stopped_before_it_told_transfer_queue_holds_up_nothing_but_the_ids(stepped):
    producer = stepped.client("put(entering=True)")
    producer.go_to("committed")
    producer.stop()
    assert stepped.get("a") == {1}
    assert stepped.claim(2).sample_ids == ["a", "b"]
    stepped.others_go_on()
    stepped.put(["b"], 3)
    assert stepped.clear(["a"], timeout_s=0.1) == 1
    with pytest.raises(DeadlineExceededError, match="still being cleared"):
        stepped.put(["a"], timeout_s=0.1)
    producer.wake()
    producer.go_on()
    assert producer.finish() == "done"
    stepped.put(["a"], 4)
    assert (stepped.get("a"), stepped.get("b")) == ({4}, {3})


def test_a_producer_killed_before_it_told_transfer_queue_loses_nothing(stepped):
    producer = stepped.client("put(entering=True)")
    producer.go_to("committed")
    producer.kill()
    assert stepped.claim(2, timeout_s=SOON_S).sample_ids == ["a", "b"]
    assert stepped.get("a") == stepped.get("b") == {1}
    assert stepped.clear(["a", "b"]) == 2
    stepped.put(["a", "b"], 4)
    assert stepped.get("a") == {4}


def test_the_room_of_a_stopped_producer_stays_its_own(stepped):
    producer = stepped.client("put()")
    producer.go_to("half written")
    producer.stop()
    with pytest.raises(CapacityExceeded):
        stepped.put([f"s{i}" for i in range(15)], timeout_s=0.1)
    stepped.put([f"s{i}" for i in range(14)], 5)
    producer.wake()
    producer.go_on()
    assert producer.finish() == "done"
    assert stepped.get("a") == stepped.get("b") == {1}
    assert stepped.get("s0") == stepped.get("s13") == {5}


def test_two_puts_of_one_sample_never_mix_though_one_is_stopped_in_between(stepped):
    producer = stepped.client("put()")
    producer.go_to("half written")
    producer.stop()
    stepped.put(["b"], 7)
    assert stepped.get("b") == {7}
    producer.wake()
    producer.go_on()
    assert producer.finish() == "done"  # the later commit counts
    assert stepped.get("a") == stepped.get("b") == {1}
    assert stepped.clear(["a", "b"]) == 2
    assert stepped.used() == 0


def test_a_stopped_producer_whose_partition_is_cleared_meanwhile_gets_a_typed_error(stepped):
    producer = stepped.client("put()")
    producer.go_to("written")
    producer.stop()
    stepped.clear(None)
    stepped.register("p")
    stepped.clear(None)
    producer.wake()
    producer.go_on()
    assert producer.finish() == "PartitionNotFoundError"
    stepped.until(lambda: stepped.used() == 0)


def test_a_producer_stopped_for_longer_than_its_lease_cannot_overwrite(stepped):
    stepped.put(["a", "b"], 7)
    # It claims when it has started, so that the lease has only its put to outlast.
    producer = stepped.client("put(claim(1.0, lease_s=2.0).token)")
    assert producer.says() == "waiting"
    producer.go_to("written")
    producer.stop()
    assert stepped.claim(2, timeout_s=SOON_S).sample_ids == ["a", "b"]
    producer.wake()
    producer.go_on()
    assert producer.finish() == "LeaseLostError"
    assert stepped.get("a") == stepped.get("b") == {7}
    stepped.until(lambda: stepped.used() == 2 * stepped.row_nbytes)


def test_what_a_claimer_was_given_while_it_was_stopped_is_there_when_it_is_continued(stepped):
    claimer = stepped.client("step(' '.join(claim(1.0).sample_ids))")
    assert claimer.says() == "waiting"
    claimer.until_it_sleeps()
    claimer.stop()
    stepped.put(["a", "b"])
    assert stepped.claim(2).sample_ids == []  # they are its own
    claimer.wake()
    assert claimer.says() == "a b"


def test_what_a_stopped_claimer_was_given_under_a_lease_goes_to_others(stepped):
    claimer = stepped.client(
        "c = claim(60.0, lease_s=0.3); step('claimed'); "
        "link.ask('acknowledge', p.Settle('p', c.token, c.sample_ids, 'acknowledge'), object)"
    )
    assert claimer.says() == "waiting"
    claimer.until_it_sleeps()
    claimer.stop()
    stepped.put(["a", "b"])
    assert stepped.claim(2, timeout_s=SOON_S).sample_ids == ["a", "b"]
    claimer.wake()
    assert claimer.finish() == "LeaseLostError"


def test_a_claimer_stopped_past_its_deadline_is_told_so_and_takes_nothing(stepped):
    claimer = stepped.client("claim(0.2)")
    assert claimer.says() == "waiting"
    claimer.until_it_sleeps()
    claimer.stop()
    threading.Event().wait(0.5)  # the passing of its deadline is what this is about
    stepped.put(["a", "b"])
    assert stepped.claim(2).sample_ids == ["a", "b"]
    claimer.wake()
    assert claimer.finish() == "ClaimTimeoutError"


@transports
def test_a_reader_stopped_at_any_step_of_a_get_reads_what_it_asked_for(stepped, transport):
    """Though it is overwritten or cleared, and others use the room, meanwhile."""
    stepped.put(["a", "b"], 7)
    stepped.claim(2)
    reader = stepped.client("get()", transport)
    for step in ("pinned", "half read"):
        reader.go_to(step)
        reader.stop()
        stepped.others_go_on()
        if step == "pinned":
            stepped.put(["a"], 8)
        else:
            stepped.clear(["a", "b"], timeout_s=0.1)
        for _ in range(3):
            stepped.put(["full"] + [f"s{i}" for i in range(11)], 9)
            assert stepped.clear(["full"] + [f"s{i}" for i in range(11)], timeout_s=0.1) == 12
        reader.wake()
        reader.go_on()
    assert reader.says() == "values [7]"
    stepped.until(lambda: stepped.clear(["nothing"]) == 0 and stepped.used() == 0)


@pytest.mark.parametrize("step", ["pinned", "half read"])
def test_a_reader_killed_in_a_get_keeps_no_bytes(stepped, step):
    stepped.put(["a", "b"])
    reader = stepped.client("get()")
    reader.go_to(step)
    stepped.clear(["a", "b"], timeout_s=0.0)
    assert stepped.used() == 2 * stepped.row_nbytes
    reader.kill()
    stepped.until(lambda: stepped.used() == 0)
    stepped.put(["a", "b"])


def test_a_clearer_stopped_half_way_holds_up_only_the_ids_that_it_clears(stepped):
    stepped.put(["a", "b"])
    stepped.claim(2)
    clearer = stepped.client("clear(['a'])")
    clearer.go_to("waiting")
    clearer.go_to("cleared")
    clearer.stop()
    with pytest.raises(MissingDataError):
        stepped.get("a")
    assert stepped.get("b") == {2}
    stepped.others_go_on()
    with pytest.raises(DeadlineExceededError, match="still being cleared"):
        stepped.put(["a"], timeout_s=0.1)
    assert stepped.clear(["a"]) == 0
    clearer.wake()
    clearer.go_on()
    stepped.put(["a"], 4)
    assert stepped.get("a") == {4}
    assert clearer.finish() == "done"


def test_a_clearer_of_a_whole_partition_that_is_stopped_holds_up_no_other_partition(stepped):
    stepped.register("q")
    stepped.put(["a", "b"])
    clearer = stepped.client("clear(None)")
    clearer.go_to("waiting")
    clearer.go_to("cleared")
    clearer.stop()
    stepped.put(["a"], 4, partition="q")
    assert stepped.get("a", "q") == {4}
    assert stepped.clear(None, partition="q") == 1
    stepped.register("p")
    with pytest.raises(DeadlineExceededError, match="still being cleared"):
        stepped.put(["z"], timeout_s=0.1)
    clearer.wake()
    clearer.go_on()
    assert clearer.finish() == "done"
    stepped.put(["z"], 4)
    assert stepped.get("z") == {4}


def test_a_clearer_stopped_while_it_waits_for_a_reader_finishes_when_both_go_on(stepped):
    stepped.put(["a", "b"])
    reader = stepped.client("get()")
    reader.go_to("pinned")
    clearer = stepped.client("clear(['a', 'b'])")
    assert clearer.says() == "waiting"
    stepped.until(lambda: stepped.counts().cleared == 2)
    clearer.stop()
    reader.stop()
    stepped.others_go_on()
    clearer.wake()
    reader.wake()
    reader.go_on()
    reader.go_to("half read")
    reader.go_on()
    clearer.go_to("cleared")
    clearer.go_on()
    assert clearer.finish() == "done"
    stepped.put(["a", "b"], 4)
    assert stepped.get("a") == {4}
