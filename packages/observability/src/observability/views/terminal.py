"""Steps, lineages of samples and waits for the terminal, as renderables of rich.

Names and ids may come from any sender. So each is made printable and put into a ``Text``, never
into a string with markup. Color is never needed to read a view: each bucket has its own character
in the bars, an asterisk marks the critical path, and a word marks a failed span.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from observability.records import distinct_labels
from observability.views.critical_path import Segment, critical_path
from observability.views.encodable import AsciiFallback
from observability.views.lineage import LineageEvent
from observability.views.printable import join_printable, printable
from observability.views.quantities import duration, size
from observability.views.steps import Step
from observability.views.tables import Table, tables_of
from observability.views.waterfall import WaterfallLine, legend, lines_of
from observability.views.why import OpenWait

_MAX_CONSOLE_WIDTH = 10_000


def step_view(step: Step) -> RenderableType:
    """Return the view of a step: its waterfall, then the tables of `tables_of`."""
    path = critical_path(step)
    parts: list[RenderableType] = [_title(step)]
    parts += [Text(f"incomplete: {reason}", style="bold red") for reason in step.incomplete]
    parts += [Text(f"clocks: {note}", style="yellow") for note in step.clock_notes]
    parts += [Text(), _waterfall(step, path)]
    for table in tables_of(step, path):
        parts += [Text(), _rendered(table)]
    return AsciiFallback(Group(*parts))


def steps_view(steps: Iterable[Step]) -> RenderableType:
    """Return the view of several steps, one below the other."""
    views: list[RenderableType] = []
    for step in steps:
        views += [step_view(step), Text()]
    return Group(*views[:-1]) if views else Text("no steps")


def lineage_view(sample_id: str, lineage: Sequence[LineageEvent]) -> RenderableType:
    """Return the view of a sample's lineage: a line per event, details below it."""
    labels = distinct_labels(event.process for event in lineage)
    headings = ("after", "event", "process", "stage", "step", "version", "size")
    numeric_columns = {headings.index(name) for name in ("after", "step", "version", "size")}
    rows = [
        [
            duration(event.seconds),
            printable(event.name),
            printable(labels[event.process]),
            printable(event.stage),
            "" if event.step is None else str(event.step),
            "" if event.weight_version is None else str(event.weight_version),
            "" if event.n_bytes is None else size(event.n_bytes),
        ]
        for event in lineage
    ]
    widths = [
        max(cell_len(row[column]) for row in [headings, *rows]) for column in range(len(headings))
    ]

    def line(row: Sequence[str], style: str = "") -> Text:
        cells = [
            " " * (width - cell_len(cell)) + cell
            if column in numeric_columns
            else set_cell_size(cell, width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return Text("  ".join(cells).rstrip(), style=style)

    parts: list[RenderableType] = [
        Text(f"sample {printable(sample_id)}", style="bold"),
        line(headings, "dim"),
    ]
    for event, row in zip(lineage, rows, strict=True):
        parts.append(line(row))
        if details := _details(event):
            # Indent the details to the second column: the first one and two spaces precede it.
            parts.append(Padding(Text(details, style="dim"), (0, 0, 0, widths[0] + 2)))
    return AsciiFallback(Group(*parts))


def waits_view(waits: Sequence[OpenWait]) -> RenderableType:
    """Return the view of waits: a numbered sentence each, those of silent processes last."""
    groups: list[RenderableType] = []
    numbered = list(enumerate(waits, 1))
    blocked = [(number, wait) for number, wait in numbered if not wait.silent_s]
    silent = [(number, wait) for number, wait in numbered if wait.silent_s]
    groups.append(_sentences(blocked) if blocked else Text("No task is blocked."))
    if silent:
        groups += [Text("Silent processes:", style="yellow"), _sentences(silent)]
    return AsciiFallback(Group(*groups))


def _sentences(waits: Iterable[tuple[int, OpenWait]]) -> Grid:
    table = Grid.grid(padding=(0, 1))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for number, wait in waits:
        table.add_row(Text(f"{number}.", style="bold"), Text(str(wait)))
    return table


def print_view(view: RenderableType, console: Console) -> None:
    """Print a view; make the console wider if it would break or cut ids otherwise.

    Args:
        view: any renderable; columns that must not wrap need ``no_wrap``.
        console: the console.
    """
    min_width = Measurement.get(
        console, console.options.update(max_width=_MAX_CONSOLE_WIDTH), view
    ).minimum
    # A console clips its output to its width.
    console.width = max(console.width, min_width)
    console.print(view)


def _title(step: Step) -> Text:
    run = f" of run {printable(step.run_id)}" if step.run_id else ""
    name = step.root.name.removeprefix("grpo.") if step.root is not None else "step"
    title = Text(f"{printable(name)} {step.number}{run}: {duration(step.seconds)}", style="bold")
    return title.append(
        f"   {len(step.spans)} spans, trace {printable(step.trace_id)}", style="not bold dim"
    )


def _waterfall(step: Step, path: Sequence[Segment]) -> RenderableType:
    lines, note = lines_of(step, path)
    table = Grid(box=None, padding=(0, 1, 0, 0), expand=True, show_edge=False)
    table.add_column(Text("span"), no_wrap=True, overflow="ellipsis", ratio=6)
    table.add_column(Text("process"), no_wrap=True, overflow="ellipsis", max_width=18)
    table.add_column(Text("start"), no_wrap=True, justify="right")
    table.add_column(Text("duration"), no_wrap=True, justify="right")
    table.add_column(Text(""), no_wrap=True, ratio=7)
    for line in lines:
        table.add_row(*_waterfall_row(line))
    parts: list[RenderableType] = [table]
    if note:
        parts.append(Text(note, style="italic"))
    parts.append(legend())
    return Group(*parts)


def _waterfall_row(line: WaterfallLine) -> list[RenderableType]:
    name = Text("* " if line.critical else "  ", style="bold" if line.critical else "")
    name.append(line.guide, style="dim").append(line.name)
    if line.failed:
        name.append(" failed").stylize("red")
    return [
        name,
        Text(line.process),
        Text(duration(line.offset_seconds)),
        Text(duration(line.seconds)),
        line.bar,
    ]


def _rendered(table: Table) -> RenderableType:
    grid = Grid(
        title=Text(table.title, style="bold"),
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
        header_style="dim",
    )
    for index, column in enumerate(table.columns):
        grid.add_column(
            Text(column.name),
            justify="right" if column.is_numeric else "left",
            no_wrap=True,
            min_width=max(cell_len(row[index]) for row in table.rows),
        )
    for row in table.rows:
        grid.add_row(*map(Text, row))
    return Group(grid, *map(Text, table.notes))


def _details(event: LineageEvent) -> str:
    parts = [
        f"task {event.task}" if event.task else "",
        ", ".join(event.fields),
        event.detail,
        f"partition {event.partition}" if event.partition else "",
        f"with {event.batch - 1} more samples" if event.batch > 1 else "",
    ]
    return join_printable([part for part in parts if part])
