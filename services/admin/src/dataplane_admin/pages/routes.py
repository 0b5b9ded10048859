"""Routes of the pages."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import unquote

from fastapi import APIRouter, Depends, Request
from fastapi.responses import RedirectResponse, Response
from starlette.concurrency import run_in_threadpool

from dataplane_admin import models
from dataplane_admin.pages import words
from dataplane_admin.pages.actions import confirmation, perform
from dataplane_admin.pages.alerts import cause, figure
from dataplane_admin.pages.comparison import comparison_page
from dataplane_admin.pages.histogram import histogram
from dataplane_admin.pages.learning import learning
from dataplane_admin.pages.life import life_page
from dataplane_admin.pages.links import to
from dataplane_admin.pages.load import LOAD_POINTS, engines_page
from dataplane_admin.pages.overview import Buckets, overview, task_text
from dataplane_admin.pages.params import Params
from dataplane_admin.pages.partition import partition_page
from dataplane_admin.pages.run_page import numbers, run_page
from dataplane_admin.pages.runs import compared_runs, run_list, seen_ago, tag_change
from dataplane_admin.pages.samples import content_page, members, sample_list
from dataplane_admin.pages.shell import Shell, next_page
from dataplane_admin.pages.trace_page import marks_of, query_of, trace_page
from dataplane_admin.service import AdminService, NotFound, Refused, ServiceError
from dataplane_admin.service.alerts import MAX_CLEARED
from dataplane_admin.service.traces import MAX_ROWS, Selection
from dataplane_admin.settings import Settings
from dataplane_admin.web import caller_of
from observability.views.drawing import MAX_BARS

_STEPS = 20
_LOGIN_PROBLEMS = {
    "1": "Wrong token. Enter the token of this service.",
    "often": "Too many wrong tokens from your address. Try again in a moment.",
}
_MAX_STEPS = 10_000
_LOAD_S = 3_600
_MAX_SMOOTHING = 0.99

_Answer = TypeVar("_Answer")


def router(shell: Shell, service: AdminService, settings: Settings) -> APIRouter:
    """Return the routes of all pages and their static files."""
    routes = APIRouter(include_in_schema=False, dependencies=[Depends(_show_in_zone)])
    _add_files(routes, shell)
    _add_state(routes, shell, service, settings.stuck_after_s)
    _add_lineage(routes, shell, service)
    _add_traces(routes, shell, service, settings)
    if settings.allow_actions:
        _add_actions(routes, shell, service, settings.root_path)
    return routes


async def _show_in_zone(request: Request) -> None:
    """Show times in the zone that the browser's cookie names, by default in UTC."""
    words.shown_zone.set(words.zone_named(unquote(request.cookies.get("dataplane_zone", ""))))


def _add_files(routes: APIRouter, shell: Shell) -> None:
    @routes.get("/static/{digest}/{name}")
    def static(request: Request, digest: str, name: str) -> Response:
        response = shell.assets.answer(digest, name)
        return response or shell.problem(request, 404, f"file '{name}' does not exist")

    @routes.get("/docs")
    def docs(request: Request) -> Response:
        return shell.page(request, "docs.html.j2", document=to("/api/v1/openapi.json"))

    @routes.get("/login")
    def login(request: Request) -> Response:
        params = Params(request.query_params)
        problem = _LOGIN_PROBLEMS.get(params.text("failed"), "")
        return shell.page(request, "login.html.j2", problem=problem, next=params.text("next"))


def _add_state(
    routes: APIRouter, shell: Shell, service: AdminService, stuck_after_s: float
) -> None:
    buckets = Buckets(service)

    @routes.get("/")
    @shell.with_error_page
    def first(request: Request) -> Response:
        run = Params(request.query_params).maybe("run")
        view = overview(service, buckets, run, stuck_after_s=stuck_after_s)
        return shell.page(request, "overview.html.j2", view=view, task_text=task_text)

    @routes.get("/partition")
    @shell.with_error_page
    def partition(request: Request) -> Response:
        params = Params(request.query_params)
        view = partition_page(service, params, stuck_after_s=stuck_after_s)
        return shell.page(request, "partition.html.j2", view=view, rows=params.rows)

    @routes.get("/alerts")
    def alerts(request: Request) -> Response:
        listed = service.alerts(limit=Params(request.query_params).rows("cleared", MAX_CLEARED))
        return shell.page(request, "alerts.html.j2", alerts=listed, cause=cause, figure=figure)

    @routes.get("/audit")
    @shell.with_error_page
    def audit(request: Request) -> Response:
        params = Params(request.query_params)
        cursor = params.maybe("cursor")
        log = service.audit(cursor=cursor, limit=params.rows("audit"))
        return shell.page(
            request,
            "audit.html.j2",
            log=log,
            next_url=next_page("/audit", {}, log.next),
            first_url=to("/audit") if cursor else None,
        )


def _add_lineage(routes: APIRouter, shell: Shell, service: AdminService) -> None:
    @routes.get("/samples")
    def samples(request: Request) -> Response:
        params = Params(request.query_params)
        query = {name: params.text(name) for name in ("q", "tag", "value", "partition")}
        searched = bool(query["q"] or query["tag"])
        hits, listed = None, None
        if searched:
            hits, problem, status = _attempt(
                lambda: service.samples(
                    query["q"],
                    tag=query["tag"] or None,
                    value=query["value"] if query["tag"] else None,
                    partition=query["partition"] or None,
                    cursor=params.maybe("cursor"),
                    limit=params.rows("hits"),
                )
            )
        else:
            listed, problem, status = _attempt(lambda: sample_list(service, params))
        return shell.page(
            request,
            "samples.html.j2",
            status=status,
            **query,
            searched=searched,
            hits=hits,
            listed=listed,
            problem=problem,
            partition_ids=_partition_ids(service),
            run_ids=[known.run_id for known in service.runs().runs if known.run_id],
            next_url=next_page("/samples", query, hits.next if hits else None),
            first_url=to("/samples", **query) if params.text("cursor") else None,
        )

    @routes.get("/sample")
    @shell.with_error_page
    def sample(request: Request) -> Response:
        params = Params(request.query_params)
        sample_id, partition, text = params.required("id"), params.maybe("partition"), None
        life = service.sample(sample_id, run=params.given("run"), partition=partition)
        try:
            content = service.sample_content(sample_id, run=life.run_id)
            text = content_page(content, params.text("color"), partition)
        except NotFound:
            pass  # it has no facts; its lifecycle is stored
        generated_by = None if text is None else text.content.facts.first_version
        view = life_page(life, service.status().live, generated_by)
        return shell.page(request, "sample.html.j2", view=view, text=text)

    @routes.get("/group")
    @shell.with_error_page
    def group(request: Request) -> Response:
        params = Params(request.query_params)
        # Without the parameter ``run``, the group has the samples without a run.
        step = params.integer("step")
        shown = service.group(params.text("run"), params.required("group"), step=step)
        return shell.page(request, "group.html.j2", group=shown, step=step, members=members(shown))

    @routes.get("/staleness")
    def staleness(request: Request) -> Response:
        params = Params(request.query_params)

        def count() -> models.Staleness:
            steps = params.integer("steps")
            return service.staleness(
                run=params.maybe("run"),
                steps=min(max(1, _STEPS if steps is None else steps), _MAX_STEPS),
            )

        counted, problem, status = _attempt(count)
        return shell.page(
            request,
            "staleness.html.j2",
            status=status,
            counted=counted,
            problem=problem,
            chart=histogram(counted) if counted else None,
            runs=service.runs().runs,
            run=params.text("run"),
            steps=params.text("steps") or _STEPS,
        )


def _add_traces(routes: APIRouter, shell: Shell, service: AdminService, settings: Settings) -> None:
    @routes.get("/traces")
    def traces(request: Request) -> Response:
        params = Params(request.query_params)
        names = ("run", "step", "name", "service", "min_s", "max_s", "error")
        query = {name: params.text(name) for name in names}
        page, problem, status = _attempt(
            lambda: service.traces(
                run=params.maybe("run"),
                step=params.integer("step"),
                min_s=params.number("min_s"),
                max_s=params.number("max_s"),
                error=True if params.flag("error") else None,
                name=params.maybe("name"),
                service=params.maybe("service"),
                cursor=params.maybe("cursor"),
                limit=params.rows("traces"),
            )
        )
        return shell.page(
            request,
            "traces.html.j2",
            status=status,
            page=page,
            problem=problem,
            runs=service.runs().runs,
            filters=query,
            filtered=any(query.values()),
            next_url=next_page("/traces", query, page.next if page else None),
            first_url=to("/traces", **query) if params.text("cursor") else None,
        )

    @routes.get("/runs")
    def runs(request: Request) -> Response:
        params = Params(request.query_params)
        view, problem, status = _attempt(lambda: run_list(service, params))
        return shell.page(
            request,
            "runs.html.j2",
            status=status,
            view=view,
            problem=problem,
            seen_ago=seen_ago,
        )

    @routes.get("/runs/compare")
    @shell.with_error_page
    def compare_runs(request: Request) -> Response:
        params = Params(request.query_params)
        return shell.page(
            request,
            "compare_runs.html.j2",
            view=compared_runs(service, params),
            smooth=min(params.number("smooth") or 0.0, _MAX_SMOOTHING),
            max_smooth=_MAX_SMOOTHING,
        )

    @routes.get("/run")
    @shell.with_error_page
    def run(request: Request) -> Response:
        params = Params(request.query_params)
        run_id = params.maybe("run")
        shown = run_id or service.newest_run() or ""
        view = run_page(service, shown)
        traces = service.traces(run=shown, limit=1).traces if shown else []
        return shell.page(
            request,
            "run.html.j2",
            view=view,
            numbers=numbers,
            facts=service.run(run_id) if run_id else service.find_run(shown),
            newest=traces[0] if traces else None,
            seen_ago=seen_ago,
            shown=shown,
            learning=learning(service, shown),
            smooth=min(params.number("smooth") or 0.0, _MAX_SMOOTHING),
            max_smooth=_MAX_SMOOTHING,
            runs=service.runs().runs,
            run=run_id or "",
        )

    @routes.get("/trace")
    @shell.with_error_page
    def trace(request: Request) -> Response:
        params = Params(request.query_params)
        query = query_of(params)
        chosen = Selection(
            max_rows=params.rows("tree", MAX_BARS, MAX_ROWS),
            span_id=params.maybe("span"),
            prefer=marks_of(query),
            details_of=query["span"],
        )
        facts = service.trace(params.required("id"), chosen)
        return shell.page(
            request,
            "trace.html.j2",
            view=trace_page(facts, _load(service, facts), params),
            keeps_text=settings.keep_sample_text,
            previous=_step(service, facts, -1),
            following=_step(service, facts, 1),
            percent_of=_percent_of,
        )

    @routes.get("/engines")
    @shell.with_error_page
    def engines(request: Request) -> Response:
        now_ns = time.time_ns()
        run = Params(request.query_params).maybe("run")
        load = service.load(now_ns - _LOAD_S * 10**9, now_ns, run=run, max_points=LOAD_POINTS)
        return shell.page(request, "engines.html.j2", view=engines_page(load), run=run)

    @routes.get("/compare")
    @shell.with_error_page
    def compare(request: Request) -> Response:
        params = Params(request.query_params)
        a, b = params.text("a"), params.text("b")
        view = None
        if a and b:
            view = comparison_page(service.trace_compare(a, b))
        return shell.page(request, "compare.html.j2", view=view, a=a, b=b, rows=params.rows)


def _add_actions(routes: APIRouter, shell: Shell, service: AdminService, root_path: str) -> None:
    @routes.get("/actions/{name}")
    @shell.with_error_page
    def confirm(request: Request, name: str) -> Response:
        shown = confirmation(service, name, Params(request.query_params))
        return shell.page(request, "confirm.html.j2", confirmation=shown, problem="")

    @routes.post("/actions/tag-run")
    async def tag_run(request: Request) -> Response:
        # `require_csrf` has checked the form's CSRF value.
        params = Params(await request.form(max_files=0, max_fields=20))

        def make() -> Response:
            run_id = params.required("run")
            service.actions.tag_run(tag_change(run_id, params), caller_of(request).name)
            return RedirectResponse(f"{root_path}{to('/run', run=run_id)}", 303)

        return await run_in_threadpool(shell.answer, request, make)

    @routes.post("/actions/{name}")
    async def act(request: Request, name: str) -> Response:
        # `require_csrf` has checked the form's CSRF value.
        params = Params(await request.form(max_files=0, max_fields=20))

        def make() -> Response:
            result = perform(service, name, params, caller_of(request).name)
            return shell.page(request, "done.html.j2", result=result)

        return await run_in_threadpool(shell.answer, request, make)


def _attempt(read: Callable[[], _Answer]) -> tuple[_Answer | None, str, int]:
    """Return the answer or None, the problem that the page shows, and the HTTP status."""
    try:
        return read(), "", 200
    except ServiceError as error:
        return None, str(error), error.status


def _partition_ids(service: AdminService) -> list[str]:
    try:
        return [item.id for item in service.partitions().partitions[:200]]
    except ServiceError:
        return []


def _step(service: AdminService, trace: models.Trace, away: int) -> models.TraceFacts | None:
    """Return the trace of the step that is ``away`` steps later in the run; None without one."""
    if trace.step is None or trace.step + away < 0:
        return None
    try:
        traces = service.traces(run=trace.run_id or None, step=trace.step + away, limit=1).traces
    except Refused:
        return None
    return traces[0] if traces else None


def _load(service: AdminService, trace: models.Trace) -> models.Load | None:
    """Return the load of engines and nodes during a trace; None if its time is unknown."""
    if trace.start_ns is None or trace.end_ns is None:
        return None
    run = trace.run_id or None
    return service.load(trace.start_ns, trace.end_ns, run=run, max_points=LOAD_POINTS)


def _percent_of(part: float, total: float) -> float:
    return round(100 * part / total, 3) if total > 0 else 0.0
