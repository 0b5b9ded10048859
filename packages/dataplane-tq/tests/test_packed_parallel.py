"""Transfers over several connections: all bytes arrive, and errors are raised.

Imports internals: tests check how bytes are divided among connections.
"""

import signal
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane_tq.packed import parallel
from dataplane_tq.packed.parallel import CONNECTIONS, run_all, split
from dataplane_tq.packed.slices import Slices

TIMEOUT_S = 10.0


@given(
    sizes=st.lists(st.lists(st.integers(0, 50), max_size=8), max_size=5),
    min_bytes=st.sampled_from([0, 60]),
)
def test_split_parts_hold_every_byte_once_at_its_offset(sizes, min_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "MIN_BYTES", min_bytes)
        total = sum(sum(piece) for piece in sizes)
        flat = np.arange(total + 1, dtype=np.uint32).astype(np.uint8)
        pieces, offset = [], 0
        for piece in sizes:
            starts = [offset + sum(piece[:row]) for row in range(len(piece))]
            pieces.append((offset, Slices(flat, starts, piece)))
            offset += sum(piece)
        memory = np.zeros(total, np.uint8)
        parts = split(pieces)
        assert len(parts) <= CONNECTIONS
        written = 0
        for part in parts:
            for at, piece in part:
                if piece.nbytes:
                    piece.copy_into(memory[at : at + piece.nbytes])
                    written += piece.nbytes
        assert written == total
        assert memory.tolist() == flat[:total].tolist()


@given(count=st.integers(2, 200), size=st.integers(1, 100))
def test_split_sizes_differ_by_one_row_or_less(count, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "MIN_BYTES", 0)
        flat = np.zeros(count * size, np.uint8)
        piece = Slices(flat, [row * size for row in range(count)], [size] * count)
        sums = [sum(piece.nbytes for _, piece in part) for part in split([(0, piece)])]
        assert len(sums) == CONNECTIONS
        assert max(sums) - min(sums) <= size


def test_actions_run_in_parallel():
    barrier = threading.Barrier(CONNECTIONS)
    numbers = []
    run_all([lambda: numbers.append(barrier.wait(TIMEOUT_S)) for _ in range(CONNECTIONS)])
    assert sorted(numbers) == list(range(CONNECTIONS))


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_error_of_any_action_is_raised_in_the_caller(failing):
    def act(number):
        if number == failing:
            raise ConnectionResetError(f"action {number}")

    with pytest.raises(ConnectionResetError, match=f"action {failing}"):
        run_all([lambda number=number: act(number) for number in range(3)])


def test_interrupt_is_raised_after_running_actions_end():
    # A shell without job control starts its background processes with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    began, returned, ended = threading.Event(), threading.Event(), []

    def act():
        if threading.current_thread() is threading.main_thread():
            began.wait(TIMEOUT_S)
            return
        began.set()
        returned.wait(0.1)  # the main thread waits for this one by then
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        ended.append(not returned.wait(0.2))

    try:
        with pytest.raises(KeyboardInterrupt):
            run_all([act] * CONNECTIONS)
    finally:
        signal.signal(signal.SIGINT, before)
    returned.set()
    assert ended == [True]
