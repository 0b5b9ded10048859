"""Every page renders, explains empty states, and escapes untrusted text."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from made_up_traces import (
    HOSTILE,
    HOSTILE_PARTITION,
    REVERSED,
    RUN,
    STEPS,
    trace_id_of,
)
from waiting import until

LAST = trace_id_of(STEPS - 1)
HOSTILE_TRACE = trace_id_of(STEPS - 2)
TORN = trace_id_of(STEPS - 3)
PAGES = [
    "/",
    "/partition?id=train",
    "/partition?id=replay-100k&start=30024&count=834",
    f"/partition?id={quote(HOSTILE_PARTITION, safe='')}",
    "/samples",
    f"/samples?q={quote(HOSTILE, safe='')}",
    "/samples?tag=prompt_id&value=3&partition=train",
    f"/samples?run={quote(HOSTILE, safe='')}&sort=reward&min_length=100&truncated=no",
    f"/group?run={quote(HOSTILE, safe='')}&group={quote(HOSTILE, safe='')}",
    f"/sample?id={quote(f'{HOSTILE}_g0', safe='')}&run={quote(HOSTILE, safe='')}&color=difference",
    f"/sample?id={quote(f'{HOSTILE}_g0', safe='')}&run={quote(HOSTILE, safe='')}&color=mask",
    f"/sample?id={quote(f'{HOSTILE}_g0', safe='')}&run={quote(HOSTILE, safe='')}&color=version",
    f"/sample?id={quote(REVERSED)}&partition=train",
    "/runs",
    f"/runs?q={quote(HOSTILE, safe='')}&state=silent&sort=reward&order=ascending",
    f"/runs/compare?run={quote(HOSTILE, safe='')}&run={quote(RUN, safe='')}&axis=time",
    "/run",
    f"/run?run={quote(HOSTILE, safe='')}",
    "/traces",
    f"/traces?run={quote(HOSTILE, safe='')}",
    f"/trace?id={LAST}",
    f"/trace?id={HOSTILE_TRACE}",
    f"/trace?id={HOSTILE_TRACE}&name={quote(HOSTILE, safe='')}&sort=p95&order=ascending",
    f"/trace?id={HOSTILE_TRACE}&service={quote(HOSTILE, safe='')}&frame={quote(HOSTILE, safe='')}",
    f"/trace?id={TORN}",
    f"/compare?a={HOSTILE_TRACE}&b={LAST}",
    "/compare",
    "/engines",
    "/staleness",
    "/alerts",
    "/audit",
    "/docs",
    "/login",
    f"/actions/clear?partition={quote(HOSTILE_PARTITION, safe='')}",
    f"/actions/redeliver?partition=train&task=train&ids={quote(HOSTILE, safe='')}",
    "/actions/end-claim?partition=train&claim=train-01bc",
]


class Document(HTMLParser):
    """The elements and the text of a page."""

    VOID = frozenset({"meta", "link", "input", "br", "img", "wbr"})

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.text = ""
        self.open = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> does not close what is open"

    def handle_data(self, data):
        self.text += data

    def links(self):
        return [held["href"] for tag, held in self.elements if tag == "a" and "href" in held]


@pytest.mark.parametrize("path", PAGES)
def test_a_page_has_valid_html_without_inline_code(client, path):
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    page = Document(answer.text)
    assert page.open == []
    for tag, held in page.elements:
        assert tag != "style"
        assert "style" not in held
        assert not [name for name in held if name.startswith("on")]
        assert tag != "script" or held.get("src", "").startswith("/static/")
    ids = [held["id"] for _, held in page.elements if "id" in held]
    assert len(ids) == len(set(ids)), "an id is used twice"


@pytest.mark.parametrize("path", PAGES)
def test_links_are_local_or_configured(client, path):
    for link in Document(client.get(path).text).links():
        parts = urlsplit(link)
        assert (parts.scheme, parts.netloc) in {("", ""), ("http", "jaeger.example:16686")}
        assert parts.scheme or link.startswith(("/", "#"))


@pytest.mark.parametrize("path", PAGES)
def test_direction_marks_are_shown_as_escapes(client, path):
    # Forms send values back unchanged, and ids are copied unchanged.
    shown = re.sub(r' (value|data-copy)="[^"]*"', "", client.get(path).text)
    assert "\u202e" not in shown


@pytest.mark.parametrize("path", PAGES)
def test_a_page_has_one_heading_landmarks_and_named_controls(client, path):
    page = Document(client.get(path).text)
    tags = [tag for tag, _ in page.elements]
    assert tags.count("h1") == 1
    assert tags.count("main") == 1
    named = {held.get("for") for tag, held in page.elements if tag == "label"}
    for tag, held in page.elements:
        if tag == "svg" and "aria-hidden" not in held and held.get("role"):
            assert held.get("aria-label")
        if tag == "th":
            assert held.get("scope") in {"col", "row"}
    assert named <= {None}, "a label must contain its control"


def test_any_id_survives_a_link(client):
    links = Document(client.get("/").text).links()
    ids = [
        parse_qs(urlsplit(link).query)["id"][0] for link in links if link.startswith("/partition")
    ]
    assert HOSTILE_PARTITION in ids
    assert client.get(f"/partition?id={quote(HOSTILE_PARTITION, safe='')}").status_code == 200


def test_the_overview_shows_why_a_run_is_stuck(client):
    text = Document(client.get("/").text).text
    assert "2 tasks blocked, longest for 10 min 40 s" in text
    assert "3 of 480 lack advantages" in text
    assert "s39_p0_g0" in text


def test_the_overview_lists_silent_processes_separately(client):
    text = Document(client.get("/").text).text
    above, title, below = text.partition("Silent processes")
    assert title
    assert "last seen" in below
    assert "last seen" not in above
    assert "3 of 480 lack advantages" in above


def test_silent_processes_do_not_make_the_headline_stuck(site, client, monkeypatch):
    gone = [wait for wait in site.service.why() if wait.silent_s is not None]
    monkeypatch.setattr(site.service, "why", lambda *, run=None: gone)
    page = client.get("/").text
    assert "Silent processes" in Document(page).text
    assert "No task is blocked." in page
    assert "tasks blocked" not in page


@pytest.mark.parametrize(
    ("kind", "seconds", "stuck"),
    [("wait", 59, False), ("wait", 61, True), ("claim", 59, False), ("backlog", 61, True)],
)
def test_a_short_wait_is_not_stuck(site, client, monkeypatch, kind, seconds, stuck):
    [wait] = [
        changed for changed in site.service.why() if changed.requested and changed.silent_s is None
    ]
    changed = wait.model_copy(update={"kind": kind, "seconds": float(seconds)})
    monkeypatch.setattr(site.service, "why", lambda *, run=None: [changed])
    # The last step finished just now, however long the tests before this one took.
    paces = site.service.paces
    monkeypatch.setattr(
        site.service,
        "paces",
        lambda *arguments: {
            run: replace(pace, since_s=0.0) for run, pace in paces(*arguments).items()
        },
    )
    page = client.get("/").text
    assert '<h2 id="why">Blocked</h2>' in page
    text = Document(page).text
    assert ("1 task blocked" in text) == stuck
    assert (f"Running: step {STEPS - 1} finished in" in text) == (not stuck)
    assert "3 of 480 lack advantages" in text
    page = client.get("/partition?id=train").text
    assert ('class="strip critical"' in page) == (seconds > 60)
    assert "3 of 480 samples lack advantages" in page


def test_partition_bars_show_the_present_samples(site, client, monkeypatch):
    held = site.service.partitions()
    [train] = [each for each in held.partitions if each.id == "train"]
    changes = {"present": 480, "put": 5_000, "declared": 60_000, "not_put": 55_000}
    changed = held.model_copy(update={"partitions": [train.model_copy(update=changes)]})
    monkeypatch.setattr(site.service, "partitions", lambda: changed)
    text = Document(client.get("/").text).text
    assert "480 samples" in text
    assert "60,000" not in text
    assert "55,000 not put yet" not in text
    view = site.service.partition_view("train")
    view = view.model_copy(update={"partition": view.partition.model_copy(update=changes)})
    monkeypatch.setattr(site.service, "partition_view", lambda *_, **__: view)
    text = Document(client.get("/partition?id=train").text).text
    assert "480" in text
    assert "60,000" not in text


def test_the_overview_filters_by_run(client):
    text = Document(client.get("/?run=yesterday").text).text
    assert "Silent processes" in text
    assert "3 of 480 lack advantages" not in text
    text = Document(client.get(f"/?run={quote(RUN, safe='')}").text).text
    assert "3 of 480 lack advantages" in text
    assert "Silent processes" not in text


def test_the_run_page_compares_its_steps(client):
    page = Document(client.get("/run").text)
    text = " ".join(page.text.split())
    assert re.search(r"Step duration unchanged: .* in steps \d+ to 39, .* in steps 0 to", text)
    compared = [parse_qs(urlsplit(link).query) for link in page.links() if "/compare" in link]
    assert len(compared) == 9
    assert len({query["a"][0] for query in compared}) == 1
    links = {link for link in page.links() if link.startswith("/trace?")}
    assert f"/trace?id={LAST}" in links, "the slowest step of all"


def test_staleness_of_a_step_counts_unknown_samples(client):
    text = Document(client.get(f"/trace?id={trace_id_of(0)}").text).text
    assert "0.50 versions, max 2; unknown for 4 samples" in " ".join(text.split())
    text = Document(client.get(f"/trace?id={trace_id_of(STEPS - 1)}").text).text
    assert "unknown for 8 samples" in " ".join(text.split())


def test_staleness_shows_omitted_steps(site, client, monkeypatch):
    counted = {"counts": {1: 2}, "mean": 1.0, "steps_omitted": 3}
    staleness = site.service.staleness(run=RUN).model_copy(update=counted)
    monkeypatch.setattr(site.service, "staleness", lambda **_: staleness)
    text = Document(client.get("/staleness").text).text
    assert "The 3 oldest steps are not counted" in " ".join(text.split())


def test_an_empty_overview_says_how_to_send_telemetry(bare_client):
    text = Document(bare_client.get("/").text).text
    assert "OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost" in text
    assert "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf" in text
    assert "--ray-address" in text


@pytest.mark.parametrize("path", ["/runs", "/run", "/traces", "/staleness", "/audit", "/samples"])
def test_empty_lists_have_a_message(bare_client, path):
    answer = bare_client.get(path)
    assert answer.status_code == 200
    assert 'class="empty"' in answer.text


def test_a_page_works_without_the_data_plane(site, client):
    site.plane.is_away = True
    try:
        until(lambda: not site.service.status().live.attached)
        text = Document(client.get("/partition?id=train").text).text
    finally:
        site.plane.is_away = False
        until(lambda: site.service.status().live.attached)
    assert "Cannot read the data plane." in text
    assert "the data plane did not answer within 5 s" in text
    assert "jagged int64" in text


def test_pages_say_that_the_plane_answers_no_clients(site, client):
    site.plane.fault = "its request thread ended <b>"
    try:
        until(lambda: site.service.status().live.error)
        pages = [Document(client.get(path).text).text for path in ("/", "/partition?id=train")]
    finally:
        site.plane.fault = None
        until(lambda: not site.service.status().live.error)
    for text in pages:
        assert "does not answer its clients. MadeUpPlane: its request thread ended <b>." in text
        assert "Cannot read" not in text
    assert "not answering" in pages[0]
    assert "jagged int64" in pages[1]


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [
        ("/sample?id=unknown", 404, "no event or live partition has sample"),
        ("/partition?id=nothing", 404, "Partition 'nothing' is not registered"),
        ("/partition", 422, "Parameter 'id' is missing"),
        ("/trace?id=..%2F..%2Fetc%2Fpasswd", 422, "expected 32 hexadecimal digits"),
        ("/traces?step=many", 422, "expected an integer"),
        ("/traces?min_s=nan", 422, "expected a number of at least 0"),
        ("/samples?q=a&cursor=wrong", 422, "cursor"),
        ("/static/0/nothing.css", 404, "does not exist"),
        ("/static/0/..%2Frender.py", 404, ""),
    ],
)
def test_an_error_page_gives_the_reason(client, path, status, reason):
    answer = client.get(path)
    assert answer.status_code == status
    assert reason.lower() in answer.text.replace("&#39;", "'").lower()


def test_the_matrix_of_100000_samples_is_small(client):
    answer = client.get("/partition?id=replay-100k")
    page = Document(answer.text)
    windows = [held for tag, held in page.elements if tag == "a" and held.get("class") == "window"]
    assert len(windows) == 120
    assert windows[0]["aria-label"].startswith("Samples 0 to 833: written: ")
    assert windows[-1]["href"].endswith("start=99246&count=754#samples")
    assert len(answer.content) < 200_000


def test_generators_are_listed_with_what_they_hold(client):
    text = Document(client.get("/partition?id=train").text).text
    table = text[text.index("Generators 3 in the run") : text.index("Claims 2, oldest first")]
    rows = re.findall(
        r"rollout actor (\d)(node-2:401\d)(joined|left) .*?:\d\d:\d\d(?:\.\d{3})?(.*)", table
    )
    assert rows == [
        ("0", "node-2:4010", "joined", "00-"),
        ("1", "node-2:4011", "joined", "13212 s"),
        ("3", "node-2:4013", "joined", "1810 min 40 s"),
        ("2", "node-2:4012", "left", "out of memory 00-"),
    ]
    assert "Generators" not in Document(client.get("/partition?id=replay-100k").text).text


def test_a_chosen_window_lists_its_samples(client):
    page = Document(client.get("/partition?id=replay-100k&start=834&count=834").text)
    assert "Samples 834 to 883" in page.text
    assert "/partition?id=replay-100k&start=884&count=50" in page.links()


def test_an_incomplete_trace_is_drawn_with_a_note(client):
    page = Document(client.get(f"/trace?id={TORN}").text)
    assert "Telemetry incomplete" in page.text
    assert "no root" in page.text
    assert "rejected spans, invalid or beyond the limits: 7" in page.text
    assert [held for tag, held in page.elements if tag == "a" and held.get("class") == "bar"]


def test_a_trace_shows_every_span_and_the_critical_path(site, client):
    trace = site.service.trace(LAST)
    page = Document(client.get(f"/trace?id={LAST}").text)
    kinds = [held.get("class") for _, held in page.elements]
    assert kinds.count("bar") == len(trace.rows)
    assert kinds.count("path") == len(trace.critical_path)
    assert "/compare?a=" + HOSTILE_TRACE + "&b=" + LAST in page.links()
    assert f"http://jaeger.example:16686/trace/{LAST}" in page.links()
    assert f"/trace?id={trace_id_of(0)}" in page.links()


def test_spans_of_the_critical_path_keep_marks_and_order(client):
    page = Document(client.get(f"/trace?id={LAST}&name=train&sort=max&frame=x").text)
    links = [
        parse_qs(urlsplit(attributes["href"]).query)
        for tag, attributes in page.elements
        if tag == "a" and "&span=" in attributes["href"]
    ]
    assert len(links) > 10
    for query in links:
        assert (query["name"], query["sort"], query["frame"]) == (["train"], ["max"], ["x"])


def test_long_run_ids_differ_in_the_choice_of_runs(job_of, otlp):
    job = job_of()
    runs = [f"qwen2.5-math-7b/grpo/2026-11-28_lr1e-6_seed{seed}" for seed in (0, 1)]
    job.send(*(otlp.trace(run=run, step=0) for run in runs))
    for path in ("/", "/run", "/traces", "/samples", "/staleness"):
        options = re.findall(r"<option[^>]*>(qwen[^<]*)</option>", job.client.get(path).text)
        assert len({*options}) == 2, path


def test_a_sample_page_distinguishes_absent_from_unknown(client, site, job_of, otlp):
    job = job_of()
    job.send(otlp.log("put", ["a"]))
    page = Document(job.client.get("/sample?id=a").text).text
    assert "In the data planeunknown" in page
    assert "Not connected to a data plane" in page
    page = Document(client.get("/sample?id=s0_p0_g0").text).text
    assert "In the data planeno" in page
    assert "Cleared from the data plane." in page


def test_a_span_in_the_url_is_shown_in_detail(site, client):
    got = next(row for row in site.service.trace(LAST).rows if row.name == "get train")
    page = Document(client.get(f"/trace?id={LAST}&span={got.span_id}").text)
    assert "db.operation.batch.size" in page.text
    assert f"/trace?id={LAST}&span={got.links[0].span_id}" in page.links()
    assert f"/trace?id={LAST}&span={got.parent_id}" in page.links()
    current = [held for _, held in page.elements if held.get("aria-current") == "true"]
    assert got.span_id in [held.get("data-key") for held in current]


def test_filters_of_the_url_are_in_the_form(client):
    page = Document(client.get("/traces?step=12&min_s=0.5&error=true&name=grpo&service=vllm").text)
    values = {held["name"]: held for tag, held in page.elements if "name" in held}
    assert values["step"]["value"] == "12"
    assert values["min_s"]["value"] == "0.5"
    assert values["name"]["value"] == "grpo"
    assert values["service"]["value"] == "vllm"
    assert "checked" in values["error"]


def test_a_tag_of_a_sample_keeps_the_other_filters(client, job, otlp):
    body = {"ids": ["tagged"], "reward": [0.5], "tags": [{"source": "gsm8k"}]}
    request = otlp.log("", run="tags/1", body=json.dumps(body), step=3)
    request.resource_logs[0].scope_logs[0].log_records[0].event_name = "rl.sample.facts"
    job.send(request)
    [link] = [
        urlsplit(link)
        for link in Document(client.get("/samples?run=tags%2F1&step=3&sort=reward").text).links()
        if "gsm8k" in link
    ]
    chosen = {"run": ["tags/1"], "step": ["3"], "sort": ["reward"], "tagged": ["source=gsm8k"]}
    assert parse_qs(link.query) == chosen


def test_labels_say_what_is_counted(client):
    assert "Puts in flight" in client.get("/partition?id=train").text
    trace = Document(client.get(f"/trace?id={LAST}").text).text
    assert re.search(r"\d % of the trace", trace)
    assert re.search(r"Productive\d+\.\d % of process time", Document(client.get("/").text).text)
    run = client.get("/run").text
    assert "Compare opens the median steps of two ranges" in run
    assert "Steps with failures" in run
    sample = client.get(next(page for page in PAGES if page.startswith("/sample?"))).text
    assert "1 of 180 compared tokens differs by more" in sample


def test_the_next_page_of_traces_keeps_the_filters(client):
    following = next(
        link for link in Document(client.get("/traces?name=grpo").text).links() if "cursor" in link
    )
    assert parse_qs(urlsplit(following).query)["name"] == ["grpo"]
    assert client.get(following).status_code == 200


def test_a_comparison_names_the_slower_stage(client):
    text = Document(client.get(f"/compare?a={HOSTILE_TRACE}&b={LAST}").text).text
    assert re.search(r"Step 39 is \d+ ms slower than step 38 \(\+\d+ %\), mostly in train", text)


def test_static_files_are_cached_under_their_digest(client):
    match = re.search(r'href="(/static/[0-9a-f]{16}/base.css)"', client.get("/").text)
    answer = client.get(match[1])
    assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert answer.headers["content-type"].startswith("text/css")
    old = client.get("/static/0123456789abcdef/main.js")
    assert old.headers["cache-control"] == "no-cache"


def test_only_a_valid_theme_cookie_is_applied(client):
    page = client.get("/", headers={"cookie": "dataplane_theme=dark"}).text
    assert '<html lang="en" data-theme="dark">' in page
    page = client.get("/", headers={"cookie": 'dataplane_theme="><script>'}).text
    assert '<html lang="en">' in page
