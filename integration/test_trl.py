"""TRL's own `GRPOTrainer`, traced by the adapter in a separate environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from integration.admin_service import quiet_tab, serving
from integration.environments import ROOT, create_environment
from integration.recipes import blocks
from integration.watching import WatchedRun
from playwright.sync_api import Browser

from observability.receiver import Receiver
from observability.views import steps_of

pytestmark = pytest.mark.timeout(900)

STEPS = 6
"""Steps of the watched run, which pauses in the middle until it reads a line."""

TRL = """
import sys
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", *"abcdefgh"])}
words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(vocabulary), **sizes, **heads, **ends))
model.save_pretrained("model")  # the reference model is loaded from there

def count_a(completions, **kwargs):
    return [float(text.count("a")) for text in completions]

data = Dataset.from_dict({"prompt": ["a b", "c d", "e f", "g h"] * 4})
arguments = GRPOConfig(
    output_dir="out", max_steps=STEPS, per_device_train_batch_size=4, num_generations=4, beta=0.1,
    gradient_accumulation_steps=2, max_completion_length=8, use_cpu=True, report_to=[],
    save_strategy="no", eval_strategy="steps", eval_steps=1, disable_tqdm=True, logging_steps=1,
)
trainer = GRPOTrainer(
    model="model", reward_funcs=count_a, processing_class=tokenizer, args=arguments,
    train_dataset=data, eval_dataset=data.select(range(4)),
)
"""


PAUSE = """
from transformers import TrainerCallback

class Pause(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == STEPS // 2:
            input()

trainer.add_callback(Pause())
"""


def program(steps: int, changes: str = "") -> str:
    return f"STEPS = {steps}\n{TRL}{changes}" + blocks("trace-trl", "python")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Install TRL, and return the Python that has it."""
    core, observability = ROOT / "packages/dataplane-core", ROOT / "packages/observability"
    wheels = ["trl==1.16.0", "torch==2.13.0", str(core), f"{observability}[sdk,views]"]
    return create_environment(tmp_path_factory.mktemp("trl") / "venv", sys.executable, wheels)


def test_steps_have_waterfalls_and_critical_paths(python: str, tmp_path: Path) -> None:
    with Receiver(tmp_path / "recording") as receiver:
        done = subprocess.run(
            [python, "-c", program(2)],
            cwd=tmp_path,
            env={**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint},
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        records = receiver.snapshot()
    steps = steps_of(records)
    [started] = [event for event in records.events if event.name == "run_started"]
    assert started.attributes["dataplane.config"]["max_completion_length"] == "8"
    assert [(step.run_id, step.number) for step in steps] == [("my-run", 0), ("my-run", 1)]
    for step in steps:
        assert step.incomplete == []
        micro_batch = ["rollout", "forward", "backward"]
        stages = [span.name for span in step.children(step.root.span_id)]
        assert stages == [*micro_batch, *micro_batch, "optimizer_step"]
        rollout, *_ = step.children(step.root.span_id)
        inside = [span.name for span in step.children(rollout.span_id)]
        assert inside == ["generate", "logprobs", "environment_step"]
    show = [python, "-m", "observability", "show", "recording"]
    shown = subprocess.run(
        show, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert shown.count("of run my-run") == 2
    assert shown.count("Critical path") == 2
    assert "count_a" in shown


def test_run_is_watched_from_start_to_end(python: str, browser: Browser, tmp_path: Path) -> None:
    with serving(tmp_path) as admin, quiet_tab(browser, admin.url) as tab:
        watched = WatchedRun(tab)
        environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": admin.url}
        with (tmp_path / "trl.log").open("wb") as log:
            process = subprocess.Popen(
                [python, "-c", program(STEPS, PAUSE)],
                cwd=tmp_path,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
            try:
                watched.follow(process, ["rl.reward.mean", "rl.loss", "rl.reward.component"])
                process.communicate(b"\n", timeout=600)
                assert process.returncode == 0, (tmp_path / "trl.log").read_text()
            finally:
                process.kill()
                process.wait()
        watched.finish(steps=STEPS)
