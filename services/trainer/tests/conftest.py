"""Configurations made from the demo's, a tiny model on disk, and the command line as a process."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from hypothesis import settings

from grpo_trainer.config import DEMO_CONFIG, check_config

COMMAND = str(Path(sys.executable).with_name("grpo-trainer"))

SMALL = {
    "cluster.num_cpus": 4,
    "cluster.call_timeout_s": 120,
    "policy.data_parallel": 1,
    "policy.model.hidden_size": 32,
    "policy.model.intermediate_size": 64,
    "policy.model.num_layers": 1,
    "policy.model.num_heads": 2,
    "policy.model.head_dim": 16,
    "policy.global_batch_size": 8,
    "policy.micro_batch_size": 4,
    "policy.generation.num_threads": 1,
    "grpo.num_prompts_per_step": 4,
    "grpo.num_generations_per_prompt": 4,
    "grpo.dynamic_sampling.enabled": False,
    "data_plane.storage_capacity": 256,
}


def change(raw, changes):
    """A copy of ``raw`` with dotted keys set."""
    raw = copy.deepcopy(raw)
    for key, value in changes.items():
        *parents, leaf = key.split(".")
        node = raw
        for parent in parents:
            node = node[parent]
        node[leaf] = value
    return raw


@pytest.fixture
def demo():
    """The shipped configuration as plain data."""
    return yaml.safe_load(DEMO_CONFIG.read_text())


@pytest.fixture(scope="session")
def raw_config():
    """Plain data of a small run; called with dotted keys to change."""
    base = yaml.safe_load(DEMO_CONFIG.read_text())
    return lambda changes=(): change(base, {**SMALL, **dict(changes)})


@pytest.fixture(scope="session")
def configure(raw_config):
    """A small run's configuration; called with dotted keys to change."""
    return lambda changes=(): check_config(raw_config(changes), source="test")


@pytest.fixture(scope="session")
def model_folder(configure, tmp_path_factory):
    """A model and a tokenizer on disk, as somebody else would have saved them."""
    from grpo_trainer.model import save_random_model

    folder = tmp_path_factory.mktemp("model")
    model = configure({"policy.model.initializer_range": 0.3}).policy.model
    save_random_model(model, folder, seed=3, max_length=48)
    return folder


@pytest.fixture(scope="session")
def network(model_folder):
    import torch

    from grpo_trainer.model import load_model

    return load_model(str(model_folder), torch.device("cpu")).eval()


@pytest.fixture(scope="session")
def tokenizer(model_folder):
    from grpo_trainer.tokenizer import load_tokenizer

    return load_tokenizer(str(model_folder))


@pytest.fixture(scope="session")
def questions(network, tokenizer):
    """Questions with answers that begin as the model likes to: some responses score, some not."""
    import torch

    from grpo_trainer.sampling import sample_responses

    texts = ["max(1,2)=", "min(3,0)=", "max(4,4)=", "min(2,1)="]
    rows = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
    responses = sample_responses(
        network, tokenizer, rows, max_new_tokens=[1] * len(rows), temperature=1.0, greedy=True
    )
    answers = [tokenizer.decode(response.token_ids) + "=" for response in responses]
    return dict(zip(texts, answers, strict=True))


@pytest.fixture
def config_file(tmp_path, raw_config):
    """Writes a small run's configuration; called with dotted keys to change."""

    def write(changes=(), *, edit=None):
        raw = raw_config({"run.output": str(tmp_path / "runs"), **dict(changes)})
        if edit is not None:
            edit(raw)
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(raw))
        return path

    return write


class CommandLine:
    """Runs the program to its end, without a terminal and without the hub."""

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
    """The processes of a Ray cluster, found by its folder, which each has in its command line."""

    def find(temp_dir):
        found = []
        for process in psutil.process_iter(["cmdline"]):
            if any(str(temp_dir) in part for part in process.info["cmdline"] or []):
                found.append(process)
        return found

    return find


# How long an example takes depends on what else the machine does.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
