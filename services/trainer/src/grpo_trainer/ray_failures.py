"""Ray's exceptions in a line that a user can read."""

from __future__ import annotations

from ray.exceptions import RayActorError


def first_line(error: BaseException) -> str:
    """What the error says first, or its class's name if it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def death(error: RayActorError, method: str) -> str:
    """How an actor ended: "could not start" with the reason, or "died during ``method``"."""
    if error.actor_init_failed:
        # Ray puts the whole stack before the reason.
        return f"could not start: {str(error).strip().splitlines()[-1].strip()}"
    return f"died during {method}: {first_line(error)}"
