"""Live updates that add rows move nothing: layout shifts as a real Chromium counts them."""

import itertools
import json
import re
import time
from urllib.parse import quote

import pytest
from alerting import raised
from loads import NS, engine
from made_up_traces import HOSTILE, RUN, STEPS, sample_id, trace_id_of
from playwright.sync_api import expect
from waiting import until

TIMEOUT_MS = 40_000
MAX_SHIFT = 0.03
"""Maximum sum of layout-shift scores of an update; browsers rate up to 0.1 as good."""

_NUMBERS = itertools.count()
_METRICS = iter(
    [
        *("rl.loss", "rl.entropy", "rl.clip_fraction"),
        *("rl.grad_norm", "rl.learning_rate", "rl.tokens_per_s"),
    ]
)
_PANELS = iter(
    [
        *("rl.kl", "rl.reward.std", "rl.validation.reward"),
        *("rl.validation.pass_rate", "rl.response.length", "rl.response.truncated"),
    ]
)


def now_s(otlp):
    return (time.time_ns() - otlp.start_ns) / 1e9


def add_alert(job, otlp, name):
    job.send(otlp.run("started", name), otlp.curve([0.5], run=name, name="rl.logprob_gap.mean"))


def add_cleared_alert(job, otlp, name):
    add_alert(job, otlp, name)
    until(lambda: name in [run for _, run in raised(job)])
    job.send(otlp.run("finished", name, at_s=1))


def add_step(job, otlp, name):
    step = 100 + int(name.removeprefix("grown-"))
    job.send(otlp.trace(run=name, step=step, start_s=now_s(otlp) - 3, seconds=2.5))


def add_curves(job, otlp, name):
    metrics = [*itertools.islice(_PANELS, 3), name]  # more panels than fit into a row
    job.send(*[otlp.curve([1.0, 2.0], run=RUN, name=metric) for metric in metrics])


def add_waits(job, otlp, name):
    for number in range(3):
        since_ns = time.time_ns() - (5 + number) * 10**9
        facts = {"wait": f"{name} {number}", "task": name, "fields": ["a"], "samples": 8}
        job.send(otlp.log("waiting", at_s=now_s(otlp), run=name, since_ns=since_ns, **facts))


def add_partition(job, otlp, name):
    job.site.plane.more.append(name)
    job.site.change()


def add_samples(job, otlp, name):
    facts = {"reward": [0.125] * 4, "state": ["generated"] * 4, "group": [name] * 4}
    body = {"ids": [f"{name}_g{number}" for number in range(4)], **facts}
    request = otlp.log("", run=name, body=json.dumps(body), step=7)
    request.resource_logs[0].scope_logs[0].log_records[0].event_name = "rl.sample.facts"
    job.send(request)


def add_span(job, otlp, name):
    trace_id = bytes.fromhex(trace_id_of(STEPS - 1))
    named = {"run": RUN, "step": STEPS - 1, "names": [name], "service": name, "root": False}
    job.send(otlp.trace(trace_id, start_s=now_s(otlp), **named))


def add_engine(job, otlp, name):
    now = time.time_ns() // NS
    job.send(*[engine(now - 5 * ago, name=name, running=3, kv=0.5) for ago in range(3)])


def add_hop(job, otlp, name):
    job.send(
        otlp.log("acknowledged", [sample_id(STEPS - 1, 1)], at_s=now_s(otlp), run=RUN, task=name)
    )


def add_trained(job, otlp, name):
    last = {"trace_id": bytes.fromhex(trace_id_of(STEPS - 1)), "step": STEPS - 1}
    facts = {"partition": name, "run": RUN, **last}
    ids = [f"{name}_g{number}" for number in range(4)]
    job.send(otlp.log("put", ids, at_s=now_s(otlp) - 2, version=STEPS - 4, **facts))
    job.send(otlp.log("trained", ids, at_s=now_s(otlp) - 1, task="train", version=STEPS, **facts))
    counted = job.get("staleness", run=RUN, steps=STEPS)["counts"]
    return f"<dt>Samples</dt><dd>{sum(counted.values())}</dd>"


def add_point(job, otlp, name):
    number = int(name.removeprefix("grown-"))
    value = round(0.5 + number / 1000, 3)
    job.send(otlp.curve([value], run=RUN, first=STEPS + number))
    return f"{value}"


def add_metric(job, otlp, name):
    metric = next(_METRICS)
    job.send(otlp.curve([1.0], run=RUN, name=metric))
    return f'data-curve="{metric}"'


_OF_RUN = f"run={quote(RUN, safe='')}"
_COMPARE = f"/runs/compare?{_OF_RUN}&run={quote(HOSTILE, safe='')}"
PAGES = [
    ("/", add_alert),
    ("/", add_step),
    ("/", add_waits),
    ("/", add_partition),
    ("/alerts", add_alert),
    ("/alerts", add_cleared_alert),
    ("/audit", add_cleared_alert),
    ("/samples", add_samples),
    ("/runs", add_step),
    ("/traces", add_step),
    (f"/trace?id={trace_id_of(STEPS - 1)}", add_span),
    (f"/run?{_OF_RUN}", add_curves),
]
MORE_PAGES = [
    ("/engines", add_engine),
    (f"/staleness?{_OF_RUN}&steps={STEPS}", add_trained),
    (_COMPARE, add_point),
    (_COMPARE, add_metric),
    (f"/sample?id={sample_id(STEPS - 1, 1)}", add_hop),
]
SCREENS = [(width, *page) for width in (390, 1280) for page in PAGES]
SCREENS += [(390, *page) for page in MORE_PAGES]
SCREENS += [pytest.param(1280, *page, marks=pytest.mark.long) for page in MORE_PAGES]
LISTS = [page for page in PAGES if page[0] in ("/audit", "/samples", "/runs", "/traces")]
LISTS += [(_COMPARE, add_metric), (f"/run?{_OF_RUN}", add_metric)]


def named(value):
    return value.split("?")[0] if isinstance(value, str) else getattr(value, "__name__", None)


@pytest.fixture
def grow(job, otlp):
    """Return a function that adds rows, and removes what they would change for other tests.

    It returns a text that pages show once they show the rows: the name it gave, or another one.
    """
    names = []

    def add(rows):
        names.append(f"grown-{next(_NUMBERS)}")
        return rows(job, otlp, names[-1]) or names[-1]

    yield add
    job.site.plane.more.clear()
    for name in names:
        job.send(otlp.run("finished", name, at_s=2))
    until(lambda: not {*names} & {run for _, run in raised(job)})


def live(page):
    """Use the page, and wait until it shows the newest state."""
    page.mouse.move(2, 2)
    page.wait_for_selector('#live[data-state="live"]')
    page.evaluate(
        "() => { window.swaps = 0; document.addEventListener('swapped', () => { swaps += 1; }); }"
    )
    page.wait_for_function("() => swaps > 0")


def watch_shifts(page):
    page.evaluate(
        "() => { window.observer?.disconnect(); window.shifts = [];"
        "window.observer = new PerformanceObserver((list) => shifts.push(...list.getEntries()));"
        "observer.observe({ type: 'layout-shift' }); }"
    )


def assert_unmoved(page):
    # Shifts are recorded when a frame is drawn.
    shifts = page.evaluate(
        "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => {"
        " shifts.push(...observer.takeRecords());"
        " done(shifts.filter((one) => !one.hadRecentInput).map((one) => [one.value,"
        " one.sources.map(({ node }) => node?.id || node?.className || node?.nodeName)])); })))"
    )
    assert sum(value for value, _ in shifts) <= MAX_SHIFT, shifts


def wait_for_text(page, text):
    page.wait_for_function(
        "(text) => document.querySelector('main').innerHTML.includes(text)"
        " || document.querySelector('#newer:not([hidden])')",
        arg=text,
        timeout=TIMEOUT_MS,
    )


@pytest.mark.parametrize(("width", "path", "rows"), SCREENS, ids=named)
def test_new_rows_move_nothing(watched, grow, path, rows, width):
    if rows in (add_point, add_metric, add_curves):
        grow(add_point)  # the first metric of all is shown at once
    # The sections below the curves are in view.
    height = 3_000 if rows is add_curves else 900
    page = watched(viewport={"width": width, "height": height}).go(path)
    live(page)
    watch_shifts(page)
    wait_for_text(page, grow(rows))
    assert_unmoved(page)


@pytest.mark.parametrize("width", [390, 1280])
def test_a_third_alert_moves_nothing(watched, job, grow, width):
    cleared = grow(add_cleared_alert)
    before = {grow(add_alert) for _ in range(2)}
    until(lambda: before <= {run for _, run in raised(job)})
    page = watched(viewport={"width": width, "height": 900}).go("/alerts")
    live(page)
    place = page.locator("#cleared", has_text=cleared).bounding_box()
    for _ in range(2):
        watch_shifts(page)
        wait_for_text(page, grow(add_alert))
        assert_unmoved(page)
    assert page.locator("#cleared").bounding_box()["y"] == place["y"]
    page.get_by_role("button", name="Show all raised").click()
    expect(page.locator("#all-raised")).to_be_hidden()
    rows = "document.getElementById('raised-rows')"
    assert page.evaluate(f"{rows}.scrollHeight <= {rows}.clientHeight")


@pytest.mark.parametrize("width", [390, 1280])
def test_a_blocked_task_moves_nothing(watched, job, otlp, grow, width):
    name = grow(add_partition)
    until(lambda: name in [each["id"] for each in job.get("partitions")["partitions"]])
    page = watched(viewport={"width": width, "height": 900}).go(f"/partition?id={name}")
    page.locator(".heat-cells").wait_for()
    live(page)
    blocked, heat = page.locator("#partition .strip"), page.locator("#heat")
    expect(blocked).to_have_text("No task is blocked.")
    place = heat.bounding_box()
    facts = {"partition": name, "task": "train", "fields": ["advantages"], "samples": 8}
    for number, seconds in enumerate((90, 7_200)):
        wait = {"wait": f"{name} {number}", "since_ns": time.time_ns() - seconds * 10**9, **facts}
        watch_shifts(page)
        job.send(otlp.log("waiting", at_s=now_s(otlp), run=name, **wait))
        expect(blocked).to_contain_text("longest of 2" if number else "Blocked for 1 min")
        assert_unmoved(page)
    assert heat.bounding_box() == place


@pytest.mark.parametrize("path", ["/", "/partition?id=train"])
@pytest.mark.parametrize("width", [390, 1280])
def test_an_unreachable_data_plane_moves_nothing(watched, site, path, width):
    page = watched(viewport={"width": width, "height": 900}).go(path)
    live(page)
    watch_shifts(page)
    site.plane.is_away = True
    try:
        fault = page.locator(".faults .banner")
        expect(fault).to_contain_text("Cannot read the data plane.", timeout=TIMEOUT_MS)
        expect(fault).to_be_in_viewport(ratio=1)
        assert_unmoved(page)
    finally:
        site.plane.is_away = False
        until(lambda: site.service.status().live.attached)
    watch_shifts(page)
    expect(fault).to_have_count(0, timeout=TIMEOUT_MS)
    assert_unmoved(page)


@pytest.mark.parametrize(("path", "rows"), LISTS, ids=named)
def test_new_rows_are_shown_on_request(watched, grow, path, rows):
    grow(rows)  # the first row of an empty list is shown at once
    page = watched().go(path)
    live(page)
    keys = "[...document.querySelectorAll('[data-hold] > *')].map((row) => row.dataset.key)"
    before = page.evaluate(keys)
    grow(rows)
    button = page.locator("#newer")
    expect(button).to_have_text(re.compile(r"Show [1-4] new"), timeout=TIMEOUT_MS)
    assert page.evaluate(keys) == before
    button.click()
    expect(button).to_be_hidden()
    assert page.evaluate(keys) != before


def test_the_steps_rest_under_the_pointer(watched, grow):
    page = watched(viewport={"width": 1280, "height": 1600}).go("/")
    live(page)
    steps = page.locator("#steps tbody th")
    before = steps.all_inner_texts()
    steps.nth(1).hover()
    name = grow(add_step)
    expect(page.locator("#state .steady")).to_contain_text(name, timeout=TIMEOUT_MS)
    assert steps.all_inner_texts() == before
    page.mouse.move(2, 2)
    expect(steps.nth(0)).not_to_have_text(before[0], timeout=TIMEOUT_MS)
