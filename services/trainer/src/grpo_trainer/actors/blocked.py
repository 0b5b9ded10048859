"""Events that say what a process of the run is currently blocked on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry import context as otel_context

from observability import PendingCall, emit, waits


@dataclass(frozen=True)
class AwaitedColumns:
    """Columns that a call writes: ``fields`` of ``samples`` samples of a partition."""

    partition_id: str
    fields: tuple[str, ...]
    samples: int


@contextmanager
def report_while_blocked(
    on: str, awaited: AwaitedColumns | None = None, *, quiet_s: float = 0.0
) -> Iterator[Callable[[], None]]:
    """Report a call that blocks for more than a second.

    Args:
        on: the actor and method called, "policy worker 1: train".
        awaited: the columns that the call writes; None if it writes none.
        quiet_s: seconds of blocking that are normal for the call; a shorter wait is not reported.

    Yields:
        A function that ends the wait before the end of the ``with`` block.
    """
    context = otel_context.get_current()

    began = time.monotonic()
    is_reported = False

    def report(wait: PendingCall) -> None:
        nonlocal is_reported
        if time.monotonic() < began + quiet_s:
            return
        is_reported = True
        emit(
            "waiting",
            None if awaited is None else awaited.partition_id,
            samples=None if awaited is None else awaited.samples,
            context=context,
            wait=wait.name,
            since_ns=wait.since_ns,
            report_every_s=wait.report_every_s,
            fields=None if awaited is None else list(awaited.fields),
            on=on,
        )

    wait = waits.begin(report)
    ended = False

    def end(error: BaseException | None = None) -> None:
        nonlocal ended
        if not ended:
            ended = True
            waits.end(wait)
            if is_reported:
                emit("answered", context=context, error=error, wait=wait.name, on=on)

    try:
        yield end
    except BaseException as error:  # whatever ends the call also ends the wait
        end(error)
        raise
    finally:
        end()
