"""`make demo` does what the README's first screen says: the reward rises."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from statistics import fmean

import pytest

ROOT = Path(__file__).parents[1]
UV = shutil.which("uv") or str(ROOT / ".tools" / "bin" / "uv")


STEPS = 30
"""Half of the demo's: it has learned by then."""


@pytest.mark.timeout(900)
def test_the_demo_learns(tmp_path: Path) -> None:
    # Through `uv run`, because Ray behaves differently below it.
    command = [UV, "run", "--no-sync", "grpo-trainer", "train", "--output", str(tmp_path)]
    command += ["--set", f"grpo.num_steps={STEPS}"]
    environment = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850, check=False
    )
    assert done.returncode == 0, done.stderr
    [run] = (tmp_path / "demo").iterdir()
    history = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [record["reward"] for record in history]
    assert len(rewards) == STEPS
    assert fmean(rewards[:5]) <= 0.3
    assert fmean(rewards[-5:]) >= 0.8
    assert (run / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert "last five steps" in done.stdout
