"""Every page without violations of axe-core's rules, in both themes and at three widths."""

import pytest
from axe_playwright_python.sync_playwright import Axe
from test_pages_render import PAGES

# Swagger UI makes the markup of /docs after it has loaded.
PATHS = [path for path in PAGES if path != "/docs"]
LOAD_MS = 60_000


def violations_of(page):
    # Without its copies of imported style sheets, which the policy of the pages refuses, and with
    # one element only for each rule that passed.
    options = {"preload": False, "resultTypes": ["violations"]}
    return [
        f"{each['id']}: {node['target']}: {node['failureSummary']}"
        for each in Axe().run(page, options=options).response["violations"]
        for node in each["nodes"]
    ]


SCREENS = pytest.mark.parametrize(
    ("width", "theme"),
    [
        pytest.param(width, theme, marks=[pytest.mark.long] * ((width, theme) != (390, "dark")))
        for width in (390, 1280, 2560)
        for theme in ("light", "dark")
    ],
)


def test_pages_in_turn_have_no_axe_violation(watched):
    """Each page in one of four combinations: each theme and width with half of the pages."""
    screens = [(width, theme) for width in (390, 1280) for theme in ("light", "dark")]
    violated = []
    for place, (width, theme) in enumerate(screens):
        watch = watched(viewport={"width": width, "height": 900}, color_scheme=theme)
        for path in PATHS[place :: len(screens)]:
            page = watch.go(path)
            violated += [f"{path} {width} {theme}: {each}" for each in violations_of(page)]
    assert not violated, "\n".join(violated)


@pytest.mark.long
@SCREENS
def test_no_page_has_an_axe_violation(watched, width, theme):
    watch = watched(viewport={"width": width, "height": 900}, color_scheme=theme)
    violated = []
    for path in PATHS:
        page = watch.go(path)
        violated += [f"{path}: {each}" for each in violations_of(page)]
    assert not violated, "\n".join(violated)


@pytest.mark.parametrize("key", ["Control+k", "?"])
def test_open_dialogs_have_no_axe_violation(watched, key):
    page = watched().go("/runs")
    page.locator("html.scripted").wait_for()
    page.keyboard.press(key)
    page.locator("dialog[open]").wait_for()
    assert violations_of(page) == []


@SCREENS
def test_the_api_page_has_no_axe_violation(watched, width, theme):
    watch = watched(viewport={"width": width, "height": 900}, color_scheme=theme)
    page = watch.go("/docs")
    block = page.locator("#operations-actions-clear_samples")
    block.locator(".opblock-summary-control").click(timeout=LOAD_MS)
    block.get_by_role("button", name="Try it out").click()
    assert violations_of(page) == []
