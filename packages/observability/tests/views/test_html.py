"""The page is whole in one file, and nothing that was received can act in it."""

import base64
import hashlib
import os
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from told_runs import DRIVER, HOSTILE, POLICIES, Teller, grpo_step, run_of, trees

from observability.records import Records
from observability.views import page_of, steps_of, write_page
from observability.views.page import MOST_BARS

VOID = {"meta", "input", "br"}


class Page(HTMLParser):
    """The elements of a page, and that they are closed in the order in which they were opened."""

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
    found = page(grpo_step())
    assert len(found.all("svg", "bar")) == 46
    lanes = [text for text in found.texts["text"] if text.startswith("grpo.")]
    assert {"grpo.driver", "grpo.policy 0", "grpo.policy 1", "grpo.rollout"} <= set(lanes)
    tips = "".join(found.texts["title"])
    assert (
        "install_weights in grpo.generation\n380 ms, from 500 ms on\nrl.bucket = overhead" in tips
    )


def test_bars_lie_within_the_drawing_and_not_over_each_other():
    bars = page(run_of(1)).all("svg", "bar")
    rows = {}
    for bar in bars:
        left, width = (float(bar[name].rstrip("%")) for name in ("x", "width"))
        assert 0 <= left < 100
        assert 0 < width <= 100
        rows.setdefault(bar["y"], []).append((left, left + width))
    for row in rows.values():
        row.sort()
        # Nothing here is so short that it is drawn wider than it is.
        assert all(one[1] <= two[0] + 1e-3 for one, two in pairwise(row))


def test_the_critical_path_is_outlined_from_end_to_end():
    found = page(grpo_step())
    parts = [one for one in found.all("rect", "critical") if one["x"].endswith("%")]
    widths = sum(float(one["width"].rstrip("%")) for one in parts)
    assert widths == pytest.approx(100, abs=0.01)


def test_the_figures_stand_in_tables():
    text = page_of(steps_of(grpo_step()))
    for told in (
        "<h3>Processes</h3>",
        "<h3>Critical path</h3>",
        "<h3>Bytes through the data plane</h3>",
        "<h3>Process-seconds</h3>",
        "<h3>Slowest operations</h3>",
        "worth 860 ms of productive rollout",
        "staleness: 1 to 1 versions",
    ):
        assert told in text


def test_several_steps_have_a_table_of_their_own_with_links_that_lead_to_them():
    found = page(run_of(3))
    targets = {attrs["id"] for attrs in found.all("section", "step")}
    links = [attrs["href"] for attrs in found.all("a")]
    assert [link.lstrip("#") for link in links] == sorted(targets)


def test_an_incomplete_step_says_why():
    tell = Teller()
    tell.span("refit", DRIVER, 0, 1, "f" * 16)
    found = page(tell.records)
    assert "no root: the span of the whole step has not arrived" in found.texts["li"]


def test_a_page_without_steps_says_so():
    assert "No step has arrived." in "".join(page(Records()).texts["p"])


def test_the_page_asks_nothing_of_anybody():
    text = page_of(steps_of(run_of(2)))
    assert "://" not in text
    found = Page(text)
    tags = {tag for tag, _ in found.elements}
    assert tags.isdisjoint({"link", "img", "iframe", "object", "embed", "form", "base", "image"})
    for _, attrs in found.elements:
        assert "src" not in attrs
        assert attrs.get("href", "#").startswith("#")
    assert "url(" not in text
    assert "@import" not in text


def test_the_policy_lets_in_only_the_style_and_the_script_of_the_page():
    found = page(run_of(2))
    (policy,) = [attrs["content"] for attrs in found.all("meta") if "http-equiv" in attrs]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))

    def digest(tag):
        (text,) = found.texts[tag]
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    assert rules == {
        "default-src": "'none'",
        "style-src": f"'sha256-{digest('style')}'",
        "script-src": f"'sha256-{digest('script')}'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    for _, attrs in found.elements:
        # The policy forbids them, so they would silently do nothing.
        assert not [name for name in attrs if name == "style" or name.startswith("on")]


def test_light_and_dark_are_both_there_and_every_color_has_both():
    (style,) = page(grpo_step()).texts["style"]
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    names = re.findall(r"--([\w-]+):", light)
    assert names == re.findall(r"--([\w-]+):", dark)
    assert set(re.findall(r"var\(--([\w-]+)\)", style)) == set(names)


def hostile_run(hostile):
    tell = Teller(run_id=hostile)
    root = tell.span("grpo.step", DRIVER, 0, 1, outcome="error", message=hostile)
    process = POLICIES[0].__class__(hostile, hostile, hostile, 1)
    attributes = {hostile: hostile, "error.type": hostile}
    tell.span(hostile, process, 0, 1, root, hostile, attributes=attributes)
    tell.span("orphan", process, 0, 1, hostile)
    return tell.records


@pytest.mark.parametrize("hostile", HOSTILE)
def test_names_of_others_are_text_and_nothing_else(hostile):
    text = page_of(steps_of(hostile_run(hostile)), title=hostile)
    found = Page(text)
    tame = page(hostile_run("tame"), title="tame")
    assert [tag for tag, _ in found.elements] == [tag for tag, _ in tame.elements]
    assert [sorted(attrs) for _, attrs in found.elements] == [
        sorted(attrs) for _, attrs in tame.elements
    ]
    assert all(line.isprintable() for line in text.split("\n"))
    assert "49" not in found.texts["h1"][0]


@given(trees())
def test_any_tree_is_a_sound_page(records):
    assert page(records).all("svg", "bar")


def test_beyond_many_bars_the_shortest_are_left_out_and_it_says_so():
    tell = Teller()
    root = tell.span("grpo.step", DRIVER, 0, MOST_BARS)
    for place in range(MOST_BARS + 4):
        tell.span("tiny", DRIVER, place, place + 0.5, root)
    text = page_of(steps_of(tell.records))
    assert "The 5 shortest spans are not drawn." in text
    assert text.count('<svg class="bar') == MOST_BARS


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "page.html"
    path.write_text("before")
    write_page(steps_of(grpo_step()), path, title="Run A")
    assert path.read_text("utf-8").startswith("<!doctype html>")
    assert "<h1>Run A</h1>" in path.read_text("utf-8")
    assert os.listdir(tmp_path) == ["page.html"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_page([], tmp_path / "folder")
    assert sorted(os.listdir(tmp_path)) == ["folder", "page.html"]


def test_a_page_has_the_rights_of_any_new_file(tmp_path: Path):
    write_page([], tmp_path / "page.html")
    (tmp_path / "other").touch()
    modes = {(tmp_path / name).stat().st_mode for name in ("page.html", "other")}
    assert len(modes) == 1
