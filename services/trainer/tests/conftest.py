"""Fixtures: configurations based on the demo's, a tiny model on disk, and runs.

Imports internals: a model is saved as a run saves its own.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from hypothesis import settings
from integration.lean_ray import lean_ray
from integration.temporary_ray import temporary_ray

from grpo_trainer import DEMO_CONFIG, RunDisplay, check_config

__all__ = ["lean_ray"]

COMMAND = str(Path(sys.executable).with_name("grpo-trainer"))

SMALL = {
    "cluster.num_cpus": 4,
    "cluster.call_timeout_s": 240,
    "policy.data_parallel": 1,
    "policy.model.hidden_size": 32,
    "policy.model.intermediate_size": 64,
    "policy.model.num_layers": 1,
    "policy.model.num_heads": 2,
    "policy.model.head_dim": 16,
    "policy.model.initializer_range": 0.3,
    "policy.global_batch_size": 8,
    "policy.micro_batch_size": 4,
    "policy.generation.num_threads": 1,
    "grpo.num_prompts_per_step": 4,
    "grpo.num_generations_per_prompt": 4,
    "grpo.dynamic_sampling.enabled": False,
    "data_plane.storage_capacity": 256,
    "data_plane.transfer_queue_mirror": False,  # a process less for each run
}
RAW = yaml.safe_load(DEMO_CONFIG.read_text())


def raw_with(changes):
    """Return the demo's configuration as plain data, with dotted keys set."""
    raw = copy.deepcopy(RAW)
    for key, value in dict(changes).items():
        *parents, leaf = key.split(".")
        node = raw
        for parent in parents:
            node = node[parent]
        node[leaf] = value
    return raw


@pytest.fixture(scope="session")
def raw_config():
    """Function that returns plain data of a small run; takes dotted keys to change."""
    return lambda changes=(): raw_with({**SMALL, **dict(changes)})


@pytest.fixture(scope="session")
def configure(raw_config):
    """Function that returns a small run's configuration; takes dotted keys to change."""
    return lambda changes=(): check_config(raw_config(changes), source="test")


@pytest.fixture(scope="session")
def model_folder(configure, tmp_path_factory):
    """Model and tokenizer on disk, saved without the trainer."""
    from grpo_trainer.model.load import save_random_model

    folder = tmp_path_factory.mktemp("model")
    save_random_model(configure().policy.model, folder, seed=3, max_length=48)
    return folder


@pytest.fixture(scope="session")
def network(model_folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_folder).eval()


@pytest.fixture(scope="session")
def tokenizer(model_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder)


@pytest.fixture(scope="session")
def questions(network, tokenizer):
    """Questions with answers that begin with likely tokens, so that some responses score."""
    import torch

    answers = {}
    for text in ("max(1,2)=", "min(3,0)=", "max(4,4)=", "min(2,1)="):
        with torch.no_grad():
            logits = network(torch.tensor([tokenizer(text)["input_ids"]])).logits
        answers[text] = tokenizer.decode(logits[0, -1].argmax()) + "="
    return answers


@pytest.fixture(scope="session")
def write_prompts(tmp_path_factory):
    """Function that writes a data set of prompts and answers, and returns its path."""

    def write(pairs):
        path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
        path.write_text("".join(json.dumps({"prompt": q, "answer": a}) + "\n" for q, a in pairs))
        return path

    return write


@pytest.fixture(scope="session")
def questions_file(questions, write_prompts):
    """Path of a data set of the questions."""
    return write_prompts(questions.items())


@pytest.fixture(scope="session")
def configure_async(configure, model_folder, questions_file, tmp_path_factory):
    """Function that configures a small asynchronous run; takes dotted keys to change."""
    return lambda changes=(): configure(
        {
            "run.output": str(tmp_path_factory.mktemp("runs")),
            "data.train": str(questions_file),
            "policy.model": {
                "kind": "pretrained",
                "name": str(model_folder),
                "use_chat_template": False,
            },
            "policy.data_parallel": 2,
            "grpo.mode": "async",
            "grpo.asynchronous.max_staleness": 2,
            "grpo.asynchronous.generators": 2,
            "grpo.asynchronous.prompts_per_rollout": 1,
            "grpo.asynchronous.concurrent_rollouts": 2,
            "grpo.asynchronous.prompts_per_claim": 1,
            "policy.generation.simulated_latency": {"median_s": 0.05, "sigma": 1.0},
            "validation.every_steps": 0,
            **dict(changes),
        }
    )


@pytest.fixture(scope="module")
def local_ray():
    """Ray cluster that the runs of this process join."""
    with temporary_ray(num_cpus=8, namespace="grpo-trainer"):
        yield


class Interrupting(RunDisplay):
    """Display that interrupts a run at a notice; "starting Ray" comes after all input checks."""

    def __init__(self, at):
        self.at, self.lines = at, []

    def notice(self, text):
        if text.startswith(self.at):
            raise KeyboardInterrupt
        self.lines.append(text)


@pytest.fixture(scope="session")
def accepted():
    """Function that starts a run, interrupts it at a notice, and returns the earlier notices.

    Its argument is a function that starts the run with a given display.
    """

    def begin(start, at="starting Ray"):
        display = Interrupting(at)
        with pytest.raises(KeyboardInterrupt):
            start(display)
        return display.lines

    return begin


@pytest.fixture
def config_file(tmp_path, raw_config):
    """Function that writes a small run's configuration; takes dotted keys to change."""

    def write(changes=(), *, edit=lambda raw: None):
        raw = raw_config({"run.output": str(tmp_path / "runs"), **dict(changes)})
        edit(raw)
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(raw))
        return path

    return write


class CommandLine:
    """Runner of the program, without a terminal and without the hub."""

    def __init__(self):
        self.environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "80"}

    def run(self, *arguments, timeout=60):
        started = time.monotonic()
        done = subprocess.run(
            [COMMAND, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=self.environment,
        )
        done.seconds = time.monotonic() - started
        return done

    def start(self, *arguments):
        return subprocess.Popen(
            [COMMAND, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
        )


@pytest.fixture(scope="session")
def command_line():
    return CommandLine()


@pytest.fixture(scope="session")
def processes_of():
    """Function that returns the processes of a Ray cluster, by its folder in their commands."""

    def find(temp_dir):
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if any(str(temp_dir) in part for part in process.info["cmdline"] or [])
        ]

    return find


# How long an example takes depends on what else the machine does.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
