"""The addresses of the pages, and what each shows."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from dataplane_admin.access import caller_of
from dataplane_admin.answers import AnswerError, Answers, Refused, models
from dataplane_admin.pages import marks
from dataplane_admin.pages.actions import act, ask
from dataplane_admin.pages.asked import Asked
from dataplane_admin.pages.comparison import comparison_page
from dataplane_admin.pages.histogram import histogram
from dataplane_admin.pages.life import life_page
from dataplane_admin.pages.links import to
from dataplane_admin.pages.overview import Buckets, overview
from dataplane_admin.pages.partition import partition_page
from dataplane_admin.pages.run_page import run_page
from dataplane_admin.pages.shell import Shell, next_page
from dataplane_admin.pages.trace_page import trace_page
from dataplane_admin.settings import Settings

_ACTIONS = ("clear", "reset-consumption", "end-claim")
_STEPS = 20
_LOGIN_PROBLEMS = {
    "1": "That is not the token of this service.",
    "often": "Too many wrong tokens came from your address. Try again in a moment.",
}
_MOST_STEPS = 10_000


def router(answers: Answers, settings: Settings) -> APIRouter:
    """Every page, and the files they are made of."""
    made = APIRouter(include_in_schema=False)
    shell = Shell(settings)
    _add_files(made, shell)
    _add_state(made, shell, answers, settings.stuck_after_s)
    _add_lineage(made, shell, answers)
    _add_traces(made, shell, answers)
    if settings.allow_actions:
        _add_actions(made, shell, answers)
    return made


def _add_files(made: APIRouter, shell: Shell) -> None:
    @made.get("/static/{digest}/{name}")
    def static(request: Request, digest: str, name: str) -> Response:
        found = shell.assets.answer(digest, name)
        return found or shell.problem(request, 404, f"there is no file '{name}'")

    @made.get("/login")
    def login(request: Request) -> Response:
        asked = Asked(request.query_params)
        problem = _LOGIN_PROBLEMS.get(asked.text("failed"), "")
        return shell.page(request, "login.html.j2", problem=problem, next=asked.text("next"))


def _add_state(made: APIRouter, shell: Shell, answers: Answers, stuck_after_s: float) -> None:
    buckets = Buckets(answers)

    @made.get("/")
    def first(request: Request) -> Response:
        run = Asked(request.query_params).maybe("run")
        return shell.tell(
            request,
            lambda: shell.page(
                request,
                "overview.html.j2",
                view=overview(answers, buckets, run, stuck_after_s=stuck_after_s),
            ),
        )

    @made.get("/partition")
    def partition(request: Request) -> Response:
        def make() -> Response:
            asked = Asked(request.query_params)
            view = partition_page(
                answers,
                asked.required("id"),
                start=asked.integer("start"),
                count=asked.integer("count"),
            )
            return shell.page(request, "partition.html.j2", view=view, now_ns=time.time_ns())

        return shell.tell(request, make)

    @made.get("/audit")
    def audit(request: Request) -> Response:
        def make() -> Response:
            cursor = Asked(request.query_params).maybe("cursor")
            found = answers.audit(cursor=cursor)
            return shell.page(
                request,
                "audit.html.j2",
                found=found,
                now_ns=time.time_ns(),
                next_url=next_page("/audit", {}, found.next),
                first_url=to("/audit") if cursor else None,
            )

        return shell.tell(request, make)


def _add_lineage(made: APIRouter, shell: Shell, answers: Answers) -> None:
    @made.get("/samples")
    def samples(request: Request) -> Response:
        asked = Asked(request.query_params)
        query = {name: asked.text(name) for name in ("q", "tag", "value", "partition")}
        searched = bool(query["q"] or query["tag"])
        hits, problem, status = None, "", 200
        try:
            if searched:
                hits = answers.samples(
                    query["q"],
                    tag=query["tag"] or None,
                    value=query["value"] if query["tag"] else None,
                    partition=query["partition"] or None,
                    cursor=asked.maybe("cursor"),
                )
        except AnswerError as error:
            problem, status = str(error), error.status
        return shell.page(
            request,
            "samples.html.j2",
            status=status,
            **query,
            searched=searched,
            hits=hits,
            problem=problem,
            partition_ids=_partition_ids(answers),
            now_ns=time.time_ns(),
            next_url=next_page("/samples", query, hits.next if hits else None),
            first_url=to("/samples", **query) if asked.text("cursor") else None,
        )

    @made.get("/sample")
    def sample(request: Request) -> Response:
        def make() -> Response:
            asked = Asked(request.query_params)
            life = answers.sample(asked.required("id"), partition=asked.maybe("partition"))
            return shell.page(request, "sample.html.j2", view=life_page(life, time.time_ns()))

        return shell.tell(request, make)

    @made.get("/staleness")
    def staleness(request: Request) -> Response:
        asked = Asked(request.query_params)
        found, problem, status = None, "", 200
        try:
            steps = asked.integer("steps")
            found = answers.staleness(
                run=asked.maybe("run"),
                steps=min(max(1, _STEPS if steps is None else steps), _MOST_STEPS),
            )
        except AnswerError as error:
            problem, status = str(error), error.status
        return shell.page(
            request,
            "staleness.html.j2",
            status=status,
            found=found,
            problem=problem,
            chart=histogram(found) if found else None,
            runs=answers.runs().runs,
            run=asked.text("run"),
            steps=asked.text("steps") or _STEPS,
        )


def _add_traces(made: APIRouter, shell: Shell, answers: Answers) -> None:
    @made.get("/traces")
    def traces(request: Request) -> Response:
        asked = Asked(request.query_params)
        names = ("run", "step", "name", "min_s", "max_s", "error")
        query = {name: asked.text(name) for name in names}
        found, problem, status = None, "", 200
        try:
            found = answers.traces(
                run=asked.maybe("run"),
                step=asked.integer("step"),
                min_s=asked.number("min_s"),
                max_s=asked.number("max_s"),
                error=True if asked.flag("error") else None,
                name=asked.maybe("name"),
                cursor=asked.maybe("cursor"),
            )
        except AnswerError as error:
            problem, status = str(error), error.status
        held = found.traces if found else []
        longest = max((one.seconds for one in held), default=0.0)
        return shell.page(
            request,
            "traces.html.j2",
            status=status,
            found=found,
            problem=problem,
            rows=[(one, marks.stack([("accent", one.seconds)], longest, "")) for one in held],
            runs=answers.runs().runs,
            asked=query,
            filtered=any(query.values()),
            now_ns=time.time_ns(),
            next_url=next_page("/traces", query, found.next if found else None),
            first_url=to("/traces", **query) if asked.text("cursor") else None,
        )

    @made.get("/run")
    def run(request: Request) -> Response:
        asked = Asked(request.query_params).maybe("run")
        return shell.tell(
            request,
            lambda: shell.page(
                request,
                "run.html.j2",
                view=run_page(answers, asked),
                runs=answers.runs().runs,
                run=asked or "",
                now_ns=time.time_ns(),
            ),
        )

    @made.get("/trace")
    def trace(request: Request) -> Response:
        def make() -> Response:
            asked = Asked(request.query_params)
            found = answers.trace(asked.required("id"))
            return shell.page(
                request,
                "trace.html.j2",
                view=trace_page(found, span_id=asked.maybe("span")),
                previous=_step(answers, found, -1),
                following=_step(answers, found, 1),
                now_ns=time.time_ns(),
                percent_of=_percent_of,
            )

        return shell.tell(request, make)

    @made.get("/compare")
    def compare(request: Request) -> Response:
        def make() -> Response:
            asked = Asked(request.query_params)
            a, b = asked.text("a"), asked.text("b")
            view = None
            if a and b:
                view = comparison_page(answers.trace_compare(a, b))
            return shell.page(request, "compare.html.j2", view=view, asked_a=a, asked_b=b)

        return shell.tell(request, make)


def _add_actions(made: APIRouter, shell: Shell, answers: Answers) -> None:
    @made.get("/actions/{name}")
    def question(request: Request, name: str) -> Response:
        def make() -> Response:
            if name not in _ACTIONS:
                return shell.problem(request, 404, f"there is no action '{name}'")
            asked = Asked(request.query_params)
            return shell.page(request, "confirm.html.j2", ask=ask(answers, name, asked), problem="")

        return shell.tell(request, make)

    @made.post("/actions/{name}")
    async def do(request: Request, name: str) -> Response:
        # The value of the form was compared by `CsrfMiddleware`.
        asked = Asked(await request.form(max_files=0, max_fields=20))

        def make() -> Response:
            if name not in _ACTIONS:
                return shell.problem(request, 404, f"there is no action '{name}'")
            result = act(answers, name, asked, caller_of(request).name)
            return shell.page(request, "done.html.j2", result=result)

        return await run_in_threadpool(shell.tell, request, make)


def _partition_ids(answers: Answers) -> list[str]:
    try:
        return [one.id for one in answers.partitions().partitions[:200]]
    except AnswerError:
        return []


def _step(answers: Answers, trace: models.Trace, away: int) -> models.TraceFacts | None:
    """The trace of a step before or after, of the same run."""
    if trace.step is None or trace.step + away < 0:
        return None
    try:
        found = answers.traces(run=trace.run_id or None, step=trace.step + away, limit=1).traces
    except Refused:
        return None
    return found[0] if found else None


def _percent_of(part: float, whole: float) -> float:
    return round(100 * part / whole, 3) if whole > 0 else 0.0
