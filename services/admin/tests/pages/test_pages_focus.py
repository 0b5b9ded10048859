"""The focus stays during live updates, also if it moves while one is fetched."""

import re
from urllib.parse import urlsplit

from playwright.sync_api import expect
from test_pages_growth import live


def change_updates(page, change, *, before=lambda: None):
    """Change the HTML of each live update; call ``before`` while the first one is fetched."""
    path = urlsplit(page.url).path
    calls = [before]

    def update(route):
        if route.request.resource_type != "fetch":
            route.continue_()
            return
        for call in calls:
            call()
        calls.clear()
        answer = route.fetch()
        route.fulfill(response=answer, body=change(answer.text()))

    page.route(lambda url: urlsplit(url).path == path, update)


def wait_for_updates(page, count):
    """Wait until as many live updates were shown as the page had swaps, and ``count``."""
    shown = page.evaluate("swaps")
    page.wait_for_function("(count) => swaps >= count", arg=shown + count)


def row_of_focus(page):
    return page.evaluate("document.activeElement.closest('tr')?.dataset.key")


def test_rows_rest_if_the_focus_moves_during_an_update(watched, served):
    page = watched().go("/")
    live(page)
    head = page.locator("#steps thead")
    change_updates(
        page,
        lambda text: text.replace("Processes</th>", "Changed</th>"),
        before=page.locator("#steps tbody a").nth(1).focus,
    )
    served.change()
    wait_for_updates(page, 1)
    expect(head).to_contain_text("Processes")
    page.evaluate("document.activeElement.blur()")
    expect(head).to_contain_text("Changed")


def test_next_row_follows_a_row_that_an_update_removed(watched, served):
    page = watched().go("/partition?id=train")
    live(page)
    rows = page.locator("#samples tbody tr")
    keys = rows.evaluate_all("(all) => all.map((row) => row.dataset.key)")
    for _ in range(3):
        page.keyboard.press("j")
    assert row_of_focus(page) == keys[2]
    row = re.compile(rf'<tr data-key="{re.escape(keys[2])}">.*?</tr>', re.DOTALL)
    change_updates(page, lambda text: row.sub("", text))
    served.change()
    expect(rows).to_have_count(len(keys) - 1)
    page.keyboard.press("j")
    assert row_of_focus(page) == keys[3]
    page.keyboard.press("k")
    assert row_of_focus(page) == keys[1]


def test_palette_keeps_the_choice_when_runs_arrive(watched):
    page = watched().go("/alerts")
    held = []
    page.route("**/api/v1/runs*", lambda route: held.append(route))
    with page.expect_request("**/api/v1/runs*"):
        page.keyboard.press("Control+k")
    page.locator("#palette input").fill("ma")
    items = page.locator("#palette li")
    page.keyboard.press("ArrowUp")  # the last one
    chosen = page.locator("#palette [aria-selected=true]")
    expect(chosen).to_have_text(re.compile("Ids that begin with ma"))
    before = items.count()
    for route in held:
        route.continue_()
    expect(items.filter(has_text="grpo-math")).to_have_count(1)
    assert items.count() > before
    expect(chosen).to_have_text(re.compile("Ids that begin with ma"))


def test_pages_are_live_without_web_locks(watched, served):
    watch = watched()
    watch.context.add_init_script("delete Navigator.prototype.locks")
    page = watch.go("/partition?id=train")
    assert page.evaluate("navigator.locks === undefined")
    live(page)
    cell = page.locator('#tables tr[data-key="logprob"] td').nth(4)  # acknowledged
    before = cell.inner_text()
    served.change()
    expect(cell).not_to_have_text(before)
