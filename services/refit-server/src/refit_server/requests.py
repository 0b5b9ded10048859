"""The interceptor that bounds the wait for requests; an asynchronous server needs its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from inspect import iscoroutinefunction
from typing import Any, NoReturn

import grpc

from refit_mx.grpc_listening import MALFORMED, REQUEST_S, decoded, host_of
from refit_mx.listening import PeerLog

_LATE = f"the request did not come within {REQUEST_S:g} s"

# grpc has no types.
Handler = Any
Details = Any
Context = Any


class _Aborted(Exception):
    """A synchronous servicer ended its call with a status."""


class _SyncContext:
    """The part of a call's context that the control plane's servicers use, for another thread."""

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise _Aborted(code, details)


class RequestGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """As `refit_mx.grpc_listening.RequestGuard`; here a call without its request holds no thread.

    Args:
        threads: in which synchronous servicers run.
        log: that is told of peers that are silent or send nonsense.
    """

    def __init__(self, threads: Executor, log: PeerLog) -> None:
        self._threads = threads
        self._log = log

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler]], details: Details
    ) -> Handler:
        """Give a handler that waits for its request a bounded time."""
        handler = await continuation(details)
        if handler is None or handler.unary_unary is None:
            return handler

        async def serve(requests: object, context: Context) -> Any:
            try:
                async with asyncio.timeout(REQUEST_S):
                    data = await context.read()
            except TimeoutError:
                self._log.warn(host_of(context.peer()), f"sent no request within {REQUEST_S:g} s")
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, _LATE)
            request = None if data is grpc.aio.EOF else decoded(handler, data)
            if request is None:
                self._log.warn(host_of(context.peer()), "sent a malformed request")
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, MALFORMED)
            if iscoroutinefunction(handler.unary_unary):
                return await handler.unary_unary(request, context)
            try:
                return await asyncio.get_running_loop().run_in_executor(
                    self._threads, handler.unary_unary, request, _SyncContext()
                )
            except _Aborted as aborted:
                await context.abort(*aborted.args)

        # A stream of one request looks the same to clients.
        return grpc.stream_unary_rpc_method_handler(
            serve, request_deserializer=None, response_serializer=handler.response_serializer
        )
