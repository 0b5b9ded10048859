"""Recipes of docs/recipes whose programs need a launcher, or packages that are not installed here.

TRL and verl are replaced by modules with the names that the recipes use. A test marked `long` finds
these names, and the calls of them, in the wheels of TRL 1.16 and verl 0.9.1.
"""

from __future__ import annotations

import ast
import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from observability.receiver import Receiver
from observability.views import Step, steps_of

RECIPES = Path(__file__).parents[1] / "docs" / "recipes"


def blocks(name: str, language: str) -> str:
    text = (RECIPES / f"{name}.md").read_text()
    return "\n".join(re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL))


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
    (tmp_path / "train.py").write_text(blocks("trace-torchrun", "python"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with Receiver() as receiver:
        run([*launcher, "--nproc-per-node", "2", "train.py"], tmp_path, receiver)
        steps = steps_of(receiver.snapshot())
    assert [step.number for step in steps] == [0, 1, 2]
    for step in steps:
        assert step.incomplete == []
        assert {span.process.instance for span in step.spans} == {"0", "1"}
        assert stages(step) == ["rank", "rank"]


TRL = """
import sys, types
from transformers import TrainerControl, TrainerState

class GRPOTrainer:
    accelerator = types.SimpleNamespace(process_index=0)

    def add_callback(self, callback):
        self.callback = callback

    def training_step(self):
        self._generate([])
        self._calculate_rewards([])
        self.compute_loss(None)

    def _generate(self, prompts): ...
    def _calculate_rewards(self, inputs): ...
    def compute_loss(self, model): ...

    def train(self):
        arguments, control = None, TrainerControl()  # real arguments need accelerate
        for step in range(2):
            state = TrainerState(global_step=step)
            self.callback.on_step_begin(arguments, state, control)
            self.training_step()
            self.callback.on_pre_optimizer_step(arguments, state, control)
            self.callback.on_optimizer_step(arguments, state, control)
            self.callback.on_step_end(arguments, state, control)

sys.modules["trl"] = types.SimpleNamespace(GRPOTrainer=GRPOTrainer)
import traced_trl

trainer = traced_trl.TracedGRPOTrainer()
with traced_trl.trace(trainer, "my-run"):
    trainer.train()
"""


VERL = """
import sys, types
from contextlib import contextmanager

@contextmanager
def marked_timer(name, timing_raw, color=None, domain=None, category=None):
    yield
    timing_raw[name] = 1.0

debug = types.ModuleType("verl.utils.debug")
debug.marked_timer = marked_timer
for name in ("verl", "verl.utils"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["verl.utils.debug"] = sys.modules["verl.utils"].debug = debug
sys.modules["verl"].utils = sys.modules["verl.utils"]
import traced_verl

traced_verl.install()
from verl.utils.debug import marked_timer

for _ in range(2):
    times = {}
    with marked_timer("step", times):
        for name in ("gen", "reward", "old_log_prob", "ref", "adv", "update_actor"):
            with marked_timer(name, times, color="red"):
                pass
    assert len(times) == 7
"""


@pytest.mark.parametrize(
    ("page", "program", "expected"),
    [
        ("trace-trl", TRL, ["train", "optimizer_step"]),
        ("trace-verl", VERL, ["rollout", "reward", "logprobs", "reference", "adv", "train"]),
    ],
)
def test_steps_have_their_stages(
    tmp_path: Path, page: str, program: str, expected: list[str]
) -> None:
    module = page.replace("trace-", "traced_")
    (tmp_path / f"{module}.py").write_text(blocks(page, "python"))
    with Receiver() as receiver:
        run([sys.executable, "-c", program], tmp_path, receiver)
        steps = steps_of(receiver.snapshot())
    assert [step.number for step in steps] == [0, 1]
    for step in steps:
        assert step.incomplete == []
        assert stages(step) == expected
        for train in step.spans:
            if page == "trace-trl" and train.name == "train":
                inside = [span.name for span in step.children(train.span_id)]
                assert inside == ["rollout", "environment_step", "forward"]


@pytest.mark.long
def test_wheels_have_what_the_recipes_replace(tmp_path: Path) -> None:
    uv = shutil.which("uv") or str(Path(__file__).parents[1] / ".tools" / "bin" / "uv")
    install = [uv, "pip", "install", "--quiet", "--no-deps", "--python", sys.executable]
    wheels = ["trl==1.16.0", "verl==0.9.1"]
    subprocess.run([*install, "--target", str(tmp_path), *wheels], check=True, timeout=300)
    trainer = ast.parse((tmp_path / "trl" / "trainer" / "grpo_trainer.py").read_text())
    [grpo] = [n for n in trainer.body if isinstance(n, ast.ClassDef) and n.name == "GRPOTrainer"]
    methods = {node.name for node in grpo.body if isinstance(node, ast.FunctionDef)}
    replaced = set(re.findall(r"super\(\)\.(\w+)", blocks("trace-trl", "python")))
    assert replaced
    assert replaced <= methods
    for name in ("trainer/ppo/ray_trainer.py", "trainer/ppo/v1/trainer_sync.py"):
        source = (tmp_path / "verl" / name).read_text()
        assert "from verl.utils.debug import marked_timer" in source, name
        timed = set(re.findall(r'marked_timer\("(\w+)"', source))
        if name.endswith("ray_trainer.py"):
            assert {"step", "gen", "old_log_prob", "update_actor"} <= timed


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
