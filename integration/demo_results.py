"""Runs the demo with several seeds and with learning rate 0, and prints a table of what came out.

The figures of docs/results.md come from here: ``.venv/bin/python integration/demo_results.py``, or
with the names of some of `RUNS` as arguments.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean

RUNS: dict[str, list[str]] = {
    "default seed (17)": [],
    "seed 1": ["--seed", "1"],
    "seed 2": ["--seed", "2"],
    "learning rate 0": ["--set", "policy.optimizer.learning_rate=0"],
}


def main() -> None:
    """Print the table as it stands in docs/results.md."""
    trainer = str(Path(sys.executable).with_name("grpo-trainer"))
    print("| run | first five | step of 0.8 | last five | held out | wall, s | step, s |")
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
