"""What can be asked of the service; the API, the pages and the commands ask nothing else."""

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
    # The commands need the models alone, and would wait for the store to be imported.
    if name == "Answers":
        from dataplane_admin.answers.answers import Answers

        return Answers
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
