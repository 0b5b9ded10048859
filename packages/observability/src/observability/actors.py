"""Trace context across actors: methods that accept a carrier, and handles that send one.

Nothing here imports Ray. The carrier is the keyword-only argument ``carrier`` of a method: visible
in the method's signature, and omitted by callers that do not trace.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import Context, copy_context
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
    """Decorate an actor's method so that each call records a child span of the caller's span.

    The method gains the keyword-only argument ``carrier``, to which the caller passes the result of
    `dataplane_core.telemetry.inject`. Its other parameters do not change, so Ray checks calls as
    before. Coroutine functions and generator functions are supported.

    A generator runs in a copy of the consumer's context, taken at the first item. So spans that the
    consumer starts between two items are not children of the generator's span.

    Args:
        method: the method to decorate.
        name: name of the span; None takes the method's name.
        bucket: bucket of the span, see docs/tracing.md; None for a span that only groups others.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        if CARRIER in signature.parameters:
            raise TypeError(f"{function.__qualname__} has an argument {CARRIER!r} already")
        span_name = name or function.__name__

        wrapper: Any
        if inspect.isasyncgenfunction(function):
            server_span = functools.partial(_server_span, span_name, bucket)
            wrapper = _in_own_context_async(function, server_span)

        elif inspect.iscoroutinefunction(function):

            async def run_coroutine(*args: Any, carrier: Any = None, **kwargs: Any) -> Any:
                with _server_span(span_name, bucket, carrier):
                    return await function(*args, **kwargs)

            wrapper = run_coroutine

        elif inspect.isgeneratorfunction(function):

            def generate(*args: Any, carrier: Any = None, **kwargs: Any) -> Any:
                with _server_span(span_name, bucket, carrier):
                    return (yield from function(*args, **kwargs))

            wrapper = _in_own_context(generate)

        else:

            def run(*args: Any, carrier: Any = None, **kwargs: Any) -> Any:
                with _server_span(span_name, bucket, carrier):
                    return function(*args, **kwargs)

            wrapper = run

        functools.update_wrapper(wrapper, function)
        del wrapper.__wrapped__  # Ray would follow it and read a signature without ``carrier``
        parameters = list(signature.parameters.values())
        carrier_parameter = inspect.Parameter(CARRIER, inspect.Parameter.KEYWORD_ONLY, default=None)
        position = len(parameters)
        if parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:
            position -= 1  # ``**kwargs`` must be the last parameter
        parameters.insert(position, carrier_parameter)
        wrapper.__signature__ = signature.replace(parameters=parameters)
        return cast("F", wrapper)

    return decorate if method is None else decorate(method)


@contextmanager
def _server_span(
    name: str, bucket: Bucket | None, carrier: Mapping[str, str] | None
) -> Iterator[None]:
    """Run the block in a span that is a child of the carrier's span."""
    with attached(carrier), span(name, bucket, kind=SpanKind.SERVER):
        yield


def _in_own_context(function: Callable[..., Generator[Any, Any, Any]]) -> Callable[..., Any]:
    def generated(*args: Any, **kwargs: Any) -> Any:
        return (yield from _steps(copy_context(), function(*args, **kwargs)))

    return generated


def _in_own_context_async(
    function: Callable[..., AsyncGenerator[Any, Any]],
    server_span: Callable[[Any], AbstractContextManager[None]],
) -> Callable[..., Any]:
    async def items(*args: Any, carrier: Any = None, **kwargs: Any) -> Any:
        context, yielded = copy_context(), function(*args, **kwargs)
        step: Awaitable[Any] = yielded.asend(None)
        with _entered_in(context, server_span(carrier)):
            try:
                while True:
                    try:
                        item = await _Awaitable(context, step)
                    except StopAsyncIteration:
                        return
                    try:
                        sent = yield item
                    except GeneratorExit:
                        raise
                    except BaseException as error:  # noqa: BLE001 - passed on to the generator
                        step = yielded.athrow(error)
                    else:
                        step = yielded.asend(sent)
            finally:
                await _Awaitable(context, yielded.aclose())

    return items


@contextmanager
def _entered_in(context: Context, manager: AbstractContextManager[None]) -> Iterator[None]:
    """Enter and exit a manager in a context: a variable can be reset only where it was set."""
    context.run(manager.__enter__)
    try:
        yield
    except BaseException as error:
        context.run(manager.__exit__, type(error), error, error.__traceback__)
        raise
    context.run(manager.__exit__, None, None, None)


def _steps(context: Context, generator: Any) -> Generator[Any, Any, Any]:
    """Run each step of a generator in a context; otherwise the same as ``yield from generator``."""
    step: Callable[[], Any] = functools.partial(next, generator)
    while True:
        try:
            item = context.run(step)
        except StopIteration as stop:
            return stop.value
        try:
            sent = yield item
        except GeneratorExit:
            context.run(generator.close)
            raise
        except BaseException as error:  # noqa: BLE001 - passed on to the generator
            step = functools.partial(generator.throw, error)
        else:
            step = functools.partial(generator.send, sent)


class _Awaitable:
    """An awaitable that runs each step of another awaitable in a context."""

    def __init__(self, context: Context, awaitable: Awaitable[Any]) -> None:
        self._context = context
        self._awaitable = awaitable

    def __await__(self) -> Generator[Any, Any, Any]:
        return _steps(self._context, self._awaitable.__await__())


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
        """Call the method with a carrier; return what the handle's ``remote`` returns."""
        return self._method.remote(*args, carrier=inject(), **kwargs)
