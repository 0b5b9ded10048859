"""Recipes of docs/recipes whose programs need a launcher, or packages that are not installed here.

TRL, verl and SkyRL are replaced by modules with the names that the adapters use. `test_trl.py`
trains with TRL, `integration/verl` runs verl's loop, and `test_skyrl.py` SkyRL's.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from integration.recipes import blocks, torchrun

from observability.receiver import Receiver
from observability.views import Step, steps_of


def stages(step: Step) -> list[str]:
    return [span.name for span in step.children(step.root.span_id)]


def run(command: list[str], folder: Path, receiver: Receiver) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint, "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_torchrun_steps_have_a_lane_per_rank(tmp_path: Path) -> None:
    forward = "        loss = model(batch).square().mean()\n"
    program = blocks("trace-torchrun", "python")
    assert forward in program
    slow = f"        __import__('time').sleep(rank)\n{forward}"
    (tmp_path / "train.py").write_text(program.replace(forward, slow))
    with torchrun(2) as launcher, Receiver() as receiver:
        run([*launcher, "train.py"], tmp_path, receiver)
        steps = steps_of(receiver.snapshot())
    assert [step.number for step in steps] == [0, 1, 2]
    for step in steps:
        assert step.incomplete == []
        assert {span.process.instance for span in step.spans} == {"0", "1"}
        assert stages(step) == ["rank", "rank"]
        barriers = {
            span.process.instance: span.seconds for span in step.spans if span.name == "barrier"
        }
        if step.number != 1:  # DDP's second forward rebuilds its buckets, and waits
            assert barriers["0"] > barriers["1"]  # the slow rank has the shortest one


TRL = """
import sys, types
from transformers import TrainerControl, TrainerState

class ProfilingContext:
    def __init__(self, name):
        self.name = "GRPOTrainer." + name

    def __enter__(self): ...
    def __exit__(self, *error): ...

class GRPOTrainer:
    accelerator = types.SimpleNamespace(process_index=0)

    def add_callback(self, callback):
        self.callback = callback

    def training_step(self):
        with ProfilingContext("_prepare_inputs"):
            for name in ("transformers.generate", "_calculate_rewards"):
                with ProfilingContext(name):
                    pass
        with ProfilingContext("compute_loss"):
            pass

    def train(self):
        # Real arguments need accelerate.
        arguments, control = types.SimpleNamespace(to_sanitized_dict=dict), TrainerControl()
        self.callback.on_train_begin(arguments, TrainerState(), control)
        for step in range(2):
            state = TrainerState(global_step=step)
            self.callback.on_step_begin(arguments, state, control)
            self.training_step()
            self.callback.on_pre_optimizer_step(arguments, state, control)
            self.callback.on_optimizer_step(arguments, state, control)
            self.callback.on_step_end(arguments, state, control)
        self.callback.on_train_end(arguments, state, control)

for name in ("trl", "trl.extras", "trl.extras.profiling"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["trl.extras.profiling"].ProfilingContext = ProfilingContext
trainer = GRPOTrainer()
"""

VERL = """
import sys, types
from contextlib import contextmanager

@contextmanager
def marked_timer(name, timing_raw, color=None, domain=None, category=None):
    yield
    timing_raw[name] = 1.0

class Tracking:
    def __init__(self, project_name, experiment_name, default_backend="console", config=None): ...
    def log(self, data, step, backend=None): ...
    def finish(self, exit_code=0): ...

class SkipManager:
    step = -1  # as in trainers that do not set it

for name in ("", ".utils", ".utils.profiler", ".utils.tracking", ".utils.skip",
             ".utils.skip.skip_manager"):
    module = sys.modules["verl" + name] = types.ModuleType("verl" + name)
    parent, _, own = ("verl" + name).rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, module)
sys.modules["verl.utils.profiler"].marked_timer = marked_timer
sys.modules["verl.utils.tracking"].Tracking = Tracking
sys.modules["verl.utils.skip.skip_manager"].SkipManager = SkipManager
"""

VERL_TRAINER = """
from verl.utils.profiler import marked_timer

Tracking("my-project", "my-run")
for _ in range(2):
    times = {}
    with marked_timer("step", times):
        for name in ("gen", "reward", "old_log_prob", "ref", "adv", "update_actor"):
            with marked_timer(name, times, color="red"):
                pass
    assert len(times) == 7
"""


SKYRL = """
import sys, types

class Timer:
    def __init__(self, message, update_dict=None):
        self.message = message

    def __enter__(self): ...
    def __exit__(self, *error): ...

class RayPPOTrainer:
    global_step, dynamic_sampling_state = 1, None

class Tracking:
    def log(self, data, step, commit=False): ...

for name in ("", ".train", ".train.trainer", ".train.utils", ".train.utils.tracking"):
    sys.modules["skyrl" + name] = types.ModuleType("skyrl" + name)
sys.modules["skyrl.train.trainer"].RayPPOTrainer = RayPPOTrainer
sys.modules["skyrl.train.utils"].Timer = Timer
sys.modules["skyrl.train.utils.tracking"].Tracking = Tracking

class experiment:
    def run():
        trainer = RayPPOTrainer()
        for _ in range(2):
            with Timer("step"):
                for name in ("generate", "train_critic_and_policy", "sync_weights"):
                    with Timer(name, {}):
                        pass
            trainer.global_step += 1
"""


@pytest.mark.parametrize(
    ("page", "before", "after", "expected"),
    [
        ("trace-trl", TRL, "", ["rollout", "forward", "backward", "optimizer_step"]),
        (
            "trace-verl",
            VERL,
            VERL_TRAINER,
            ["rollout", "reward", "logprobs", "reference", "advantages", "train"],
        ),
        ("trace-skyrl", SKYRL, "", ["rollout", "train", "refit"]),
    ],
    ids=["trl", "verl", "skyrl"],
)
def test_steps_have_their_stages(
    tmp_path: Path, page: str, before: str, after: str, expected: list[str]
) -> None:
    with Receiver() as receiver:
        program = before + blocks(page, "python") + after
        run([sys.executable, "-c", program], tmp_path, receiver)
        steps = steps_of(receiver.snapshot())
    assert [(step.run_id, step.number) for step in steps] == [("my-run", 0), ("my-run", 1)]
    for step in steps:
        assert step.incomplete == []
        assert stages(step) == expected
        for rollout in step.spans:
            if page == "trace-trl" and rollout.name == "rollout":
                inside = [span.name for span in step.children(rollout.span_id)]
                assert inside == ["generate", "environment_step"]


def test_systemd_unit_is_valid(tmp_path: Path) -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(blocks("dashboard-service", "ini"))
    assert unit.sections() == ["Unit", "Service", "Install"]
    words = unit["Service"]["ExecStart"].split()
    help_text = subprocess.run(
        [sys.executable, "-m", "dataplane_admin", "serve", "--help"],
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    for option in re.findall(r"--[\w-]+", " ".join(words)):
        assert option in help_text, option
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze, of the Debian package systemd")
    path = tmp_path / "dataplane-admin.service"
    text = blocks("dashboard-service", "ini").replace(words[0], sys.executable)
    path.write_text(text)
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", path], capture_output=True, text=True, timeout=60
    )
    assert "dataplane-admin.service" not in checked.stderr, checked.stderr
