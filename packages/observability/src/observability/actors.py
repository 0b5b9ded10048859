"""Trace context across actors: methods that accept a carrier, and handles that send one.

Nothing here imports Ray. The carrier is the keyword-only argument ``carrier`` of a method: visible
in its signature, and omitted by callers that do not trace.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import (
    Any,
    TypeVar,
    cast,
    overload,
)  # Any: methods of any signature, handles of any framework

from opentelemetry.trace import SpanKind

from dataplane_core.telemetry import Bucket, attached, inject, span

F = TypeVar("F", bound=Callable[..., Any])

CARRIER = "carrier"


@overload
def traced(method: F, /) -> F: ...
@overload
def traced(*, name: str | None = None, bucket: Bucket | None = None) -> Callable[[F], F]: ...


def traced(
    method: F | None = None, /, *, name: str | None = None, bucket: Bucket | None = None
) -> F | Callable[[F], F]:
    """Decorate an actor's method so that each call is a child span of the caller's span.

    The method gains the keyword-only argument ``carrier``; the caller passes the result of
    `dataplane_core.telemetry.inject`. The rest of the signature stays, so Ray checks calls as
    before. Coroutine methods and generators keep their kind.

    Args:
        method: the method to decorate.
        name: name of the span; None takes the method's name.
        bucket: bucket of the span, see docs/telemetry.md; None for a span that only groups others.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        if CARRIER in signature.parameters:
            raise TypeError(f"{function.__qualname__} has an argument {CARRIER!r} already")
        called = name or function.__name__

        wrapper: Any
        if inspect.isasyncgenfunction(function):

            async def items(*args: Any, carrier: Any = None, **kwargs: Any) -> Any:
                with _calling(called, bucket, carrier):
                    async for item in function(*args, **kwargs):
                        yield item

            wrapper = items

        elif inspect.iscoroutinefunction(function):

            async def awaited(*args: Any, carrier: Any = None, **kwargs: Any) -> Any:
                with _calling(called, bucket, carrier):
                    return await function(*args, **kwargs)

            wrapper = awaited

        elif inspect.isgeneratorfunction(function):

            def generated(*args: Any, carrier: Any = None, **kwargs: Any) -> Any:
                with _calling(called, bucket, carrier):
                    return (yield from function(*args, **kwargs))

            wrapper = generated

        else:

            def returned(*args: Any, carrier: Any = None, **kwargs: Any) -> Any:
                with _calling(called, bucket, carrier):
                    return function(*args, **kwargs)

            wrapper = returned

        functools.update_wrapper(wrapper, function)
        del wrapper.__wrapped__  # Ray would follow it to a signature without a carrier
        parameters = list(signature.parameters.values())
        extra = inspect.Parameter(CARRIER, inspect.Parameter.KEYWORD_ONLY, default=None)
        at = len(parameters)
        if parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:
            at -= 1
        wrapper.__signature__ = signature.replace(
            parameters=[*parameters[:at], extra, *parameters[at:]]
        )
        return cast("F", wrapper)

    return decorate if method is None else decorate(method)


@contextmanager
def _calling(name: str, bucket: Bucket | None, carrier: Mapping[str, str] | None) -> Iterator[None]:
    with attached(carrier), span(name, bucket, kind=SpanKind.SERVER):
        yield


class TracedHandle:
    """An actor's handle that passes the caller's carrier to the actor's `traced` methods.

    ``TracedHandle(actor).step.remote(1)`` is ``actor.step.remote(1, carrier=inject())``. It can be
    pickled and sent like the handle itself.

    Args:
        handle: handle of the actor; every method called through it must be `traced`.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> _TracedMethod:
        if name.startswith("_"):
            raise AttributeError(name)
        return _TracedMethod(getattr(self._handle, name))


class _TracedMethod:
    def __init__(self, method: Any) -> None:
        self._method = method

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method and return the result of the handle's ``remote``."""
        return self._method.remote(*args, carrier=inject(), **kwargs)
