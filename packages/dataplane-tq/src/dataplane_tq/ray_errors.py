"""Errors of Ray in one line."""

from __future__ import annotations

from ray.exceptions import RayTaskError


def reason_of(error: Exception) -> str:
    """Return an error of Ray without the traceback of another process, which its text contains."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if isinstance(error, RayTaskError) or "creation task" in lines[0]:
        return lines[-1]  # the error that the actor's code raised
    return lines[0]
