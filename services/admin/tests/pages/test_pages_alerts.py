"""The page of alerts in a real Chromium: live, linked and readable on narrow screens."""

import pytest
from alerting import cleared, raised
from playwright.sync_api import expect
from waiting import until

RUN = "alerted run"
TIMEOUT_MS = 40_000


@pytest.mark.parametrize("width", [1280, 390])
def test_alerts_appear_and_clear_without_a_reload(watched, job, otlp, width):
    run = f"{RUN} {width}"
    page = watched(viewport={"width": width, "height": 900}).go("/alerts")
    about = page.locator("#raised a", has_text=run)
    assert about.count() == 0
    job.send(otlp.curve([0.5], run=run, name="rl.logprob_gap.mean"))
    job.send(otlp.run("started", run))
    expect(about.first).to_be_visible(timeout=TIMEOUT_MS)
    expect(page.locator("#alert-count")).to_contain_text("raised")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    job.send(otlp.run("finished", run, at_s=1))
    expect(page.locator("#cleared a", has_text=run).first).to_be_visible(timeout=TIMEOUT_MS)
    expect(about).to_have_count(0)


def test_an_alert_leads_to_the_page_of_its_run(watched, job, otlp):
    job.send(otlp.run("started", RUN))
    job.send(otlp.curve([0.5], run=RUN, name="rl.logprob_gap.mean"))
    page = watched().go("/alerts")
    page.locator("#raised a", has_text=RUN).first.click(timeout=TIMEOUT_MS)
    expect(page.locator('[data-curve="rl.logprob_gap.mean"]')).to_be_visible()
    assert page.url.endswith("#learning")


def test_ids_of_runs_are_readable_on_a_phone(watched, job, otlp):
    run = "demo-pages/20261129-175553"
    job.send(otlp.run("started", run), otlp.curve([0.5], run=run, name="rl.logprob_gap.mean"))
    until(lambda: run in [each for _, each in raised(job)])
    job.send(otlp.run("finished", run, at_s=1))
    until(lambda: run in [each for _, each in cleared(job)])
    watch = watched(viewport={"width": 390, "height": 900})
    for path in ("/audit", "/alerts", "/runs"):
        link = watch.go(path).locator("td a, th a", has_text=run).first
        lines = link.evaluate("(link) => [...link.getClientRects()].map((line) => line.width)")
        assert len(lines) <= 3, path
        assert min(lines) > 30, path
        scrolls = "(link) => link.closest('.wide').scrollWidth > link.closest('.wide').clientWidth"
        assert not link.evaluate(scrolls), path
