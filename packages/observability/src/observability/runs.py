"""Lifecycle events of a run: its start with its configuration, and how it ended.

docs/telemetry.md lists them. A process that is killed records no end; the admin service then shows
its run as silent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice

from opentelemetry import baggage, context

from dataplane_core.telemetry import RUN_ID
from observability.middleware.lifecycle import EventName, emit

MAX_KEYS = 1000
"""Maximum number of recorded keys of a configuration; verl's has about 900."""
MAX_KEY = 200
"""Maximum length of a recorded key in characters."""
MAX_VALUE = 500
"""Maximum length of a recorded value in characters."""
_MAX_REASON = 500


class RunRecord:
    """The kind of end that `record_run` records if no error leaves the block."""

    def __init__(self) -> None:
        self.end: EventName = "run_finished"

    def stop(self) -> None:
        """Record the end as stopped, not finished: a stop was requested; the run may be resumed."""
        self.end = "run_stopped"


@contextmanager
def record_run(
    config: Mapping[str, object] | None = None,
    *,
    resumed_from: int | None = None,
    run_id: str | None = None,
) -> Iterator[RunRecord]:
    """Record the start and the end of a run; use it inside of `setup`, which exports the end.

    If an error leaves the block, the run counts as failed; the error's class and the first line of
    its message are recorded. After an interrupt or `SystemExit` it counts as stopped. Without an
    SDK in this process, nothing is recorded.

    Args:
        config: the run's configuration, possibly nested. It must have no secrets.
        resumed_from: number of the first step, as ``rl.step``, if the run is resumed.
        run_id: id of the run; None if the process's resource has it.
    """
    current = context.get_current()
    if run_id is not None:
        current = baggage.set_baggage(RUN_ID, run_id, current)
    facts = dict(islice(_leaves(config or {}), MAX_KEYS))
    emit("run_started", context=current, resumed_from=resumed_from, config=facts or None)
    run = RunRecord()
    try:
        yield run
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "")[:_MAX_REASON]
        emit("run_failed", context=current, error=error, reason=reason)
        raise
    except BaseException:
        emit("run_stopped", context=current)
        raise
    emit(run.end, context=current)


def _leaves(config: Mapping[str, object], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted keys and values as text; an empty mapping is a value."""
    for name, value in config.items():
        key = f"{path}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield key[:MAX_KEY], text[:MAX_VALUE]
