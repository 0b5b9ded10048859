"""The list of runs and their comparison: filtered, sorted, tagged, drawn, live, and safe."""

import math
from urllib.parse import parse_qs, urlsplit

import pytest
from test_pages_actions import SAME_ORIGIN, hidden
from test_pages_browser import query
from test_pages_learning import TIMEOUT_MS, drawn, figure, until
from test_pages_render import Document

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def runs(job, otlp):
    """Send three runs: one resumed and failed, one finished, one hostile."""
    for place, run in enumerate(("cmp/a", "cmp/b", f"cmp/{HOSTILE}")):
        config = {"lr": f"{place + 1}e-6", "seed": "0", HOSTILE: HOSTILE * place}
        job.send(
            otlp.run("started", run, config=config, **({"resumed_from": 7} if not place else {}))
        )
        job.send(otlp.curve([math.sin(step / (9 + place)) for step in range(100)], run=run))
        start_s = otlp.start_ns / 1e9
        times = [start_s + (60 + 60 * place) * (step + 1) for step in range(100)]
        job.send(otlp.curve(times, run=run, name="rl.time", unit="s"))
        job.send(otlp.curve([0.5], run=run, name="m", **{"rl.component": HOSTILE}))
    job.send(otlp.run("failed", "cmp/a", at_s=6000, error="OSError", reason=f"disk full {HOSTILE}"))
    job.send(otlp.run("finished", "cmp/b", at_s=9000))
    for run, samples in (("cmp/a", 8.0), ("cmp/b", 16.0)):
        trained_on = [samples * (step + 1) for step in range(100)]
        job.send(otlp.curve(trained_on, run=run, name="rl.samples"))
    return ["cmp/a", "cmp/b"]


COMPARE = "/runs/compare?run=cmp%2Fa&run=cmp%2Fb"
THIRD = f"&run=cmp%2F{HOSTILE.replace('=', '%3D').replace(' ', '%20')}"


def listed(client, address):
    page = Document(client.get(address).text)
    links = [urlsplit(link) for link in page.links()]
    ids = [parse_qs(link.query)["run"][0] for link in links if link.path == "/run"]
    return [run for run in ids if run.startswith("cmp/")]


def test_the_url_of_the_list_has_filters_and_order(client, runs):
    assert listed(client, "/runs?q=cmp&state=failed") == ["cmp/a"]
    assert listed(client, "/runs?q=DISK") == ["cmp/a"]
    assert listed(client, "/runs?q=cmp%2F&sort=duration")[:2] == ["cmp/b", "cmp/a"]
    ascending = listed(client, "/runs?q=cmp%2F&sort=duration&order=ascending")
    assert ascending[-2:] == ["cmp/a", "cmp/b"]
    page = client.get("/runs?q=cmp&sort=duration").text
    assert 'aria-sort="descending"' in page
    assert "sort=duration&amp;order=ascending" in page
    assert client.get("/runs?sort=name").status_code == 422
    assert "No matching runs" in client.get("/runs?q=nothing").text


def test_a_list_without_all_runs_says_so(job_of, otlp):
    job = job_of()
    started = otlp.run("started", "run 0")
    for number in range(1, 1_002):
        started.MergeFrom(otlp.run("started", f"run {number}"))
    job.send(started)
    page = job.client.get("/runs?all=runs").text
    assert page.count('data-key="run-') == 1_000
    assert "2 older runs omitted." in page
    assert "data-omitted" in page


def test_the_pages_of_a_run_show_how_it_started_and_ended(client, runs):
    for address in ("/runs?q=cmp", "/run?run=cmp%2Fa"):
        text = " ".join(Document(client.get(address).text).text.split())
        assert "failed" in text
        assert "OSError: disk full <img" in text
        assert "at step 7" in text
    assert "Configuration 3 keys" in text
    text = Document(client.get("/run?run=cmp%2Fb").text).text
    assert "finished" in text
    assert "Failed." not in text


def test_tags_are_set_on_the_page_of_the_run(client, runs):
    form = hidden(client.get("/run?run=cmp%2Fb").text)
    sent = form | {"tags": f"good,, {HOSTILE} , good"}
    answer = client.post("/actions/tag-run", data=sent, headers=SAME_ORIGIN, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/run?run=cmp%2Fb")
    assert listed(client, "/runs?tag=good") == ["cmp/b"]
    links = Document(client.get("/runs?q=cmp&sort=steps").text).links()
    assert "/runs?q=cmp&tag=good&sort=steps" in links
    audit = client.get("/audit").text
    assert "tag-run" in audit
    assert '"/run?run=cmp%2Fb"' in audit
    without = {name: value for name, value in sent.items() if name != "csrf"}
    assert client.post("/actions/tag-run", data=without, headers=SAME_ORIGIN).status_code == 403
    too_long = client.post("/actions/tag-run", data=sent | {"tags": "x" * 65}, headers=SAME_ORIGIN)
    assert too_long.status_code == 422
    assert "Nothing was changed" in too_long.text


def test_runs_without_metrics_say_how_to_send_them(client, job, otlp):
    job.send(otlp.run("started", "no metrics/1"), otlp.run("started", "no metrics/2"))
    page = client.get("/runs/compare?run=no+metrics/1&run=no+metrics/2&axis=time").text
    assert '<a href="/run?run=no%20metrics%2F1#learning">How to send them</a>' in page
    assert "No time reported" not in page


def test_without_actions_tags_cannot_be_set(bare_client):
    assert bare_client.post("/actions/tag-run", headers=SAME_ORIGIN).status_code in (403, 404, 405)
    assert "Set tags" not in bare_client.get("/run").text


def test_a_comparison_shows_differing_keys_and_keeps_its_state(client, runs):
    page = Document(client.get(f"{COMPARE}&axis=time&smooth=0.5&first=60&last=90").text)
    text = " ".join(page.text.split())
    assert "2 runs compared" in text
    assert "2 differences, 1 equal key" in text
    links = [link for link in page.links() if link.startswith("/runs/compare")]
    assert "/runs/compare?run=cmp%2Fa&run=cmp%2Fb&axis=samples&smooth=0.5" in links
    assert "/runs/compare?run=cmp%2Fb&axis=time&smooth=0.5&first=60&last=90" in links
    by_samples = Document(client.get(f"{COMPARE}{THIRD}&axis=samples").text).text
    assert f"No samples reported by cmp/{HOSTILE}." in by_samples


@pytest.mark.parametrize(
    ("address", "status"),
    [
        ("/runs/compare", 422),
        ("/runs/compare?run=nothing", 404),
        (f"{COMPARE}&axis=tokens", 422),
        ("/runs/compare?" + "&".join(f"run={number}" for number in range(9)), 422),
    ],
)
def test_a_comparison_that_is_not_possible_says_why(client, runs, address, status):
    answer = client.get(address)
    assert answer.status_code == status
    assert '<a href="/runs">All runs</a>' in answer.text


def test_selected_runs_are_overlaid(watched, runs):
    page = watched().go("/runs?q=cmp")
    for run in runs:
        page.get_by_label(f"Compare {run}").check()
    page.get_by_role("button", name="Compare").click()
    page.wait_for_url("**/runs/compare?*")
    box = drawn(page, "rl.reward.mean")
    mark = figure(page, "rl.reward.mean").get_by_title("cmp/a resumed at step 7", exact=True)
    place = mark.bounding_box()
    assert place["x"] + place["width"] / 2 - box["x"] == pytest.approx(box["width"] * 7 / 99, abs=9)
    page.locator("#smooth").fill("0.9")
    until(page, lambda: query(page).get("smooth") == "0.9")
    page.get_by_role("link", name="time", exact=True).click()
    page.wait_for_url("**axis=time&smooth=0.9")
    box = drawn(page, "rl.reward.mean")
    values = figure(page, "rl.reward.mean").locator(".curve-value")
    last = values.all_inner_texts()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 40)
    until(page, lambda: page.locator("#curve-step").inner_text().endswith("min"))
    until(page, lambda: values.all_inner_texts() != last)
    # The longer run takes 200 min, so a quarter of the axis is 50 min.
    hours = page.locator("#curve-step").inner_text()
    assert 45 <= int(hours.removesuffix(" min")) <= 55
    place = mark.bounding_box()  # step 7 is at 8 min
    assert place["x"] + place["width"] / 2 - box["x"] == pytest.approx(box["width"] / 25, abs=9)
    page.get_by_role("link", name="samples", exact=True).click()
    page.wait_for_url("**axis=samples*")
    box = drawn(page, "rl.reward.mean")
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 40)
    until(page, lambda: page.locator("#curve-step").inner_text().endswith(" samples"))
    samples = int(page.locator("#curve-step").inner_text().removesuffix(" samples"))
    assert 360 <= samples <= 440  # cmp/b ends at 1600
    rewards = [math.sin((samples / 16 - 1) / 10), math.sin((samples / 8 - 1) / 9)]
    read = pytest.approx(rewards, abs=0.1)
    until(page, lambda: [float(each.split(",")[0]) for each in values.all_inner_texts()] == read)


def test_a_zoomed_comparison_keeps_its_runs_and_axis(watched, runs):
    page = watched().go(f"{COMPARE}&axis=time")
    box = drawn(page, "rl.reward.mean")
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 40, steps=4)
    page.mouse.up()
    until(page, lambda: "first" in query(page))
    assert 2700 <= float(query(page)["first"]) <= 3300
    assert parse_qs(urlsplit(page.url).query)["run"] == runs
    first = query(page)["first"]
    page.get_by_role("link", name="Hide cmp/a").click()
    page.wait_for_url("**compare?run=cmp%2Fb&axis=time&first=*")
    assert query(page)["first"] == first
    drawn(page, "rl.reward.mean")
    assert page.locator("#curve-reset").is_visible()


def test_compared_runs_are_smoothed_alike_and_new_points_appear(watched, runs, job, otlp):
    for run, steps in zip(runs, (20, 100), strict=True):
        job.send(otlp.curve([0.0, 1.0] * (steps // 2), run=run, name="rl.loss"))
    page = watched().go(COMPARE)
    drawn(page, "rl.reward.mean")
    assert page.get_by_title("cmp/b resumed").count() == 0
    drawn(page, "rl.loss")
    page.evaluate(
        "() => { const { join } = uPlot; uPlot.join = (curves) => {"
        " if (curves[0]?.[0].length === 20) window.smoothed = curves.map((curve) => curve[4][19]);"
        " return join(curves); }; }"
    )
    page.locator("#smooth").fill("0.9")
    shorter, longer = page.evaluate("smoothed")
    assert 0 < shorter < 1
    assert longer == pytest.approx(shorter)
    job.send(otlp.curve([12.5], run="cmp/b", first=100))
    values = figure(page, "rl.reward.mean").locator(".curve-value")
    until(page, lambda: values.all_inner_texts()[1] == "12.5")


def test_hostile_runs_and_keys_are_text(watched, runs):
    for address in ("/runs?q=cmp", f"{COMPARE}{THIRD}"):
        page = watched().go(address)
        assert page.locator("main img").count() == 0
    drawn(page, "rl.reward.mean")
    page.locator(".more-curves summary").click()
    figure(page, "m").locator("canvas").wait_for(timeout=TIMEOUT_MS)
