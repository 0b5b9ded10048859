"""Calls in a pool that is kept."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from refit_mx.side_by_side import Beside, each


@pytest.fixture
def threads():
    with ThreadPoolExecutor(2) as pool:
        yield pool


def test_answers_come_in_the_order_of_the_items(threads):
    later = threading.Event()

    def slow_first(item):
        if item == 0:
            assert later.wait(10)
        else:
            later.set()
        return item * item

    assert each(threads, slow_first, range(5)) == [0, 1, 4, 9, 16]
    assert each(threads, slow_first, []) == []


def test_when_a_call_failed_none_goes_on_and_those_behind_it_never_begin(threads):
    began = threading.Event()
    running, begun = [], []

    def work(item):
        begun.append(item)
        if item == 0:
            assert began.wait(10)
            raise RuntimeError("the first")
        running.append(item)
        began.set()
        time.sleep(0.05)  # it goes on while the first one fails
        running.remove(item)

    with pytest.raises(RuntimeError, match="the first"):
        each(threads, work, range(50))
    assert running == []
    assert len(begun) < 50
    assert each(threads, lambda item: item, [7]) == [7]  # the pool is still good


class Interrupted(BaseException):
    """What a signal handler raises."""


@pytest.fixture
def interrupting():
    def interrupt(*_):
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


def test_what_runs_beside_is_waited_for_and_its_error_is_raised(threads):
    beside = Beside(threads)
    begun, done = threading.Event(), []

    def fail():
        begun.set()
        time.sleep(0.05)
        done.append(1)
        raise ZeroDivisionError

    beside.start(fail)
    assert begun.wait(10)
    assert beside.join(10)
    beside.end()
    assert done == [1]
    assert beside.stopped
    with pytest.raises(ZeroDivisionError):
        beside.check()


def test_an_interrupt_of_the_wait_is_raised_when_nothing_is_under_way_any_more(
    threads, interrupting
):
    beside = Beside(threads)
    begun, ended = threading.Event(), []

    def wait_for(holds):
        until = time.monotonic() + 10
        while not holds() and time.monotonic() < until:
            time.sleep(0.001)

    def work():
        begun.set()
        wait_for(lambda: beside._ended)  # so that it is `end` that is interrupted
        interrupting()
        wait_for(lambda: beside.stopped)
        interrupting()  # impatience changes nothing
        time.sleep(0.1)
        ended.append(1)

    beside.start(work)
    assert begun.wait(10)
    with pytest.raises(Interrupted):
        beside.end()
    assert ended == [1]


def test_a_call_whose_thread_could_not_be_started_never_begins():
    begun = []

    class Full(ThreadPoolExecutor):
        full = True

        def _adjust_thread_count(self):
            if self.full:
                raise RuntimeError("can't start new thread")
            super()._adjust_thread_count()

    with Full(1) as pool:
        beside = Beside(pool)
        with pytest.raises(RuntimeError):
            beside.start(lambda: begun.append("late"))
        beside.end()
        pool.full = False
        pool.submit(begun.append, "next").result(10)
    assert begun == ["next"]


def test_a_join_that_runs_out_of_time_says_so(threads):
    beside, go_on = Beside(threads), threading.Event()
    beside.start(lambda: go_on.wait(10))
    assert not beside.join(0.01)
    go_on.set()
    assert beside.join(10)
    beside.end()
    beside.check()
