"""The command: ``python -m integration.benchmarks --quick`` or ``--full``.

Most of a quick run is the start of processes, since most of them import torch. So the parts share
processes, and the admin service's processes start while this one imports.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from integration.benchmarks.admin_ingest import cores, ingest_servers, measure_ingest
from integration.benchmarks.admin_pages import LIVE_SAMPLES, measure_pages
from integration.benchmarks.admin_service import serving
from integration.benchmarks.admin_soak import measure_soak
from integration.benchmarks.parts import PARTS_HEADINGS, Parts
from integration.benchmarks.results_file import merge_entries
from rich.console import Console

# Under `uv run`, Ray would also start every worker by `uv run`. Ray reads this on import.
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def benchmarks(
    full: Annotated[
        bool,
        typer.Option("--full/--quick", help="Run every case, or the small ones (3 minutes)."),
    ] = False,
    backend: Annotated[
        str,
        typer.Option(
            help="Storage backend. Results of backend simple begin with tq_simple, not tq."
        ),
    ] = "packed",
    json: Annotated[Path, typer.Option(help="File of results, merged by name.")] = Path(
        "build/bench.json"
    ),
    pictures: Annotated[Path | None, typer.Option(help="Folder for one PNG per area.")] = None,
) -> None:
    """Compare the data plane on TransferQueue with other systems, in one interleaved run."""
    # Standard output has only the Markdown of a full run.
    console = Console(stderr=full, highlight=False, log_path=False)
    if not console.is_terminal:
        console.width = 140
    parts = Parts(console)
    parts.begin("importing, while the admin service and its baseline start")
    with ingest_servers() as servers:
        core, _ = cores(os.sched_getaffinity(0))
        with serving(live_samples=LIVE_SAMPLES, core=core) as service:
            from integration.benchmarks import cluster, report
            from integration.benchmarks.async_grpo import measure_async
            from integration.benchmarks.circumstances import CIRCUMSTANCES_HEADINGS, circumstances
            from integration.benchmarks.growth import measure_growth
            from integration.benchmarks.refit import measure_refit
            from integration.benchmarks.refit_planning import measure_planning
            from integration.benchmarks.run import run_sessions
            from integration.benchmarks.tables import tables
            from integration.benchmarks.tracing import measure_tracing

            measured_on = circumstances()
            service.wait()
            parts.begin("admin service: its pages")
            pages = measure_pages(service, full=full)
        parts.begin("admin service: ingested spans")
        ingest = measure_ingest(servers, full=full)
    soak = None
    if full:
        parts.begin("admin service: one hour of telemetry")
        soak = measure_soak()
    parts.begin("starting Ray")
    with cluster.ray_cluster(full=full):
        sessions = run_sessions(parts, backend=backend, full=full)
        cost = measure_tracing(parts.begin, full=full)
        async_results = measure_async(parts.begin) if full else []
        growth = measure_growth(parts, full=True) if full else None
    refits = measure_refit(parts.begin, full=full)
    planning = measure_planning(parts.begin) if full else None
    parts.begin("writing the results")
    of_full_run = [part for part in (planning, soak, growth) if part is not None]
    measured = [*sessions, *refits, cost, *async_results, ingest, pages, *of_full_run]
    entries = [entry for part in measured for entry in part.entries()]
    merge_entries(json, entries)
    markdown = Console(soft_wrap=True, highlight=False, markup=False)
    for title, headings, rows in (
        ("Measured on", CIRCUMSTANCES_HEADINGS, measured_on),
        *tables(sessions, cost, async_results, refits, planning, (ingest, pages, soak), growth),
    ):
        if not rows:
            continue
        console.print(report.terminal_table(title, headings, rows))
        if full:
            markdown.print(report.markdown_table(title, headings, rows))
    if pictures is not None:
        from integration.benchmarks.pictures import save_pictures

        for path in save_pictures(pictures, sessions[0], refits, ingest, pages):
            console.print(f"picture: {path}")
    console.print("ratios:")
    for entry in entries:
        if entry.unit == "x":
            console.print(
                f"  {entry.name} = {entry.value:.3g} (IQR {entry.spread:.2g}, n {entry.n})"
            )
    missing = set(report.HEADLINES) - {entry.name for entry in entries}
    if missing:
        console.print(f"not measured: {', '.join(sorted(missing))}", style="bold red")
    console.print(report.terminal_table("Duration of each part", PARTS_HEADINGS, parts.rows()))
    console.print(f"{len(entries)} entries in {json}")
