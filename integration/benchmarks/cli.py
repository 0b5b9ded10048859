"""The command: ``python -m integration.benchmarks --quick`` or ``--full``."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

# Started by `uv run`, Ray would start every worker by `uv run` too. Read when Ray is imported.
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"

from integration.benchmarks import report
from integration.benchmarks.admin_ingest import INGEST_HEADINGS, measure_ingest
from integration.benchmarks.admin_pages import PAGES_HEADINGS, measure_pages
from integration.benchmarks.admin_soak import SOAK_HEADINGS, measure_soak
from integration.benchmarks.refit import REFIT_HEADINGS, STAGE_HEADINGS, measure_refit
from integration.benchmarks.results_file import merge_entries
from integration.benchmarks.run import run_sessions
from integration.benchmarks.tracing import (
    DEMO,
    INSIDE_HEADINGS,
    LARGER,
    TRACING_HEADINGS,
    measure_tracing,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def benchmarks(
    full: Annotated[
        bool,
        typer.Option("--full/--quick", help="Every case; or what fits in three minutes."),
    ] = False,
    backend: Annotated[
        str,
        typer.Option(help="Our backend. Results of others than packed get names of their own."),
    ] = "packed",
    json: Annotated[Path, typer.Option(help="Results; entries of other names in it stay.")] = Path(
        "build/bench.json"
    ),
    picture: Annotated[Path | None, typer.Option(help="With --full: where to draw a PNG.")] = None,
) -> None:
    """Compare the data plane on TransferQueue with other ways, in one interleaved run."""
    # Standard output carries the Markdown of a full run and nothing else.
    console = Console(stderr=full, highlight=False, log_path=False)
    if not console.is_terminal:
        console.width = 140
    started = time.monotonic()
    sessions = run_sessions(console, backend=backend, full=full)
    entries = [entry for session in sessions for entry in session.entries()]
    refits = measure_refit(lambda what: console.log(f"measuring {what}", style="dim"), full=full)
    entries += [entry for refit in refits for entry in refit.entries()]
    console.log("measuring a step with tracing off and on", style="dim")
    costs = [measure_tracing(load, full=full) for load in ((LARGER, DEMO) if full else (LARGER,))]
    entries += [entry for cost in costs for entry in cost.entries()]
    console.log("measuring what the admin service takes in", style="dim")
    ingest = measure_ingest(full=full)
    console.log("measuring its pages", style="dim")
    pages = measure_pages(full=full)
    entries += [*ingest.entries(), *pages.entries()]
    soak = measure_soak() if full else None
    if soak is not None:
        entries += soak.entries()
    merge_entries(json, entries)
    markdown = Console(soft_wrap=True, highlight=False, markup=False)
    for session in sessions:
        tables = [
            (f"{case.title}{session.note}", report.CASE_HEADINGS, session.case_rows(case))
            for case in session.cases
        ]
        if session.claims:
            title = f"Claim of 32{session.note}"
            tables.append((title, report.CLAIM_HEADINGS, session.claim_rows()))
        if session.inspecting:
            tables.append(("Inspector", report.INSPECTING_HEADINGS, session.inspecting_rows()))
        for title, headings, rows in tables:
            console.print(report.terminal_table(title, headings, rows))
            if full:
                markdown.print(report.markdown_table(title, headings, rows))
    for refit in refits:
        for headings, rows in (
            (REFIT_HEADINGS, refit.rows()),
            (STAGE_HEADINGS, refit.stage_rows()),
        ):
            console.print(report.terminal_table(refit.title, headings, rows))
            if full:
                markdown.print(report.markdown_table(refit.title, headings, rows))
    for cost in costs:
        title = f"Tracing of a GRPO step: {cost.load.title}"
        for headings, rows in (
            (TRACING_HEADINGS, cost.rows()),
            (INSIDE_HEADINGS, cost.inside_rows()),
        ):
            console.print(report.terminal_table(title, headings, rows))
            if full:
                markdown.print(report.markdown_table(title, headings, rows))
    for title, headings, rows in (
        ("Admin service: spans taken in", INGEST_HEADINGS, ingest.rows()),
        ("Admin service: pages and answers", PAGES_HEADINGS, pages.rows()),
        ("Admin service: an hour", SOAK_HEADINGS, [] if soak is None else soak.rows()),
    ):
        if not rows:
            continue
        console.print(report.terminal_table(title, headings, rows))
        if full:
            markdown.print(report.markdown_table(title, headings, rows))
    if full and picture is not None:
        report.save_picture(sessions[0], picture)
        console.print(f"picture: {picture}")
    console.print("ratios:")
    for entry in entries:
        if entry.unit == "x":
            console.print(
                f"  {entry.name} = {entry.value:.3g} (IQR {entry.spread:.2g}, n {entry.n})"
            )
    missing = set(report.HEADLINES) - {entry.name for entry in entries}
    if missing:
        console.print(f"not measured: {', '.join(sorted(missing))}", style="bold red")
    console.print(f"{len(entries)} entries in {json}; {time.monotonic() - started:.0f} s")
