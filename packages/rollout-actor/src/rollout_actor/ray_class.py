"""`RayClass`: a base class whose subclasses also run as Ray actors.

A class decorated with ``ray.remote`` cannot be used in-process. Here the class stays plain, and
``remote`` and ``options`` create its Ray form on demand.
"""

from __future__ import annotations

from typing import Any, NoReturn  # Any: Ray's handles and options are not typed

import ray


class _Hidden:
    """Descriptor that makes an inherited attribute look absent."""

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError


class RayClass:
    """Base of a class that also runs as a Ray actor."""

    @classmethod
    def remote(cls, *args: Any, **kwargs: Any) -> Any:
        """Start an actor of this class; return its handle."""
        return _ray_form(cls).remote(*args, **kwargs)

    @classmethod
    def options(cls, **ray_options: Any) -> Any:
        """Return the Ray form with actor options (``num_cpus``, ...), which has ``remote``."""
        return _ray_form(cls).options(**ray_options)


def _ray_form(cls: type) -> Any:
    # Ray adds its own `remote` and `options`, and warns about a class that already has them.
    hidden = {"remote": _Hidden(), "options": _Hidden(), "__doc__": cls.__doc__}
    return ray.remote(type(cls.__name__, (cls,), {"__module__": cls.__module__, **hidden}))
