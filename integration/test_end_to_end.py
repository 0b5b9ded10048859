"""Everything together, on real parts: a traced run on Ray, TransferQueue and NIXL reports to the
admin service by OTLP, and what that says over HTTP and in a browser is what the trainer knows.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import time
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from integration.conftest import configured
from playwright.sync_api import Browser, Page, expect, sync_playwright

from dataplane_core import KVBatchMeta
from grpo_trainer import RunDisplay, train

ADMIN = Path(sysconfig.get_path("scripts")) / "dataplane-admin"
PATIENCE_S = 60.0
STEPS, PROMPTS, GROUP, RANKS = 3, 8, 8, 2
SAMPLES = PROMPTS * GROUP
LOOKED_AT = 2
"""The step during which the live data plane is looked at."""
TASKS = {"prev_lp", "ref_lp", "train"}


class Admin:
    """What the service answers."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, **query: object) -> Any:
        """One answer of the API."""
        asked = urllib.parse.urlencode(query)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{asked}", timeout=30) as answer:
            return json.load(answer)

    def until(self, found: Callable[[], Any]) -> Any:
        """What ``found`` returns once it is true; the service polls and takes in meanwhile."""
        deadline = time.monotonic() + PATIENCE_S
        while not (answer := found()):
            assert time.monotonic() < deadline, self.ask("status")
            time.sleep(0.1)
        return answer


class Known(RunDisplay):
    """What the trainer's driver knows of its run, and what the service shows of it meanwhile.

    Args:
        admin: the service.
        overview: a tab with its first page, opened before the run.
        other: another tab.

    Attributes:
        history: the metrics of each step.
        trained: step, rank and the samples that it was told to train on.
        live: the partition as the service showed it at the end of a step.
    """

    def __init__(self, admin: Admin, overview: Page, other: Page) -> None:
        self.admin = admin
        self.overview, self.other = overview, other
        self.history: list[dict[str, Any]] = []
        self.trained: dict[int, dict[int, list[str]]] = defaultdict(dict)
        self.live: dict[str, Any] = {}
        self._phase = ""

    def phase(self, name: str) -> None:
        self._phase = name
        if name == "clear" and len(self.history) + 1 == LOOKED_AT:
            self.live = self.admin.until(self._all_written)
            self.other.goto("/partition?id=train")
            expect(self.other.get_by_role("heading", level=1)).to_have_text("train")
            expect(self.other.locator("#heat")).to_contain_text("input_ids")
            first = self.overview.locator("#steps a").filter(has_text="0").first
            expect(first).to_be_visible(timeout=30_000)

    def finished_step(self, record: dict[str, Any]) -> None:
        self.history.append(record)

    def observe(self, name: str, direction: str, what: Any) -> None:
        """See `grpo_trainer.actor_calls.Observer`."""
        if self._phase == "train" and direction == "sent" and name.startswith("policy worker"):
            (meta,), _ = what
            assert isinstance(meta, KVBatchMeta)
            self.trained[len(self.history) + 1][int(name.split()[-1])] = list(meta.sample_ids)

    def _all_written(self) -> Any:
        """A poll that began before the step's last write does not have it yet."""
        for partition in self.admin.ask("partitions")["partitions"]:
            written = {field["name"]: field["written"] for field in partition["fields"]}
            if partition["id"] == "train" and set(written.values()) == {SAMPLES}:
                return partition
        return None


@pytest.fixture(scope="module")
def admin(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Admin]:
    """A real ``dataplane-admin serve`` that looks into the cluster."""
    folder = tmp_path_factory.mktemp("admin")
    address = ray.get_runtime_context().gcs_address
    serve = [str(ADMIN), "serve", "--port", "0", "--ray-address", address, "--poll", "0.1"]
    with (folder / "log").open("wb") as log:
        service = subprocess.Popen(serve, cwd=folder, stdout=subprocess.PIPE, stderr=log)
        assert service.stdout is not None
        try:
            url = service.stdout.readline().decode().strip()
            assert url, (folder / "log").read_text()
            yield Admin(url)
            service.terminate()
            assert service.wait(30) == 0, (folder / "log").read_text()
        finally:
            service.kill()
            service.wait()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    assert chromium, "these tests drive Debian's package chromium, which is not installed"
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        started = playwright.chromium.launch(executable_path=chromium, args=arguments)
        yield started
        started.close()


@pytest.fixture(scope="module")
def known(admin: Admin, browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Known:
    """A run that has ended, so that every process has sent what it had."""
    overview, other = (browser.new_page(base_url=admin.url) for _ in range(2))
    overview.goto("/")
    overview.evaluate("window.kept = true")
    told = Known(admin, overview, other)
    config = configured(
        tmp_path_factory.mktemp("run"),
        {
            "run.name": "whole",
            "grpo.num_steps": STEPS,
            "grpo.num_prompts_per_step": PROMPTS,
            "grpo.num_generations_per_prompt": GROUP,
            "policy.data_parallel": RANKS,
            "policy.global_batch_size": 32,
            "policy.micro_batch_size": 16,
            "refit.transport": "nixl",
            "tracing.enabled": True,
            "tracing.endpoint": admin.url,
        },
    )
    train(config, display=told, observer=told.observe)
    return told


@pytest.fixture
def page(admin: Admin, browser: Browser) -> Iterator[Page]:
    """A tab; the test fails by whatever the page complains of in the console."""
    tab = browser.new_page(viewport={"width": 1280, "height": 900}, base_url=admin.url)
    complaints: list[str] = []
    tab.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    yield tab
    tab.close()
    assert complaints == []


@pytest.fixture(scope="module")
def traces(admin: Admin, known: Known) -> dict[int, dict[str, Any]]:
    """The trace of each step, numbered as the trainer's metrics do; spans begin with 0."""

    def all_whole() -> Any:
        found = [
            each for each in admin.ask("traces", limit=100)["traces"] if each["name"] == "grpo.step"
        ]
        whole = [each for each in found if each["has_root"]]
        return found if len(whole) == STEPS else None

    return {
        each["step"] + 1: admin.ask("trace", id=each["trace_id"]) for each in admin.until(all_whole)
    }


def test_the_run_trained_on_what_it_asked_for(known: Known) -> None:
    assert [record["step"] for record in known.history] == [*range(1, STEPS + 1)]
    for shards in known.trained.values():
        assert sorted(shards) == [*range(RANKS)]
        assert len({one for ids in shards.values() for one in ids}) == SAMPLES


def test_there_is_one_whole_trace_a_step(known: Known, traces: dict[int, dict[str, Any]]) -> None:
    assert sorted(traces) == sorted(known.trained)
    assert len({trace["run_id"] for trace in traces.values()}) == 1
    everybody = {"grpo.driver", "grpo.rollout", "grpo.generation", "grpo.environment"}
    everybody |= {f"grpo.policy {rank}" for rank in range(RANKS)}
    for step, trace in traces.items():
        assert trace["incomplete"] == [], f"step {step}"
        assert trace["rejected"] == trace["errors"] == 0
        assert {each["process"] for each in trace["process_times"]} == everybody
        assert trace["seconds"] > sum(known.history[step - 1]["seconds"].values())


def test_new_weights_came_over_nixl_and_the_bytes_are_those_of_the_model(
    traces: dict[int, dict[str, Any]],
) -> None:
    moved = set()
    for trace in traces.values():
        [transfer] = [row for row in trace["rows"] if row["name"] == "refit.transfer"]
        assert transfer["attributes"]["refit.transport"] == "nixl"
        assert transfer["attributes"]["refit.sources"] == RANKS
        moved.add(transfer["attributes"]["refit.bytes"])
    assert len(moved) == 1
    assert moved.pop() > 100_000


def test_the_live_partition_was_what_the_step_had_put(known: Known) -> None:
    live = known.live
    assert live["present"] == live["put"] == live["declared"] == SAMPLES
    assert (live["outstanding"], live["reserved"], live["cleared"]) == (0, 0, 0)
    # A synchronous step hands its samples out itself: nobody claims them.
    assert {task["name"] for task in live["tasks"]} == TASKS
    for task in live["tasks"]:
        assert (task["unclaimed"], task["leased"], task["settled"]) == (SAMPLES, 0, 0)
    fields = {field["name"] for field in live["fields"]}
    assert {"input_ids", "generation_logprobs", "prev_logprobs", "advantages"} <= fields


def test_the_life_of_every_sample_is_what_the_driver_had_done_with_it(
    admin: Admin, known: Known, traces: dict[int, dict[str, Any]]
) -> None:
    for step, shards in known.trained.items():
        for rank, ids in shards.items():
            for sample_id in ids[:: SAMPLES // 8]:
                life = admin.ask("sample", id=sample_id)
                hops = [hop for hop in life["hops"] if hop["step"] == step - 1]
                names = [hop["name"] for hop in hops]
                assert names[0] == "put", names
                assert names[-1] == "cleared", names
                assert hops[0]["process"] == "grpo.rollout"
                [trained] = [hop for hop in hops if hop["name"] == "trained"]
                assert trained["process"] == f"grpo.policy {rank}"
                assert trained["task"] == "train"
                assert trained["trace_id"] == traces[step]["trace_id"]
                # Generated with the weights of the step before, and trained on at once.
                assert hops[0]["weight_version"] == step - 1
                assert life["live"] is None  # it was cleared


def test_everything_that_was_trained_on_was_fresh(
    admin: Admin, known: Known, traces: dict[int, dict[str, Any]]
) -> None:
    told = admin.ask("staleness", run=traces[1]["run_id"])
    assert set(told["counts"]) == {"0"}
    assert sum(told["counts"].values()) == STEPS * SAMPLES


def test_nothing_is_waited_for_when_all_is_done(admin: Admin, known: Known) -> None:
    assert admin.until(lambda: admin.ask("why") == [])


def test_the_overview_followed_the_run_without_a_reload(known: Known) -> None:
    newest = known.overview.locator("#steps a").filter(has_text=str(STEPS - 1)).first
    expect(newest).to_be_visible(timeout=30_000)
    assert known.overview.evaluate("window.kept"), "the page was loaded anew"


def test_a_page_shows_the_step_across_its_processes(
    traces: dict[int, dict[str, Any]], page: Page
) -> None:
    page.goto(f"/trace?id={traces[STEPS]['trace_id']}")
    expect(page.get_by_role("heading", level=1)).to_contain_text(f"Step {STEPS - 1}")
    for each in traces[STEPS]["process_times"]:
        expect(page.locator("#chart").get_by_text(each["process"]).first).to_be_visible()


def test_a_sample_is_found_and_its_life_is_shown(known: Known, page: Page) -> None:
    sample_id = known.trained[STEPS][0][0]
    page.goto(f"/samples?q={urllib.parse.quote(sample_id)}")
    page.locator("main").get_by_role("link", name=sample_id).first.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text(sample_id)
    expect(page.locator("#life").get_by_text("trained").first).to_be_visible()


def test_two_steps_are_compared(traces: dict[int, dict[str, Any]], page: Page) -> None:
    page.goto(f"/compare?a={traces[1]['trace_id']}&b={traces[2]['trace_id']}")
    expect(page.locator("main")).to_contain_text("train")


@pytest.mark.parametrize("path", ["/", "/traces", "/staleness", "/audit", "/samples?q="])
def test_every_other_page_is_quiet(known: Known, page: Page, path: str) -> None:
    page.goto(path)
    expect(page.get_by_role("heading", level=1)).to_be_visible()


def test_a_terminal_says_the_same_of_a_sample(admin: Admin, known: Known) -> None:
    sample_id = known.trained[1][0][0]
    done = subprocess.run(
        [str(ADMIN), "sample", sample_id, "--url", admin.url, "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert json.loads(done.stdout)["hops"] == admin.ask("sample", id=sample_id)["hops"]
