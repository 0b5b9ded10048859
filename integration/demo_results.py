"""Run the demo with several seeds and with learning rate 0, and print a table of the results.

The table is for docs/results.md. Usage: ``.venv/bin/python integration/demo_results.py [RUN ...]``.
Without arguments, all of `RUNS` run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean

from grpo_trainer import DEMO_CONFIG

RUNS: dict[str, list[str]] = {
    "default seed (17)": [],
    "seed 1": ["--seed", "1"],
    "seed 2": ["--seed", "2"],
    "learning rate 0": ["--set", "policy.optimizer.learning_rate=0"],
    "vLLM server": ["--config", str(DEMO_CONFIG.with_name("demo-vllm.yaml"))],
}


def main() -> None:
    """Print the table of docs/results.md."""
    trainer = str(Path(sys.executable).with_name("grpo-trainer"))
    columns = (
        "run",
        "first five steps",
        "first step ≥ 0.8",
        "last five steps",
        "held out",
        "wall, s",
    )
    print(f"| {' | '.join(columns)} | step, s |")
    print("|---|---|---|---|---|---|---|")
    chosen = sys.argv[1:] or list(RUNS)
    for name in chosen:
        options = RUNS[name]
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            subprocess.run(
                [trainer, "train", "--output", folder, *options],
                check=True,
                capture_output=True,
                timeout=1800,
            )
            wall = time.perf_counter() - started
            [metrics] = Path(folder).glob("*/*/metrics.jsonl")
            history = [json.loads(line) for line in metrics.read_text().splitlines()]
        rewards = [record["reward"] for record in history]
        reached = next((record["step"] for record in history if record["reward"] >= 0.8), "never")
        step_s = fmean(sum(record["seconds"].values()) for record in history)
        held_out = history[-1]["validation_reward"]
        print(
            f"| {name} | {fmean(rewards[:5]):.3f} | {reached} | {fmean(rewards[-5:]):.3f} "
            f"| {held_out:.3f} | {wall:.0f} | {step_s:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
