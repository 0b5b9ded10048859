"""Pictures of demo runs for the docs: ``python -m integration.run_pictures``, about ten minutes.

Chromium takes them for ``docs/images`` while a synchronous and then an asynchronous run train, and
after their ends; ``sync`` or ``async`` as argument takes those of one. ``pages`` takes every page
of a third run at three widths; without an earlier run, it first trains a short one to compare.
`integration.admin_pictures` takes those of a blocked run.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import urlencode

from integration.admin_demo import LOG, SCRIPTS, Process, served_run
from integration.admin_pictures import FOLDER, HEIGHT, TIMEOUT_S, WIDTH
from integration.admin_service import Admin
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

_DRAW_MS = 1000
"""Time in which a page draws what it has fetched."""
_ASYNC = (
    "run.name=demo-async",
    "grpo.mode=async",
    "grpo.num_steps=12",
    "grpo.asynchronous.generators=2",
    "grpo.asynchronous.prompts_per_rollout=4",
    "validation.every_steps=0",
    "checkpointing.every_steps=0",
    "policy.generation.simulated_latency={median_s: 0.05, sigma: 1.0}",
)
_SHORT: tuple[str, ...] = (
    "run.name=demo-short",
    "grpo.num_steps=8",
    "validation.every_steps=0",
    "checkpointing.every_steps=0",
)
_PAGES = (
    "run.name=demo-pages",
    "grpo.mode=async",
    "grpo.num_steps=1000",
    "grpo.asynchronous.generators=2",
    "validation.every_steps=0",
    "checkpointing.every_steps=0",
    "tracing.sample_texts=4",
)
_RULES = """\
rules:
  - {name: off-policy, kind: staleness, bound: 0.5}
  - {name: blocked, kind: blocked, bound: 600, severity: critical}
  - {name: logprob-gap, kind: logprob_gap, bound: 0.01, runs: demo-pages*}
webhooks: []
"""
"""Rules of alerts. The first steps of the asynchronous runs raise ``off-policy``, which is cleared
later. The run of the pages raises ``logprob-gap``, which is cleared at its end."""
_SCRAPE = (str(SCRIPTS / "dataplane-admin"), "scrape", "--node", "--to")
_SIZE, _COLORS = (1280, 1132), 128
_SCREENS = (
    # Size of the screen, the part that is shown, and its box in the picture. The sides of the
    # widest screen are empty.
    ((390, 844), (0, 0, 390, 844), (0, 0, 296, 640)),
    ((1280, 900), (0, 0, 1280, 844), (308, 0, 1280, 640)),
    ((2560, 1440), (320, 0, 2240, 720), (0, 652, 1280, 1132)),
)
_Box: TypeAlias = tuple[int, int, int, int]


def steps_of(url: str, **chosen: object) -> list[str]:
    """Return the trace ids of steps, newest first; ``chosen`` filters, as by ``run``."""
    listed = Admin(url).ask("traces", name="grpo.step", limit=200, **chosen)["traces"]
    return [each["trace_id"] for each in listed]


def trained_sample(url: str) -> str:
    """Return the id of a sample that was trained on."""
    for hit in Admin(url).ask("samples", limit=1000)["samples"]:
        hops = Admin(url).ask("sample", id=hit["sample_id"])["hops"]
        if any(hop["name"] == "trained" for hop in hops):
            return str(hit["sample_id"])
    raise AssertionError("no sample was trained on")


def opened(browser: Browser, url: str, scheme: Literal["light", "dark"] = "light") -> Page:
    """Return a new page of the service."""
    page = browser.new_page(
        viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme, base_url=url
    )
    page.set_default_timeout(TIMEOUT_S * 1000)
    return page


def wait_for_step(page: Page, step: int) -> None:
    """Wait on the overview until a step has finished."""
    page.locator("#steps").get_by_role("link", name=str(step), exact=True).wait_for()


def take(page: Page, name: str) -> None:
    """Write a picture."""
    page.wait_for_timeout(_DRAW_MS)
    page.screenshot(path=FOLDER / f"admin-{name}.png")


def take_synchronous(browser: Browser, url: str, run: Process) -> None:
    """Take the pictures of a synchronous run, live and after its end."""
    light, dark = opened(browser, url), opened(browser, url, "dark")
    light.goto("/")
    dark.goto("/")
    wait_for_step(light, 30)
    counts = light.locator("#partitions li .count")
    counts.filter(has_text=re.compile("^[1-9]")).first.wait_for()
    take(light, "overview")
    take(dark, "overview-dark")
    dark.close()
    light.goto(f"/sample?{urlencode({'id': trained_sample(url)})}")
    take(light, "sample")
    assert run.wait(TIMEOUT_S) == 0, "the run failed"
    newest, *_, oldest = steps_of(url)
    for name, path in {
        "run": "/run?smooth=0.6",
        "trace": f"/trace?id={newest}",
        "compare": f"/compare?a={oldest}&b={newest}",
    }.items():
        light.goto(path)
        take(light, name)


def take_asynchronous(browser: Browser, url: str, run: Process) -> None:
    """Take the pictures of an asynchronous run, live and at its end, and of all runs compared."""
    page = opened(browser, url)
    page.set_viewport_size({"width": WIDTH, "height": HEIGHT + 200})
    page.goto("/")
    wait_for_step(page, 5)
    page.goto("/partition?id=train")
    acknowledged = page.locator("[aria-labelledby=tasks-h] tr[data-key=train] td").nth(4)
    acknowledged.filter(has_text=re.compile("^[1-9]")).wait_for()
    # Hide the list of samples, which is above tasks and generators. Take the picture at once,
    # because the step continues.
    page.evaluate("document.getElementById('samples').hidden = true")
    page.screenshot(path=FOLDER / "admin-async.png")
    assert run.wait(TIMEOUT_S) == 0, "the run failed"
    page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    page.goto(f"/trace?id={steps_of(url)[1]}")
    take(page, "async-trace")
    runs = [each["run_id"] for each in Admin(url).ask("runs")["runs"]]
    if len(runs) > 1:  # the synchronous run came first
        page.goto(f"/runs/compare?{urlencode({'run': runs, 'smooth': 0.6}, doseq=True)}")
        take(page, "runs")


def take_pages(browser: Browser, url: str, run: Process) -> None:
    """Take every page at three widths while a run trains, each page as one picture."""
    with subprocess.Popen([*_SCRAPE, url], stderr=subprocess.DEVNULL) as scraper:
        try:
            _take_pages(browser, url)
        finally:
            scraper.terminate()
    assert run.poll() is None, "the run ended before its pictures were taken"


def _take_pages(browser: Browser, url: str) -> None:
    page = opened(browser, url)
    page.goto("/")
    wait_for_step(page, 20)
    page.goto("/alerts")
    for place in ("#raised li", "#cleared tbody tr"):
        page.locator(place).first.wait_for()
    runs = [each["run_id"] for each in Admin(url).ask("runs")["runs"]]
    run_id = runs[0]  # the newest; others may have run before
    newest, *_, oldest = steps_of(url, run=run_id)
    sample = Admin(url).ask("samples/facts", run=run_id, text=True)["samples"][0]
    of_run = urlencode({"run": run_id})
    paths = {
        "overview": "/",
        "partition": "/partition?id=train",
        "samples": "/samples",
        "sample": f"/sample?{urlencode({'id': sample['sample_id'], 'run': run_id})}",
        "group": f"/group?{urlencode({'run': run_id, 'group': sample['group']})}",
        "runs": "/runs",
        "run": f"/run?{of_run}&smooth=0.6",
        "traces": "/traces",
        "trace": f"/trace?id={newest}",
        "compare": f"/compare?a={oldest}&b={newest}",
        "compare-runs": f"/runs/compare?{urlencode({'run': runs, 'smooth': 0.6}, doseq=True)}",
        "engines": "/engines",
        "staleness": f"/staleness?{of_run}",
        "alerts": "/alerts",
        "audit": "/audit",
        "api": "/docs",
        "confirm": "/actions/clear?partition=train",
        "login": "/login",
    }
    folder = FOLDER / "pages"
    folder.mkdir(exist_ok=True)
    for name, path in paths.items():
        picture = Image.new("RGB", _SIZE, "#c3c9d0")
        for screen, part, box in _SCREENS:
            picture.paste(_shown(page, path, screen, part, box), box)
        # This method retains the color of small marks.
        reduced = picture.quantize(_COLORS, Image.Quantize.MAXCOVERAGE)
        reduced.save(folder / f"{name}.png", optimize=True)
    page.close()


def _shown(page: Page, path: str, screen: tuple[int, int], part: _Box, box: _Box) -> Image.Image:
    """Return a part of what a screen shows of a page, in the size of a box."""
    page.set_viewport_size({"width": screen[0], "height": screen[1]})
    page.goto(path)
    page.wait_for_timeout(_DRAW_MS)
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    size = (box[2] - box[0], box[3] - box[1])
    return image.resize(size, Image.Resampling.LANCZOS, box=part)


def await_end(browser: Browser, url: str, run: Process) -> None:
    """Wait for the end of a run, with which a later one is compared."""
    assert run.wait(TIMEOUT_S) == 0, "the run failed"


_MODES = {
    "sync": ((), take_synchronous),
    "async": (_ASYNC, take_asynchronous),
    "pages": (_PAGES, take_pages),
}


def main() -> None:
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rules = folder / "alerts.yaml"
        rules.write_text(_RULES)
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        modes = [_MODES[name] for name in sys.argv[1:] or _MODES]
        if modes[0] == _MODES["pages"]:
            modes.insert(0, (_SHORT, await_end))
        for changes, take_all in modes:
            options = ["--port", "0", "--keep-sample-text", "--allow-actions"]
            options += ["--alert-rules", str(rules)]
            with served_run(folder, changes, options) as started:
                assert started is not None, (folder / LOG).read_text()
                url, _, run = started
                take_all(browser, url, run)
        browser.close()


if __name__ == "__main__":
    main()
