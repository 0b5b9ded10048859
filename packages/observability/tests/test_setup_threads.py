"""Threads that are there before they are needed, and waiting for what they do."""

from __future__ import annotations

import signal
import threading
import time

from observability._setup_threads import Over, ReadyThreads, all_over

PATIENCE_S = 30.0


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def test_each_action_is_over_when_it_is_whatever_it_raises() -> None:
    threads = ReadyThreads(2)
    done: list[str] = []

    def fails() -> None:
        raise ValueError

    assert all_over(threads.start([lambda: done.append("a"), fails]), soon())
    assert all_over(threads.start([fails, fails, lambda: done.append("b")]), soon())
    assert done == ["a", "b"]
    threads.close()


def test_what_is_not_over_by_the_deadline_is_told_and_what_waits_for_a_thread_comes_later() -> None:
    threads = ReadyThreads(1)
    go = threading.Event()
    first, second = threads.start([go.wait, lambda: None])
    assert not all_over([first, second], time.monotonic() + 0.05)
    assert not second.wait(0)
    go.set()
    assert all_over([first, second], soon())
    threads.close()


def test_an_interrupted_wait_and_the_one_of_the_signal_handler_both_end() -> None:
    """With a lock that the interrupted thread holds, the handler would wait for ever."""
    over = Over()
    found: list[bool] = []

    def handler(*_: object) -> None:
        threading.Thread(target=over.set).start()
        found.append(over.wait(PATIENCE_S))

    former = signal.signal(signal.SIGUSR1, handler)
    try:
        me = threading.main_thread().ident
        assert me is not None
        threading.Timer(0.05, signal.pthread_kill, (me, signal.SIGUSR1)).start()
        assert over.wait(PATIENCE_S)
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert found == [True]


def test_closed_threads_end() -> None:
    before = set(threading.enumerate())
    threads = ReadyThreads(3)
    started = set(threading.enumerate()) - before
    assert len(started) == 3
    threads.close()
    for thread in started:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
