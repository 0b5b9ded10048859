"""SkyRL 0.4.0's own entry point and trainer, traced by the adapter in a separate environment.

SkyRL needs Python 3.12, and its workers need GPUs. So what they compute is replaced, and so is Ray,
which would only run the entry point in another process.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from integration.environments import ROOT, UV, create_environment

from observability.receiver import Receiver
from observability.views import steps_of

SKYRL = ["skyrl==0.4.0", "skyrl-gym"]
IMPORTED = [
    "aiohttp",
    "cloudpathlib",
    "datasets",
    "httpx",
    "jaxtyping",
    "loguru",
    "omegaconf",
    "pybase64",
    "ray==2.57.0",
    "tensordict==0.10.0",
    "torch==2.13.0",
    "torchdata",
    "transformers",
]
"""Imports of SkyRL's trainer; `skyrl[skyrl-train]` would compile kernels for GPUs as well."""

TRAIN = """
import asyncio, sys, time
from types import SimpleNamespace
import ray, torch
import skyrl.train.trainer as module
from skyrl.train.entrypoints import main_base
from skyrl.train.utils import Timer
from skyrl.train.utils.tracking import Tracking

async def wait(*args):
    time.sleep(0.01)

class Batch(dict):
    def __init__(self, **columns):
        super().__init__(columns)
        self.metadata = {"uids": []}

class Trainer(module.RayPPOTrainer):
    def _build_train_dataloader_and_compute_training_steps(self):
        self.train_dataloader, self.total_training_steps = [[{}]] * 4, 9

    def load_checkpoints(self):
        return 5, None  # as after a resume

    async def generate(self, prompts):
        return {"response_ids": [[1]], "trajectory_ids": []}

    def handle_dynamic_sampling(self, output, uids):  # needs two rounds for each step
        again = self.dynamic_sampling_state is None
        self.dynamic_sampling_state = {} if again else None
        return output, uids, again

    def convert_to_training_input(self, output, uids):
        return Batch(rewards=0, attention_mask=torch.ones(1, 1))

    def train_critic_and_policy(self, batch):
        with Timer("policy_train", self.all_timings):
            if self.global_step == int(FAILING):
                raise RuntimeError("out of memory")
        return {}

    def init_weight_sync_state(self): ...
    def save_checkpoints(self): ...
    _remove_tail_data = fwd_logprobs_values_reward = compute_advantages_and_returns = (
        lambda self, batch: batch
    )
    postprocess_generator_output = lambda self, output, uids: (output, uids)

module.prepare_generator_input = lambda *args: ({"prompts": [[]]}, ["a"])

class Experiment(main_base.BasePPOExp):
    def __init__(self, cfg):
        self.cfg = cfg

    def _setup_trainer(self):
        settings = self.cfg.trainer
        tracker = Tracking(settings.project_name, settings.run_name, settings.logger)
        generator = SimpleNamespace(sleep=wait)
        self.trainer = Trainer(self.cfg, tracker, None, None, generator, None)
        self.trainer.dispatch = SimpleNamespace(
            save_weights_for_sampler=wait, get_timing_metrics=dict,
            finalize_pending_saves=lambda model: None,
        )
        return self.trainer

main_base.BasePPOExp = Experiment
main_base.validate_cfg = main_base.initialize_ray = lambda cfg: None
ray.remote = lambda **options: lambda function: SimpleNamespace(remote=function)
ray.get = lambda result: result
sys.argv += [
    "trainer.override_entrypoint=observability.adapters.skyrl", "trainer.run_name=my-run",
    "trainer.logger=console", "trainer.max_training_steps=7", "trainer.epochs=9",
    "trainer.eval_before_train=false", "trainer.eval_interval=-1", "trainer.ckpt_interval=7",
    "trainer.print_example_interval=-1", "trainer.enable_ray_gpu_monitor=false",
    "trainer.algorithm.dynamic_sampling.type=filter", "trainer.hf_save_interval=-1",
    "generator.inference_engine.enable_ray_prometheus_stats=false",
]
originals = Timer.__enter__, Timer.__exit__, module.RayPPOTrainer.__init__
try:
    main_base.main()
finally:
    assert originals == (Timer.__enter__, Timer.__exit__, module.RayPPOTrainer.__init__)
"""

STAGES = [
    "rollout",
    "rollout",
    "postprocess_generator_output",
    "convert_to_training_input",
    "logprobs",
    "advantages",
    "train",
]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Install SkyRL, and return the Python that has it."""
    find = [UV, "python", "find", "--no-python-downloads", "--no-project", ">=3.12,<3.14"]
    search = subprocess.run(find, capture_output=True, text=True, timeout=60)
    if search.returncode:
        pytest.skip("needs Python 3.12 or 3.13, as SkyRL does")
    folder = tmp_path_factory.mktemp("skyrl") / "venv"
    workspace = [str(ROOT / "packages/dataplane-core"), f"{ROOT}/packages/observability[skyrl]"]
    return create_environment(
        folder, search.stdout.strip(), [*IMPORTED, *workspace], ["--no-deps", *SKYRL]
    )


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("failing", [False, True], ids=["complete", "failed"])
def test_training_loop_has_a_trace_per_step(python: str, tmp_path: Path, failing: bool) -> None:
    with Receiver() as receiver:
        environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}
        environment.pop("RUN_ID", None)
        done = subprocess.run(
            [python, "-c", f"FAILING = {7 if failing else -1}\n{TRAIN}"],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
        )
        steps = steps_of(receiver.snapshot())
    assert (done.returncode == 0) != failing, done.stdout + done.stderr
    # SkyRL counts steps from 1, rl.step from 0.
    assert [(step.run_id, step.number) for step in steps] == [("my-run", 5), ("my-run", 6)]
    first, last = ([span.name for span in step.children(step.root.span_id)] for step in steps)
    assert steps[0].incomplete == []
    assert first == [*STAGES, "refit"]
    if failing:
        assert last == STAGES
        assert steps[1].root.outcome == "error"
        assert all("failed: RuntimeError" in reason for reason in steps[1].incomplete)
    else:
        assert steps[1].incomplete == []
        assert last == [*STAGES, "save_checkpoints", "refit"]
