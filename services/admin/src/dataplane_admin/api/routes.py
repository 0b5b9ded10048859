"""Routes of the API. Ids are query parameters, since they may contain any character."""

from __future__ import annotations

import time
from typing import Annotated, Any  # Any: FastAPI's description of responses

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import BeforeValidator, Field, StringConstraints

from dataplane_admin import models
from dataplane_admin.api.actions import actions_router
from dataplane_admin.api.metrics import metrics_router
from dataplane_admin.api.openapi import problems
from dataplane_admin.api.replies import conditional_reply, json_reply
from dataplane_admin.api.updates import LiveUpdates
from dataplane_admin.service import AdminService, limits
from dataplane_admin.service.alerts import MAX_CLEARED
from dataplane_admin.service.cursors import MAX_CURSOR
from dataplane_admin.service.runs import MAX_COMPARED, MAX_CURVES
from dataplane_admin.service.service import NAME
from dataplane_admin.service.traces import canonical_trace_id

Id = Annotated[str, Query(min_length=1, max_length=limits.MAX_ID)]
OptionalId = Annotated[str | None, Query(min_length=1, max_length=limits.MAX_ID)]
Text = Annotated[str, Query(max_length=limits.MAX_ID)]
OptionalText = Annotated[str | None, Query(max_length=limits.MAX_ID)]
ServiceName = Annotated[str | None, Query(alias="service", max_length=limits.MAX_ID)]
Integer = Annotated[int | None, Query(ge=0, le=2**63 - 1)]
TraceId = Annotated[
    str,
    BeforeValidator(lambda given: canonical_trace_id(given) if isinstance(given, str) else given),
    Query(
        pattern="^[0-9a-f]{32}$",
        description="32 hexadecimal digits; case, dashes and spaces are ignored",
    ),
]
# Generated clients name a type inside a union by its title.
RunStateFilter = Annotated[models.RunState, Field(title="State")] | None
Limit = Annotated[int, Query(ge=1, le=limits.MAX_PAGE)]
Cursor = Annotated[str | None, Query(max_length=MAX_CURSOR, description="`next` of a page")]
Runs = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=limits.MAX_ID)]],
    Query(min_length=1, max_length=MAX_COMPARED),
]
Place = Annotated[float | None, Query(ge=0, le=1e15, allow_inf_nan=False)]
Seconds = Annotated[float | None, Query(ge=0, le=1e9, allow_inf_nan=False)]

_HOUR_NS = 3_600 * 10**9

_NOT_MODIFIED: dict[int | str, dict[str, Any]] = {304: {"description": "Not modified"}}
_ITEM_RESPONSES = {**_NOT_MODIFIED, **problems(404)}
_COMMON_PROBLEMS = problems(400, 401, 403, 422, 503)
_LIVE_PROBLEMS = problems(404, 504)


def routers(service: AdminService, updates: LiveUpdates, *, allow_actions: bool) -> list[APIRouter]:
    """Return all API routes except those that receive telemetry.

    They are not nested: FastAPI would analyze the routes of a nested router twice.

    The name of a route's function is its operation id. Client generators derive method names from
    it, so it begins with a verb: ``list_partitions``. Renaming it breaks generated clients.
    """
    always = [_probes(service), _live(service, updates), _history(service), metrics_router(service)]
    return [*always, actions_router(service)] if allow_actions else always


def _probes(service: AdminService) -> APIRouter:
    routes = APIRouter(tags=["service"])

    @routes.get("/healthz", response_model=models.Liveness, responses=problems(400, 403))
    async def get_liveness() -> Response:
        """Report that the process answers requests."""
        return json_reply(models.Liveness())

    @routes.get(
        "/readyz",
        response_model=models.Readiness,
        responses={
            **problems(400, 403),
            503: {"description": "Not ready", "model": models.Readiness},
        },
    )
    def get_readiness() -> Response:
        """Report whether telemetry can be stored, and the state of the data plane connection."""
        readiness = service.readiness()
        return json_reply(readiness, status=200 if readiness.ready else 503)

    @routes.get("/api/v1/version", response_model=models.Version, responses=_COMMON_PROBLEMS)
    def get_version() -> Response:
        """Return name and version."""
        return json_reply(models.Version(name=NAME, version=service.version))

    @routes.get("/api/v1/status", response_model=models.Status, responses=_COMMON_PROBLEMS)
    def get_status() -> Response:
        """Return the state of the service."""
        return json_reply(service.status())

    return routes


def _live(service: AdminService, updates: LiveUpdates) -> APIRouter:
    routes = APIRouter(prefix="/api/v1", tags=["live"], responses=_COMMON_PROBLEMS)

    @routes.get("/partitions", response_model=models.Partitions, responses=_NOT_MODIFIED)
    def list_partitions(request: Request) -> Response:
        """List partitions and storage units, from one snapshot."""
        return conditional_reply(request, service.partitions, ages=True)

    @routes.get("/partition", response_model=models.Partition, responses=_ITEM_RESPONSES)
    def get_partition(request: Request, id: Id) -> Response:  # noqa: A002  # the parameter's name
        """Return one partition, from the newest snapshot."""
        return conditional_reply(request, lambda: service.partition(id), ages=True)

    @routes.get("/partition/matrix", response_model=models.Matrix, responses=_ITEM_RESPONSES)
    def get_partition_matrix(
        request: Request,
        id: Id,  # noqa: A002
        windows: Annotated[int, Query(ge=1, le=limits.MAX_WINDOWS)] = 120,
    ) -> Response:
        """Return the samples of a partition by field and task, in windows."""
        return conditional_reply(request, lambda: service.partition_matrix(id, windows=windows))

    @routes.get(
        "/partition/history", response_model=models.PartitionHistory, responses=_ITEM_RESPONSES
    )
    def get_partition_history(request: Request, id: Id) -> Response:  # noqa: A002
        """Return the numbers of a partition over the last hour."""
        return conditional_reply(request, lambda: service.partition_history(id))

    @routes.get("/partition/samples", response_model=models.SamplePage, responses=_LIVE_PROBLEMS)
    def list_partition_samples(
        id: Id,  # noqa: A002
        start: Annotated[int, Query(ge=0, le=2**31)] = 0,
        limit: Limit = 100,
    ) -> Response:
        """List a page of samples, read from the data plane."""
        return json_reply(service.partition_samples(id, start=start, limit=limit))

    @routes.get("/partition/claims", response_model=list[models.Claim], responses=_LIVE_PROBLEMS)
    def list_partition_claims(id: Id) -> Response:  # noqa: A002
        """List leased claims, oldest first, read from the data plane."""
        return json_reply(service.partition_claims(id))

    @routes.get(
        "/live",
        response_class=Response,
        responses={
            200: {
                "description": "Events named `changed`; the data of each is a `Changed` as JSON",
                "content": {"text/event-stream": {"schema": {"type": "string"}}},
            }
        },
    )
    async def stream_changes() -> Response:
        """Stream server-sent events when something changes."""
        return updates.subscribe()

    return routes


def _history(service: AdminService) -> APIRouter:
    routes = APIRouter(prefix="/api/v1", tags=["history"], responses=_COMMON_PROBLEMS)

    @routes.get("/samples", response_model=models.SampleHits, responses=problems(504))
    def search_samples(
        q: Annotated[str, Query(max_length=limits.MAX_ID)] = "",
        tag: OptionalText = None,
        value: OptionalText = None,
        partition: OptionalId = None,
        cursor: Cursor = None,
        limit: Limit = 50,
    ) -> Response:
        """Search samples by a prefix of their id, or by a tag in the live data plane.

        `q` is the prefix.
        """
        return json_reply(
            service.samples(
                q, tag=tag, value=value, partition=partition, cursor=cursor, limit=limit
            )
        )

    @routes.get("/sample", response_model=models.SampleLife, responses=_LIVE_PROBLEMS)
    def get_sample(
        id: Id,  # noqa: A002
        run: OptionalText = None,
        partition: OptionalId = None,
    ) -> Response:
        """Return the lifecycle of one sample in a run.

        Without `run`, the run is that of the live sample, else the newest run with this id.
        Another run may use the same ids.
        """
        return json_reply(service.sample(id, run=run, partition=partition))

    @routes.get("/samples/facts", response_model=models.SampleFactsPage, responses=_NOT_MODIFIED)
    def list_sample_facts(
        request: Request,
        run: OptionalText = None,
        step: Integer = None,
        group: OptionalText = None,
        state: OptionalText = None,
        truncated: bool | None = None,
        text: bool | None = None,
        tag: OptionalText = None,
        min_reward: Annotated[float | None, Query(allow_inf_nan=False)] = None,
        max_reward: Annotated[float | None, Query(allow_inf_nan=False)] = None,
        min_length: Annotated[int | None, Query(ge=0, le=2**53)] = None,
        max_length: Annotated[int | None, Query(ge=0, le=2**53)] = None,
        sort: models.SampleSort = "newest",
        ascending: bool = False,
        cursor: Cursor = None,
        limit: Limit = 50,
    ) -> Response:
        """List facts of samples, by default newest first.

        Samples without the number to sort by are omitted. A ``tag`` is ``name=value``, or the name
        of a tag with any value.
        """
        return conditional_reply(
            request,
            lambda: service.sample_facts(
                run=run,
                step=step,
                group=group,
                state=state,
                truncated=truncated,
                text=text,
                tag=tag,
                min_reward=min_reward,
                max_reward=max_reward,
                min_length=min_length,
                max_length=max_length,
                sort=sort,
                ascending=ascending,
                cursor=cursor,
                limit=limit,
            ),
        )

    @routes.get("/samples/group", response_model=models.SampleGroup, responses=_ITEM_RESPONSES)
    def get_sample_group(request: Request, run: Text, group: Id, step: Integer = None) -> Response:
        """Return the samples of one prompt, by default in all steps."""
        return conditional_reply(request, lambda: service.group(run, group, step=step))

    @routes.get("/sample/content", response_model=models.SampleContent, responses=_ITEM_RESPONSES)
    def get_sample_content(
        request: Request,
        id: Id,  # noqa: A002
        run: OptionalText = None,
        threshold: Annotated[float, Query(gt=0, le=1e3)] = 0.5,
    ) -> Response:
        """Return facts, conversation and tokens of a sample.

        The divergence is at the first token whose log-probabilities differ by more than `threshold`
        nats.
        """
        return conditional_reply(
            request, lambda: service.sample_content(id, run=run, threshold=threshold)
        )

    @routes.get("/why", response_model=list[models.Wait], responses=_NOT_MODIFIED)
    def list_blocked_tasks(request: Request, run: OptionalId = None) -> Response:
        """List blocked tasks, longest first; those of silent processes last.

        With `run`, only tasks that processes of this run reported are listed. Idle tasks of the
        data plane belong to no run and are omitted.
        """
        return conditional_reply(request, lambda: service.why(run=run), ages=True)

    @routes.get("/alerts", response_model=models.Alerts, responses=_NOT_MODIFIED)
    def list_alerts(request: Request, limit: Limit = MAX_CLEARED) -> Response:
        """List raised alerts, most severe first, and the latest `limit` cleared ones."""
        return conditional_reply(request, lambda: service.alerts(limit=limit), ages=True)

    @routes.get("/staleness", response_model=models.Staleness, responses=_NOT_MODIFIED)
    def get_staleness(
        request: Request,
        run: OptionalText = None,
        steps: Annotated[int, Query(ge=1, le=limits.MAX_STEPS)] = 20,
    ) -> Response:
        """Return the staleness of trained samples, in weight versions."""
        return conditional_reply(request, lambda: service.staleness(run=run, steps=steps))

    @routes.get("/runs", response_model=models.Runs, responses=_NOT_MODIFIED)
    def list_runs(
        request: Request,
        q: OptionalText = None,
        state: RunStateFilter = None,
        tag: OptionalText = None,
        sort: models.RunSort = "seen",
        ascending: bool = False,
        limit: Limit = limits.MAX_PAGE,
    ) -> Response:
        """List runs, by default those with the newest records first.

        `q` is part of id, tag or error. Runs without the number to sort by come last.
        """
        return conditional_reply(
            request,
            lambda: service.runs(
                q=q, state=state, tag=tag, sort=sort, ascending=ascending, limit=limit
            ),
            ages=True,
        )

    @routes.get("/run", response_model=models.RunDetail, responses=_ITEM_RESPONSES)
    def get_run(request: Request, run: Id) -> Response:
        """Return one run with its configuration."""
        return conditional_reply(request, lambda: service.run(run), ages=True)

    @routes.get("/runs/compare", response_model=models.RunComparison, responses=_ITEM_RESPONSES)
    def compare_runs(request: Request, run: Runs) -> Response:
        """Compare the configurations of runs."""
        return conditional_reply(request, lambda: service.compare_runs(run), ages=True)

    @routes.get("/runs/curves", response_model=models.ComparedCurves, responses=_ITEM_RESPONSES)
    def compare_run_curves(
        request: Request,
        run: Runs,
        axis: models.Axis = "step",
        name: Annotated[list[str] | None, Query(max_length=MAX_CURVES)] = None,
        first: Place = None,
        last: Place = None,
        max_points: Annotated[int, Query(ge=2, le=limits.MAX_POINTS)] = 400,
    ) -> Response:
        """Return metrics of one or more runs over steps, time or samples.

        `name` selects metrics, and may be repeated; at most 200 curves of a run are returned. A
        curve with more than `max_points` points has buckets of steps with mean, smallest and
        largest value.

        `axis=time` counts seconds since the first record of each run, `axis=samples` the samples
        that the run has trained on. `first` and `last` are places on the axis.
        """
        return conditional_reply(
            request,
            lambda: service.compare_run_curves(
                run, axis=axis, names=name, first=first, last=last, max_points=max_points
            ),
        )

    @routes.get("/run/steps", response_model=models.RunSteps, responses=_NOT_MODIFIED)
    def get_run_steps(
        request: Request,
        run: OptionalText = None,
        ranges: Annotated[int, Query(ge=1, le=limits.MAX_RANGES)] = 10,
    ) -> Response:
        """Return step durations of a run, by default the newest with a finished step."""
        return conditional_reply(request, lambda: service.run_steps(run=run, ranges=ranges))

    @routes.get("/traces", response_model=models.Traces, responses=_NOT_MODIFIED)
    def list_traces(
        request: Request,
        run: OptionalText = None,
        step: Integer = None,
        min_s: Seconds = None,
        max_s: Seconds = None,
        error: bool | None = None,
        name: OptionalText = None,
        service_name: ServiceName = None,
        cursor: Cursor = None,
        limit: Limit = 50,
    ) -> Response:
        """List traces, newest first."""
        return conditional_reply(
            request,
            lambda: service.traces(
                run=run,
                step=step,
                min_s=min_s,
                max_s=max_s,
                error=error,
                name=name,
                service=service_name,
                cursor=cursor,
                limit=limit,
            ),
        )

    @routes.get("/trace", response_model=models.Trace, responses=_ITEM_RESPONSES)
    def get_trace(request: Request, id: TraceId) -> Response:  # noqa: A002
        """Return one trace across all its processes."""
        return conditional_reply(request, lambda: service.trace(id))

    @routes.get("/trace/compare", response_model=models.TraceComparison, responses=_ITEM_RESPONSES)
    def compare_traces(request: Request, a: TraceId, b: TraceId) -> Response:
        """Compare two traces."""
        return conditional_reply(request, lambda: service.trace_compare(a, b))

    @routes.get("/load", response_model=models.Load, responses=_NOT_MODIFIED)
    def get_load(
        request: Request,
        start_ns: Integer = None,
        end_ns: Integer = None,
        run: OptionalId = None,
        max_points: Annotated[int, Query(ge=2, le=limits.MAX_POINTS)] = 1_000,
    ) -> Response:
        """Return the load of inference engines and nodes, by default in the last hour.

        With `run`, engines and nodes that report another run are omitted. A series with more than
        `max_points` points has means of equally long intervals. At most 64 engines and 64 nodes
        are returned.
        """
        # Without an end the answer changes with the time, not only with the store.
        end = time.time_ns() if end_ns is None else end_ns
        start = max(0, end - _HOUR_NS) if start_ns is None else min(start_ns, end)
        return conditional_reply(
            request,
            lambda: service.load(start, end, run=run, max_points=max_points),
            ages=end_ns is None,
        )

    @routes.get("/audit", response_model=models.Audit, responses=_NOT_MODIFIED)
    def list_audit_entries(request: Request, cursor: Cursor = None, limit: Limit = 50) -> Response:
        """List manual changes and alerts, newest first."""
        return conditional_reply(request, lambda: service.audit(cursor=cursor, limit=limit))

    @routes.get("/series", response_model=list[models.Series], responses=_NOT_MODIFIED)
    def list_series(request: Request, name: OptionalId = None) -> Response:
        """Return the newest value of each metric series."""
        return conditional_reply(request, lambda: service.series(name=name))

    return routes
