"""Large transfers over several parallel connections.

One connection is bounded by one core on each side, which copies between socket and memory. Two
connections are almost twice as fast if both sides have a second core.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from dataplane_tq.packed.slices import Slices

CONNECTIONS = 2
"""Connections of one large transfer; more would gain nothing on two cores, and little on many."""

MIN_BYTES = 2 << 20
"""Smallest transfer over several connections; it takes ten times as long as starting a thread."""

Write = tuple[int, Slices]
"""Offset in the unit's memory, and the bytes to write there."""


def is_large(nbytes: int) -> bool:
    """Return True if a transfer of ``nbytes`` should use several connections."""
    return nbytes >= MIN_BYTES


def run_all(actions: Iterable[Callable[[], None]]) -> None:
    """Run all actions in order, `CONNECTIONS` at a time, and wait until they finish.

    No action is running when this has returned or raised, even if the caller was interrupted while
    it waited. Otherwise the directory might place another put where an action still writes.

    Raises:
        BaseException: the error of the first action that failed, or an interrupt; later actions are
            not started.
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

    changed = threading.Condition()
    running: set[int] = set()

    def help_work() -> None:
        with changed:
            if errors:
                return
            running.add(threading.get_ident())
        try:
            work()
        finally:
            with changed:
                running.remove(threading.get_ident())
                changed.notify_all()

    try:
        for _ in range(min(CONNECTIONS, len(waiting)) - 1):
            threading.Thread(target=help_work, name="unit-transfer", daemon=True).start()
        work()
    except BaseException as error:  # noqa: BLE001  # an interrupt; raised below
        errors.append(error)
    # `join` is not used: after an interrupt, Python 3.11 treats a running thread as ended.
    while True:
        try:
            with changed:
                changed.wait_for(lambda: not running)
            break
        except BaseException as error:  # noqa: BLE001  # raised below
            errors.append(error)
    if errors:
        raise errors[0]


def split(writes: Sequence[Write]) -> list[list[Write]]:
    """Split writes into one part of about equal size per connection; no slice is cut."""
    total = sum(data.nbytes for _, data in writes)
    if not total or not is_large(total):
        return [list(writes)]
    parts: list[list[Write]] = [[] for _ in range(CONNECTIONS)]
    done = 0
    for offset, data in writes:
        first = 0
        while first < len(data.sizes):
            # Bytes done..limit of the total go to part number `part`.
            part = min(done * CONNECTIONS // total, CONNECTIONS - 1)
            limit = total * (part + 1) // CONNECTIONS
            stop, size = first, 0
            while stop < len(data.sizes) and (
                stop == first or done + size + data.sizes[stop] <= limit
            ):
                size += data.sizes[stop]
                stop += 1
            rows = slice(first, stop)
            parts[part].append((offset, Slices(data.flat, data.starts[rows], data.sizes[rows])))
            offset, done, first = offset + size, done + size, stop
    return [part for part in parts if part]
