"""Calls in a pool that is kept."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from refit_mx.side_by_side import each


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
