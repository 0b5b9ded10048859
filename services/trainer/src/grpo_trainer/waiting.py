"""Tells what a process of the run waits for, while it waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry import context as otel_context

from observability import emit, waits
from observability.waits import Wait


@dataclass(frozen=True)
class Awaited:
    """What a call is to bring about: ``fields`` of ``samples`` samples of a partition."""

    partition_id: str
    fields: tuple[str, ...]
    samples: int


@contextmanager
def told(on: str, awaited: Awaited | None = None) -> Iterator[Callable[[], None]]:
    """Tell of a call that has not been answered for a moment.

    Args:
        on: whom and what is called, "policy worker 1: train".
        awaited: what the call is to bring about.

    Yields:
        What ends the wait, if that is before the block ends.
    """
    context = otel_context.get_current()

    def tell(wait: Wait) -> None:
        emit(
            "waiting",
            None if awaited is None else awaited.partition_id,
            samples=None if awaited is None else awaited.samples,
            context=context,
            wait=wait.name,
            since_ns=wait.since_ns,
            again_s=wait.again_s,
            fields=None if awaited is None else list(awaited.fields),
            on=on,
        )

    wait = waits.begin(tell)
    ended = False

    def end(error: BaseException | None = None) -> None:
        nonlocal ended
        if not ended:
            ended = True
            waits.end(wait)
            if wait.told:
                emit("answered", context=context, error=error, wait=wait.name, on=on)

    try:
        yield end
    except BaseException as error:
        end(error)
        raise
    finally:
        end()
