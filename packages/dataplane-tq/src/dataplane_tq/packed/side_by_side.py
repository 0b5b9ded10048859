"""Large transfers over several connections at once.

One connection is bounded by one core on each side, which copies between socket and memory; two
reach almost twice as much where both sides have a second core.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from dataplane_core.slices import Slices

CONNECTIONS = 2
"""For one transfer. More gain nothing on two cores and little on many."""

WORTH_IT = 2 << 20
"""Bytes from which on it is: their transfer takes some ten times as long as a thread's start."""

Piece = tuple[int, Slices]
"""Offset in the unit's memory, and what goes there."""


def worth_it(nbytes: int) -> bool:
    """Whether a transfer of so many bytes is to go over several connections."""
    return nbytes >= WORTH_IT


def run_all(actions: Iterable[Callable[[], None]]) -> None:
    """Run every action, `CONNECTIONS` at a time, in their order; return when all have ended.

    Raises:
        BaseException: what the first that failed raised; those that had not begun are left out.
    """
    waiting = deque(actions)
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            try:
                action = waiting.popleft()
            except IndexError:
                return
            try:
                action()
            except BaseException as error:  # noqa: BLE001  # raised below, in the caller's thread
                errors.append(error)

    helpers = [
        threading.Thread(target=work, name="side-by-side", daemon=True)
        for _ in range(min(CONNECTIONS, len(waiting)) - 1)
    ]
    for thread in helpers:
        thread.start()
    work()
    for thread in helpers:
        thread.join()
    if errors:
        raise errors[0]


def shares(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Divide what is to be written into parts of about one size; a slice is not cut."""
    total = sum(piece.nbytes for _, piece in pieces)
    if not total or not worth_it(total):
        return [list(pieces)]
    divided: list[list[Piece]] = [[] for _ in range(CONNECTIONS)]
    done = 0
    for offset, piece in pieces:
        first = 0
        while first < len(piece.sizes):
            part = min(done * CONNECTIONS // total, CONNECTIONS - 1)
            room = total * (part + 1) // CONNECTIONS - done
            stop, size = first, 0
            while stop < len(piece.sizes) and (stop == first or size + piece.sizes[stop] <= room):
                size += piece.sizes[stop]
                stop += 1
            rows = slice(first, stop)
            some = Slices(piece.flat, piece.starts[rows], piece.sizes[rows])
            divided[part].append((offset, some))
            offset, done, first = offset + size, done + size, stop
    return [part for part in divided if part]
