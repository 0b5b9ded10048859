"""`record_logged`: records what another trainer logs, under the names in docs/telemetry.md."""

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
    """Record the metrics that a trainer logs after ``completed`` steps.

    Metrics of a validation get the number of the next step, which starts with the validated
    weights. All others get the number of the last completed step.

    Args:
        completed: number of completed steps.
        logged: values by the trainer's name.
        names: documented names by the trainer's name. A metric that is not in it keeps its name.
        validation: prefix of the trainer's names for metrics of a validation.
        run_id: id of the run.
        components: mean reward by component.
    """
    of_validation = {name: value for name, value in logged.items() if name.startswith(validation)}
    of_training = {name: value for name, value in logged.items() if name not in of_validation}
    record_step_metrics(completed, of_validation, names=names, run_id=run_id)
    if completed > 0:
        record_step_metrics(
            completed - 1, of_training, components=components, names=names, run_id=run_id
        )
