"""Lifecycle events of a run: its start, with its configuration, and its end.

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
MAX_KEY_LENGTH = 200
"""Maximum length of a recorded key in characters."""
MAX_VALUE_LENGTH = 500
"""Maximum length of a recorded value in characters."""
_MAX_REASON_LENGTH = 500


class RunRecord:
    """The run of a `record_run` block.

    If the block ends without an error, the run is recorded as finished, or after `stop` as stopped.
    """

    def __init__(self) -> None:
        self.end: EventName = "run_finished"

    def stop(self) -> None:
        """Make `record_run` record the run as stopped: it was asked to stop and may be resumed."""
        self.end = "run_stopped"


@contextmanager
def record_run(
    config: Mapping[str, object] | None = None,
    *,
    resumed_from: int | None = None,
    run_id: str | None = None,
) -> Iterator[RunRecord]:
    """Record the start and the end of a run; without an SDK in this process, do nothing.

    Use it inside the ``with`` block of `setup`, which exports the end of the run. If the block
    of `record_run` raises an error, the run has failed: the error's class and the first line of its
    message are recorded. After a `KeyboardInterrupt` or `SystemExit` the run is stopped.

    Args:
        config: the run's configuration, possibly nested. It must not contain secrets.
        resumed_from: ``rl.step`` of the first step of a resumed run; None for a new run.
        run_id: id of the run. None takes the id in the context, or in the process's resource.
    """
    current = context.get_current()
    if run_id is not None:
        current = baggage.set_baggage(RUN_ID, run_id, current)
    flat_config = dict(islice(_leaves(config or {}), MAX_KEYS))
    emit("run_started", context=current, resumed_from=resumed_from, config=flat_config or None)
    run = RunRecord()
    try:
        yield run
    except Exception as error:  # any error of the program ends its run; it is raised again
        reason = next(iter(str(error).strip().splitlines()), "")[:_MAX_REASON_LENGTH]
        emit("run_failed", context=current, error=error, reason=reason)
        raise
    except BaseException:  # an interrupt or an exit of the program
        emit("run_stopped", context=current)
        raise
    emit(run.end, context=current)


def _leaves(config: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the text of each value; an empty mapping is a value."""
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{key}.")
        else:
            yield key[:MAX_KEY_LENGTH], _as_text(value)[:MAX_VALUE_LENGTH]


def _as_text(value: object) -> str:
    """Return a string unchanged, another value as JSON, or its type's name if that fails."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, default=str)
    except Exception:  # noqa: BLE001  # a value's `__str__` may raise anything; the run must start
        return f"<{type(value).__name__}>"
