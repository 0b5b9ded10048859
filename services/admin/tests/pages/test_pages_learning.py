"""Curves of a run's metrics: drawn under one crosshair, zoomed, smoothed, live, and safe."""

import math
import re

import pytest
from playwright.sync_api import expect
from test_pages_browser import query

RUN = "learning run"
HOSTILE_NAME = "<img src=x onerror=alert(1)>"
TIMEOUT_MS = 20_000


@pytest.fixture(scope="module")
def run(job, otlp):
    """Send the metrics of 600 steps."""
    values = [math.sin(step / 50) for step in range(600)]
    job.send(
        otlp.curve(values, run=RUN),
        otlp.curve([float(step) for step in range(600)], run=RUN, name="rl.loss"),
        otlp.curve([0.5] * 7, run=RUN, name=HOSTILE_NAME, **{"rl.component": HOSTILE_NAME}),
    )
    for component in ("answer", "format"):
        named = {"name": "rl.reward.component", "rl.component": component}
        job.send(otlp.curve([0.25, 0.75], run=RUN, **named))
    return f"/run?run={RUN}"


def figure(page, name):
    return page.locator(f'[data-curve="{name}"]')


def drawn(page, name="rl.loss"):
    figure(page, name).locator("canvas").wait_for(timeout=TIMEOUT_MS)
    return figure(page, name).locator(".u-over").bounding_box()


def until(page, condition):
    for _ in range(TIMEOUT_MS // 50):
        if condition():
            return
        page.wait_for_timeout(50)
    raise AssertionError("not in time")


def test_metrics_are_text_without_scripts(client, run):
    page = client.get(run).text
    assert 'data-curve="rl.loss"' in page
    assert ">599</output>" in page
    assert HOSTILE_NAME not in page


def test_a_run_without_metrics_says_how_to_send_them(client, bare_client):
    for page in (client.get("/run?run=yesterday").text, bare_client.get("/run").text):
        assert "No step metrics" in page
        assert "record_step_metrics(step" in page


def test_the_overview_does_not_list_a_validation_as_a_step(job_of, otlp):
    job = job_of()
    job.send(
        otlp.trace(step=0, seconds=2.0),
        otlp.trace(names=("grpo.validation",), step=1, start_s=2.0, seconds=0.25),
        otlp.trace(run="other", names=("train_step",), step=7, seconds=3.0),
    )
    of_run = job.client.get("/?run=run").text
    assert "step 0 finished in 2.00 s" in of_run
    assert "250 ms" not in of_run
    assert "step 7 finished in 3.00 s" in job.client.get("/?run=other").text


def test_the_overview_draws_the_metrics_of_the_newest_run(job_of, otlp):
    job = job_of()
    job.send(
        otlp.trace(step=2),
        otlp.curve([-2.0, -1.0, -1.5]),
        otlp.curve([8.0, 9.0], **{"rl.component": "answer"}),
        otlp.curve([step % 4 for step in range(1_001)], name="rl.kl"),
        otlp.curve([4.0], name="rl.loss"),
    )
    page = job.client.get("/").text
    # Values of single steps, also if a point of the line is the mean of several.
    tiles = re.findall(r"<small>(step [\d,]+)</small></dt><dd><a [^>]+>(.+?)</a>", page)
    assert tiles == [("step 2", "-1.5"), ("step 1,000", "0")]
    assert re.findall(r'aria-label="([^"]+) over all steps"', page) == ["Reward", "KL divergence"]


def test_labelled_curves_hide_no_metric_of_all_samples(job_of, otlp):
    job = job_of()
    names = ["rl.entropy", "rl.reward.mean", "rl.response.length"]
    for part in range(30):
        for name in names:
            job.send(otlp.curve([8.0, 9.0], name=name, **{"rl.component": f"part {part:02}"}))
    job.send(otlp.curve([4.0, 5.0], name="rl.loss"))
    for name in names[:2]:
        job.send(otlp.curve([1.0, 2.0], name=name))
    job.send(otlp.trace(step=1))
    page = job.client.get("/").text
    tiles = re.findall(r"<small>step 1</small></dt><dd><a [^>]+>(.+?)</a>", page)
    titles = re.findall(r'aria-label="([^"]+) over all steps"', page)
    expected = {"Reward": "2", "Loss": "5", "Entropy": "2", "Response length": "9"}
    assert dict(zip(titles, tiles, strict=True)) == expected
    panel = job.client.get("/run?run=run").text.partition('data-curve="rl.entropy"')[2]
    assert panel.index(">2</output>") < panel.index("part 00")


def test_the_overview_names_a_run_without_metrics(job_of, otlp):
    job = job_of()
    job.send(otlp.trace(step=2))
    assert ">no step metrics</a>" in job.client.get("/").text


def test_one_crosshair_reads_all_panels(watched, run):
    page = watched().go(run)
    box = drawn(page, "rl.reward.mean")
    drawn(page, "rl.reward.component")
    loss = figure(page, "rl.loss").locator(".curve-value")
    assert loss.inner_text() == "599"
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
    until(page, lambda: page.locator("#curve-step").inner_text().startswith("step "))
    step = int(page.locator("#curve-step").inner_text().removeprefix("step "))
    assert 290 <= step <= 310
    until(page, lambda: abs(float(loss.inner_text()) - step) < 6)
    page.mouse.move(2, 2)
    until(page, lambda: loss.inner_text() == "599")
    assert page.locator("#curve-step").inner_text() == ""


@pytest.mark.parametrize("width", [1280, 390])
def test_a_point_links_to_the_samples_and_trace_of_its_step(watched, job, otlp, width):
    trace_id = b"trace of a point"
    job.send(
        otlp.curve([0.5] * 5, run="linked", name="rl.loss"),
        otlp.trace(trace_id, run="linked", step=4),
    )
    page = watched(viewport={"width": width, "height": 900}).go("/run?run=linked")
    box = drawn(page)
    page.mouse.click(box["x"] + box["width"] - 2, box["y"] + 40)
    links = page.locator("#step-links")
    trace = links.get_by_role("link", name="Trace", exact=True)
    trace.wait_for(timeout=TIMEOUT_MS)
    assert trace.get_attribute("href").endswith(f"/trace?id={trace_id.hex()}")
    shown = links.bounding_box()
    assert shown["x"] >= 0
    assert shown["x"] + shown["width"] <= width
    assert drawn(page) == box
    page.keyboard.press("Escape")
    expect(links).to_be_hidden()
    page.locator("#open-step").press("Enter")
    page.keyboard.press("Control+A")
    page.keyboard.type("2")
    expect(links).to_contain_text("No trace")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_url("**/samples?*")
    state = {"run": "linked", "step": "2", "sort": "reward", "order": "ascending"}
    assert query(page) == state


def test_ticks_of_close_values_differ(watched, job, otlp):
    named = {"run": "steady", "name": "rl.tokens_per_s"}
    job.send(otlp.curve([102_300 + step % 200 for step in range(300)], **named))
    watch = watched()
    # The axes are drawn on a canvas.
    watch.context.add_init_script(
        "window.drawn = []; const write = CanvasRenderingContext2D.prototype.fillText;"
        "CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {"
        " window.drawn.push(text); return write.call(this, text, ...rest); };"
    )
    page = watch.go("/run?run=steady")
    drawn(page, "rl.tokens_per_s")
    labels = page.evaluate("window.drawn.filter((text) => text.endsWith('k'))")
    assert len(labels) > 2
    assert len({*labels}) == len(labels)


def test_a_run_has_no_value_after_its_last_step(watched, run, job, otlp):
    job.send(otlp.curve([7.0] * 60, run="short", name="rl.loss"))
    page = watched().go(f"/runs/compare?run={RUN}&run=short")
    box = drawn(page)
    values = figure(page, "rl.loss").locator(".curve-value")
    assert values.all_inner_texts() == ["599", "7"]
    page.mouse.move(box["x"] + box["width"] * 0.05, box["y"] + 40)
    until(page, lambda: float(values.nth(0).inner_text()) < 60)
    assert values.nth(1).inner_text() == "7"
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 40)
    until(page, lambda: float(values.nth(0).inner_text()) > 250)
    assert values.nth(1).inner_text() == "-"


def test_dragging_zooms_and_the_url_has_the_range(watched, run):
    page = watched().go(run)
    box = drawn(page)
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 40, steps=4)
    page.mouse.up()
    until(page, lambda: "first" in query(page))
    first, last = int(query(page)["first"]), int(query(page)["last"])
    assert 140 <= first <= 160
    assert 290 <= last <= 310
    page.reload()
    drawn(page)
    page.locator("#curve-reset").click()
    until(page, lambda: "first" not in query(page))


def test_smoothing_is_drawn_in_the_url_and_survives_a_reload(watched, job, otlp):
    job.send(otlp.curve([0.0, 1.0] * 20, run="noisy", name="rl.loss"))
    watch = watched()
    watch.context.add_init_script(
        "window.drawn = new Set(); const line = Path2D.prototype.lineTo;"
        "Path2D.prototype.lineTo = function (x, y) {"
        " if (y) window.drawn.add(Math.round(y)); return line.call(this, x, y); };"
    )
    page = watch.go("/run?run=noisy")
    drawn(page)

    def middle():
        heights = sorted(page.evaluate("[...window.drawn]"))
        quarter = (heights[-1] - heights[0]) / 4
        return [each for each in heights if heights[0] + quarter < each < heights[-1] - quarter]

    assert middle() == []
    page.locator("#smooth").fill("0.99")
    until(page, lambda: query(page).get("smooth") == "0.99")
    smoothed = middle()
    assert smoothed
    page.reload()
    drawn(page)
    assert middle() == smoothed
    assert page.locator("#smooth").input_value() == "0.99"
    assert page.locator("#smooth-value").inner_text() == "0.99"


def test_the_crosshair_reads_raw_and_smoothed_values(watched, job, otlp):
    job.send(otlp.curve([0.0, 1.0] * 20, run="noisy", name="rl.loss"))
    job.send(otlp.curve([0.0, 1.0] * 4, run="noisy", name="rl.kl"))
    page = watched().go("/run?run=noisy&smooth=0.99")
    drawn(page, "rl.kl")
    box = drawn(page, "rl.loss")
    page.mouse.move(box["x"] + 60, box["y"] + 40)
    loss, few = (figure(page, name).locator(".curve-value") for name in ("rl.loss", "rl.kl"))
    until(page, lambda: re.fullmatch(r"[01], smoothed 0\.\d+", loss.inner_text()))
    until(page, lambda: re.fullmatch(r"[01]", few.inner_text()))


def test_new_steps_appear_without_moving_the_page(watched, run, job, otlp):
    page = watched().go(f"{run}&live=1")
    drawn(page)
    before = figure(page, "rl.loss").bounding_box()
    job.send(otlp.curve([1234.0], run=RUN, name="rl.loss", first=600))
    loss = figure(page, "rl.loss").locator(".curve-value")
    until(page, lambda: loss.inner_text() == "1234")
    assert figure(page, "rl.loss").bounding_box() == before
    job.send(otlp.curve([0.5], run=RUN, name="rl.kl"))
    drawn(page, "rl.kl")  # the page has had no input


def test_hostile_names_are_drawn_as_text(watched, run):
    page = watched().go(run)
    drawn(page)
    page.locator("#metric-filter").fill("IMG src")
    page.keyboard.press("Tab")
    until(page, lambda: query(page).get("metrics") == "IMG src")
    assert page.locator("[data-curve]").filter(visible=True).count() == 1
    page.reload()
    figure(page, HOSTILE_NAME).locator("canvas").wait_for(timeout=TIMEOUT_MS)
    assert page.locator("main img").count() == 0
