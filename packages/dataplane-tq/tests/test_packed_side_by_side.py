"""Transfers over several connections: everything arrives, and what fails is told."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane_core.slices import Slices
from dataplane_tq.packed import side_by_side
from dataplane_tq.packed.side_by_side import CONNECTIONS, run_all, shares

PATIENCE_S = 10.0


@given(
    sizes=st.lists(st.lists(st.integers(0, 50), max_size=8), max_size=5),
    worth=st.sampled_from([0, 60]),
)
def test_shares_hold_every_byte_once_at_its_place(sizes, worth):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side_by_side, "WORTH_IT", worth)
        total = sum(sum(piece) for piece in sizes)
        flat = np.arange(total + 1, dtype=np.uint32).astype(np.uint8)
        pieces, offset = [], 0
        for piece in sizes:
            starts = [offset + sum(piece[:row]) for row in range(len(piece))]
            pieces.append((offset, Slices(flat, starts, piece)))
            offset += sum(piece)
        memory = np.zeros(total, np.uint8)
        divided = shares(pieces)
        assert len(divided) <= CONNECTIONS
        written = 0
        for share in divided:
            for at, piece in share:
                if piece.nbytes:
                    piece.copy_into(memory[at : at + piece.nbytes])
                    written += piece.nbytes
        assert written == total
        assert memory.tolist() == flat[:total].tolist()


@given(count=st.integers(2, 200), size=st.integers(1, 100))
def test_shares_of_equal_rows_differ_by_a_row_at_most(count, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side_by_side, "WORTH_IT", 0)
        flat = np.zeros(count * size, np.uint8)
        piece = Slices(flat, [row * size for row in range(count)], [size] * count)
        sums = [sum(piece.nbytes for _, piece in share) for share in shares([(0, piece)])]
        assert len(sums) == CONNECTIONS
        assert max(sums) - min(sums) <= size


def test_actions_run_at_the_same_time():
    meeting = threading.Barrier(CONNECTIONS)
    met = []
    run_all([lambda: met.append(meeting.wait(PATIENCE_S)) for _ in range(CONNECTIONS)])
    assert sorted(met) == list(range(CONNECTIONS))


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_error_of_any_action_is_the_callers(failing):
    def act(number):
        if number == failing:
            raise ConnectionResetError(f"action {number}")

    with pytest.raises(ConnectionResetError, match=f"action {failing}"):
        run_all([lambda number=number: act(number) for number in range(3)])
