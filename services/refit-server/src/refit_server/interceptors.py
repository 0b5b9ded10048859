"""Interceptors of the asynchronous server: `RequestGuard` and `TokenInterceptor`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from inspect import iscoroutinefunction
from typing import Any, NoReturn

import grpc

from refit_mx.control.auth import HEALTH, REFUSAL, WITHOUT_TOKEN, is_allowed
from refit_mx.listening.grpc_server import MALFORMED, REQUEST_S, decoded, host_of
from refit_mx.listening.peers import PeerLog

_LATE = f"the request did not arrive within {REQUEST_S:g} s"

# grpc has no types.
Handler = Any
Details = Any
Context = Any


class _Aborted(Exception):
    """The status with which a synchronous servicer ended a call."""


class _SyncContext:
    """The part of a call's context that servicers use, for calls in another thread."""

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise _Aborted(code, details)


class RequestGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Asynchronous form of `refit_mx.listening.grpc_server.RequestGuard`.

    Synchronous servicers run in ``threads``.
    """

    def __init__(self, threads: Executor, log: PeerLog) -> None:
        self._threads = threads
        self._log = log

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler]], details: Details
    ) -> Handler:
        """Return a handler that waits for its request for a bounded time."""
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

        # For clients, a stream of one request is the same as a single request.
        return grpc.stream_unary_rpc_method_handler(
            serve, request_deserializer=None, response_serializer=handler.response_serializer
        )


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Interceptor that refuses calls without the token before decoding, except health calls."""

    def __init__(self, token: str, log: PeerLog) -> None:
        self._token = token
        self._log = log

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler]], details: Details
    ) -> Handler:
        """Return the call's handler, or one that refuses the call."""
        if details.method.startswith(HEALTH) or is_allowed(
            self._token, details.invocation_metadata
        ):
            return await continuation(details)
        return grpc.unary_unary_rpc_method_handler(self._refuse)

    async def _refuse(self, request: object, context: Any) -> None:  # grpc has no types
        self._log.warn(host_of(context.peer()), WITHOUT_TOKEN)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSAL)
