"""Lanes of engines and nodes: below the waterfall of their step, and on their page."""

import time

import pytest
from loads import NS, cpu_times, engine, gauges, node
from made_up_traces import HOSTILE
from test_pages_browser import watched  # noqa: F401  # a fixture

STEP_S = 40
PATIENCE_MS = 20_000


def send_load(job, start_s, end_s, run):
    """Send two engines, one of which idles half of the time, and two nodes."""
    for second in range(int(start_s) - 10, int(end_s) + 10, 5):
        busy = second - start_s < (end_s - start_s) / 2
        tokens = 900 * min(second - start_s, (end_s - start_s) / 2) + 10_000
        load = {"hits": second % 10**6, "queries": 2 * (second % 10**6)}
        job.send(
            engine(
                second,
                run=run,
                running=24 if busy else 0,
                waiting=6 if busy else 0,
                kv=0.6 if busy else 0.05,
                tokens=tokens,
                **load,
            ),
            engine(
                second, run=run, name="node-2:8000", running=12, waiting=0, kv=0.3, tokens=tokens
            ),
        )
        for name in ("node-1", f"node-2 {HOSTILE}"):
            since = second - start_s + 100
            cpu = cpu_times(2, busy_s=since, idle_s=1.5 * since)
            job.send(node(second, cpu, memory={"used": 40e9, "free": 88e9}, name=name))
        gpus = [
            ("hw.gpu.utilization", {"hw.id": str(gpu)}, 0.9 if busy or gpu else 0.02)
            for gpu in range(4)
        ]
        job.send(gauges({"host.name": "node-1"}, second, gpus))


@pytest.fixture(scope="module")
def trace_id(job, otlp):
    """Send a step of a run with its load."""
    trace_id = b"engines and load"
    start_s = otlp.start_ns / NS
    names = ["grpo.step", "rollout", "train"]
    job.send(otlp.trace(trace_id, names=names, run="with load", step=3, seconds=STEP_S))
    send_load(job, start_s, start_s + STEP_S, "with load")
    return trace_id.hex()


@pytest.fixture(scope="module")
def newest(job):
    now_s = time.time_ns() // NS
    send_load(job, now_s - 1_800, now_s - 8, "")


def test_a_step_shows_the_load_of_its_time(client, trace_id):
    page = client.get(f"/trace?id={trace_id}").text
    assert "mean 12.6 running, idle" in page
    assert "node-1:8000" in page
    assert "requests, max 30" in page
    assert "GPU 0 90.0 %, GPU 1 90.0 %" in page


def test_a_step_without_load_shows_nothing_of_it(client, otlp, job):
    trace_id = b"no engine or CPU"
    job.send(otlp.trace(trace_id, run="no load", step=1, start_s=10_000))
    page = client.get(f"/trace?id={trace_id.hex()}").text
    assert "load-" not in page
    assert "waiting requests" not in page


def test_engines_without_load_say_how_to_send_it(bare_client):
    assert "dataplane-admin scrape --engine" in bare_client.get("/engines").text


def test_pages_escape_names_of_engines(client, trace_id, newest):
    for path in (f"/trace?id={trace_id}", "/engines"):
        page = client.get(path).text
        assert "node-2 &lt;" in page
        assert HOSTILE not in page


@pytest.mark.parametrize("width", [1280, 390])
def test_values_are_read_by_pointer_and_keyboard(watched, trace_id, width):  # noqa: F811
    page = watched(viewport={"width": width, "height": 900}).go(f"/trace?id={trace_id}")
    columns = page.locator('.load-column[aria-label^="engine node-1:8000"]')
    assert columns.count() == 60
    columns.nth(10).hover()
    reading = page.locator("#reading")
    assert "24 running, 6 waiting, KV cache 60.0 %" in reading.inner_text()
    columns.nth(50).focus()
    assert ": 0 running" in reading.inner_text()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert reading.inner_text().startswith("node node-1, at ")
    overflow = "document.documentElement.scrollWidth - innerWidth"
    assert page.evaluate(overflow) <= 0


def test_the_page_of_engines_shows_the_newest_values(watched, newest):  # noqa: F811
    page = watched().go("/engines")
    names = page.locator(".chart-names .lane-name").all_inner_texts()
    assert names[0].startswith("node-1:8000")
    assert "0 running, 0 waiting, KV cache 5.0 %" in names[0]
    assert any("GPU 0 2.0 %" in name for name in names)
    page.locator(".load-column").first.hover()
    assert page.locator("#reading").inner_text().startswith("engine node-1:8000, at ")
