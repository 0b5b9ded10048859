"""Answers as tables in a terminal. What others named is made printable and is no markup."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence

from pydantic import TypeAdapter, ValidationError
from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from dataplane_admin.answers import models
from observability.views import print_view, printable

_DASH = "-"


def show(path: str, body: str, console: Console | None = None) -> None:
    """Print the answer ``body`` of ``path``.

    Raises:
        ValueError: it is not an answer of this version's API.
    """
    try:
        shown = _VIEWS[path](body)
    except ValidationError:
        raise ValueError(
            "the answer is none of this version of dataplane-admin; --json prints it as it is"
        ) from None
    print_view(shown, console or Console())


def _partitions(body: str) -> RenderableType:
    told = models.Partitions.model_validate_json(body)
    parts: list[RenderableType] = []
    live = told.live
    if not live.asked:
        parts.append(Text("no data plane is looked into; start the service with --ray-address"))
    elif not live.attached:
        age = "" if live.age_s is None else f"; what follows is {_seconds(live.age_s)} old"
        parts.append(Text(f"{_one_line(live.error or '')}{age}", "yellow"))
    elif not told.partitions:
        parts.append(Text(f"{printable(live.source)}: no partition is registered"))
    for one in told.partitions:
        parts += [_heading(one), _tasks(one), _fields(one), Text("")]
    if told.storage:
        parts.append(
            _table(
                ("storage unit", "node", "used", "free", "capacity"),
                [
                    (one.name, one.node, _size(one.used), _size(one.free), _size(one.capacity))
                    for one in told.storage
                ],
            )
        )
    return Group(*parts)


def _heading(one: models.Partition) -> Text:
    held = "" if one.nbytes is None else f", {_size(one.nbytes)}"
    return Text.assemble(
        (printable(one.id), "bold"),
        f"  {one.present} samples there, {one.put} of {one.declared} put, "
        f"{one.outstanding} to come{held}",
    )


def _tasks(one: models.Partition) -> Table:
    names = (
        "task",
        "unclaimed",
        "ready",
        "assigned",
        "leased",
        "settled",
        "claims/s",
        "oldest",
        "oldest claim",
    )
    return _table(
        names,
        [
            (
                task.name,
                task.unclaimed,
                task.ready,
                task.assigned,
                task.leased,
                task.settled,
                None if task.claimed_per_s is None else f"{task.claimed_per_s:.1f}",
                None if task.oldest_unclaimed_s is None else _seconds(task.oldest_unclaimed_s),
                _claim(task.oldest_claim),
            )
            for task in one.tasks
        ],
    )


def _claim(claim: models.Claim | None) -> str | None:
    if claim is None:
        return None
    return f"{claim.samples} by {claim.owner or 'unknown'} for {_seconds(claim.age_s)}"


def _fields(one: models.Partition) -> Table:
    return _table(
        ("field", "kind", "written", "bytes"),
        [
            (
                held.name,
                held.kind,
                f"{held.written} of {one.present}",
                None if held.nbytes is None else _size(held.nbytes),
            )
            for held in one.fields
        ],
    )


def _sample(body: str) -> RenderableType:
    told = models.SampleLife.model_validate_json(body)
    parts: list[RenderableType] = [Text(printable(told.sample_id), "bold")]
    if told.hops:
        parts.append(
            _table(
                ("time", "after", "event", "process", "task", "version", "step", "fields", "trace"),
                [
                    (
                        _time(hop.time_ns),
                        _seconds(hop.seconds),
                        f"{hop.name} ({hop.detail})" if hop.detail else hop.name,
                        hop.process,
                        hop.task,
                        hop.weight_version,
                        hop.step,
                        tuple(hop.fields),
                        hop.trace_id,
                    )
                    for hop in told.hops
                ],
            )
        )
    if told.live is not None:
        tasks = ", ".join(f"{name}: {state}" for name, state in told.live.tasks.items())
        parts.append(
            Text(
                f"now in partition {printable(told.live.partition)} with "
                f"{printable(', '.join(told.live.fields) or 'no field')}; {printable(tasks)}"
            )
        )
    parts += [Text(_one_line(note), "yellow") for note in told.notes]
    return Group(*parts)


def _trace(body: str) -> RenderableType:
    one = models.Trace.model_validate_json(body)
    parts: list[RenderableType] = [
        Text.assemble(
            (printable(one.trace_id), "bold"),
            f"  {printable(one.name)}, {_seconds(one.seconds)}, {one.spans} spans, "
            f"{one.errors} failed, {one.processes} processes",
        )
    ]
    parts += [Text(_one_line(note), "yellow") for note in (*one.incomplete, *one.clocks)]
    if one.critical_path:
        parts.append(
            _table(
                ("critical path", "process", "at", "duration"),
                [
                    (part.name, part.process, _seconds(part.start_s), _seconds(part.seconds))
                    for part in one.critical_path
                ],
            )
        )
    return Group(*parts)


def _traces(body: str) -> RenderableType:
    told = models.Traces.model_validate_json(body)
    if not told.traces:
        return Text("no trace matches")
    shown = _table(
        ("trace", "began", "took", "run", "step", "name", "spans", "errors", "processes"),
        [
            (
                one.trace_id,
                _time(one.start_ns),
                _seconds(one.seconds),
                one.run_id,
                one.step,
                one.name if one.has_root else f"{one.name} (incomplete)",
                one.spans,
                one.errors,
                one.processes,
            )
            for one in told.traces
        ],
    )
    more = [] if told.next is None else [Text("there are more; give --limit or a filter")]
    return Group(shown, *more)


def _why(body: str) -> RenderableType:
    told = TypeAdapter(list[models.Wait]).validate_json(body)
    lines = [Text(f"{place}. {_one_line(one.sentence)}") for place, one in enumerate(told, 1)]
    # Those come last.
    fresh = sum(one.silent_s is None for one in told)
    parts = lines[:fresh] or [Text("nothing waits")]
    if lines[fresh:]:
        parts += [Text("of processes that are not heard of any more:", "yellow"), *lines[fresh:]]
    return Group(*parts)


_VIEWS: dict[str, Callable[[str], RenderableType]] = {
    "/api/v1/partitions": _partitions,
    "/api/v1/sample": _sample,
    "/api/v1/trace": _trace,
    "/api/v1/traces": _traces,
    "/api/v1/why": _why,
}


def _table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown = [[_cell(cell) for cell in row] for row in rows]
    for place, name in enumerate(names):
        # An id in two lines can neither be copied nor searched for.
        lines = [line for row in [names, *shown] for line in row[place].split("\n")]
        table.add_column(name, no_wrap=True, min_width=max(map(cell_len, lines)))
    for cells in shown:
        table.add_row(*map(Text, cells))
    return table


def _cell(cell: object) -> str:
    if isinstance(cell, tuple):
        return ",\n".join(map(printable, cell)) or _DASH
    return _DASH if cell in (None, "") else printable(cell)


def _one_line(text: str) -> str:
    return printable(text)


def _time(time_ns: int | None) -> str:
    if time_ns is None:
        return "n/a"
    try:
        moment = datetime.datetime.fromtimestamp(time_ns / 1e9).astimezone()
    except (ValueError, OverflowError, OSError):  # a clock of others may tell anything
        return str(time_ns)
    return moment.isoformat(" ", "milliseconds")


def _seconds(seconds: float) -> str:
    if seconds >= 120:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _size(nbytes: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes:.0f} B"
