"""Contrast of text and marks with their background, and of buckets with each other."""

import itertools
import re
from importlib.resources import files

import pytest

CSS = files("dataplane_admin.pages").joinpath("static/base.css").read_text()
COLOURS = {
    name: (light, dark)
    for name, light, dark in re.findall(
        r"--([a-z-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", CSS
    )
}
THEMES = pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
# Vision without one kind of cone, after Machado and others (2009), severity 1.
BLIND = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deutan": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritan": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def linear(color):
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def luminance(color):
    return sum(w * part for w, part in zip((0.2126, 0.7152, 0.0722), linear(color), strict=True))


def contrast(left, right):
    low, high = sorted((luminance(left), luminance(right)))
    return (high + 0.05) / (low + 0.05)


def lab(rgb):
    rows = (
        (0.4124564, 0.3575761, 0.1804375),
        (0.2126729, 0.7151522, 0.0721750),
        (0.0193339, 0.1191920, 0.9503041),
    )
    white = (0.95047, 1.0, 1.08883)
    f = []
    for row, reference in zip(rows, white, strict=True):
        value = sum(w * max(0, part) for w, part in zip(row, rgb, strict=True)) / reference
        f.append(value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116)
    return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])


@THEMES
@pytest.mark.parametrize("text", ["ink", "quiet", "accent", "bad", "good"])
@pytest.mark.parametrize("behind", ["paper", "band", "notice"])
def test_text_has_a_contrast_of_4_5(theme, text, behind):
    assert contrast(COLOURS[text][theme], COLOURS[behind][theme]) >= 4.5


@THEMES
@pytest.mark.parametrize("kind", ["productive", "overhead", "wasted", "accent"])
def test_text_on_marks_has_a_contrast_of_4_5(theme, kind):
    assert contrast(COLOURS[f"on-{kind}"][theme], COLOURS[kind][theme]) >= 4.5


@THEMES
@pytest.mark.parametrize("mark", ["productive", "overhead", "wasted", "idle", "accent"])
def test_marks_have_a_contrast_of_3(theme, mark):
    assert contrast(COLOURS[mark][theme], COLOURS["paper"][theme]) >= 3


@THEMES
@pytest.mark.parametrize("eyes", BLIND)
def test_buckets_are_distinguishable_for_all_color_vision(theme, eyes):
    """Check that the color difference is 20, or 10 if the shapes differ too."""
    seen = {}
    for bucket in ("productive", "overhead", "wasted", "idle"):
        rgb = linear(COLOURS[bucket][theme])
        seen[bucket] = lab(
            [sum(w * v for w, v in zip(row, rgb, strict=True)) for row in BLIND[eyes]]
        )
    for left, right in itertools.combinations(seen, 2):
        apart = sum((a - b) ** 2 for a, b in zip(seen[left], seen[right], strict=True)) ** 0.5
        # Idle is a thin line, and wasted is hatched.
        shaped = {left, right} & {"idle", "wasted"}
        assert apart >= (10 if shaped else 20), (left, right, apart)
