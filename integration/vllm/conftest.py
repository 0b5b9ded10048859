"""Tests against vLLM itself, in a separate environment: `make test-vllm`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from integration.rare_gc import pytest_collection_finish, pytest_runtest_logfinish
from integration.vllm.answers import Answer, answers
from integration.vllm.fleet_rig import FleetRig, started_rig
from integration.vllm.server import RUNNING, VllmServer, running_server
from integration.vllm.tiny_model import MAX_LENGTH, save_tiny_model
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

__all__ = ["pytest_collection_finish", "pytest_runtest_logfinish"]

# vLLM reads these at its import.
if not torch.cuda.is_available():
    # Bind no cores, since other tests share them.
    os.environ.update(
        VLLM_TARGET_DEVICE="cpu", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1"
    )
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_SERVER_DEV_MODE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
)


_FIRST = ("test_trainer", "test_fleet_tp")
"""Files whose tests take longest; they come first, so that none of them runs alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in _FIRST)


class SpanCollector:
    """An OTLP receiver over HTTP that stores the spans it receives.

    Attributes:
        base: its URL.
        endpoint: its URL with the path for traces.
    """

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._arrived = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path == "/v1/traces":
                    collector._add(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.base = f"http://127.0.0.1:{self._server.server_port}"
        self.endpoint = f"{self.base}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _add(self, request: ExportTraceServiceRequest) -> None:
        with self._arrived:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    self._spans.extend(scope.spans)
            self._arrived.notify_all()

    def wait_for_first(self, name: str, timeout_s: float = 30) -> Span:
        """Wait for a span called ``name``, and return the first one received."""

        def first() -> Span | None:
            return next((span for span in self._spans if span.name == name), None)

        with self._arrived:
            span = self._arrived.wait_for(first, timeout_s)
        assert span is not None, f"no span {name} after {timeout_s:g} s"
        return span

    def wait_for(
        self, trace_id: int, count: int, timeout_s: float = 30, *, with_parents: bool = False
    ) -> list[Span]:
        """Wait for ``count`` spans of a trace, and all parents if asked; return those received."""

        def received() -> list[Span]:
            wanted = trace_id.to_bytes(16, "big")
            return [span for span in self._spans if span.trace_id == wanted]

        def is_complete(spans: list[Span]) -> bool:
            missing = {span.parent_span_id for span in spans} - {span.span_id for span in spans}
            return len(spans) >= count and (missing <= {b""} or not with_parents)

        with self._arrived:
            self._arrived.wait_for(lambda: is_complete(received()), timeout_s)
            return received()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that makes tiny random models, by seed and options of `save_tiny_model`."""

    @cache
    def model(seed: int, **options: Any) -> Path:
        folder = tmp_path_factory.mktemp(f"tiny-model-{seed}")
        return save_tiny_model(folder, seed=seed, **options)

    return model


@pytest.fixture(scope="session")
def tiny_model(models: Callable[..., Path]) -> Path:
    """Return the folder of a tiny random Qwen3 and its tokenizer."""
    return models(0)


@pytest.fixture(scope="session")
def reference(
    models: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[Answer]]:
    """Return a function that gets the `answers` of a fresh vLLM server, by model."""

    @cache
    def fresh(seed: int, *options: str, **model: Any) -> list[Answer]:
        folder = tmp_path_factory.mktemp("reference")
        with running_server(
            models(seed, **model), folder, "--max-model-len", str(MAX_LENGTH), *options
        ) as server:
            return answers(server.address)

    return fresh


@pytest.fixture(scope="module")
def rig(
    models: Callable[..., Path],
    reference: Callable[..., list[Answer]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[FleetRig]:
    """Start two servers and a trainer."""
    with started_rig(models, reference, tmp_path_factory.mktemp("fleet")) as rig:
        yield rig


@pytest.fixture(scope="session")
def vllm_spans() -> Iterator[SpanCollector]:
    """Collect the spans that `vllm_server` exports."""
    collector = SpanCollector()
    yield collector
    collector.close()


@pytest.fixture(scope="session")
def vllm_server(
    tiny_model: Path,
    vllm_spans: SpanCollector,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[VllmServer]:
    """Start a server that all tests share: a test must leave it running and not paused."""
    with running_server(
        tiny_model,
        tmp_path_factory.mktemp("vllm"),
        "--otlp-traces-endpoint",
        vllm_spans.endpoint,
        environment={
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        },
    ) as server:
        yield server


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Show the end of the servers' logs below a failed test."""
    report = yield
    if report.failed:
        for server in RUNNING:
            report.sections.append((f"log of vLLM at {server.address}", server.log_tail()))
    return report
