"""Record of a run that starts with its first step, whose number shows whether the run is resumed.

Trainers load their checkpoint after they have set up tracking.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack

from observability.runs import record_run

_VALIDATIONS = "eval/", "val-"  # prefixes of metrics of SkyRL and verl


class LateRun:
    """A context of a run; its start is recorded at its first step or log, or else at its end."""

    def __init__(self, run_id: str, config: Mapping[str, object] | None = None) -> None:
        self.run_id, self._config = run_id, config
        self._record: ExitStack | None = None  # until the start

    def start(self, step: int = 0) -> None:
        """Record the start once; a run whose first step is above 0 is resumed."""
        if self._record is None:
            self._record = ExitStack()
            resumed_from = max(0, step) or None
            record = record_run(self._config, resumed_from=resumed_from, run_id=self.run_id)
            self._record.enter_context(record)

    def start_at_log(self, completed: int, names: Iterable[str]) -> None:
        """Record the start at the log of a validation or of the last of ``completed`` steps."""
        is_validation = all(name.startswith(_VALIDATIONS) for name in names)
        self.start(completed if is_validation else completed - 1)

    def __enter__(self) -> LateRun:
        return self

    def __exit__(self, *error: object) -> None:
        self.start()
        if self._record is not None:
            self._record.__exit__(*error)  # type: ignore[arg-type]
