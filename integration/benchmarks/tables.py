"""Tables of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from integration.benchmarks.admin_ingest import INGEST_HEADINGS, IngestResult
from integration.benchmarks.admin_pages import PAGES_HEADINGS, PAINT_HEADINGS, PagesResult
from integration.benchmarks.admin_soak import SOAK_HEADINGS, SoakResult
from integration.benchmarks.async_grpo import ASYNC_HEADINGS, WHAT_IF_HEADINGS, AsyncResult
from integration.benchmarks.growth import GrowthResult, Table
from integration.benchmarks.refit import REFIT_HEADINGS, STAGE_HEADINGS, RefitResult
from integration.benchmarks.refit_planning import PLANNING_HEADINGS, PlanningResult
from integration.benchmarks.report import (
    CASE_HEADINGS,
    CLAIM_HEADINGS,
    INSPECTING_HEADINGS,
    Session,
)
from integration.benchmarks.tracing import INSIDE_HEADINGS, TRACING_HEADINGS, TracingCost


def tables(
    sessions: Sequence[Session],
    cost: TracingCost,
    async_results: Sequence[AsyncResult],
    refits: Sequence[RefitResult],
    planning: PlanningResult | None,
    admin: tuple[IngestResult, PagesResult, SoakResult | None],
    growth: GrowthResult | None,
) -> Iterator[Table]:
    """Yield the tables in the order of the docs; one without rows was not measured."""
    for session in sessions:
        for case in session.cases:
            yield f"{case.title}{session.note}", CASE_HEADINGS, session.case_rows(case)
        yield f"Claim of 32{session.note}", CLAIM_HEADINGS, session.claim_rows()
        yield "Inspector", INSPECTING_HEADINGS, session.inspecting_rows()
    for refit in refits:
        yield refit.title, REFIT_HEADINGS, refit.rows()
        yield refit.title, STAGE_HEADINGS, refit.stage_rows()
    yield "Refit: planning", PLANNING_HEADINGS, [] if planning is None else planning.rows()
    yield "Tracing of a GRPO step", TRACING_HEADINGS, cost.rows()
    yield "Tracing of a GRPO step", INSIDE_HEADINGS, cost.inside_rows()
    rows = [row for result in async_results for row in result.rows()]
    yield "Asynchronous GRPO", ASYNC_HEADINGS, rows
    rows = [row for result in async_results for row in result.what_if_rows()]
    yield "What-if: predictions from one traced run", WHAT_IF_HEADINGS, rows
    ingest, pages, soak = admin
    yield "Admin service: ingested spans", INGEST_HEADINGS, ingest.rows()
    yield "Admin service: pages and answers", PAGES_HEADINGS, pages.rows()
    yield "Admin service: first paint", PAINT_HEADINGS, pages.paint_rows()
    yield "Admin service: one hour", SOAK_HEADINGS, [] if soak is None else soak.rows()
    if growth is not None:
        yield from growth.tables()
