"""The admin service beside a real traced run, in a real browser."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from playwright.sync_api import Browser, Page, expect, sync_playwright

SCRIPTS = Path(sysconfig.get_path("scripts"))
PATIENCE_S = 90.0
CHROMIUM = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class Service:
    """A real ``dataplane-admin serve``."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, **query: object) -> Any:
        """The answer of a route of the API."""
        asked = urllib.parse.urlencode(query)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{asked}", timeout=30) as answer:
            return json.load(answer)

    def until(self, found: Callable[[], Any]) -> Any:
        """What ``found`` returns once it is true; the run goes on meanwhile."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if answer := found():
                return answer
            time.sleep(0.2)
        raise AssertionError(f"not so within {PATIENCE_S:g} s: {self.ask('status')}")

    def whole_steps(self, at_least: int) -> list[dict[str, Any]]:
        """Steps whose root has arrived, the newest first; empty as long as they are fewer."""
        traces = self.ask("traces", limit=100)["traces"]
        whole = [one for one in traces if one["has_root"] and one["name"] == "grpo.step"]
        return whole if len(whole) >= at_least else []


@pytest.fixture(scope="module")
def service(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Looks into the cluster, in which a run goes on that reports to it."""
    folder = tmp_path_factory.mktemp("admin")
    address = ray.get_runtime_context().gcs_address
    serve = [str(SCRIPTS / "dataplane-admin"), "serve", "--port", "0", "--db", "admin.sqlite"]
    with (folder / "log").open("wb") as log:
        admin = subprocess.Popen(
            [*serve, "--ray-address", address, "--poll", "0.2"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        assert admin.stdout is not None
        url = admin.stdout.readline().decode().strip()
        changes = (
            f"cluster.address={address}",
            "grpo.num_steps=10000",
            "grpo.num_prompts_per_step=8",
            "policy.global_batch_size=64",
            "validation.every_steps=0",
            "checkpointing.every_steps=0",
            "tracing.enabled=true",
            f"tracing.endpoint={url}",
        )
        train = [str(SCRIPTS / "grpo-trainer"), "train"]
        run = subprocess.Popen(
            [*train, *(word for change in changes for word in ("--set", change))],
            cwd=folder,
            stdout=log,
            stderr=log,
            env={
                **os.environ,
                "OTEL_BSP_SCHEDULE_DELAY": "200",
                "OTEL_BLRP_SCHEDULE_DELAY": "200",
            },
        )
        try:
            assert url, (folder / "log").read_text()
            yield Service(url)
        finally:
            for process in (run, admin):
                process.terminate()
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium")
        assert chromium, "these tests drive Debian's package chromium, which is not installed"
        started = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM)
        yield started
        started.close()


@pytest.fixture
def page(service: Service, browser: Browser) -> Iterator[Page]:
    """A tab; the test fails by whatever the page complains of in the console."""
    tab = browser.new_page(viewport={"width": 1280, "height": 900}, base_url=service.url)
    tab.set_default_timeout(30_000)
    complaints: list[str] = []
    tab.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    yield tab
    tab.close()
    assert complaints == []


def test_the_overview_follows_the_run_without_a_reload(service: Service, page: Page) -> None:
    service.until(lambda: service.whole_steps(3))
    page.goto("/")
    page.evaluate("window.kept = true")
    newest = service.whole_steps(1)[0]["step"]
    links = page.locator("#steps a")
    expect(links.filter(has_text=str(newest + 2)).first).to_be_visible()
    assert page.evaluate("window.kept"), "the page was loaded anew"


def test_a_step_is_shown_across_all_its_processes(service: Service, page: Page) -> None:
    everybody = {
        "grpo.driver",
        "grpo.rollout",
        "grpo.generation",
        "grpo.environment",
        "grpo.policy 0",
        "grpo.policy 1",
    }

    def complete() -> Any:
        """Its processes export when it suits them."""
        for step in service.whole_steps(1)[:5]:
            trace = service.ask("trace", id=step["trace_id"])
            present = {one["process"] for one in trace["process_times"]}
            if present == everybody and not trace["incomplete"]:
                return trace
        return None

    trace = service.until(complete)
    page.goto(f"/trace?id={trace['trace_id']}")
    expect(page.get_by_role("heading", level=1)).to_contain_text(f"Step {trace['step']}")
    for process in everybody:
        expect(page.locator("#chart").get_by_text(process).first).to_be_visible()


def test_a_sample_is_found_from_its_rollout_to_its_clear(service: Service, page: Page) -> None:
    def a_life() -> Any:
        for hit in service.ask("samples", q="", limit=100)["samples"]:
            life = service.ask("sample", id=hit["sample_id"])
            if {"put", "trained", "cleared"} <= {hop["name"] for hop in life["hops"]}:
                return life
        return None

    life = service.until(a_life)
    names = [hop["name"] for hop in life["hops"]]
    assert names[0] == "put"
    assert names[-1] == "cleared"
    processes = {hop["process"] for hop in life["hops"]}
    assert {"grpo.rollout", "grpo.driver"} <= processes
    page.goto(f"/samples?q={urllib.parse.quote(life['sample_id'])}")
    page.locator("main").get_by_role("link", name=life["sample_id"]).first.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text(life["sample_id"])
    expect(page.locator("#life").get_by_text("trained").first).to_be_visible()


def test_the_live_partition_is_shown_by_field_task_and_sample(service: Service, page: Page) -> None:
    def partitions() -> Any:
        return [one for one in service.ask("partitions")["partitions"] if one["present"]]

    [partition] = service.until(partitions)
    assert partition["id"] == "train"
    assert {task["name"] for task in partition["tasks"]} == {"prev_lp", "ref_lp", "train"}
    page.goto("/partition?id=train")
    expect(page.get_by_role("heading", level=1)).to_have_text("train")
    expect(page.locator("#heat")).to_contain_text("input_ids")


@pytest.mark.parametrize("path", ["/traces", "/staleness", "/audit", "/samples?q="])
def test_every_other_page_is_quiet(service: Service, page: Page, path: str) -> None:
    service.until(lambda: service.whole_steps(1))
    page.goto(path)
    expect(page.get_by_role("heading", level=1)).to_be_visible()


def test_what_training_consumed_is_fresh(service: Service) -> None:
    [step, *_] = service.until(lambda: service.whole_steps(3))
    told = service.ask("staleness", run=step["run_id"])
    assert set(told["counts"]) == {"0"}


def test_two_steps_are_compared(service: Service, page: Page) -> None:
    [second, first, *_] = service.until(lambda: service.whole_steps(2))
    page.goto(f"/compare?a={first['trace_id']}&b={second['trace_id']}")
    expect(page.locator("main")).to_contain_text("train")
