"""The page is one complete file, and received text injects no markup or scripts."""

import base64
import hashlib
import os
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from made_up_runs import DRIVER, HOSTILE, POLICIES, TraceMaker, grpo_step, run_of, trees

from observability.views import page_of, steps_of, write_page

MAX_BARS = 4_000
VOID = {"meta", "input", "br"}


class Page(HTMLParser):
    """Elements of a page, which must be closed in the order of opening."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements = []
        self.texts = {}
        self._open = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)

    def all(self, tag, class_name=None):
        return [
            attrs
            for name, attrs in self.elements
            if name == tag and (class_name is None or class_name in attrs.get("class", "").split())
        ]


def page(records, **options):
    return Page(page_of(steps_of(records), **options))


def test_every_span_is_a_bar_and_every_process_a_lane():
    result = page(grpo_step())
    assert len(result.all("g", "bar")) == 46
    lanes = [text for text in result.texts["text"] if text.startswith("grpo.")]
    assert {"grpo.driver", "grpo.policy 0", "grpo.policy 1", "grpo.rollout"} <= set(lanes)
    tips = "".join(result.texts["title"])
    assert (
        "install_weights in grpo.generation\n380 ms, starts at 500 ms\nrl.bucket = overhead" in tips
    )


def test_bars_are_within_the_drawing_and_do_not_overlap():
    # A bar is a group: its tooltip, then an SVG whose x and width are the position.
    elements = page(run_of(1)).elements
    bars = [
        elements[index + 2][1]
        for index, (tag, attrs) in enumerate(elements)
        if tag == "g" and attrs.get("class", "").startswith("bar")
    ]
    rows = {}
    for bar in bars:
        left, width = (float(bar[name].rstrip("%")) for name in ("x", "width"))
        assert 0 <= left < 100
        assert 0 < width <= 100
        rows.setdefault(bar["y"], []).append((left, left + width))
    for row in rows.values():
        row.sort()
        # No bar here is so short that it has the minimum width.
        assert all(first[1] <= second[0] + 1e-3 for first, second in pairwise(row))


def test_critical_path_is_drawn_from_end_to_end():
    result = page(grpo_step())
    segments = result.all("rect", "path")
    widths = sum(float(segment["width"].rstrip("%")) for segment in segments)
    # Each segment has a minimum width, so that it is visible.
    assert widths == pytest.approx(100, abs=1)


def test_page_contains_tables_and_figures():
    text = page_of(steps_of(grpo_step()))
    for expected in (
        "<h3>Processes</h3>",
        "<h3>Critical path</h3>",
        "<h3>Bytes by stage</h3>",
        "<h3>Process-seconds by bucket</h3>",
        "<h3>Slowest operations</h3>",
        "worth 860 ms of productive rollout",
        "staleness: 1 to 1 versions",
    ):
        assert expected in text


def test_several_steps_have_a_table_with_links():
    result = page(run_of(3))
    targets = {attrs["id"] for attrs in result.all("section", "step")}
    links = [attrs["href"] for attrs in result.all("a")]
    assert [link.lstrip("#") for link in links] == sorted(targets)


def test_an_incomplete_step_says_why():
    maker = TraceMaker()
    maker.span("refit", DRIVER, 0, 1, "f" * 16)
    result = page(maker.records)
    assert "no root: the span of the step was not received" in result.texts["li"]


def test_page_loads_no_external_resource():
    text = page_of(steps_of(run_of(2)))
    assert "://" not in text
    result = Page(text)
    tags = {tag for tag, _ in result.elements}
    assert tags.isdisjoint({"link", "img", "iframe", "object", "embed", "form", "base", "image"})
    for _, attrs in result.elements:
        assert "src" not in attrs
        assert attrs.get("href", "#").startswith("#")
    assert text.count("url(") == text.count("url(#hatch)")
    assert "@import" not in text


def test_policy_allows_only_the_style_and_script_of_the_page():
    result = page(run_of(2))
    (policy,) = [attrs["content"] for attrs in result.all("meta") if "http-equiv" in attrs]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))

    def digest(tag):
        (text,) = result.texts[tag]
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    assert rules == {
        "default-src": "'none'",
        "style-src": f"'sha256-{digest('style')}'",
        "script-src": f"'sha256-{digest('script')}'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    for _, attrs in result.elements:
        # The policy blocks inline styles and event handlers without an error.
        assert not [name for name in attrs if name == "style" or name.startswith("on")]


def test_every_color_has_a_light_and_a_dark_value():
    (style,) = page(grpo_step()).texts["style"]
    colors = dict(re.findall(r"--([\w-]+): (light-dark\(#\w+, #\w+\)|[^;]+);", style))
    assert [name for name, value in colors.items() if not value.startswith("light-dark")] == [
        "sans"
    ]
    assert set(re.findall(r"var\(--([\w-]+)\)", style)) == set(colors)


def hostile_run(hostile):
    maker = TraceMaker(run_id=hostile)
    root = maker.span("grpo.step", DRIVER, 0, 1, outcome="error", message=hostile)
    process = POLICIES[0].__class__(hostile, hostile, hostile, 1)
    attributes = {hostile: hostile, "error.type": hostile}
    maker.span(hostile, process, 0, 1, root, hostile, attributes=attributes)
    maker.span("orphan", process, 0, 1, hostile)
    return maker.records


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_names_are_escaped(hostile):
    text = page_of(steps_of(hostile_run(hostile)), title=hostile)
    result = Page(text)
    harmless = page(hostile_run("harmless"), title="harmless")
    assert [tag for tag, _ in result.elements] == [tag for tag, _ in harmless.elements]
    assert [sorted(attrs) for _, attrs in result.elements] == [
        sorted(attrs) for _, attrs in harmless.elements
    ]
    assert all(line.isprintable() for line in text.split("\n"))
    assert "49" not in result.texts["h1"][0]


@given(trees())
def test_any_tree_makes_a_valid_page(records):
    assert page(records).all("g", "bar")


def test_beyond_max_bars_the_shortest_are_omitted_with_a_note():
    maker = TraceMaker()
    root = maker.span("grpo.step", DRIVER, 0, MAX_BARS)
    for index in range(MAX_BARS + 4):
        maker.span("tiny", DRIVER, index, index + 0.5, root)
    text = page_of(steps_of(maker.records))
    assert "The 5 shortest spans are omitted." in text
    assert text.count('<g class="bar') == MAX_BARS


def test_page_is_written_atomically(tmp_path: Path):
    path = tmp_path / "page.html"
    path.write_text("before")
    write_page(steps_of(grpo_step()), path, title="Run A")
    assert path.read_text("utf-8").startswith("<!doctype html>")
    assert "<h1>Run A</h1>" in path.read_text("utf-8")
    assert os.listdir(tmp_path) == ["page.html"]
    path.unlink()
    write_page([], path)
    assert "No steps." in path.read_text("utf-8")
    (tmp_path / "other").touch()  # a new file: the page must have the same mode
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_page([], tmp_path / "folder")
    assert sorted(os.listdir(tmp_path)) == ["folder", "other", "page.html"]
