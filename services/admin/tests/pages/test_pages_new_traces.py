"""Pages of traces that arrive while they are shown, and of traces of any duration."""

import pytest


def test_a_new_trace_keeps_the_choice_of_traces_to_compare(watched, job, otlp):
    page = watched().go("/traces")
    page.wait_for_selector('#live[data-state="live"]')
    chosen = page.locator('input[name="a"]').nth(4).get_attribute("value")
    page.locator('input[name="a"]').nth(4).check()
    newest = page.locator('input[name="b"]:checked').get_attribute("value")
    trace_id = b"a trace of later"
    job.send(otlp.trace(trace_id, run="later", step=None, names=["later"]))
    page.get_by_role("button", name="Show 1 new").click()
    page.locator(f'input[name="b"][value="{trace_id.hex()}"]').wait_for()
    assert page.locator('input[name="a"]:checked').get_attribute("value") == chosen
    assert page.locator('input[name="b"]:checked').get_attribute("value") == newest


@pytest.mark.parametrize("seconds", [0.4, 11.0, 61.0, 620.0, 8_000.0])
def test_the_ruler_is_the_same_with_and_without_scripts(watched, job, otlp, seconds):
    trace_id = f"ruler of {seconds:<8}"[:16].encode()
    job.send(otlp.trace(trace_id, run="rulers", step=None, seconds=seconds))
    address = f"/trace?id={trace_id.hex()}"
    labels = [
        watched(java_script_enabled=scripts)
        .go(address)
        .locator("svg.time .ticks text")
        .all_text_contents()
        for scripts in (True, False)
    ]
    assert labels[0] == labels[1]
    assert len(labels[0]) >= 4
