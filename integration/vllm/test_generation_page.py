"""Programs next to a real vLLM: that of docs/rollout-actor.md, and the scraper of its metrics."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from integration.vllm.prompts import completions, random_prompts
from integration.vllm.server import VllmServer

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "rollout-actor.md"
ADMIN = ROOT / ".venv/bin/dataplane-admin"


def test_program_of_the_page_runs(
    vllm_server: VllmServer, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S))
    replacements = {
        "Qwen/Qwen3-0.6B": str(tiny_model),
        "http://127.0.0.1:8000": vllm_server.address,
    }
    for name, replacement in replacements.items():
        assert name in program
        program = program.replace(name, replacement)
    exec(compile(program, str(PAGE), "exec"), {"__name__": "__main__"})
    *responses, rate = capsys.readouterr().out.splitlines()
    assert responses
    assert float(rate) > 0


def test_scraped_server_has_a_lane_with_every_metric_of_load(
    vllm_server: VllmServer, tmp_path: Path
) -> None:
    metrics = f"{vllm_server.address}/metrics"
    serve = [ADMIN, "serve", "--port", "0", "--db", str(tmp_path / "admin.sqlite")]
    start_ns = time.time_ns()
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        url = service.stdout.readline().strip()
        scrape = [ADMIN, "scrape", "--engine", metrics, "--to", url, "--interval-s", "1"]
        with subprocess.Popen(scrape) as scraper:
            try:
                _await_rates(url, vllm_server.address)
                _check_lane(url, start_ns)
            finally:
                scraper.terminate()
                service.terminate()
    assert (scraper.returncode, service.returncode) == (0, 0)


def _check_lane(url: str, start_ns: int) -> None:
    """Check that the page of a trace since ``start_ns`` has the engine below the waterfall."""
    trace_id = "5" * 32
    span = {"traceId": trace_id, "spanId": "5" * 16, "name": "grpo.step"}
    span |= {"startTimeUnixNano": str(start_ns), "endTimeUnixNano": str(time.time_ns())}
    request = {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}
    httpx.post(f"{url}/v1/traces", json=request, timeout=60).raise_for_status()
    page = httpx.get(f"{url}/trace", params={"id": trace_id}, timeout=60).text
    [engine] = re.findall(
        r'class="lane-name"[^>]*>([^<]+)<tspan class="lane-busy"[^>]*>mean ', page
    )
    assert re.search(rf'aria-label="engine {engine}, at [^"]*: [^"]*running', page)
    assert {*re.findall(r'class="strip-name"[^>]*>([^<,]+)', page)} >= {"requests", "KV cache"}
    assert '<path class="load-busy" d="M' in page


def _await_rates(url: str, address: str) -> None:
    """Generate until each metric is shown, and the rates are those of the generation."""
    prompts = random_prompts((40, 40))
    deadline = time.monotonic() + 240
    while True:
        completions(address, prompts, max_tokens=24, temperature=0)
        subjects = httpx.get(f"{url}/api/v1/load", timeout=60).json()["subjects"]
        shown = {
            series["metric"]: [value for value in series["values"] if value is not None]
            for subject in subjects
            for series in subject["series"]
        }
        rates = ("generation_tokens", "prompt_tokens")
        if {*shown} >= {"running", "waiting", "kv_cache", "preemptions", "prefix_hits"} and all(
            max(shown.get(name) or [0]) > 0 for name in rates
        ):
            assert all(
                0 <= value <= 1 for name in ("kv_cache", "prefix_hits") for value in shown[name]
            )
            return
        assert time.monotonic() < deadline, shown
