"""The admin service shows an asynchronous run from start to end, in a browser.

The driver waits while the test looks at the pages, so the ranks neither train nor clear samples
meanwhile; the generators continue.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from integration.admin_service import Admin, quiet_tab
from integration.conftest import configured
from integration.waiting import wait_until
from integration.watching import WatchedRun
from playwright.sync_api import Browser, Page, expect

from grpo_trainer import RunDisplay, train

STEPS, PROMPTS, GROUP, GENERATORS = 4, 8, 4, 2
SAMPLES = PROMPTS * GROUP
TEXTS = 3
TIMEOUT_MS = 60_000
KILLED_IN = 1
"""The step in which a generation worker is killed."""
CURVES = {
    "rl.reward.mean",
    "rl.reward.std",
    "rl.loss",
    "rl.kl",
    "rl.entropy",
    "rl.clip_fraction",
    "rl.grad_norm",
    "rl.learning_rate",
    "rl.staleness.mean",
    "rl.staleness.max",
    "rl.logprob_gap.mean",
    "rl.logprob_gap.p99",
    "rl.samples_per_s",
    "rl.tokens_per_s",
    "rl.samples",
    "rl.time",
}
"""Metrics of every step of an asynchronous run."""
GENERATION_CURVES = {
    "rl.reward.component",
    "rl.response.length",
    "rl.response.truncated",
    "rl.generation.tokens_per_s",
}
"""Metrics of steps during which a rollout finished."""
VALIDATION_CURVES = {"rl.validation.reward", "rl.validation.pass_rate"}


class Watcher(RunDisplay):
    """Display that checks what tabs of the overview, of the partition and of the run show.

    Attributes:
        overview: opened before the run.
        partition: opened in the first step; like the overview, it is never reloaded.
        run: the page of the run.
        steps: finished steps.
        staleness: mean staleness of each, from the tags of its samples.
    """

    def __init__(self, overview: Page, partition: Page, run: Page) -> None:
        self.overview, self.partition, self.run = overview, partition, WatchedRun(run)
        self.steps = 0
        self.staleness: list[float] = []

    def phase(self, name: str) -> None:
        if name == "train":
            self._before_training()
        elif name == "clear":
            self._after_training()

    def finished_step(self, record: dict[str, Any]) -> None:
        self.steps += 1
        self.staleness.append(record["staleness"])

    def _before_training(self) -> None:
        expect(self._bar("train")).to_have_text(re.compile("^0 acknowledged"))
        if self.steps == 0:
            self.partition.goto("/partition?id=train")
            self.partition.evaluate("window.kept = true")
            expect(self._generators("joined")).to_have_count(GENERATORS)
        expect(self._acknowledged("train")).to_have_text("0")
        if self.steps == KILLED_IN:
            _kill_a_generation_worker()
        elif self.steps == KILLED_IN + 1:
            lost = self._generators("left")
            expect(lost).to_have_count(1)
            expect(lost).to_contain_text("generation worker")
            self.run.check_running(["rl.reward.mean", "rl.staleness.mean"], steps=1)

    def _after_training(self) -> None:
        expect(self._acknowledged("train")).to_have_text(str(SAMPLES))
        expect(self._bar("generate")).to_contain_text("acknowledged")
        expect(self._bar("train")).to_have_text(re.compile(f"^{SAMPLES} acknowledged"))
        # A generator acknowledges after the put that makes its samples ready.
        wait_until(lambda: int(self._acknowledged("generate").inner_text()) >= SAMPLES)

    def _acknowledged(self, task: str) -> Any:
        row = self.partition.locator(f"[aria-labelledby=tasks-h] tr[data-key={task}]")
        return row.locator("td").nth(4)

    def _bar(self, task: str) -> Any:
        return self.overview.locator(f"#partitions li[data-key={task}] .count")

    def _generators(self, state: str) -> Any:
        return self.partition.locator("#generators tbody tr").filter(has_text=state)


def _kill_a_generation_worker() -> None:
    workers = [
        each
        for each in psutil.Process().children(recursive=True)
        if each.cmdline() and each.cmdline()[0].startswith("ray::GenerationWorker")
    ]
    workers[-1].send_signal(signal.SIGKILL)


@pytest.fixture
def tabs(admin: Admin, browser: Browser) -> Iterator[list[Page]]:
    """Yield three tabs; the test fails on any console message or page error."""
    expect.set_options(timeout=TIMEOUT_MS)
    with ExitStack() as stack:
        yield [stack.enter_context(quiet_tab(browser, admin.url)) for _ in range(3)]
    expect.set_options(timeout=5_000)


def test_pages_follow_an_asynchronous_run(admin: Admin, tabs: list[Page], tmp_path: Path) -> None:
    watcher = Watcher(*tabs)
    watcher.overview.goto("/")
    empty = watcher.overview.get_by_role("heading", name="No telemetry yet", level=2)
    expect(empty).to_be_visible()
    watcher.overview.evaluate("window.kept = true")
    config = configured(
        tmp_path,
        {
            "run.name": "dashboard",
            "grpo.mode": "async",
            "grpo.num_steps": STEPS,
            "validation.every_steps": STEPS,
            "grpo.num_prompts_per_step": PROMPTS,
            "grpo.num_generations_per_prompt": GROUP,
            "grpo.asynchronous.generators": GENERATORS,
            "grpo.asynchronous.prompts_per_rollout": 1,
            "grpo.asynchronous.prompts_per_claim": 2,
            "policy.global_batch_size": SAMPLES,
            "policy.micro_batch_size": SAMPLES // 2,
            "policy.generation.simulated_latency": {"median_s": 0.2, "sigma": 0.5},
            "tracing.enabled": True,
            "tracing.endpoint": admin.url,
            "tracing.sample_texts": TEXTS,
        },
    )
    train(config, display=watcher)
    assert watcher.steps == STEPS
    expect(empty).to_have_count(0)
    for step in range(STEPS):
        link = watcher.overview.locator("#steps").get_by_role("link", name=str(step), exact=True)
        expect(link).to_be_visible()
    finished = re.compile(f"^Run finished; step {STEPS - 1} finished")
    expect(watcher.overview.get_by_role("heading", level=1)).to_have_text(finished)
    assert all(tab.evaluate("window.kept") for tab in tabs), "a page was reloaded"
    watcher.run.finish(steps=STEPS)
    [run] = admin.ask("runs")["runs"]
    admin.until_curves(run["run_id"], CURVES, min_points=STEPS)
    admin.until_curves(run["run_id"], GENERATION_CURVES | VALIDATION_CURVES, min_points=1)
    admin.check_alerts(run["run_id"])
    check_samples(admin)
    check_staleness(admin, watcher.staleness)


def check_samples(admin: Admin) -> None:
    """Check the facts of all samples, and the tokens of those whose text was recorded."""
    trained = admin.until(lambda: _trained(admin, STEPS * SAMPLES))
    # The facts that the killed generator had not exported are lost.
    with_facts = [each for each in trained if each["length"] is not None]
    assert len(with_facts) >= STEPS * SAMPLES / 2
    for each in with_facts:
        assert each["sample_id"].rpartition("_g")[0] == each["group"]
        assert each["first_version"] <= each["last_version"] <= each["step"]
    functions = {name: _tagged(admin, f"function={name}") for name in ("max", "min")}
    assert all(functions.values())
    assert {each["sample_id"] for each in with_facts} <= set().union(*functions.values())
    texts = admin.ask("samples/facts", text=True, limit=500)["samples"]
    assert len(texts) == STEPS * TEXTS
    for each in texts:
        content = admin.ask("sample/content", id=each["sample_id"], run=each["run_id"])
        drawn = [token for token in content["tokens"] if token["mask"]]
        assert drawn
        if each["length"] is None:
            continue
        assert len(drawn) == each["length"]
        versions = {token["version"] for token in drawn}
        assert (min(versions), max(versions)) == (each["first_version"], each["last_version"])
        assert all(abs(token["generator"] - token["trainer"]) < 2 for token in drawn)
        text = "".join(turn["content"] for turn in content["turns"])
        shown = "".join(token["text"] for token in content["tokens"])
        assert re.sub("<eos>|<pad>", "", shown) == text


def check_staleness(admin: Admin, of_tags: Sequence[float]) -> None:
    """Check that the service's staleness, from puts of responses, is that of the samples' tags."""
    answer = admin.ask("staleness", steps=STEPS)
    assert sum(answer["counts"].values()) + answer["unknown"] == STEPS * SAMPLES
    # The killed generator may not have exported its last put, and new weights may arrive between
    # the claim of a prompt and the first token of its response.
    assert answer["unknown"] < SAMPLES
    assert abs(answer["mean"] - sum(of_tags) / STEPS) < 0.2


def _tagged(admin: Admin, tag: str) -> set[str]:
    """Return the ids of samples with a tag."""
    listed = admin.ask("samples/facts", tag=tag, limit=500)["samples"]
    name, _, value = tag.partition("=")
    assert all(each["tags"] == {name: value} for each in listed)
    return {each["sample_id"] for each in listed}


def _trained(admin: Admin, count: int) -> Any:
    """Return the samples that were trained, once they are ``count``."""
    listed: list[Any] = []
    page: dict[str, Any] = {"next": ""}
    while page["next"] is not None:
        cursor = {"cursor": page["next"]} if page["next"] else {}
        page = admin.ask("samples/facts", state="trained", limit=500, **cursor)
        listed += page["samples"]
    return listed if len(listed) == count else None
