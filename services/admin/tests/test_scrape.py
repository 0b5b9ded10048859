"""`dataplane-admin scrape`: engines and this node, gaps where one fails, and a clean end."""

import os
import signal
import subprocess
import sysconfig
import threading
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import psutil
import pytest
import waiting
from typer.testing import CliRunner

from dataplane_admin.cli import app

COMMAND = str(Path(sysconfig.get_path("scripts")) / "dataplane-admin")
TIMEOUT_S = 60.0
START_S = 240.0
TEXT = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a \\"b\\"\\n<script>"} 3.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} NaN
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0",model_name="tiny"} 48.0
vllm:generation_tokens_created{engine="0",model_name="tiny"} 1.79e+09
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="tiny"} 0.0
process_cpu_seconds_total 4.5
"""
SGLANG = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="tiny",pp_rank="0",tp_rank="0"} 162.0
sglang:num_running_reqs{engine_type="unified",model_name="tiny",pp_rank="1",tp_rank="0"} 162.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="tiny",priority=""} 5.0
sglang:num_queue_reqs{model_name="tiny",priority="1"} 5.0
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="tiny"} 0.28
# TYPE sglang:cache_hit_rate gauge
sglang:cache_hit_rate{model_name="tiny"} 7.507552643049313e-03
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="tiny"} 8.128902e+06
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{model_name="tiny"} 7.557572e+06
# TYPE sglang:time_to_first_token_seconds histogram
sglang:time_to_first_token_seconds_bucket{le="0.001",model_name="tiny"} 0.0
"""
AHEAD = """
import time
now_ns = time.time_ns
time.time_ns = lambda: now_ns() + 2 * 3600 * 10**9
"""
GPUS = """
class NVMLError(Exception): pass
class Use: gpu = 37
class Memory: used, total = 2**30, 4 * 2**30
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetMemoryInfo(device): return Memory
def nvmlDeviceGetUtilizationRates(device):
    if device: raise NVMLError("Not Supported")
    return Use
"""


class Engine:
    """A server whose answers a test sets; ``answer`` may block."""

    def __init__(self, text=TEXT):
        self.answer = lambda handler: self.write(handler, text.encode())
        self.receive = lambda handler: self.write(handler, b"", 501)
        self.requests = 0
        self.closed = threading.Event()
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                engine.requests += 1
                engine.answer(self)

            def do_POST(self):
                engine.receive(self)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}/metrics"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @staticmethod
    def write(handler, body, status=200):
        with suppress(OSError):  # the scraper is gone
            handler.send_response(status)
            handler.end_headers()
            handler.wfile.write(body)

    def end(self):
        self.closed.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def engine():
    engine = Engine()
    yield engine
    engine.end()


@pytest.fixture
def sglang():
    engine = Engine(SGLANG)
    yield engine
    engine.end()


@pytest.fixture
def scraping(start, tmp_path):
    """Start a service and a scraper that sends to it; return both."""
    processes = []

    def run(*arguments, environment=None):
        service = start()
        log = (tmp_path / "scrape.log").open("w")
        command = [COMMAND, "scrape", "--to", service.url, "--interval-s", "2", *arguments]
        process = subprocess.Popen(command, stderr=log, env=environment)
        processes.append(process)
        return service, process

    yield run
    for process in processes:
        process.kill()
        process.wait()


def subjects(service):
    answer = httpx.get(f"{service.url}/api/v1/load", timeout=TIMEOUT_S).json()
    return {
        each["name"]: {(held["metric"], held["device"]): held["values"] for held in each["series"]}
        for each in answer["subjects"]
    }


def warnings_of(log, engine):
    return [
        line for line in log.read_text().splitlines() if "failed" in line and engine.url in line
    ]


def has_recovered(log, engine):
    lines = [line for line in log.read_text().splitlines() if engine.url in line]
    return not lines or "scrape_recovered" in lines[-1]


until = partial(waiting.until, seconds=START_S)


def test_engines_and_node_are_sent_until_sigterm(engine, sglang, scraping, tmp_path):
    (tmp_path / "pynvml.py").write_text(GPUS)
    environment = dict(os.environ, PYTHONPATH=str(tmp_path))
    service, process = scraping(
        "--engine", engine.url, "--engine", sglang.url, "--node", environment=environment
    )
    shown = until(lambda: (held := subjects(service)) and len(held) == 3 and held)
    [name] = [name for name in shown if name.endswith(f":{engine.port}")]
    assert shown[name]["running", ""][0] == 3.0
    assert shown[name]["kv_cache", ""][0] == 0.25
    assert ("waiting", "") not in shown[name]
    [other] = [name for name in shown if name.endswith(f":{sglang.port}")]
    assert shown[other]["running", ""][0] == 162.0
    assert shown[other]["waiting", ""][0] == 5.0
    assert shown[other]["kv_cache", ""][0] == 0.28
    assert shown[other]["prefix_hits", ""][0] == pytest.approx(0.0075, abs=1e-4)
    [node] = shown.keys() - {name, other}
    until(lambda: subjects(service)[node].get(("cpu", "")))
    of_node = subjects(service)[node]
    assert all(0 <= value <= 1 for value in of_node["cpu", ""] if value is not None)
    used = 1 - psutil.virtual_memory().available / psutil.virtual_memory().total
    assert of_node["memory", ""][-1] == pytest.approx(used, abs=0.3)
    assert of_node["gpu", "0"][0] == 0.37
    assert of_node["gpu_memory", "1"][0] == 0.25
    assert ("gpu", "1") not in of_node
    until(lambda: len(subjects(service)[name]["generation_tokens", ""]) > 1)
    assert set(subjects(service)[name]["generation_tokens", ""]) == {0.0}
    for metric in ("prompt_tokens", "generation_tokens"):
        assert set(subjects(service)[other][metric, ""]) == {0.0}
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT_S) == 0


def test_a_failing_engine_is_one_warning_and_a_gap(engine, scraping, tmp_path):
    good = Engine()
    try:
        # A byte at a time never exceeds the timeout of a read.
        def drip(handler):
            handler.send_response(200)
            handler.end_headers()
            with suppress(OSError):  # the scraper is gone
                while not engine.closed.wait(0.1):
                    handler.wfile.write(b"#")

        engine.answer = drip
        service, process = scraping(
            "--interval-s", "1", "--engine", engine.url, "--engine", good.url
        )
        until(lambda: engine.requests > 2 and subjects(service))
        log = tmp_path / "scrape.log"
        assert len(warnings_of(log, engine)) == 1
        assert [name.rpartition(":")[2] for name in subjects(service)] == [str(good.port)]
        engine.answer = lambda handler: engine.write(handler, TEXT.encode())
        until(lambda: any(name.endswith(f":{engine.port}") for name in subjects(service)))
        for answer, reason in (
            (lambda handler: engine.write(handler, b"", 503), "status 503"),
            (lambda handler: engine.write(handler, b"<html>"), "no metric of vLLM or SGLang"),
            (lambda handler: engine.write(handler, b"x" * (9 << 20)), "larger than"),
            (
                lambda handler: engine.write(handler, b"vllm:num_requests_running{a 1\n"),
                "not Prometheus text",
            ),
            (
                lambda handler: engine.write(handler, b"vllm:num_requests_running 1\n" * 2_001),
                "expected at most 2000",
            ),
        ):
            until(lambda: has_recovered(log, engine))
            engine.answer = answer
            until(lambda reason=reason: reason in log.read_text())
            engine.answer = lambda handler: engine.write(handler, TEXT.encode())
        engine.answer = drip
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
    finally:
        good.end()


def test_a_service_that_is_down_is_one_warning(engine, tmp_path):
    command = [COMMAND, "scrape", "--engine", engine.url, "--to", "http://127.0.0.1:9"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*command, "--interval-s", "1"], stderr=log)
    try:
        until(lambda: engine.requests > 2)
        log = (tmp_path / "log").read_text()
        assert log.count("export_failed") == 1
        assert "http://127.0.0.1:9/v1/metrics" in log
        assert "Connection refused" in log
    finally:
        process.terminate()
        assert process.wait(TIMEOUT_S) == 0


def test_points_that_the_service_rejects_are_a_warning(engine, scraping, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(AHEAD)
    environment = dict(os.environ, PYTHONPATH=str(tmp_path))
    service, process = scraping("--engine", engine.url, environment=environment)
    log = tmp_path / "scrape.log"
    until(lambda: "export_failed" in log.read_text())
    assert "3 items: 3 data points: the time of a metric of load is more than" in log.read_text()
    requests = engine.requests
    until(lambda: engine.requests > requests + 1)
    assert log.read_text().count("export_failed") == 1
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT_S) == 0
    assert not subjects(service)


def test_a_different_failure_of_the_export_is_a_new_warning(engine, tmp_path):
    service = Engine()

    def cut_off(handler):
        handler.send_response(200)
        handler.send_header("content-length", "10")
        handler.end_headers()

    command = [COMMAND, "scrape", "--engine", engine.url, "--to", service.url]
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen([*command, "--interval-s", "1"], stderr=output)
    try:
        until(lambda: "collector answered 501" in log.read_text())
        service.receive = cut_off
        until(lambda: "export raised ProtocolError" in log.read_text())
        service.end()
        until(lambda: "collector is unreachable" in log.read_text())
    finally:
        process.terminate()
        assert process.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "nothing to scrape"),
        (["--engine", "127.0.0.1:8000"], "expected a URL"),
        (["--engine", "file:///etc/passwd"], "expected a URL"),
        (["--engine", "http://user:secret@host/metrics"], "without a user"),
        (["--engine", "http://host:99999999/metrics"], "expected a URL"),
    ],
)
def test_wrong_options_are_refused(arguments, reason):
    done = CliRunner().invoke(app, ["scrape", *arguments])
    assert done.exit_code == 2
    assert reason in done.stderr
