"""A unit or a directory that is stopped or killed in the middle of an operation. No Ray."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from dataplane_core import DeadlineExceededError, MissingDataError
from dataplane_core.ledger import ClaimRequest
from dataplane_tq import protocol as p

PATIENCE_S = 20.0
SOON_S = 5.0


def test_a_stopped_unit_ends_a_put_over_tcp_at_its_deadline_and_one_in_shared_memory_goes_on(
    stepped,
):
    stepped.unit_process.stop()
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError, match="'u0'"):
        stepped.put(["late"], 1, timeout_s=0.3, unit=stepped.over_tcp)
    assert time.monotonic() - started < SOON_S
    with pytest.raises(MissingDataError):
        stepped.get("late")
    stepped.until(lambda: stepped.used() == 0)
    stepped.others_go_on()
    stepped.unit_process.wake()
    stepped.put(["late"], 4, unit=stepped.over_tcp)
    assert stepped.get("late") == {4}


def test_a_stopped_unit_that_is_continued_writes_nothing_of_a_put_that_was_given_up(stepped):
    """Its room may be another's by then."""
    producers = [stepped.client("put()", "tcp") for _ in range(2)]
    for producer in producers:
        producer.go_to("half written")  # connected, so that the next bytes need no answer
    stepped.unit_process.stop()
    producers[0].go_on()
    producers[1].go_on()
    for producer in producers:
        producer.until_it_sleeps()
    producers[0].kill()
    assert producers[1].finish() == "DeadlineExceededError"
    stepped.until(lambda: stepped.used() == 0)
    stepped.put([f"s{i}" for i in range(16)], 7)
    stepped.unit_process.wake()
    for _ in range(100):  # by the last answer it has done what it was sent before
        stepped.over_tcp.read([(0, stepped.row_nbytes)], SOON_S)
    assert [i for i in range(16) if stepped.get(f"s{i}") != {7}] == []


def test_a_unit_killed_in_a_put_is_a_typed_error_and_nothing_of_it_is_visible(stepped):
    producers = [stepped.client("put()", transport) for transport in ("shm", "tcp")]
    for producer in producers:
        producer.go_to("half written")
    stepped.unit_process.kill()
    for producer in producers:
        producer.go_on()
        assert producer.finish() == "UnavailableError"
    stepped.until(lambda: stepped.used() == 0)
    with pytest.raises(MissingDataError):
        stepped.get("a")


def test_a_directory_stopped_at_any_step_ends_each_request_at_its_deadline(stepped):
    stepped.put(["a", "b"], 7)
    reader = stepped.client("get()")
    reader.go_to("half read")
    producer = stepped.client("put()")
    producer.go_to("written")
    wanted = ClaimRequest("train", ("x",), 2, lease_s=0.3)
    begin = p.BeginPut("p", ["c"], {"x": "torch.uint8"}, [], "node", None, 0.1)
    requests = [
        begin,
        p.Read("p", ["a"], ["x"]),
        p.Claim("p", wanted, 0.0),
        p.Clear("p", ["nothing"], False, 0.1),
    ]
    stepped.directory.stop()
    producer.go_on()
    reader.go_on()
    started = time.monotonic()
    with ThreadPoolExecutor(len(requests)) as pool:
        asking = [pool.submit(stepped.ask, request, object, 0.1) for request in requests]
        for answer in asking:
            assert isinstance(answer.exception(SOON_S), DeadlineExceededError)
    assert reader.says() == "values [7]"  # what it had found, it reads to the end
    assert producer.finish() == "DeadlineExceededError"
    assert time.monotonic() - started < SOON_S
    stepped.directory.wake()
    # What was asked is done as a whole or not at all: the put's commit had been sent.
    assert stepped.claim(2, timeout_s=SOON_S).sample_ids == ["a", "b"]
    assert stepped.get("a") == stepped.get("b") in ({1}, {7})
    stepped.others_go_on()
    assert stepped.clear(["a", "b"]) == 2
    stepped.until(lambda: stepped.used() == 0)


def test_a_put_given_up_while_the_directory_was_stopped_stores_nothing_when_it_is_continued(
    stepped,
):
    """Its samples may have been withdrawn by then, on a connection that is read before."""
    producer = stepped.client("put()")
    producer.go_to("written")
    stepped.directory.stop()
    producer.go_on()
    assert producer.finish() == "DeadlineExceededError"
    stepped.directory.wake()
    stepped.until(lambda: stepped.used() == 0)
    with pytest.raises(MissingDataError):
        stepped.get("a")


def test_a_waiting_claim_given_up_while_the_directory_was_stopped_takes_no_sample_with_it(stepped):
    stepped.put(["a"])
    claimer = stepped.client("claim(1.0)")
    assert claimer.says() == "waiting"
    claimer.until_it_sleeps()
    stepped.directory.stop()
    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(stepped.put, ["b"], timeout_s=PATIENCE_S)
        assert claimer.finish() == "DeadlineExceededError"
        stepped.directory.wake()
        putting.result(PATIENCE_S)
    assert stepped.claim(2).sample_ids == ["a", "b"]


def test_a_claim_given_up_while_the_directory_was_stopped_takes_no_sample_with_it(stepped):
    stepped.put(["a", "b"])
    stepped.directory.stop()
    request = p.Claim("p", ClaimRequest("train", ("x",), 2), 0.0)
    with pytest.raises(DeadlineExceededError):
        stepped.ask(request, p.ClaimAnswer, 0.1)
    stepped.directory.wake()
    assert stepped.claim(2).sample_ids == ["a", "b"]
