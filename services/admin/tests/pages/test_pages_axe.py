"""Every page without violations of axe-core's rules, in both themes and at three widths."""

import pytest
from axe_playwright_python.sync_playwright import Axe
from test_pages_render import PAGES

# Swagger UI makes the markup of /docs; its frame is that of every page.
PATHS = [path for path in PAGES if path != "/docs"]
# Axe then returns only one element for each rule that passed.
OPTIONS = {"resultTypes": ["violations"]}


@pytest.mark.parametrize(
    ("width", "theme"),
    [
        pytest.param(width, theme, marks=[pytest.mark.long] * ((width, theme) != (390, "dark")))
        for width in (390, 1280, 2560)
        for theme in ("light", "dark")
    ],
)
def test_no_page_has_an_axe_violation(watched, width, theme):
    watch = watched(viewport={"width": width, "height": 900}, color_scheme=theme)
    axe, violated = Axe(), []
    for path in PATHS:
        page = watch.go(path)
        violations = axe.run(page, options=OPTIONS).response["violations"]
        violated += [
            f"{path}: {each['id']}: {node['target']}: {node['failureSummary']}"
            for each in violations
            for node in each["nodes"]
        ]
    assert not violated, "\n".join(violated)


@pytest.mark.parametrize("key", ["Control+k", "?"])
def test_open_dialogs_have_no_axe_violation(watched, key):
    page = watched().go("/runs")
    page.locator("html.scripted").wait_for()
    page.keyboard.press(key)
    page.locator("dialog[open]").wait_for()
    assert Axe().run(page, options=OPTIONS).response["violations"] == []
