"""Lets a plain class be used as if it were decorated with ``ray.remote``.

A decorated class cannot be called in-process any more. Here the plain class stays a plain class,
and ``remote`` and ``options`` make the Ray form of it, or of a subclass, on demand.
"""

from __future__ import annotations

from typing import Any, NoReturn  # Any: Ray's handles and options are not typed

import ray


class _Hidden:
    """Makes an inherited attribute look absent."""

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError


class RayClass:
    """Base of a class that also runs as a Ray actor."""

    @classmethod
    def remote(cls, *args: Any, **kwargs: Any) -> Any:
        """Start an actor of this class; returns its handle."""
        return _ray_form(cls).remote(*args, **kwargs)

    @classmethod
    def options(cls, **ray_options: Any) -> Any:
        """The class with Ray's actor options (``num_cpus``, ``name``, ...); has ``remote``."""
        return _ray_form(cls).options(**ray_options)


def _ray_form(cls: type) -> Any:
    # Ray adds `remote` and `options` of its own and warns about a class that has one already.
    hidden = {"remote": _Hidden(), "options": _Hidden(), "__doc__": cls.__doc__}
    return ray.remote(type(cls.__name__, (cls,), {"__module__": cls.__module__, **hidden}))
