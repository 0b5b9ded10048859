"""Growth of cost with rows, clients, storage units and nodes: the packed backend on Ray.

``python -m integration.benchmarks.growth --full`` runs this part alone; a full run of all
benchmarks contains it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from integration.benchmarks.growth_clients import (
    CLIENTS_HEADINGS,
    UNITS_HEADINGS,
    ClientsResult,
    UnitsResult,
    measure_clients,
    measure_units,
)
from integration.benchmarks.growth_nodes import NODES_HEADINGS, NodesResult, measure_nodes
from integration.benchmarks.growth_rows import (
    MEMORY_HEADINGS,
    ROWS_HEADINGS,
    RowsResult,
    measure_rows,
)
from integration.benchmarks.parts import PARTS_HEADINGS, Parts
from integration.benchmarks.results_file import Entry, merge_entries
from integration.cluster.machines import MachinesError

Table = tuple[str, list[str], list[list[str]]]
"""Title, headings, rows."""


class Line(StrEnum):
    """Quantity that grows."""

    ROWS = "rows"
    CLIENTS = "clients"
    UNITS = "units"
    NODES = "nodes"


@dataclass
class GrowthResult:
    """Results of this part; None if not measured."""

    by_rows: RowsResult | None = None
    by_clients: ClientsResult | None = None
    by_units: UnitsResult | None = None
    nodes: NodesResult | None = None

    def tables(self) -> Iterator[Table]:
        """Yield the tables of what was measured."""
        if self.by_rows is not None:
            yield "Growth: rows", ROWS_HEADINGS, self.by_rows.rows()
            yield "Growth: memory of the directory", MEMORY_HEADINGS, self.by_rows.memory_rows()
        if self.by_clients is not None:
            yield "Growth: clients", CLIENTS_HEADINGS, self.by_clients.rows()
        if self.by_units is not None:
            yield "Growth: storage units", UNITS_HEADINGS, self.by_units.rows()
        if self.nodes is not None:
            yield "Growth: two nodes", NODES_HEADINGS, self.nodes.rows()

    def entries(self) -> list[Entry]:
        """Return entries for the file of results."""
        parts = (self.by_rows, self.by_clients, self.by_units, self.nodes)
        return [entry for part in parts if part is not None for entry in part.entries()]


def measure_growth(
    parts: Parts, *, full: bool, lines: Sequence[Line] = tuple(Line)
) -> GrowthResult:
    """Measure on this process's Ray cluster; a full run starts another cluster of two nodes."""
    announce: Callable[[str], None] = parts.begin
    result = GrowthResult()
    if Line.ROWS in lines:
        result.by_rows = measure_rows(announce, full=full)
    if Line.CLIENTS in lines:
        result.by_clients = measure_clients(announce, full=full)
    if Line.UNITS in lines:
        result.by_units = measure_units(announce, full=full)
    if full and Line.NODES in lines:
        try:
            result.nodes = measure_nodes(announce)
        except MachinesError as error:
            parts.console.print(f"SKIPPED, not available: two nodes: {error}", style="bold red")
    return result


def main(
    full: Annotated[
        bool, typer.Option("--full/--quick", help="Run every size, or the small ones.")
    ] = False,
    line: Annotated[
        list[Line] | None, typer.Option(help="What to measure; may be repeated. Default: all.")
    ] = None,
    json: Annotated[Path, typer.Option(help="File of results, merged by name.")] = Path(
        "build/bench.json"
    ),
) -> None:
    """Measure how cost grows; Markdown goes to standard output, progress to standard error."""
    from integration.benchmarks import cluster, report
    from integration.benchmarks.circumstances import CIRCUMSTANCES_HEADINGS, circumstances
    from rich.console import Console

    console = Console(stderr=True, highlight=False, log_path=False)
    markdown = Console(soft_wrap=True, highlight=False, markup=False)
    parts, measured_on = Parts(console), circumstances()
    markdown.print(report.markdown_table("Measured on", CIRCUMSTANCES_HEADINGS, measured_on))
    parts.begin("starting Ray")
    with cluster.ray_cluster(full=False):
        for each in line or list(Line):  # results of a line are stored even if a later one fails
            result = measure_growth(parts, full=full, lines=[each])
            merge_entries(json, result.entries())
            for table in result.tables():
                markdown.print(report.markdown_table(*table))
    console.print(report.terminal_table("Duration of each part", PARTS_HEADINGS, parts.rows()))


if __name__ == "__main__":
    typer.run(main)
