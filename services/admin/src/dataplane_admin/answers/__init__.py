"""What can be asked of the service; the API, the pages and the commands ask nothing else."""

from dataplane_admin.answers.answers import Answers
from dataplane_admin.answers.errors import (
    AnswerError,
    Conflict,
    Late,
    NotAllowed,
    NotFound,
    Refused,
    Unavailable,
)

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
