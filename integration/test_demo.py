"""`make demo` does what the README's first screen says: the reward rises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest


@pytest.mark.timeout(900)
def test_the_demo_learns(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("grpo-trainer")), "train", "--output", tmp_path]
    environment = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=850, check=False
    )
    assert done.returncode == 0, done.stderr
    [run] = (tmp_path / "demo").iterdir()
    history = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [record["reward"] for record in history]
    assert fmean(rewards[:5]) <= 0.3
    assert fmean(rewards[-5:]) >= 0.8
    assert (run / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert "last five steps" in done.stdout
