"""Calls in the threads of a pool that is kept: starting a thread costs more than many a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, wait
from typing import TypeVar

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


def each(
    threads: Executor, function: Callable[[_Item], _Found], items: Iterable[_Item]
) -> list[_Found]:
    """What a function makes of each item, in their order.

    No call goes on when this has returned or raised.

    Raises:
        BaseException: what the first of the calls, in their order, raised.
    """
    futures: list[Future[_Found]] = []
    try:
        futures += (threads.submit(function, item) for item in items)
        return [future.result() for future in futures]
    finally:
        settle(futures)


def settle(futures: list[Future[_Found]]) -> None:
    """Cancel the calls that have not begun, and wait for the others."""
    for future in futures:
        future.cancel()
    wait(futures)
