"""Three tasks of a user, done by clicks from the overview.

Each asserts the number of page loads and clicks that it takes, and prints its duration.
"""

import sys
import time
from contextlib import contextmanager

import pytest
from made_up_traces import HOSTILE
from playwright.sync_api import expect

RUN = "collapsed run"
FALL, STEPS = 60, 100


# Of a tab; a choice of an option counts as a click.
COUNTS = """
if (location.protocol === "http:") {
  const count = (name) => sessionStorage.setItem(name, Number(sessionStorage.getItem(name)) + 1);
  count("loads");
  document.addEventListener("click", () => count("clicks"), true);
  document.addEventListener("change", () => count("clicks"), true);
}
"""


@contextmanager
def done_within(watch, record_property, task, *, loads, clicks):
    """Yield the overview; check the page loads and clicks from there to the end of the block."""
    watch.context.add_init_script(COUNTS)
    began = time.monotonic()
    yield watch.go("/")
    seconds = time.monotonic() - began
    record_property(task, seconds)
    sys.stdout.write(f"{task}: {seconds:.1f} s\n")
    counts = watch.page.evaluate("({...sessionStorage})")
    assert (int(counts["loads"]), int(counts["clicks"])) == (loads, clicks)


@pytest.fixture(scope="module")
def collapsed(job, otlp):
    """Send a run whose reward falls at the step at which generator and trainer diverge."""
    job.send(otlp.run("started", RUN))
    for name, before, after in (
        ("rl.reward.mean", 0.8, 0.1),
        ("rl.logprob_gap.mean", 0.001, 0.6),
        ("rl.entropy", 1.5, 1.5),
    ):
        values = [before if step < FALL else after for step in range(STEPS)]
        job.send(otlp.curve(values, run=RUN, name=name))


def test_clicks_lead_to_the_cause_of_a_reward_drop(watched, collapsed, record_property):
    task = "find why the reward fell"
    with done_within(watched(), record_property, task, loads=3, clicks=2) as page:
        page.get_by_role("link", name="Alerts").click()
        page.locator("#raised a", has_text=RUN).first.click(timeout=40_000)
        reward, gap, entropy = (
            page.locator(f'[data-curve="{name}"]')
            for name in ("rl.reward.mean", "rl.logprob_gap.mean", "rl.entropy")
        )
        reward.locator("canvas").wait_for()
        box = reward.locator(".u-over").bounding_box()
        read = {}
        for share in (0.3, 0.9):
            page.mouse.move(box["x"] + box["width"] * share, box["y"] + 30)
            expect(page.locator("#curve-step")).to_contain_text("step ")
            step = int(page.locator("#curve-step").inner_text().removeprefix("step "))
            before = step < FALL
            expect(reward.locator(".curve-value")).to_have_text("0.8" if before else "0.1")
            read[before] = [each.locator(".curve-value").inner_text() for each in (gap, entropy)]
    # Both were read under one crosshair: the gap jumped with the reward, the entropy did not.
    assert read == {True: ["0.001", "1.5"], False: ["0.6", "1.5"]}


def test_clicks_lead_to_the_stuck_task_and_its_cause(watched, record_property):
    task = "find the stuck task"
    with done_within(watched(), record_property, task, loads=2, clicks=1) as page:
        wait = page.locator("#waits li", has_text="lack advantages")
        expect(wait).to_contain_text("Task 'train'")
        wait.get_by_role("link", name="partition train").click()
        row = page.locator("[aria-labelledby=tasks-h] tr[data-key=train]")
        expect(row).to_contain_text("input_ids, advantages")
    assert "lacks advantages" in page.locator("#samples").inner_text()


def test_clicks_lead_to_the_first_diverging_token(watched, record_property):
    task = "show the first diverging token"
    with done_within(watched(), record_property, task, loads=4, clicks=4) as page:
        page.get_by_role("link", name="Samples", exact=True).click()
        page.get_by_label("Text stored").select_option("yes")
        page.get_by_role("button", name="Filter").click()
        page.locator("#newest tr", has_text=HOSTILE).first.get_by_role("link").first.click()
        banner = page.locator(".banner", has_text="First token whose log-probabilities")
        expect(banner).to_contain_text("“w90 ” (token 90")
