"""Every page renders, says what to do where there is nothing, and lets no text of others act."""

import re
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
    f"/sample?id={quote(REVERSED)}&partition=train",
    "/run",
    f"/run?run={quote(HOSTILE, safe='')}",
    "/traces",
    f"/traces?run={quote(HOSTILE, safe='')}",
    f"/trace?id={LAST}",
    f"/trace?id={HOSTILE_TRACE}",
    f"/trace?id={TORN}",
    f"/compare?a={HOSTILE_TRACE}&b={LAST}",
    "/compare",
    "/staleness",
    "/audit",
    "/login",
    f"/actions/clear?partition={quote(HOSTILE_PARTITION, safe='')}",
    f"/actions/reset-consumption?partition=train&task=train&ids={quote(HOSTILE, safe='')}",
    "/actions/end-claim?partition=train&claim=train-01bc",
]


class Document(HTMLParser):
    """Elements of a page, and the text between them."""

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
        return [held["href"] for tag, held in self.elements if tag == "a"]


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_whole_and_has_neither_inline_script_nor_style(client, path):
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
    assert len(ids) == len(set(ids)), "an id stands there twice"


@pytest.mark.parametrize("path", PAGES)
def test_links_stay_here_or_go_to_what_was_configured(client, path):
    for link in Document(client.get(path).text).links():
        parts = urlsplit(link)
        assert (parts.scheme, parts.netloc) in {("", ""), ("http", "jaeger.example:16686")}
        assert parts.scheme or link.startswith(("/", "#"))


@pytest.mark.parametrize("path", PAGES)
def test_marks_that_turn_the_reading_direction_are_shown_as_escapes(client, path):
    shown = re.sub(r' value="[^"]*"', "", client.get(path).text)  # forms send back what they got
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
    assert named <= {None}, "labels hold what they name"


def test_an_id_survives_the_way_through_a_link(client):
    links = Document(client.get("/").text).links()
    ids = [
        parse_qs(urlsplit(link).query)["id"][0] for link in links if link.startswith("/partition")
    ]
    assert HOSTILE_PARTITION in ids
    assert client.get(f"/partition?id={quote(HOSTILE_PARTITION, safe='')}").status_code == 200


def test_the_overview_says_why_it_is_stuck_with_the_ids_that_block(client):
    text = Document(client.get("/").text).text
    assert "2 things wait, the longest for 10 min 40 s" in text
    assert "3 of 480 lack advantages" in text
    assert "s39_p0_g0" in text


def test_the_overview_shows_waits_of_processes_that_are_gone_apart_and_below(client):
    text = Document(client.get("/").text).text
    above, title, below = text.partition("Not heard of since")
    assert title
    assert "nothing has been heard of it for 1 h" in below
    assert "nothing has been heard of it" not in above
    assert "3 of 480 lack advantages" in above


def test_the_headline_is_not_stuck_by_processes_that_are_gone(site, client, monkeypatch):
    gone = [one for one in site.answers.why() if one.silent_s is not None]
    monkeypatch.setattr(site.answers, "why", lambda *, run=None: gone)
    text = Document(client.get("/").text).text
    assert "Not heard of since" in text
    assert "Why it is stuck" not in text
    assert "things wait" not in text


@pytest.mark.parametrize(
    ("kind", "seconds", "stuck"),
    [("wait", 59, False), ("wait", 61, True), ("claim", 59, False), ("backlog", 61, True)],
)
def test_what_waits_no_longer_than_steps_may_take_is_not_stuck(
    site, client, monkeypatch, kind, seconds, stuck
):
    one = site.answers.why()[0].model_copy(update={"kind": kind, "seconds": float(seconds)})
    monkeypatch.setattr(site.answers, "why", lambda *, run=None: [one])
    text = Document(client.get("/").text).text
    assert ("Why it is stuck" in text, "What waits" in text) == (stuck, not stuck)
    assert (f"Moving: step {STEPS - 1} took" in text) == (not stuck)
    assert "3 of 480 lack advantages" in text


def test_the_overview_of_one_run_shows_what_that_run_waits_for(client):
    text = Document(client.get("/?run=yesterday").text).text
    assert "Not heard of since" in text
    assert "3 of 480 lack advantages" not in text
    text = Document(client.get(f"/?run={quote(RUN, safe='')}").text).text
    assert "3 of 480 lack advantages" in text
    assert "Not heard of since" not in text


def test_a_run_says_what_became_of_its_steps_and_compares_then_with_now(client):
    page = Document(client.get("/run").text)
    text = " ".join(page.text.split())
    assert re.search(
        r"Steps take as long as they did: .* in steps \d+ to 39, .* in steps 0 to", text
    )
    compared = [parse_qs(urlsplit(link).query) for link in page.links() if "/compare" in link]
    assert len(compared) == 9
    assert len({query["a"][0] for query in compared}) == 1
    told = {link for link in page.links() if link.startswith("/trace?")}
    assert f"/trace?id={LAST}" in told, "the slowest step of all"


def test_staleness_of_a_step_says_of_how_many_samples_it_is_not_known(client):
    text = Document(client.get(f"/trace?id={trace_id_of(0)}").text).text
    assert "0.50 versions, at most 2; not known of 4 samples" in " ".join(text.split())
    text = Document(client.get(f"/trace?id={trace_id_of(STEPS - 1)}").text).text
    assert "not known of 8 samples" in " ".join(text.split())


def test_staleness_says_which_steps_were_not_counted(client):
    text = Document(client.get("/staleness").text).text
    assert "The 3 oldest steps of these are not counted" in " ".join(text.split())


def test_the_overview_of_a_fresh_service_says_how_to_send_telemetry_here(bare_client):
    text = Document(bare_client.get("/").text).text
    assert "OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost" in text
    assert "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf" in text
    assert "--ray-address" in text


@pytest.mark.parametrize("path", ["/run", "/traces", "/staleness", "/audit", "/samples"])
def test_lists_without_anything_say_so(bare_client, path):
    answer = bare_client.get(path)
    assert answer.status_code == 200
    assert 'class="empty"' in answer.text


def test_a_data_plane_that_is_away_leaves_the_rest_of_the_page(site, client):
    site.answers.unavailable = True
    try:
        text = Document(client.get("/partition?id=train").text).text
    finally:
        site.answers.unavailable = False
    assert "The data plane cannot be read." in text
    assert "The samples could not be listed: the data plane did not answer within 5 s" in text
    assert "jagged int64" in text


@pytest.mark.parametrize(
    ("path", "status", "told"),
    [
        ("/sample?id=nobody", 404, "No event names the sample"),
        ("/partition?id=nothing", 404, "Partition 'nothing' is not there"),
        ("/partition", 422, "The address lacks 'id'"),
        ("/trace?id=..%2F..%2Fetc%2Fpasswd", 422, "expected 32 hexadecimal digits"),
        ("/traces?step=many", 422, "expected a whole number"),
        ("/traces?min_s=nan", 422, "expected a number from 0 on"),
        ("/samples?q=a&cursor=wrong", 422, "cursor"),
        ("/static/0/nothing.css", 404, "there is no file"),
        ("/static/0/..%2Frender.py", 404, ""),
    ],
)
def test_what_cannot_be_answered_is_a_page_that_says_why(client, path, status, told):
    answer = client.get(path)
    assert answer.status_code == status
    assert told.lower() in answer.text.replace("&#39;", "'").lower()


def test_the_heat_map_of_100000_samples_is_small_and_names_every_window(client):
    answer = client.get("/partition?id=replay-100k")
    page = Document(answer.text)
    windows = [held for tag, held in page.elements if tag == "a" and held.get("class") == "window"]
    assert len(windows) == 120
    assert windows[0]["aria-label"].startswith("Samples 0 to 833: written: ")
    assert windows[-1]["href"].endswith("start=99246&count=754#samples")
    assert len(answer.content) < 200_000


def test_a_chosen_window_lists_its_samples_and_leads_on(client):
    page = Document(client.get("/partition?id=replay-100k&start=834&count=834").text)
    assert "Samples 834 to 883" in page.text
    assert "/partition?id=replay-100k&start=884&count=50" in page.links()


def test_an_incomplete_trace_says_so_and_is_drawn_nevertheless(client):
    page = Document(client.get(f"/trace?id={TORN}").text)
    assert "Telemetry incomplete" in page.text
    assert "no root" in page.text
    assert "7 spans were refused" in page.text
    assert [held for tag, held in page.elements if tag == "a" and held.get("class") == "bar"]


def test_a_trace_shows_a_bar_for_each_span_and_the_critical_path(site, client):
    found = site.answers.trace(LAST)
    page = Document(client.get(f"/trace?id={LAST}").text)
    kinds = [held.get("class") for _, held in page.elements]
    assert kinds.count("bar") == len(found.rows)
    assert kinds.count("path") == len(found.critical_path)
    assert "/compare?a=" + HOSTILE_TRACE + "&b=" + LAST in page.links()
    assert f"http://jaeger.example:16686/trace/{LAST}" in page.links()
    assert f"/trace?id={trace_id_of(0)}" in page.links()


def test_a_span_in_the_address_is_shown_in_detail_and_links_both_ways(site, client):
    got = next(row for row in site.answers.trace(LAST).rows if row.name == "get train")
    page = Document(client.get(f"/trace?id={LAST}&span={got.span_id}").text)
    assert "db.operation.batch.size" in page.text
    assert f"/trace?id={LAST}&span={got.links[0].span_id}" in page.links()
    assert f"/trace?id={LAST}&span={got.parent_id}" in page.links()
    current = [held for _, held in page.elements if held.get("aria-current") == "true"]
    assert got.span_id in [held.get("data-key") for held in current]


def test_filters_of_the_address_stand_in_the_form(client):
    page = Document(client.get("/traces?step=12&min_s=0.5&error=true&name=grpo").text)
    values = {held["name"]: held for tag, held in page.elements if tag == "input"}
    assert values["step"]["value"] == "12"
    assert values["min_s"]["value"] == "0.5"
    assert values["name"]["value"] == "grpo"
    assert "checked" in values["error"]


def test_the_next_page_of_traces_keeps_the_filters(client):
    following = next(
        link for link in Document(client.get("/traces?name=grpo").text).links() if "cursor" in link
    )
    assert parse_qs(urlsplit(following).query)["name"] == ["grpo"]
    assert client.get(following).status_code == 200


def test_a_comparison_says_what_got_slower(client):
    text = Document(client.get(f"/compare?a={HOSTILE_TRACE}&b={LAST}").text).text
    assert re.search(r"Step 39 took \d+ ms longer than step 38 \(\+\d+ %\), mostly in train", text)


def test_scripts_and_styles_may_be_kept_for_good_under_their_digest(client):
    found = re.search(r'href="(/static/[0-9a-f]{16}/base.css)"', client.get("/").text)
    answer = client.get(found[1])
    assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert answer.headers["content-type"].startswith("text/css")
    old = client.get("/static/0123456789abcdef/main.js")
    assert old.headers["cache-control"] == "no-cache"


def test_the_theme_of_the_cookie_stands_in_the_page_and_nothing_else_does(client):
    page = client.get("/", headers={"cookie": "dataplane_theme=dark"}).text
    assert '<html lang="en" data-theme="dark">' in page
    page = client.get("/", headers={"cookie": 'dataplane_theme="><script>'}).text
    assert '<html lang="en">' in page
