"""Lanes of engines and nodes: below the waterfall of their step, and on their page."""

import re
import time

import pytest
from loads import NS, cpu_times, engine, gauges, node
from made_up_traces import HOSTILE
from playwright.sync_api import expect

RUN = "with load"
STEP_S = 40


def load_of(start_s, end_s, run):
    """Return requests of two engines, one of which is idle in the second half, and of two nodes."""
    requests = []
    for second in range(int(start_s) - 10, int(end_s) + 10, 5):
        busy_s = min(second - start_s, (end_s - start_s) / 2)
        is_busy = second - start_s < (end_s - start_s) / 2
        load = {"running": 24, "waiting": 6, "kv": 0.6} if is_busy else {}
        load = {"running": 0, "waiting": 0, "kv": 0.05, "tokens": 900 * busy_s + 10_000} | load
        other = load | {"running": 12, "waiting": 0, "kv": 0.3}
        grown = {"hits": 3 * busy_s + 60, "queries": 4 * busy_s + 80, "preempted": busy_s + 20}
        requests += [engine(second, run=run, **load, **grown)]
        requests += [engine(second, run=run, name="node-2:8000", **other)]
        for name in ("node-1", f"node-2 {HOSTILE}"):
            since = second - start_s + 100
            times = cpu_times(2, busy_s=since, idle_s=1.5 * since)
            requests += [node(second, times, memory={"used": 40e9, "free": 88e9}, name=name)]
        shares = [0.9 if is_busy or gpu else 0.02 for gpu in range(3)] + [0.04]
        gpus = [("hw.gpu.utilization", {"hw.id": str(gpu)}, shares[gpu]) for gpu in range(4)]
        requests += [gauges({"host.name": "node-1"}, second, gpus)]
    return requests


@pytest.fixture(scope="module")
def trace_id(job, otlp):
    """Send a step of two hours ago with its load."""
    trace_id = b"engines and load"
    start_s = time.time_ns() // NS - 7_200
    since_s = start_s - otlp.start_ns / NS
    names = ["grpo.step", "rollout", "train"]
    job.send(otlp.trace(trace_id, names=names, run=RUN, start_s=since_s, seconds=STEP_S))
    job.send(*load_of(start_s, start_s + STEP_S, RUN))
    return trace_id.hex()


@pytest.fixture(scope="module")
def newest(job):
    now_s = time.time_ns() // NS
    job.send(*load_of(now_s - 1_800, now_s - 8, ""))


def test_a_step_shows_the_load_of_its_time(client, trace_id):
    page = client.get(f"/trace?id={trace_id}").text
    assert "mean 10.4 running, 2.6 waiting, idle 56.7 %" in page
    assert "node-1:8000" in page
    assert "requests, max 30" in page
    assert "GPU 0 90.0 %, GPU 1 90.0 %" in page
    assert re.findall("GPU . max [^<]+", page.replace(",", "")) == [
        *("GPU 0 max 90.0 %", "GPU 1 max 90.0 %", "GPU 2 max 90.0 %", "GPU 3 max 4.0 %")
    ]
    assert "prefix cache hits, max 75.0 %" in page
    assert "preempted, max 1 requests/s" in page


def test_step_without_load_has_no_load_charts(client, otlp, job):
    trace_id = b"no engine or CPU"
    job.send(otlp.trace(trace_id, run="no load", step=1, start_s=10_000))
    page = client.get(f"/trace?id={trace_id.hex()}").text
    assert "load-" not in page
    assert "waiting requests" not in page


def test_many_engines_leave_lanes_for_nodes(job_of):
    job = job_of()
    now_s = time.time_ns() // NS - 60
    job.send(*(engine(now_s, running=1, name=f"engine-{number:02}:8000") for number in range(18)))
    job.send(node(now_s, memory={"used": 40e9, "free": 88e9}))
    gpus = [("hw.gpu.utilization", {"hw.id": str(gpu)}, (1 + gpu) / 20) for gpu in range(19)]
    job.send(gauges({"host.name": "node-1"}, now_s, gpus))
    page = job.client.get("/engines").text
    assert "engine-15:8000" in page
    assert "engine-16:8000" not in page
    assert "2 more engines omitted" in page
    assert "node node-1, " in page
    assert "GPU 15, max 80.0 %" in page
    assert "mean of 3 more GPUs, max of any 95.0 %" in page


def test_engines_without_load_say_how_to_send_it(bare_client):
    assert "dataplane-admin scrape --engine" in bare_client.get("/engines").text


def test_pages_escape_names_of_engines(client, trace_id, newest):
    for path in (f"/trace?id={trace_id}", "/engines"):
        page = client.get(path).text
        assert "node-2 &lt;" in page
        assert HOSTILE not in page


@pytest.mark.parametrize("width", [1280, 390])
def test_values_are_read_by_pointer_and_keyboard(watched, trace_id, width):
    page = watched(viewport={"width": width, "height": 900}).go(f"/trace?id={trace_id}")
    columns = page.locator('.load-column[aria-label^="engine node-1:8000"]')
    assert columns.count() == 60
    columns.nth(10).hover()
    reading = page.locator("#reading")
    expect(reading).to_contain_text("24 running, 6 waiting, KV cache 60.0 %")
    columns.nth(50).focus()
    assert ": 0 running" in reading.inner_text()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert reading.inner_text().startswith("node node-1, at ")
    overflow = "document.documentElement.scrollWidth - innerWidth"
    assert page.evaluate(overflow) <= 0


def test_the_page_of_engines_shows_the_newest_values(watched, newest):
    page = watched().go("/engines")
    names = page.locator(".chart-names .lane-name").all_text_contents()
    assert names[0].startswith("node-1:8000")
    assert "0 running, 0 waiting, KV cache 5.0 %" in names[0]
    assert any("GPU 0 2.0 %" in name for name in names)
    page.locator(".load-column").first.hover()
    expect(page.locator("#reading")).to_contain_text(re.compile("^engine node-1:8000, "))


def overlapping_labels(page):
    """Return pairs of labels of a time axis that touch each other."""
    return page.evaluate(
        "() => { const labels = [...document.querySelectorAll('svg.time .ticks text')]"
        ".filter((one) => one.checkVisibility())"
        ".map((one) => [one.textContent, one.getBoundingClientRect()]);"
        " return labels.slice(1).flatMap(([text, box], place) =>"
        " box.left < labels[place][1].right + 2 ? [[labels[place][0], text]] : []); }"
    )


@pytest.mark.parametrize("scripted", [True, False])
def test_labels_of_time_axes_do_not_overlap(watched, newest, job, otlp, scripted):
    paths = ["/engines"]
    # Labels of these durations are long, or the last one is near the right edge.
    for seconds in (0.14, 120, 160) if scripted else (0.14, 59):
        trace_id = f"{seconds} s on an axis".encode().ljust(16)[:16]
        job.send(otlp.trace(trace_id, names=["a"], run=f"lasts {seconds} s", seconds=seconds))
        paths.append(f"/trace?id={trace_id.hex()}")
    watch = watched(java_script_enabled=scripted)
    for path in paths:
        page = watch.go(path)
        for width in (390, 640, 1280):
            page.set_viewport_size({"width": width, "height": 800})
            page.wait_for_timeout(100)
            assert page.locator("svg.time .ticks text").count() > 1
            assert overlapping_labels(page) == [], f"{path} at {width}"
    if not scripted:
        watch.check = lambda: None  # without scripts nothing can be evaluated
