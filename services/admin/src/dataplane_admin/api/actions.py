"""Routes that change the data plane; there are none unless actions are allowed."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from dataplane_admin.access import caller_of
from dataplane_admin.answers import Answers, models
from dataplane_admin.api.openapi import problems
from dataplane_admin.api.replies import json_reply


def actions_router(answers: Answers) -> APIRouter:
    """POST /api/v1/actions/..."""
    routes = APIRouter(
        prefix="/api/v1/actions",
        tags=["actions"],
        responses=problems(400, 401, 403, 404, 409, 413, 422, 503, 504),
    )

    @routes.post("/clear", response_model=models.ActionResult)
    def clear(request: Request, asked: models.ClearSamples) -> Response:
        """Drop samples, or a partition as a whole."""
        return json_reply(answers.clear(asked, actor=caller_of(request).name))

    @routes.post("/reset-consumption", response_model=models.ActionResult)
    def reset_consumption(request: Request, asked: models.ResetConsumption) -> Response:
        """Let a task claim samples again that it has consumed."""
        return json_reply(answers.reset_consumption(asked, actor=caller_of(request).name))

    @routes.post("/end-claim", response_model=models.ActionResult)
    def end_claim(request: Request, asked: models.EndClaim) -> Response:
        """End a claim as if its lease had run out."""
        return json_reply(answers.end_claim(asked, actor=caller_of(request).name))

    return routes
