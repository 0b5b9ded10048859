"""A unit or a directory that is stopped or killed in the middle of an operation. No Ray.

Imports internals: tests send single requests, to stop a part between two steps of an operation.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from dataplane_core import DeadlineExceededError, MissingDataError
from dataplane_core.ledger import ClaimRequest
from dataplane_tq.directory import protocol as p

TIMEOUT_S = 20.0
SOON_S = 5.0


def test_stopped_unit_blocks_tcp_puts_but_not_shared_memory(
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
    stepped.check_other_samples()
    stepped.unit_process.resume()
    stepped.put(["late"], 4, unit=stepped.over_tcp)
    assert stepped.get("late") == {4}


def test_resumed_unit_writes_nothing_of_an_abandoned_put(stepped):
    """The put's memory may belong to another put by then."""
    producers = [stepped.client("put()", "tcp") for _ in range(2)]
    for producer in producers:
        producer.run_to("half written")  # connected, so that the next bytes need no answer
    stepped.unit_process.stop()
    producers[0].advance()
    producers[1].advance()
    for producer in producers:
        producer.wait_until_blocked()
    producers[0].kill()
    assert producers[1].finish() == "DeadlineExceededError"
    stepped.until(lambda: stepped.used() == 0)
    stepped.put([f"s{i}" for i in range(16)], 7)
    stepped.unit_process.resume()
    for _ in range(100):  # by the last answer the unit has processed the earlier frames
        stepped.over_tcp.read([(0, stepped.row_nbytes)], SOON_S)
    assert [i for i in range(16) if stepped.get(f"s{i}") != {7}] == []


def test_unit_killed_in_a_put_raises_and_shows_nothing(stepped):
    producers = [stepped.client("put()", transport) for transport in ("shm", "tcp")]
    for producer in producers:
        producer.run_to("half written")
    stepped.unit_process.kill()
    for producer in producers:
        producer.advance()
        assert producer.finish() == "UnavailableError"
    stepped.until(lambda: stepped.used() == 0)
    with pytest.raises(MissingDataError):
        stepped.get("a")


def test_requests_to_a_stopped_directory_end_at_their_deadline(stepped):
    stepped.put(["a", "b"], 7)
    reader = stepped.client("get()")
    reader.run_to("half read")
    producer = stepped.client("put()")
    producer.run_to("written")
    wanted = ClaimRequest("train", ("x",), 2, lease_s=0.3)
    begin = p.BeginPut("p", ["c"], {"x": "torch.uint8"}, [], "node", None, 0.1)
    requests = [
        begin,
        p.Read("p", ["a"], ["x"]),
        p.Claim("p", wanted, 0.0),
        p.Clear("p", ["nothing"], False, 0.1),
    ]
    stepped.directory.stop()
    producer.advance()
    reader.advance()
    started = time.monotonic()
    with ThreadPoolExecutor(len(requests)) as pool:
        asking = [pool.submit(stepped.ask, request, object, 0.1) for request in requests]
        for answer in asking:
            assert isinstance(answer.exception(SOON_S), DeadlineExceededError)
    assert reader.read_line() == "values [7]"  # it reads from the unit, without the directory
    assert producer.finish() == "DeadlineExceededError"
    assert time.monotonic() - started < SOON_S
    stepped.directory.resume()
    # The producer had sent its commit, so the put is applied completely or not at all.
    assert stepped.claim(2, timeout_s=SOON_S).sample_ids == ["a", "b"]
    assert stepped.get("a") == stepped.get("b") in ({1}, {7})
    stepped.check_other_samples()
    assert stepped.clear(["a", "b"]) == 2
    stepped.until(lambda: stepped.used() == 0)


def test_put_abandoned_during_a_directory_stop_stores_nothing(
    stepped,
):
    """Another connection may have withdrawn its samples by then."""
    producer = stepped.client("put()")
    producer.run_to("written")
    stepped.directory.stop()
    producer.advance()
    assert producer.finish() == "DeadlineExceededError"
    stepped.directory.resume()
    stepped.until(lambda: stepped.used() == 0)
    with pytest.raises(MissingDataError):
        stepped.get("a")


def test_abandoned_blocked_claim_takes_no_sample(stepped):
    stepped.put(["a"])
    claimer = stepped.client("claim(1.0)")
    assert claimer.read_line() == "waiting"
    claimer.wait_until_blocked()
    stepped.directory.stop()
    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(stepped.put, ["b"], timeout_s=TIMEOUT_S)
        assert claimer.finish() == "DeadlineExceededError"
        stepped.directory.resume()
        putting.result(TIMEOUT_S)
    assert stepped.claim(2).sample_ids == ["a", "b"]


def test_claim_abandoned_while_directory_was_stopped_takes_none(stepped):
    stepped.put(["a", "b"])
    stepped.directory.stop()
    request = p.Claim("p", ClaimRequest("train", ("x",), 2), 0.0)
    with pytest.raises(DeadlineExceededError):
        stepped.ask(request, p.ClaimAnswer, 0.1)
    stepped.directory.resume()
    assert stepped.claim(2).sample_ids == ["a", "b"]
