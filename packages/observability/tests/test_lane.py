"""What the lane promises: order, no wait for who puts, and nothing left behind."""

from __future__ import annotations

import threading

from setup_processes import run
from structlog.testing import capture_logs

from observability import lane as lane_module
from observability.lane import Lane, later

NEVER_S = 3600.0
DEADLINE_S = 30.0


def test_work_is_done_in_its_order_and_not_by_who_puts_it() -> None:
    lane = Lane(interval_s=0.01)
    done: list[tuple[int, int]] = []
    for number in range(10):
        lane.put(lambda number=number: done.append((number, threading.get_ident())))
    finished = threading.Event()
    lane.put(finished.set)
    assert finished.wait(DEADLINE_S)
    assert [number for number, _ in done] == list(range(10))
    assert threading.get_ident() not in {thread for _, thread in done}
    lane.close()


def test_draining_waits_for_what_another_thread_is_doing() -> None:
    lane = Lane(NEVER_S)
    begun, go_on = threading.Event(), threading.Event()
    done: list[str] = []

    def slow() -> None:
        begun.set()
        go_on.wait(DEADLINE_S)
        done.append("slow")

    lane.put(slow)
    drainer = threading.Thread(target=lane.drain)
    drainer.start()
    assert begun.wait(DEADLINE_S)
    threading.Timer(0.05, go_on.set).start()
    lane.drain()
    assert done == ["slow"]
    drainer.join()


def test_where_too_much_is_queued_it_is_done_at_once() -> None:
    lane = Lane(NEVER_S, most=2)
    done: list[int] = []
    for number in range(4):
        lane.put(lambda number=number: done.append(number))
    assert done == [2, 3]
    lane.close()
    assert done == [2, 3, 0, 1]


def test_what_is_put_after_its_end_is_done_at_once() -> None:
    lane = Lane(NEVER_S)
    done: list[str] = []
    lane.put(lambda: done.append("before"))
    lane.close()
    lane.put(lambda: done.append("after"))
    assert done == ["before", "after"]


def test_work_that_fails_is_told_and_the_next_is_done() -> None:
    lane = Lane(NEVER_S)
    done: list[str] = []
    lane.put(lambda: 1 / 0)
    lane.put(lambda: done.append("next"))
    with capture_logs() as logs:
        lane.close()
    assert done == ["next"]
    assert [log["event"] for log in logs] == ["observation_failed"]


def test_without_a_lane_work_is_done_at_once() -> None:
    done: list[str] = []
    later(object(), lambda: done.append("now"))
    assert done == ["now"]


def test_much_is_not_left_until_the_interval_is_over(monkeypatch):
    monkeypatch.setattr(lane_module, "_LOOKS", 50_000)
    lane = Lane(interval_s=DEADLINE_S * 50)
    done = threading.Event()
    for _ in range(600):
        lane.put(lambda: None)
    lane.put(done.set)
    assert done.wait(DEADLINE_S)
    lane.close()


def test_a_forked_child_may_fork_again_from_another_thread() -> None:
    ran = run(
        """
from observability.lane import Lane
lane = Lane(3600.0)
done = []
if (child := os.fork()) == 0:
    signal.alarm(20)  # what hangs must not outlive the test

    def again():
        if (grandchild := os.fork()) == 0:
            signal.alarm(20)
            lane.put(lambda: done.append("grandchild"))
            lane.drain()
            os._exit(len(done))
        done.append(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))

    thread = threading.Thread(target=again, daemon=True)
    thread.start()
    thread.join(10)
    lane.put(lambda: done.append(1))
    lane.drain()
    os._exit(0 if done == [1, 1] else 1)
tell(child=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    )
    assert ran.told == [{"child": 0}]
