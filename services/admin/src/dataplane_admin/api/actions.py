"""Routes of the actions that change the data plane or tags, if actions are allowed."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from dataplane_admin import models
from dataplane_admin.api.openapi import problems
from dataplane_admin.api.replies import json_reply
from dataplane_admin.service import AdminService
from dataplane_admin.web import caller_of


def actions_router(service: AdminService) -> APIRouter:
    """Return the routes ``POST /api/v1/actions/...``."""
    routes = APIRouter(
        prefix="/api/v1/actions",
        tags=["actions"],
        responses=problems(400, 401, 403, 404, 409, 413, 422, 503, 504),
    )

    @routes.post("/clear", response_model=models.ActionResult)
    def clear_samples(request: Request, change: models.ClearSamples) -> Response:
        """Clear samples or an entire partition."""
        return json_reply(service.actions.clear(change, caller_of(request).name))

    @routes.post("/redeliver", response_model=models.ActionResult)
    def redeliver_samples(request: Request, change: models.RedeliverSamples) -> Response:
        """Redeliver acknowledged samples to a task."""
        return json_reply(service.actions.redeliver(change, caller_of(request).name))

    @routes.post("/end-claim", response_model=models.ActionResult)
    def end_claim(request: Request, change: models.EndClaim) -> Response:
        """End a claim as if its lease had expired."""
        return json_reply(service.actions.end_claim(change, caller_of(request).name))

    @routes.post("/tag-run", response_model=models.TaggedRun)
    def tag_run(request: Request, change: models.TagRun) -> Response:
        """Replace the tags of a run."""
        return json_reply(service.actions.tag_run(change, caller_of(request).name))

    return routes
