"""Clients that stop or die between any two steps of a put, a claim, a get and a clear. No Ray."""

from __future__ import annotations

import threading

import pytest

from dataplane_core import CapacityExceeded, DeadlineExceededError, MissingDataError

SOON_S = 5.0

transports = pytest.mark.parametrize("transport", ["shm", "tcp"])


@transports
def test_stopped_producer_shows_nothing_until_it_commits(stepped, transport):
    producer = stepped.client("put()", transport)
    for step in ("begun", "half written", "written"):
        producer.stop_at(step)
        with pytest.raises(MissingDataError):
            stepped.get("a")
        assert stepped.claim(2).sample_ids == []
        stepped.check_other_samples()
        assert stepped.counts().put - stepped.counts().cleared == 0
        producer.proceed()
    assert producer.finish() == "done"
    assert stepped.get("a") == stepped.get("b") == {1}


@pytest.mark.parametrize("step", ["begun", "half written", "written"])
def test_producer_killed_before_commit_leaves_nothing(stepped, step):
    producer = stepped.client("put()")
    producer.run_to(step)
    assert stepped.used() == 2 * stepped.row_nbytes
    producer.kill()
    stepped.until(lambda: stepped.used() == 0)
    with pytest.raises(MissingDataError):
        stepped.get("a")
    stepped.check_other_samples()


def test_committed_put_outlives_its_producer(stepped):
    producer = stepped.client("put()")
    producer.run_to("committed")
    producer.kill()
    assert stepped.claim(2, timeout_s=SOON_S).sample_ids == ["a", "b"]
    assert stepped.get("a") == stepped.get("b") == {1}


def test_capacity_of_a_stopped_producer_stays_reserved(stepped):
    producer = stepped.client("put()")
    producer.stop_at("half written")
    with pytest.raises(CapacityExceeded):
        stepped.put([f"s{i}" for i in range(15)], timeout_s=0.1)
    stepped.put([f"s{i}" for i in range(14)], 5)
    producer.proceed()
    assert producer.finish() == "done"
    assert stepped.get("a") == stepped.get("b") == {1}
    assert stepped.get("s0") == stepped.get("s13") == {5}


def test_overlapping_puts_of_one_sample_never_mix(stepped):
    producer = stepped.client("put()")
    producer.stop_at("half written")
    stepped.put(["b"], 7)
    assert stepped.get("b") == {7}
    producer.proceed()
    assert producer.finish() == "done"  # the later commit counts
    assert stepped.get("a") == stepped.get("b") == {1}
    assert stepped.clear(["a", "b"]) == 2
    assert stepped.used() == 0


def test_producer_of_a_cleared_partition_gets_a_typed_error(stepped):
    producer = stepped.client("put()")
    producer.stop_at("written")
    stepped.clear(None)
    stepped.register("p")
    stepped.clear(None)
    producer.proceed()
    assert producer.finish() == "PartitionNotFoundError"
    stepped.until(lambda: stepped.used() == 0)


def test_producer_with_an_expired_lease_cannot_overwrite(stepped):
    stepped.put(["a", "b"], 7)
    # The child claims after its start-up, so the lease expires during its put.
    producer = stepped.client("put(claim(1.0, lease_s=2.0).token)")
    assert producer.read_line() == "waiting"
    producer.stop_at("written")
    assert stepped.claim(2, timeout_s=SOON_S).sample_ids == ["a", "b"]
    producer.proceed()
    assert producer.finish() == "LeaseLostError"
    assert stepped.get("a") == stepped.get("b") == {7}
    stepped.until(lambda: stepped.used() == 2 * stepped.row_nbytes)


def stopped_claimer(stepped, action):
    """Start a claimer, and stop it once its claim is blocked."""
    claimer = stepped.client(action)
    assert claimer.read_line() == "waiting"
    claimer.wait_until_blocked()
    claimer.stop()
    return claimer


def test_stopped_claimer_keeps_what_it_was_assigned(stepped):
    claimer = stopped_claimer(stepped, "step(' '.join(claim(1.0).sample_ids))")
    stepped.put(["a", "b"])
    assert stepped.claim(2).sample_ids == []  # assigned to the stopped claimer
    claimer.resume()
    assert claimer.read_line() == "a b"


def test_expired_lease_of_a_stopped_claimer_is_redelivered(stepped):
    claimer = stopped_claimer(
        stepped,
        "c = claim(60.0, lease_s=0.3); step('claimed'); "
        "link.ask('acknowledge', p.UpdateLease('p', c.token, c.sample_ids, 'acknowledge'), object)",
    )
    stepped.put(["a", "b"])
    assert stepped.claim(2, timeout_s=SOON_S).sample_ids == ["a", "b"]
    claimer.resume()
    assert claimer.finish() == "LeaseLostError"


def test_claimer_stopped_past_its_deadline_takes_nothing(stepped):
    claimer = stopped_claimer(stepped, "claim(0.2)")
    threading.Event().wait(0.5)  # until its deadline passes
    stepped.put(["a", "b"])
    assert stepped.claim(2).sample_ids == ["a", "b"]
    claimer.resume()
    assert claimer.finish() == "ClaimTimeoutError"


@transports
def test_stopped_reader_reads_the_rows_it_pinned(stepped, transport):
    """Overwrite or clear the pinned rows meanwhile, and put others into the free memory."""
    stepped.put(["a", "b"], 7)
    stepped.claim(2)
    reader = stepped.client("get()", transport)
    for step in ("pinned", "half read"):
        reader.stop_at(step)
        stepped.check_other_samples()
        if step == "pinned":
            stepped.put(["a"], 8)
        else:
            stepped.clear(["a", "b"], timeout_s=0.1)
        for _ in range(3):
            stepped.put(["full"] + [f"s{i}" for i in range(11)], 9)
            assert stepped.clear(["full"] + [f"s{i}" for i in range(11)], timeout_s=0.1) == 12
        reader.proceed()
    assert reader.read_line() == "values [7]"
    stepped.until(lambda: stepped.clear(["nothing"]) == 0 and stepped.used() == 0)


@pytest.mark.parametrize("step", ["pinned", "half read"])
def test_reader_killed_in_a_get_keeps_no_bytes(stepped, step):
    stepped.put(["a", "b"])
    reader = stepped.client("get()")
    reader.run_to(step)
    stepped.clear(["a", "b"], timeout_s=0.0)
    assert stepped.used() == 2 * stepped.row_nbytes
    reader.kill()
    stepped.until(lambda: stepped.used() == 0)
    stepped.put(["a", "b"])


def test_stopped_clear_blocks_only_its_own_ids(stepped):
    stepped.put(["a", "b"])
    stepped.claim(2)
    clearer = stepped.client("clear(['a'])")
    clearer.run_to("waiting")
    clearer.stop_at("cleared")
    with pytest.raises(MissingDataError):
        stepped.get("a")
    assert stepped.get("b") == {2}
    stepped.check_other_samples()
    with pytest.raises(DeadlineExceededError, match="still being cleared"):
        stepped.put(["a"], timeout_s=0.1)
    assert stepped.clear(["a"]) == 0
    clearer.proceed()
    stepped.put(["a"], 4)
    assert stepped.get("a") == {4}
    assert clearer.finish() == "done"


def test_stopped_partition_clear_blocks_no_other_partition(stepped):
    stepped.register("q")
    stepped.put(["a", "b"])
    clearer = stepped.client("clear(None)")
    clearer.run_to("waiting")
    clearer.stop_at("cleared")
    stepped.put(["a"], 4, partition="q")
    assert stepped.get("a", "q") == {4}
    assert stepped.clear(None, partition="q") == 1
    stepped.register("p")
    with pytest.raises(DeadlineExceededError, match="still being cleared"):
        stepped.put(["z"], timeout_s=0.1)
    clearer.proceed()
    assert clearer.finish() == "done"
    stepped.put(["z"], 4)
    assert stepped.get("z") == {4}


def test_clear_blocked_on_a_reader_finishes_after_both_resume(stepped):
    stepped.put(["a", "b"])
    reader = stepped.client("get()")
    reader.run_to("pinned")
    clearer = stepped.client("clear(['a', 'b'])")
    assert clearer.read_line() == "waiting"
    stepped.until(lambda: stepped.counts().cleared == 2)
    clearer.stop()
    reader.stop()
    stepped.check_other_samples()
    clearer.resume()
    reader.proceed()
    reader.run_to("half read")
    reader.advance()
    clearer.run_to("cleared")
    clearer.advance()
    assert clearer.finish() == "done"
    stepped.put(["a", "b"], 4)
    assert stepped.get("a") == {4}
