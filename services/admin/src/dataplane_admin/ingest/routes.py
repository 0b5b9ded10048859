"""OTLP/HTTP receiver: ``POST /v1/traces``, ``/v1/logs`` and ``/v1/metrics``.

https://opentelemetry.io/docs/specs/otlp/#otlphttp. A request is answered after its records are
committed. Separate threads decompress, decode and hash bodies, so that pages are not blocked.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus

from fastapi import APIRouter, Request
from google.protobuf.message import DecodeError, Message
from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from dataplane_admin.ingest.answer import JSON, refusal_response, success_response
from dataplane_admin.ingest.body import RequestMemory, inflate, read_body
from dataplane_admin.ingest.events import batch_of_logs
from dataplane_admin.ingest.limits import BODY_S, Limits
from dataplane_admin.ingest.metrics import batch_of_metrics
from dataplane_admin.ingest.redaction import Redaction
from dataplane_admin.ingest.refusal import Refusal
from dataplane_admin.ingest.sample_text import remove_sample_text
from dataplane_admin.ingest.spans import batch_of_spans
from dataplane_admin.store import (
    Batch,
    QueueFull,
    Store,
    StoreUnavailable,
    WriteRefused,
)
from observability.otlp_json import NotOtlp, parse_json
from observability.rl_insight import join_steps
from observability.wire import PROTOBUF, OtlpSignal, parse

_DECODERS = 2
_COMMIT_S = 10.0
_SUMMARY: dict[OtlpSignal, str] = {
    "traces": "Receive spans",
    "logs": "Receive lifecycle events, facts and text of samples, and logs of traces",
    "metrics": "Receive metrics",
}


def router(store: Store, limits: Limits, *, redaction: Redaction | None = None) -> APIRouter:
    """Return the three routes, which write to ``store``.

    Text of samples is stored only with a ``redaction``, which is applied to it; see `sample_text`.
    """
    routes = APIRouter(tags=["otlp"])
    receiver = _Receiver(store, limits, redaction=redaction)

    def add(kind: OtlpSignal) -> None:
        async def receive(request: Request) -> Response:
            return await receiver.receive(kind, request)

        routes.add_api_route(
            f"/v1/{kind}",
            receive,
            methods=["POST"],
            name=f"export_{kind}",
            summary=_SUMMARY[kind],
            response_class=Response,
            openapi_extra=_BODY_IN_OPENAPI,
            responses=_ANSWERS,
        )

    for kind in _SUMMARY:
        add(kind)
    return routes


class _Receiver:
    def __init__(self, store: Store, limits: Limits, *, redaction: Redaction | None) -> None:
        self._redaction = redaction
        self._store = store
        self._limits = limits
        self._memory = RequestMemory(limits)
        self._pool = ThreadPoolExecutor(_DECODERS, thread_name_prefix="otlp-decode")

    async def receive(self, kind: OtlpSignal, request: Request) -> Response:
        content = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        media_type = JSON if content == JSON else PROTOBUF
        try:
            if content not in (JSON, PROTOBUF):
                raise Refusal(
                    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                    f"Content-Type {content[:60]!r}: expected {PROTOBUF} or {JSON}",
                )
            encoding = request.headers.get("content-encoding", "identity").strip().lower()
            with self._memory.reservation() as reserve:
                async with asyncio.timeout(BODY_S):
                    declared = request.headers.get("content-length")
                    body = await read_body(request.stream(), declared, reserve, self._limits)
                batch = await asyncio.get_running_loop().run_in_executor(
                    self._pool, self._decode, kind, body, encoding, media_type
                )
            await self._write(batch)
        except Refusal as refusal:
            return refusal_response(refusal, media_type)
        except TimeoutError:
            message = f"the body did not arrive within {BODY_S:g} s"
            return refusal_response(Refusal(HTTPStatus.REQUEST_TIMEOUT, message), media_type)
        except ClientDisconnect:
            return Response(status_code=HTTPStatus.BAD_REQUEST)  # the client is gone
        except asyncio.CancelledError:
            # The shutdown timeout has expired. The server would answer 500, after which an exporter
            # drops its records; after 503 it retries.
            message = "the service is shutting down; retry"
            return refusal_response(Refusal(HTTPStatus.SERVICE_UNAVAILABLE, message), media_type)
        return success_response(kind, len(batch.refused), batch.reasons, media_type)

    def _decode(self, kind: OtlpSignal, body: bytes, encoding: str, media_type: str) -> Batch:
        inflated = inflate(body, encoding, self._limits)
        redaction = self._redaction
        # Either function returns whether it changed the request.
        reduce = remove_sample_text if redaction is None else redaction.attributes
        try:
            if kind == "traces":
                traces = TracesData()
                changed = _parse(inflated, traces, media_type)
                changed |= join_steps(traces.resource_spans)
                changed |= reduce(traces)
                return batch_of_spans(traces, None if changed else inflated, self._limits)
            if kind == "logs":
                logs = LogsData()
                _parse(inflated, logs, media_type)
                reduce(logs)
                return batch_of_logs(logs, self._limits, time.time_ns(), redaction=redaction)
            metrics = MetricsData()
            _parse(inflated, metrics, media_type)
            reduce(metrics)
            return batch_of_metrics(metrics, self._limits, time.time_ns())
        except (DecodeError, NotOtlp) as error:
            raise Refusal(
                HTTPStatus.BAD_REQUEST, f"the body is not an OTLP request of {kind}: {error}"
            ) from error

    async def _write(self, batch: Batch) -> None:
        try:
            async with asyncio.timeout(_COMMIT_S):
                await asyncio.wrap_future(self._store.submit(batch))
        except QueueFull as error:
            raise Refusal(HTTPStatus.TOO_MANY_REQUESTS, str(error), error.retry_s) from error
        except (StoreUnavailable, TimeoutError) as error:
            message = (
                str(error) or f"the store did not write the records within {_COMMIT_S:g} s; retry"
            )
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, message, retry_s=2.0) from error
        except WriteRefused as error:
            raise Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, str(error)) from error


def _parse(body: bytes, message: Message, media_type: str) -> bool:
    """Fill a message; return whether it differs from the body as protobuf."""
    if media_type == JSON:
        parse_json(message, body)
        return True
    return parse(message, body)


# Without protobuf's content type, which generators of clients refuse.
_BODY_IN_OPENAPI = {
    "requestBody": {
        "description": f"A request of OTLP as JSON. Exporters may also send protobuf ({PROTOBUF}).",
        "required": True,
        "content": {JSON: {"schema": {"type": "object"}}},
    }
}


_STATUS = {"description": "google.rpc.Status: code and message"}
_ANSWERS: dict[int | str, dict[str, object]] = {
    200: {"description": "Written; partial_success counts rejected records"},
    **{status: dict(_STATUS) for status in (400, 408, 413, 415, 429, 500, 503)},
}
