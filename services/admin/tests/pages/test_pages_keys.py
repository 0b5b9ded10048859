"""Keyboard, palette, time zone, copies and downloads, in a real Chromium."""

import csv
import json
import re
from datetime import datetime
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from made_up_traces import HOSTILE, RUN, STEPS, trace_id_of
from playwright.sync_api import expect
from test_pages_browser import query
from test_pages_render import PAGES

LAST = trace_id_of(STEPS - 1)


def active(page, what="textContent"):
    return page.evaluate(f"document.activeElement.{what}")


def chosen(page):
    return page.locator("#palette [aria-selected=true]").inner_text()


def test_keys_move_through_rows_and_search(watched):
    page = watched().go("/runs")
    first, second = page.locator("main tbody tr a[href]").evaluate_all(
        "(all) => [...new Map(all.map((one) => [one.closest('tr'), one])).values()]"
        ".slice(0, 2).map((one) => one.closest('tr').querySelector('a[href]').textContent)"
    )
    for key, expected in [("j", first), ("j", second), ("k", first), ("k", first)]:
        page.keyboard.press(key)
        assert active(page) == expected
    page.keyboard.press("/")
    assert active(page, "type") == "search"
    page.keyboard.type("j?")
    assert active(page, "value") == "j?"
    assert not page.locator("#keys").is_visible()


def test_keys_are_listed_and_can_be_turned_off(watched):
    page = watched().go("/traces")
    page.keyboard.press("?")
    keys = page.locator("#keys")
    assert "next and previous row" in keys.inner_text()
    keys.get_by_label("Enable single-key shortcuts").uncheck()
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    assert active(page, "localName") == "body"
    page.reload()
    page.keyboard.press("?")
    assert not keys.is_visible()
    page.keyboard.press("Control+k")  # no single key
    assert page.locator("#palette").is_visible()


@pytest.mark.parametrize(
    ("typed", "expected", "path", "address_query"),
    [
        ("stale", "Staleness\npage", "/staleness", {}),
        (f"run {RUN}", f"{RUN}\nrun", "/run", {"run": RUN}),
        (f"run {HOSTILE}", f"{HOSTILE}\nrun", "/run", {"run": HOSTILE}),
        ("partition train", "train\npartition", "/partition", {"id": "train"}),
        ("s39_p0", "Ids that begin with s39_p0\nsamples", "/samples", {"q": "s39_p0"}),
        (LAST.upper(), f"{LAST.upper()}\ntrace", "/trace", {"id": LAST.upper()}),
    ],
    ids=["page", "run", "hostile run", "partition", "samples", "trace"],
)
def test_palette_opens_the_typed_destination(watched, typed, expected, path, address_query):
    page = watched().go("/alerts")
    page.keyboard.press("Control+k")
    page.locator("#palette input").fill(typed)
    name, kind = expected.split("\n")
    item = page.locator("#palette [aria-selected=true]", has=page.locator("small", has_text=kind))
    item.filter(has_text=name).wait_for()
    assert chosen(page) == expected
    page.keyboard.press("Enter")
    page.wait_for_url(f"**{path}*")
    assert query(page) == address_query


def test_palette_reads_the_runs_before_it_searches_samples(watched):
    page = watched().go("/alerts")
    held = []
    page.route("**/api/v1/runs*", lambda route: held.append(route))
    with page.expect_request("**/api/v1/runs*"):
        page.keyboard.press("Control+k")
    page.locator("#palette input").fill(f"run {RUN}")
    page.keyboard.press("Enter")
    assert chosen(page) == f"Ids that begin with run {RUN}\nsamples"
    for route in held:
        route.continue_()
    page.wait_for_url("**/run?*")
    assert query(page) == {"run": RUN}


def test_palette_works_by_arrows_pointer_and_escape(watched):
    page = watched().go("/")
    page.locator("#open-palette").click()
    first = chosen(page)
    page.keyboard.press("ArrowUp")
    assert chosen(page) != first
    page.keyboard.press("ArrowDown")
    assert chosen(page) == first
    page.keyboard.press("Escape")
    assert not page.locator("#palette").is_visible()
    page.keyboard.press("Control+k")
    page.locator("#palette input").fill("list the keys")
    page.locator("#palette li").first.click()
    assert page.locator("#keys").is_visible()


def test_times_are_in_the_chosen_zone(watched):
    page = watched(timezone_id="Asia/Tokyo").go("/traces")
    started = "[...document.querySelectorAll('tbody tr td:nth-child(8)')].map((td) => td.innerText)"
    hours = {}
    for zone in ("UTC", "Asia/Tokyo"):
        page.get_by_label("Time zone").select_option(zone)
        page.wait_for_function(
            "(zone) => document.querySelector('#zone select')?.value === zone", arg=zone
        )
        clock = page.evaluate(started)[0].split()[-1]
        hours[zone] = int(clock.partition(":")[0])
    assert (hours["Asia/Tokyo"] - hours["UTC"]) % 24 == 9


@pytest.mark.parametrize("name", ["Mars/Base", "../../etc/passwd", "Europe", "%00", "A" * 5000])
def test_unknown_zones_are_utc(client, name):
    page = client.get("/traces", headers={"cookie": f"dataplane_zone={quote(name)}"})
    assert page.status_code == 200
    assert '<span id="zone">UTC</span>' in page.text


def test_ids_are_copied_exactly(watched):
    watch = watched()
    watch.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = watch.go(f"/run?run={quote(HOSTILE, safe='')}")
    page.get_by_role("button", name="Copy the run id").click()
    page.locator("#say", has_text="Copied").wait_for(state="attached")
    assert page.evaluate("navigator.clipboard.readText()") == HOSTILE


@pytest.mark.parametrize("path", ["/run", "/staleness?steps=7"])
def test_the_copied_link_names_the_run_that_is_shown(watched, path):
    watch = watched()
    watch.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = watch.go(path)
    page.keyboard.press("Control+k")
    page.locator("#palette input").fill("copy the link")
    page.keyboard.press("Enter")
    page.wait_for_function("navigator.clipboard.readText().then((text) => text.includes('run='))")
    copied = parse_qs(urlsplit(page.evaluate("navigator.clipboard.readText()")).query)
    assert copied.pop("run") == [page.locator("[data-run]").get_attribute("data-run")]
    assert copied == parse_qs(urlsplit(path).query)


def downloaded(page, form):
    with page.expect_download() as download:
        page.locator(f".download [data-download={form}]").first.click()
    return download.value.path().read_bytes().decode()


def as_text(value):
    """Return a value of JSON as the text of CSV."""
    if value is None or isinstance(value, str):
        return value or ""
    return str(value).lower() if isinstance(value, bool) else f"{value:.12g}"


# Records downloads instead of saving them; Chromium refuses more than ten of one page.
RECORD = """
window.saved = [];
const blobs = [];
URL.createObjectURL = (blob) => `#${blobs.push(blob) - 1}`;
HTMLAnchorElement.prototype.click = function () {
  const name = this.download;
  const blob = blobs[Number(this.getAttribute("href").slice(1))];
  blob.text().then((text) => window.saved.push({ name, text }));
};
"""


def all_downloads(page):
    """Return the file names, CSV rows and JSON rows of all tables of a page."""
    page.locator("html.scripted").wait_for()
    saved = []
    for at in range(page.locator(".download").count()):
        files = []
        for form in ("csv", "json"):
            # Without `data-all`, the rows shown are downloaded.
            page.evaluate(
                "([at, form]) => { window.saved.length = 0;"
                "const controls = document.querySelectorAll('.download')[at];"
                "delete controls.dataset.all;"
                "controls.querySelector(`[data-download=${form}]`).click(); }",
                [at, form],
            )
            page.wait_for_function("() => window.saved.length === 1")
            files += page.evaluate("window.saved")
        names = {file["name"].rpartition(".")[0] for file in files}
        rows = list(csv.reader(files[0]["text"].splitlines()))
        saved.append((names.pop(), rows, json.loads(files[1]["text"])))
        assert not names
    return saved


FORMATTED = re.compile(r"-|n/a|-?\d[\d,]*(\.\d+)?( ?(%|d|h|min|s|ms|µs|[kMGT]?B|samples))*")


def test_columns_of_downloads_have_one_type(watched):
    watch = watched()
    watch.context.add_init_script(RECORD)
    tables = 0
    for path in PAGES:
        page = watch.go(path)
        if not page.locator(".download").count():
            continue
        for _, (head, *rows), listed in all_downloads(page):
            tables += 1
            assert [list(row) for row in listed] == [head] * len(rows)
            assert [list(map(as_text, row.values())) for row in listed] == [
                [re.sub("^'(?=[=+@-])", "", text) for text in row] for row in rows
            ]
            for name in head:
                values = [row[name] for row in listed if row[name] is not None]
                types = {float if type(value) is int else type(value) for value in values}
                assert len(types) <= 1, (path, name, values)
                if types == {str} and name not in ("Sample", "Value", "Trace"):
                    written = [value for value in values if FORMATTED.fullmatch(value)]
                    assert written == [], (path, name)
    assert tables > 50


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/", "overview-Last-steps"),
        ("/runs", "runs"),
        (f"/run?run={RUN}", "run-grpo-math-20261121-2114-Step-ranges"),
        ("/run", "run-grpo-math-20261121-2114-Step-ranges"),
        (f"/trace?id={LAST}", f"trace-grpo-math-20261121-2114-{LAST}-Span-names"),
        ("/partition?id=train", "partition-train-Tasks"),
    ],
)
def test_file_names_have_page_run_and_table(watched, path, name):
    watch = watched()
    watch.context.add_init_script(RECORD)
    assert name in [saved for saved, _, _ in all_downloads(watch.go(path))]


@pytest.mark.parametrize(
    "path",
    ["/", "/run", "/traces", f"/trace?id={LAST}"],
    ids=["overview", "run", "traces", "trace"],
)
def test_no_failures_are_a_zero_in_json(watched, path):
    watch = watched()
    watch.context.add_init_script(RECORD)
    tables = [listed for _, _, listed in all_downloads(watch.go(path)) if "Failed" in listed[0]]
    assert tables
    for listed in tables:
        assert 0 in [row["Failed"] for row in listed]
        assert None not in [row["Failed"] for row in listed]


def test_all_rows_of_a_table_are_downloaded(watched, job):
    page = watched().go("/traces")
    head, *rows = csv.reader(downloaded(page, "csv").splitlines())
    assert head[:4] == ["Step", "Name", "Duration (s)", "Spans"]
    stored = job.get("traces", limit=1_000)["traces"]
    assert len(rows) == len(stored) > page.locator("main tbody tr").count()
    listed = json.loads(downloaded(page, "json"))
    assert [list(map(as_text, row.values())) for row in listed] == rows
    assert "grpo.step" in listed[0]["Name"]
    assert [row["Duration (s)"] for row in listed] == pytest.approx(
        [trace["seconds"] for trace in stored]
    )
    assert [row["Spans"] for row in listed] == [trace["spans"] for trace in stored]
    started = [datetime.fromisoformat(row["Started"]).timestamp() for row in listed]
    assert started == pytest.approx([trace["start_ns"] / 1e9 for trace in stored], abs=2e-3)


def test_a_download_reads_further_pages_up_to_its_limit(watched):
    watch = watched()

    def lower_limit(route):
        answer = route.fetch()
        route.fulfill(response=answer, body=answer.text().replace("100_000", "52"))

    watch.context.route("**/tables.js", lower_limit)
    # Pages of 50 rows, instead of those of a download.
    parameter = re.compile("[?&]all=traces")
    watch.context.route(
        parameter, lambda route: route.continue_(url=parameter.sub("", route.request.url))
    )
    page = watch.go("/traces")
    with page.expect_download() as download:
        page.locator("[data-download=csv]").click()
    assert download.value.suggested_filename == "traces-only-52-rows.csv"
    assert len(download.value.path().read_text().splitlines()) == 53
    expect(page.locator(".download output")).to_have_text("Only the first 52 rows.")


def test_links_that_act_on_a_row_are_not_downloaded(watched):
    page = watched().go("/partition?id=train")
    claims = page.locator("[aria-labelledby=claims-h]")
    assert claims.get_by_text("End…").count() == 2
    with page.expect_download() as download:
        claims.locator("[data-download=csv]").click()
    head = next(csv.reader(download.value.path().read_text().splitlines()))
    assert head == ["Task", "Owner", "Samples", "Age (s)", "Lease expires (s)"]


def test_tokens_are_one_tab_stop(watched):
    sample = quote(f"{HOSTILE}_g0", safe="")
    page = watched().go(f"/sample?id={sample}&run={quote(HOSTILE, safe='')}")
    page.locator("html.scripted").wait_for()
    stops = page.locator(".tokens [data-stop]")
    assert stops.count() > 10
    assert page.locator('.tokens [tabindex="0"]').count() == 1
    page.locator('.tokens [tabindex="0"]').focus()
    page.keyboard.press("End")
    last = stops.last.get_attribute("data-facts")
    assert page.evaluate("document.activeElement.dataset.facts") == last


def test_downloaded_text_is_no_formula(watched):
    page = watched().go("/traces")
    texts = ["=1+1", "+A1", "-2+3", "@SUM(A1)", "-3.5e-7", "-", 'a "b", c']
    page.evaluate(
        # Without `data-all`, the rows shown are downloaded.
        "(texts) => { document.querySelector('.download').removeAttribute('data-all');"
        "const row = document.querySelector('main tbody tr');"
        "texts.forEach((text, at) => row.cells[at].replaceChildren(text)); }",
        texts,
    )
    row = next(csv.reader(downloaded(page, "csv").splitlines()[1:]))
    assert row[: len(texts)] == ["'=1+1", "'+A1", "'-2+3", "'@SUM(A1)", texts[4], "", texts[6]]
