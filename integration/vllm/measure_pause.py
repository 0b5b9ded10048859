"""Measure how long generation pauses for new weights, with refit-mx and with vLLM's reload.

``make bench-vllm`` runs this: one vLLM in this process, on the CPU. The two ways alternate. Each is
measured by the time during which no token can be computed. refit-mx fetches before the pause, while
the old version serves; a separate column has that time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import integration.vllm.conftest  # noqa: F401 - sets variables that vLLM reads when it is imported
import torch
from integration.vllm.in_process import start, status
from integration.vllm.published import Trainer, checkpoint
from integration.vllm.tiny_model import VOCABULARY, build_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm import LLM

HIDDEN = (256, 512, 1024, 2048)


@dataclass
class Pause:
    """Measured seconds of one model size.

    Attributes:
        mib: size of the weights.
        refit_s: durations of refit-mx's install.
        fetch_s: durations of the fetch before it, during which the old weights serve.
        reload_s: durations of vLLM's ``reload_weights`` from a folder in the page cache.
    """

    mib: float
    refit_s: list[float]
    fetch_s: list[float]
    reload_s: list[float]


def save(folder: Path, hidden: int, seed: int) -> Path:
    """Write a random model of four layers in bfloat16."""
    build_tokenizer().save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=4,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def measure(folder: Path, hidden: int, rounds: int) -> Pause:
    """Alternate between the two ways, ``rounds`` times after one warm-up round."""
    folders = [save(folder / str(seed), hidden, seed) for seed in range(2)]
    weights = [checkpoint(each) for each in folders]
    llm = start(folders[0], dtype="bfloat16")
    pause = Pause(sum(t.nbytes for t in weights[0].values()) / 2**20, [], [], [])
    with Trainer("measured", slots=2) as trainer:
        llm.init_weight_transfer_engine({"init_info": trainer.init_info()})
        for round_ in range(rounds + 1):
            version, seed = f"v{round_}", (round_ + 1) % 2
            trainer.publish(version, weights[seed])
            fetch_s = seconds(lambda version=version: fetch(llm, version))
            refit_s = seconds(llm.finish_weight_update)
            reload_s = seconds(
                lambda seed=seed: llm.collective_rpc(
                    "reload_weights", kwargs={"weights_path": str(folders[1 - seed])}
                )
            )
            if round_:
                pause.fetch_s.append(fetch_s)
                pause.refit_s.append(refit_s)
                pause.reload_s.append(reload_s)
    return pause


def fetch(llm: LLM, version_id: str) -> None:
    """Fetch in the background, and poll until the fetch is complete."""
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version_id": version_id, "background": True}})
    while (state := status(llm)["fetch"])["state"] == "running":
        time.sleep(0.001)
    if state["state"] != "received":
        raise RuntimeError(f"version {version_id}: {state['error']}")


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def text(values: list[float]) -> str:
    """Format the median and the interquartile range in milliseconds."""
    first, median, third = statistics.quantiles(values, n=4)
    return f"{median * 1e3:8.1f} ({(third - first) * 1e3:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--hidden", type=int, nargs="+", default=HIDDEN)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pauses = []
    print("MiB      pause, refit-mx  pause, reload    ratio (IQR)   fetch before; ms, median (IQR)")
    for hidden in options.hidden:
        with tempfile.TemporaryDirectory() as folder:
            pause = measure(Path(folder), hidden, options.rounds)
        pauses.append(pause)
        ratios = [b / a for a, b in zip(pause.refit_s, pause.reload_s, strict=True)]
        first, median, third = statistics.quantiles(ratios, n=4)
        print(
            f"{pause.mib:7.1f} {text(pause.refit_s)} {text(pause.reload_s)}    "
            f"{median:.2f} ({third - first:.2f})  {text(pause.fetch_s)}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(pause) for pause in pauses], indent=1))


if __name__ == "__main__":
    main()
