"""A traced run on Ray, TransferQueue and NIXL reports to the admin service by OTLP.

The service's answers and pages must match what the trainer's driver recorded.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.parse
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from integration.admin_service import ADMIN, Admin, quiet_tab
from integration.conftest import configured
from integration.watching import WatchedRun
from playwright.sync_api import Browser, Page, expect

from dataplane_core import KVBatchMeta
from grpo_trainer import RunDisplay, train

STEPS, PROMPTS, GROUP, RANKS = 3, 8, 8, 2
SAMPLES = PROMPTS * GROUP
TEXTS = 2
INSPECTED = 2
"""The step during which the live data plane is inspected."""
TASKS = {"prev_lp", "ref_lp", "train"}
CURVES = {
    "rl.reward.mean",
    "rl.reward.std",
    "rl.reward.component",
    "rl.loss",
    "rl.kl",
    "rl.entropy",
    "rl.clip_fraction",
    "rl.grad_norm",
    "rl.learning_rate",
    "rl.response.length",
    "rl.response.truncated",
    "rl.logprob_gap.mean",
    "rl.logprob_gap.p99",
    "rl.generation.tokens_per_s",
    "rl.samples_per_s",
    "rl.tokens_per_s",
    "rl.samples",
    "rl.time",
}
"""Metrics of every step of a synchronous run."""


class RunRecord(RunDisplay):
    """The driver's record of a run, with the service's view during the run.

    Args:
        admin: the service.
        overview: a tab with the overview, opened before the run.
        run: the page of the run.
        other: another tab.

    Attributes:
        history: metrics of each step.
        trained: sample ids assigned for training, by step and rank.
        live: the partition that the service reported at the end of step `INSPECTED`.
    """

    def __init__(self, admin: Admin, overview: Page, run: WatchedRun, other: Page) -> None:
        self.admin = admin
        self.overview, self.run, self.other = overview, run, other
        self.history: list[dict[str, Any]] = []
        self.trained: dict[int, dict[int, list[str]]] = defaultdict(dict)
        self.live: dict[str, Any] = {}
        self._phase = ""

    def phase(self, name: str) -> None:
        self._phase = name
        if name == "clear" and len(self.history) + 1 == INSPECTED:
            self.live = self.admin.until(self._all_acknowledged)
            self.other.goto("/partition?id=train")
            expect(self.other.get_by_role("heading", level=1)).to_have_text("train")
            expect(self.other.locator("#heat")).to_contain_text("input_ids")
            first = self.overview.locator("#steps a").filter(has_text="0").first
            expect(first).to_be_visible(timeout=30_000)
            self.run.check_running(["rl.reward.mean", "rl.loss", "rl.kl"], steps=INSPECTED - 1)

    def finished_step(self, record: dict[str, Any]) -> None:
        self.history.append(record)

    def observe(self, name: str, direction: str, message: Any) -> None:
        """Record the samples sent to each policy worker (`grpo_trainer.actors.calls.Observer`)."""
        if self._phase == "train" and direction == "sent" and name.startswith("policy worker"):
            (meta,), _ = message
            assert isinstance(meta, KVBatchMeta)
            self.trained[len(self.history) + 1][int(name.split()[-1])] = list(meta.sample_ids)

    def _all_acknowledged(self) -> Any:
        """Return the partition once a poll has seen the step's last acknowledgment, else None."""
        for partition in self.admin.ask("partitions")["partitions"]:
            acknowledged = {task["acknowledged"] for task in partition["tasks"]}
            if partition["id"] == "train" and acknowledged == {SAMPLES}:
                return partition
        return None


@pytest.fixture(scope="module")
def recorded(
    admin: Admin, browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunRecord]:
    """Yield the record of a finished run; all its processes have exported their telemetry.

    The module fails on any console message or page error in its tabs.
    """
    config = configured(
        tmp_path_factory.mktemp("run"),
        {
            "run.name": "end-to-end",
            "grpo.num_steps": STEPS,
            "grpo.num_prompts_per_step": PROMPTS,
            "grpo.num_generations_per_prompt": GROUP,
            "policy.data_parallel": RANKS,
            "policy.global_batch_size": 32,
            "policy.micro_batch_size": 16,
            "refit.transport": "nixl",
            "data_plane.transfer_queue_mirror": True,
            "tracing.enabled": True,
            "tracing.endpoint": admin.url,
            "tracing.sample_texts": TEXTS,
        },
    )
    with (
        quiet_tab(browser, admin.url) as overview,
        quiet_tab(browser, admin.url) as run,
        quiet_tab(browser, admin.url) as other,
    ):
        overview.goto("/")
        overview.evaluate("window.kept = true")
        record = RunRecord(admin, overview, WatchedRun(run), other)
        train(config, display=record, observer=record.observe)
        yield record


@pytest.fixture
def page(admin: Admin, browser: Browser) -> Iterator[Page]:
    """Yield a tab; the test fails on any console message or page error."""
    with quiet_tab(browser, admin.url) as tab:
        yield tab


@pytest.fixture(scope="module")
def traces(admin: Admin, recorded: RunRecord) -> dict[int, dict[str, Any]]:
    """Return the trace of each step, numbered from 1 as in the metrics; spans count from 0."""

    def all_complete() -> Any:
        steps = [
            each for each in admin.ask("traces", limit=100)["traces"] if each["name"] == "grpo.step"
        ]
        complete = [each for each in steps if each["has_root"]]
        return steps if len(complete) == STEPS else None

    return {
        each["step"] + 1: admin.ask("trace", id=each["trace_id"])
        for each in admin.until(all_complete)
    }


def test_run_trains_on_every_sample_once(recorded: RunRecord) -> None:
    assert [record["step"] for record in recorded.history] == [*range(1, STEPS + 1)]
    for shards in recorded.trained.values():
        assert sorted(shards) == [*range(RANKS)]
        assert len({sample_id for ids in shards.values() for sample_id in ids}) == SAMPLES


def test_each_step_has_one_complete_trace(
    recorded: RunRecord, traces: dict[int, dict[str, Any]]
) -> None:
    assert sorted(traces) == sorted(recorded.trained)
    assert len({trace["run_id"] for trace in traces.values()}) == 1
    processes = {"grpo.driver", "grpo.rollout", "grpo.generation", "grpo.environment"}
    processes |= {f"grpo.policy {rank}" for rank in range(RANKS)}
    for step, trace in traces.items():
        assert trace["incomplete"] == [], f"step {step}"
        assert trace["rejected"] == trace["errors"] == 0
        assert {each["process"] for each in trace["process_times"]} == processes
        assert trace["seconds"] > sum(recorded.history[step - 1]["seconds"].values())


def test_every_refit_moves_the_models_bytes_over_nixl(
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


def test_live_partition_has_the_samples_of_the_step(recorded: RunRecord) -> None:
    live = recorded.live
    assert live["present"] == live["put"] == live["declared"] == SAMPLES
    assert (live["not_put"], live["reserved"], live["cleared"]) == (0, 0, 0)
    assert {task["name"] for task in live["tasks"]} == TASKS
    for task in live["tasks"]:
        assert (task["unclaimed"], task["leased"], task["acknowledged"]) == (0, 0, SAMPLES)
    fields = {field["name"] for field in live["fields"]}
    assert {"input_ids", "generation_logprobs", "prev_logprobs", "advantages"} <= fields


def test_sample_history_matches_the_drivers_record(
    admin: Admin, recorded: RunRecord, traces: dict[int, dict[str, Any]]
) -> None:
    for step, shards in recorded.trained.items():
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
                # Generated with the previous step's weights, and trained on in this step.
                assert hops[0]["weight_version"] == step - 1
                assert life["live"] is None  # it was cleared


def test_all_training_samples_have_zero_staleness(
    admin: Admin, recorded: RunRecord, traces: dict[int, dict[str, Any]]
) -> None:
    counts = admin.ask("staleness", run=traces[1]["run_id"])["counts"]
    assert set(counts) == {"0"}
    assert sum(counts.values()) == STEPS * SAMPLES


def test_every_step_has_a_point_on_every_curve(
    admin: Admin, traces: dict[int, dict[str, Any]]
) -> None:
    admin.until_curves(traces[1]["run_id"], CURVES, min_points=STEPS)


def test_healthy_run_raises_no_alert(admin: Admin, traces: dict[int, dict[str, Any]]) -> None:
    admin.check_alerts(traces[1]["run_id"])


def test_newest_samples_are_listed_without_a_search(
    admin: Admin, recorded: RunRecord, page: Page
) -> None:
    page.goto("/samples?sort=reward&state=trained&text=yes")
    rows = page.locator("#newest tbody tr")
    expect(rows).to_have_count(STEPS * TEXTS)
    rewards = [float(text) for text in rows.locator("td:nth-of-type(2)").all_inner_texts()]
    assert rewards == sorted(rewards, reverse=True)
    rows.first.locator("a[href*='/group']").click()
    expect(page.locator(".group-samples article")).to_have_count(GROUP)
    page.locator(".group-samples article").first.get_by_role("link").click()
    page.get_by_role("link", name="Difference").click()
    expect(page.locator(".tokens")).to_be_visible()
    # The generator and the trainer compute the same: no token differs by more than rounding.
    # A prompt's tokens have no log-probability of the generator, so their difference is unknown.
    expect(page.locator(".tokens .tok:not(.c0):not(.unknown)")).to_have_count(0)
    expect(page.locator(".tokens .tok.c0").first).to_be_visible()


def test_nothing_is_blocked_after_the_run(admin: Admin, recorded: RunRecord) -> None:
    assert admin.until(lambda: admin.ask("why") == [])


def test_overview_follows_the_run_without_a_reload(recorded: RunRecord) -> None:
    newest = recorded.overview.locator("#steps a").filter(has_text=str(STEPS - 1)).first
    expect(newest).to_be_visible(timeout=30_000)
    finished = re.compile(f"^Run finished; step {STEPS - 1} finished")
    expect(recorded.overview.get_by_role("heading", level=1)).to_have_text(finished, timeout=30_000)
    assert recorded.overview.evaluate("window.kept"), "the page was reloaded"


def test_page_of_the_run_follows_it_without_a_reload(recorded: RunRecord) -> None:
    newest = {"rl.reward.mean": recorded.history[-1]["reward"]}
    recorded.run.finish(steps=STEPS, values=newest)


def test_trace_page_shows_the_step_in_every_process(
    traces: dict[int, dict[str, Any]], page: Page
) -> None:
    page.goto(f"/trace?id={traces[STEPS]['trace_id']}")
    expect(page.get_by_role("heading", level=1)).to_contain_text(f"Step {STEPS - 1}")
    for each in traces[STEPS]["process_times"]:
        expect(page.locator("#chart").get_by_text(each["process"]).first).to_be_visible()


def test_sample_page_is_found_and_shows_its_history(recorded: RunRecord, page: Page) -> None:
    sample_id = recorded.trained[STEPS][0][0]
    page.goto(f"/samples?q={urllib.parse.quote(sample_id)}")
    page.locator("main").get_by_role("link", name=sample_id).first.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text(sample_id)
    expect(page.locator("#life").get_by_text("trained").first).to_be_visible()


def test_compare_page_shows_two_steps(traces: dict[int, dict[str, Any]], page: Page) -> None:
    page.goto(f"/compare?a={traces[1]['trace_id']}&b={traces[2]['trace_id']}")
    expect(page.locator("main")).to_contain_text("train")


@pytest.mark.parametrize("path", ["/", "/traces", "/staleness", "/audit", "/samples?q="])
def test_other_pages_have_no_console_messages(recorded: RunRecord, page: Page, path: str) -> None:
    page.goto(path)
    expect(page.get_by_role("heading", level=1)).to_be_visible()


def test_command_line_prints_the_same_sample(admin: Admin, recorded: RunRecord) -> None:
    sample_id = recorded.trained[1][0][0]
    done = subprocess.run(
        [str(ADMIN), "sample", sample_id, "--url", admin.url, "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert json.loads(done.stdout)["hops"] == admin.ask("sample", id=sample_id)["hops"]
