"""Whether the actors of a store are alive, as Ray knows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any  # Any: Ray handles have no static types

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

_PROBE_S = 1.0


def first_dead(actors: Mapping[str, Any]) -> str | None:
    """A sentence about the first actor that Ray knows to be dead; None if there is none.

    Ray imports an actor's class into each process that holds a handle of it.
    """
    if not ray.is_initialized():
        return "Ray has ended in this process"  # to ask would start another
    probes = {}
    for name, actor in actors.items():
        try:
            probes[name] = actor.__ray_ready__.remote()
        except Exception as error:  # noqa: BLE001  # Ray has no type for a handle of an earlier Ray
            return f"{name} is gone: {_first_line(error)}"
    ready, _ = ray.wait(list(probes.values()), num_returns=len(probes), timeout=_PROBE_S)
    for name, probe in probes.items():
        if probe in ready:
            try:
                ray.get(probe, timeout=_PROBE_S)
            except ActorDiedError as error:
                return f"{name} is dead: {_first_line(error)}"
            except (ActorUnavailableError, GetTimeoutError):
                continue  # for the moment, Ray says
    return None


def _first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
