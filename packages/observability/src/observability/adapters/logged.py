"""The metrics that another trainer logs, recorded under the names in docs/telemetry.md."""

from __future__ import annotations

from collections.abc import Mapping

from observability.step_metrics import record_step_metrics


def record_logged(
    completed: int,
    logged: Mapping[str, object],
    names: Mapping[str, str],
    *,
    validation: str,
    run_id: str,
    components: Mapping[str, object] | None = None,
) -> None:
    """Record what a trainer logs after ``completed`` steps; names that are not in ``names`` stay.

    Metrics of a validation get the number of the next step, which starts with the validated
    weights; all others get the number of the last completed step.

    Args:
        completed: number of completed steps.
        logged: the trainer's name to value.
        names: the trainer's name to the documented one.
        validation: prefix of the trainer's names for metrics of a validation.
        run_id: id of the run.
        components: mean reward by component.
    """
    validated = {name: value for name, value in logged.items() if name.startswith(validation)}
    trained = {name: value for name, value in logged.items() if name not in validated}
    record_step_metrics(completed, validated, names=names, run_id=run_id)
    if completed > 0:
        record_step_metrics(
            completed - 1, trained, components=components, names=names, run_id=run_id
        )
