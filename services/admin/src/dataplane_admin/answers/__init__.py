"""Queries and actions of the service, shared by the API and the pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataplane_admin.answers.errors import (
    AnswerError,
    Conflict,
    Late,
    NotAllowed,
    NotFound,
    Refused,
    Unavailable,
)

if TYPE_CHECKING:
    from dataplane_admin.answers.answers import Answers

__all__ = [
    "AnswerError",
    "Answers",
    "Conflict",
    "Late",
    "NotAllowed",
    "NotFound",
    "Refused",
    "Unavailable",
]


def __getattr__(name: str) -> object:
    # The commands need only the models; importing the store is slow.
    if name == "Answers":
        from dataplane_admin.answers.answers import Answers

        return Answers
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
