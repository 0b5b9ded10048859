"""Terminal output of the API's answers. Text from telemetry is made printable, without markup."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterable, Sequence

from pydantic import TypeAdapter, ValidationError
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dataplane_admin import models
from observability.views import print_view, printable

_DASH = "-"
_GAP = 2


def show(path: str, body: str, console: Console | None = None) -> None:
    """Print the answer ``body`` of ``path``.

    Raises ValueError if the body is not an answer of this version's API.
    """
    console = console or Console()
    try:
        shown = _VIEWS[path](body, console.width)
    except ValidationError:
        raise ValueError(
            "the service runs another version of dataplane-admin; --json prints its raw answer"
        ) from None
    print_view(shown, console)


def _partitions(body: str, width: int) -> RenderableType:
    answer = models.Partitions.model_validate_json(body)
    parts: list[RenderableType] = []
    live = answer.live
    if not live.configured:
        parts.append(Text("Not connected to a data plane. Start the service with --ray-address."))
    elif live.error:
        parts.append(_error(live))
    elif not answer.partitions:
        parts.append(Text(f"{printable(live.source)}: no partition is registered"))
    for partition in answer.partitions:
        parts += [_heading(partition), *_tasks(partition, width), *_fields(partition, width), ""]
    if answer.storage_error:
        reason = printable(answer.storage_error)
        parts.append(Text(f"Cannot read the storage units: {reason}.", "yellow"))
    if answer.storage:
        parts += _table(
            ("unit", "node", "used", "capacity", "free"),
            [
                (unit.name, unit.node, _size(unit.used), _capacity(unit), _size(unit.free))
                for unit in answer.storage
            ],
            width,
            optional=("node", "free"),
        )
    return Group(*parts)


def _error(live: models.LiveStatus) -> Text:
    if live.attached:
        return Text(f"The data plane does not answer its clients: {printable(live.error)}.", "red")
    age = "" if live.age_s is None else f" The data shown is {_seconds(live.age_s)} old."
    return Text(f"Cannot read the data plane: {printable(live.error)}.{age}", "yellow")


def _status(body: str, _width: int) -> RenderableType:
    """Return a warning if the data plane cannot be read: blocked tasks may then be missing."""
    live = models.Status.model_validate_json(body).live
    return _error(live) if live.configured and not live.attached else Group()


def _heading(partition: models.Partition) -> Text:
    size = "" if partition.nbytes is None else f", {_size(partition.nbytes)}"
    return Text.assemble(
        (printable(partition.id), "bold"),
        f"  {partition.present} samples present, {partition.put} of {partition.declared} put, "
        f"{partition.not_put} not put yet{size}",
    )


def _tasks(partition: models.Partition, width: int) -> list[RenderableType]:
    return _table(
        (
            "task",
            "unclaimed",
            "ready",
            "assigned",
            "leased",
            "acknowledged",
            "rate",
            "oldest",
            "oldest claim",
        ),
        [
            (
                task.name,
                task.unclaimed,
                task.ready,
                task.assigned,
                task.leased,
                task.acknowledged,
                None if task.acknowledged_per_s is None else f"{task.acknowledged_per_s:.1f} /s",
                None if task.oldest_unclaimed_s is None else _seconds(task.oldest_unclaimed_s),
                _claim(task.oldest_claim),
            )
            for task in partition.tasks
        ],
        width,
        optional=("oldest claim", "rate", "assigned", "oldest"),
    )


def _claim(claim: models.Claim | None) -> str | None:
    if claim is None:
        return None
    return f"{claim.samples} by {claim.owner or 'unknown'} for {_seconds(claim.age_s)}"


def _fields(partition: models.Partition, width: int) -> list[RenderableType]:
    return _table(
        ("field", "kind", "written", "size"),
        [
            (
                field.name,
                field.kind,
                f"{field.written} of {partition.present}",
                None if field.nbytes is None else _size(field.nbytes),
            )
            for field in partition.fields
        ],
        width,
        optional=("kind",),
    )


def _sample(body: str, _width: int) -> RenderableType:
    answer = models.SampleLife.model_validate_json(body)
    run = f", run {printable(answer.run_id)}" if answer.run_id else ""
    parts: list[RenderableType] = [Text.assemble((printable(answer.sample_id), "bold"), run)]
    for hop in answer.hops:
        task = f" by {printable(hop.task)}" if hop.task else ""
        parts.append(
            Text.assemble(
                f"{_time(hop.time_ns)}  +{_seconds(hop.seconds)}  ",
                (printable(hop.name), "bold"),
                f"{task}, {printable(hop.process)}",
            )
        )
        facts = [
            hop.detail,
            "" if hop.step is None else f"step {hop.step}",
            "" if hop.weight_version is None else f"weight version {hop.weight_version}",
            f"trace {hop.trace_id}" if hop.trace_id else "",
        ]
        fields = f"fields {', '.join(hop.fields)}" if hop.fields else ""
        for line in (", ".join(filter(None, facts)), fields):
            if line:
                parts.append(Padding(Text(printable(line)), (0, 0, 0, 4)))
    if answer.live is not None:
        tasks = ", ".join(f"{name} {state}" for name, state in answer.live.tasks.items())
        fields = ", ".join(answer.live.fields) or "none"
        parts.append(
            Text(
                f"In the data plane: partition {printable(answer.live.partition)}; "
                f"fields {printable(fields)}; {printable(tasks) or 'no tasks'}"
            )
        )
    parts += [Text(printable(note), "yellow") for note in answer.notes]
    if answer.other_runs:
        others = ", ".join(f"'{printable(other)}'" for other in answer.other_runs)
        parts.append(Text(f"Other runs with this sample id: {others}; see --run", "yellow"))
    return Group(*parts)


def _trace(body: str, width: int) -> RenderableType:
    trace = models.Trace.model_validate_json(body)
    parts: list[RenderableType] = [
        Text.assemble(
            (printable(trace.trace_id), "bold"),
            f"  {printable(trace.name)}, {_seconds(trace.seconds)}, {trace.spans} spans, "
            f"{trace.errors} failed, {trace.processes} processes",
        )
    ]
    parts += [Text(printable(note), "yellow") for note in (*trace.incomplete, *trace.clocks)]
    if trace.critical_path:
        parts.append(Text("Critical path", "bold"))
        parts += _table(
            ("span", "process", "start", "duration"),
            [
                (part.name, part.process, _seconds(part.start_s), _seconds(part.seconds))
                for part in trace.critical_path
            ],
            width,
            optional=("start",),
        )
    return Group(*parts)


def _traces(body: str, width: int) -> RenderableType:
    answer = models.Traces.model_validate_json(body)
    if not answer.traces:
        return Text("No matching traces.")
    parts = _table(
        ("trace", "started", "duration", "step", "failed", "name", "spans", "processes", "run"),
        [
            (
                trace.trace_id,
                _time(trace.start_ns, with_ms=False),
                _seconds(trace.seconds),
                trace.step,
                trace.errors or None,
                _name(trace),
                trace.spans,
                trace.processes,
                trace.run_id,
            )
            for trace in answer.traces
        ],
        width,
        optional=("run", "processes", "spans", "failed", "started", "step", "name"),
    )
    if answer.next is not None:
        parts.append(Text("More traces match: set --limit or a filter."))
    return Group(*parts)


def _name(trace: models.TraceFacts) -> str:
    """Return a trace's name, marked as on the page of traces if it has no root."""
    if trace.has_root:
        return trace.name
    is_new = time.time_ns() - trace.received_ns < 60e9
    return f"{trace.name} ({'in progress' if is_new else 'no root'})"


def _runs(body: str, width: int) -> RenderableType:
    answer = models.Runs.model_validate_json(body)
    if not answer.runs:
        return Text("No matching runs." if answer.total else "No runs yet.")
    parts = _table(
        ("run", "state", "steps", "last reward", "started", "duration", "tags", "error"),
        [
            (
                run.run_id,
                run.state,
                run.steps,
                None if run.reward is None else f"{run.reward:.4g}",
                _time(run.first_ns, with_ms=False),
                _seconds(run.seconds),
                ", ".join(run.tags),
                run.error,
            )
            for run in answer.runs
        ],
        width,
        optional=("error", "tags", "duration", "started"),
    )
    if answer.matching > len(answer.runs):
        parts.append(Text("More runs match: set --limit or a filter."))
    return Group(*parts)


def _alerts(body: str, width: int) -> RenderableType:
    answer = models.Alerts.model_validate_json(body)
    parts: list[RenderableType] = []
    if not answer.raised:
        parts.append(Text("No alert is raised."))
    for listed, time_column in ((answer.raised, "raised"), (answer.cleared, "cleared")):
        if not listed:
            continue
        parts += _table(
            ("alert", "severity", "run or store", time_column, "value", "bound", "sentence"),
            [
                (
                    alert.name,
                    alert.severity,
                    alert.run_id or alert.subject or "data plane",
                    _time(alert.cleared_ns or alert.raised_ns, with_ms=False),
                    f"{alert.value:.4g}",
                    f"{alert.bound:.4g}",
                    alert.sentence,
                )
                for alert in listed
            ],
            width,
            optional=("sentence", "bound", "value"),
        )
    return Group(*parts)


def _tagged(body: str, _width: int) -> RenderableType:
    return Text(models.TaggedRun.model_validate_json(body).sentence)


def _why(body: str, _width: int) -> RenderableType:
    waits = TypeAdapter(list[models.Wait]).validate_json(body)
    lines = [Text(f"{place}. {printable(wait.sentence)}") for place, wait in enumerate(waits, 1)]
    # Silent processes come last.
    fresh = sum(wait.silent_s is None for wait in waits)
    parts = lines[:fresh] or [Text("No task is blocked.")]
    if lines[fresh:]:
        parts += [Text("Silent processes:", "yellow"), *lines[fresh:]]
    return Group(*parts)


_VIEWS: dict[str, Callable[[str, int], RenderableType]] = {
    "/api/v1/actions/tag-run": _tagged,
    "/api/v1/alerts": _alerts,
    "/api/v1/partitions": _partitions,
    "/api/v1/runs": _runs,
    "/api/v1/sample": _sample,
    "/api/v1/status": _status,
    "/api/v1/trace": _trace,
    "/api/v1/traces": _traces,
    "/api/v1/why": _why,
}


def _table(
    names: Sequence[str],
    rows: Iterable[Sequence[object]],
    width: int,
    *,
    optional: Sequence[str] = (),
) -> list[RenderableType]:
    """Return a table; ``optional`` columns are hidden, in this order, until ``width`` suffices."""
    cells = [[_DASH if cell in (None, "") else printable(cell) for cell in row] for row in rows]
    # Cells never wrap: an id on two lines can be neither copied nor searched for.
    widths = {
        name: max(cell_len(row[place]) for row in [names, *cells])
        for place, name in enumerate(names)
    }
    hidden: list[str] = []
    for name in optional:
        if sum(widths.values()) + _GAP * (len(widths) - 1) <= width:
            break
        del widths[name]
        hidden.append(name)
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    for name, column_width in widths.items():
        table.add_column(name, no_wrap=True, min_width=column_width)
    for row in cells:
        table.add_row(*(Text(row[names.index(name)]) for name in widths))
    parts: list[RenderableType] = [table]
    if hidden:
        parts.append(Text(f"Hidden columns: {', '.join(hidden)}. --json prints all.", "dim"))
    return parts


def _time(time_ns: int | None, *, with_ms: bool = True) -> str:
    """Return a local time, with the date unless it is today."""
    if time_ns is None:
        return "n/a"
    try:
        moment = datetime.datetime.fromtimestamp(time_ns / 1e9).astimezone()
    except (ValueError, OverflowError, OSError):  # the sender's clock may be arbitrarily wrong
        return str(time_ns)
    today = moment.date() == datetime.datetime.now(moment.tzinfo).date()
    date = "" if today else f"{moment:%Y-%m-%d} "
    return f"{date}{moment.time().isoformat('milliseconds' if with_ms else 'seconds')}"


def _seconds(seconds: float) -> str:
    if seconds >= 120:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _capacity(unit: models.Unit) -> str:
    if unit.capacity is not None:
        return _size(unit.capacity)
    return "no limit" if unit.max_samples is None else f"{unit.max_samples} samples"


def _size(nbytes: float | None) -> str:
    if nbytes is None:
        return "-"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes:.0f} B"
