"""Concurrent calls in a shared thread pool.

These tests use internals: a thread that fails or cannot be started.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from refit_mx.concurrency import BoundedCalls, CallGroup, map_calls


@pytest.fixture
def threads():
    with ThreadPoolExecutor(2) as pool:
        yield pool


def test_failed_call_waits_for_running_ones_and_starts_none(threads):
    began = threading.Event()
    running, begun = [], []

    def work(item):
        begun.append(item)
        if item == 0:
            assert began.wait(10)
            raise RuntimeError("the first")
        running.append(item)
        began.set()
        time.sleep(0.05)  # it is still running when the first one fails
        running.remove(item)

    with pytest.raises(RuntimeError, match="the first"):
        map_calls(threads, work, range(50))
    assert running == []
    assert len(begun) < 50
    assert map_calls(threads, lambda item: item, [7]) == [7]  # the pool is still good


def test_call_without_a_thread_never_begins():
    begun = []

    class Full(ThreadPoolExecutor):
        full = True

        def _adjust_thread_count(self):
            if self.full:
                raise RuntimeError("can't start new thread")
            super()._adjust_thread_count()

    with Full(1) as pool:
        group = CallGroup(pool)
        with pytest.raises(RuntimeError):
            group.start(lambda: begun.append("late"))
        group.end()
        pool.full = False
        pool.submit(begun.append, "next").result(10)
    assert begun == ["next"]


def test_interrupted_call_that_runs_stays_busy(monkeypatch):
    class Interrupted(threading.Thread):
        def start(self):
            super().start()
            raise KeyboardInterrupt

    calls, began, end = BoundedCalls("test"), threading.Event(), threading.Event()

    def work():
        began.set()
        end.wait(10)

    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            calls.call(work, 10)
    if began.wait(0.1):
        assert calls.busy
    end.set()
    assert calls.call(lambda: 7, 10) == 7
    assert not calls.busy
