"""Runs that finish, fail, or are stopped, and that resume with equal results."""

from __future__ import annotations

import fcntl
import json
import resource
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

import matplotlib.image
import psutil
import pytest
from integration.waiting import wait_until
from safetensors import safe_open
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo_trainer
from grpo_trainer.errors import OutputError, WorkerError

pytestmark = pytest.mark.slow

STEPS = 6
ACTORS = ("ray::PolicyWorker", "ray::GenerationWorker", "ray::RolloutActor", "ray::VerifierEnv")


@pytest.fixture(scope="module")
def configure_run(local_ray, configure, model_folder, questions_file, tmp_path_factory):
    """Function that configures a run with two ranks and all features."""
    return lambda: configure(
        {
            "run.output": str(tmp_path_factory.mktemp("runs")),
            "data.train": str(questions_file),
            "policy.model": {
                "kind": "pretrained",
                "name": str(model_folder),
                "use_chat_template": False,
            },
            "policy.data_parallel": 2,
            "policy.dynamic_batching.enabled": True,
            "policy.dynamic_batching.max_tokens_per_microbatch": 96,
            "grpo.num_steps": STEPS,
            "grpo.num_generations_per_prompt": 8,
            "grpo.dynamic_sampling": {"enabled": True, "max_batches": 2, "when_short": "proceed"},
            "validation.every_steps": 2,
            "checkpointing": {"every_steps": 2, "keep_last": 2, "journal": False},
            "tracking.sinks": ["tensorboard"],
        }
    )


@pytest.fixture(scope="module")
def finished(configure_run):
    """Uninterrupted run."""
    return grpo_trainer.train(configure_run())


def without_times(history):
    """Return the metrics that do not depend on the clock."""
    return [
        {name: value for name, value in record.items() if name not in ("seconds", "tokens_per_s")}
        for record in history
    ]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def tracked_rewards(folder):
    events = EventAccumulator(str(folder / "tracking" / "tensorboard")).Reload()
    return [(event.step, event.value) for event in events.Scalars("reward")]


def call_timeout_of(folder):
    return json.loads((folder / "config.json").read_text())["cluster"]["call_timeout_s"]


def test_finished_run_has_all_documented_files(finished):
    assert [record["step"] for record in finished.history] == [*range(1, STEPS + 1)]
    assert any("loss" in record for record in finished.history)
    assert ["validation_reward" in record for record in finished.history] == [False, True] * 3
    assert finished.rewards == [record["reward"] for record in finished.history]
    folder = finished.folder
    files = [".lock", "checkpoints", "config.json", "metrics.jsonl", "reward.png", "tracking"]
    assert names(folder) == files
    assert metrics_of(folder) == finished.history
    assert matplotlib.image.imread(folder / "reward.png").shape[:2] == (630, 1200)
    assert names(folder / "checkpoints") == [f"step-{STEPS - 2:06d}", f"step-{STEPS:06d}"]


def test_checkpoint_has_model_and_tokenizer_but_no_pickle(finished, tokenizer):
    checkpoint = finished.folder / "checkpoints" / f"step-{STEPS:06d}"
    for path in checkpoint.rglob("*.*"):
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                assert list(file.keys())
        else:
            assert path.suffix == ".json"
            json.loads(path.read_text())
    model = AutoModelForCausalLM.from_pretrained(checkpoint / "model")
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    loaded = AutoTokenizer.from_pretrained(checkpoint / "model")
    assert loaded("max(1,2)=")["input_ids"] == tokenizer("max(1,2)=")["input_ids"]
    assert (loaded.pad_token_id, loaded.eos_token_id) == (
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
    )


def test_a_finished_run_is_resumed_without_doing_anything(finished):
    (finished.folder / ".lock").unlink()  # read-only storage has no lock
    before = {path: path.stat().st_mtime_ns for path in finished.folder.rglob("*")}
    assert grpo_trainer.resume(finished.folder) == finished
    assert {path: path.stat().st_mtime_ns for path in finished.folder.rglob("*")} == before


class Calling(grpo_trainer.RunDisplay):
    """Display that calls ``actions["start"]`` at the start, and ``actions[n]`` after step n."""

    def __init__(self, actions):
        self.actions = actions

    def started(self, folder, config, done_steps):
        self.folder = folder
        self.actions.get("start", lambda folder: None)(folder)

    def finished_step(self, record):
        self.actions.get(record["step"], lambda folder: None)(self.folder)


def actors(name=ACTORS):
    processes = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it exited meanwhile
            if " ".join(process.cmdline()).startswith(name):
                processes.append(process)
    return processes


def kill_generation_worker(folder):
    for process in actors("ray::GenerationWorker"):
        process.kill()


def check_lock(folder):
    """Check that the run's lock refuses a second process."""
    with (folder / ".lock").open("ab") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if (folder / "checkpoints").exists():
        with pytest.raises(OutputError, match=f"^{folder}: another process runs this run; wait"):
            grpo_trainer.resume(folder)


def fill_disks(folder):
    """Limit files of a policy worker to 30 kB, less than the model has."""
    for process in actors("ray::PolicyWorker"):
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))


def check_no_mapped_file(folder):
    """Check that no policy worker maps a checkpoint's file, which NFS could not remove."""
    for process in actors("ray::PolicyWorker"):
        assert str(folder / "checkpoints") not in Path(f"/proc/{process.pid}/maps").read_text()


@pytest.fixture(scope="module")
def failed(configure_run):
    """Folder of a run without disk space for its second checkpoint."""
    display = Calling({1: check_lock, 4: fill_disks})
    named = "^policy worker 0: checkpoint file .*step-000004.*/model: cannot be written: "
    with pytest.raises(WorkerError, match=named):
        grpo_trainer.train(configure_run(), display=display)
    return display.folder


def assert_written_files_stay(folder, done):
    wait_until(lambda: not actors(), state=actors)
    assert names(folder / "checkpoints") == ["step-000002"]
    assert [record["step"] for record in metrics_of(folder)] == [*range(1, done + 1)]


def test_a_full_disk_is_named_and_written_files_stay(failed):
    assert_written_files_stay(failed, 4)


@pytest.mark.long  # integration/test_traced_step.py kills a policy worker
def test_a_death_is_named_and_written_files_stay(failed):
    with pytest.raises(WorkerError, match=r"^generation worker died during "):
        grpo_trainer.resume(failed, display=Calling({3: kill_generation_worker}))
    assert_written_files_stay(failed, 3)


def test_a_resumed_run_equals_an_uninterrupted_one(failed, finished):
    display = Calling({"start": check_no_mapped_file, 3: check_lock})
    resumed = grpo_trainer.resume(failed, ["cluster.call_timeout_s=900"], display=display)
    assert call_timeout_of(failed) == 900
    assert without_times(resumed.history) == without_times(finished.history)
    assert metrics_of(failed) == resumed.history
    rewards = [(record["step"], pytest.approx(record["reward"])) for record in resumed.history]
    assert tracked_rewards(failed) == rewards  # without the steps that failed
    assert names(failed / "checkpoints") == names(finished.folder / "checkpoints")
    for name in ("model/model.safetensors", "optimizer.safetensors"):
        resumed_bytes, uninterrupted_bytes = (
            (folder / "checkpoints" / f"step-{STEPS:06d}" / name).read_bytes()
            for folder in (failed, finished.folder)
        )
        assert resumed_bytes == uninterrupted_bytes, name


@pytest.fixture
def command(command_line, config_file):
    """Function that starts the command with its own Ray, and waits for a line of its output."""
    temp_dir = tempfile.mkdtemp(prefix="gt-")
    processes = []

    def start(changes, until="run folder"):
        config = config_file({"cluster.temp_dir": temp_dir, "validation.every_steps": 0, **changes})
        process = command_line.start("train", "--config", config)
        processes.append(process)
        process.folder = None
        for line in process.stdout if until else ():
            if line.startswith("run folder"):
                process.folder = Path(line.split()[-1])
            if line.startswith(until):
                return process
        assert not until, process.stderr.read()
        return process

    start.temp_dir = temp_dir
    yield start
    for process in processes:
        process.kill()
    shutil.rmtree(temp_dir)


def terminate(process):
    """Return status, output and errors of a command after a SIGTERM."""
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


# dataplane-tq's tests kill the controller in every operation; integration/test_traced_step.py
# kills a rank.
@pytest.mark.long
def test_a_dead_process_ends_the_command_and_is_named(command):
    changes = {"grpo.num_steps": 500, "data_plane.transfer_queue_mirror": True}
    process = command(changes, until="step    2")
    family = psutil.Process(process.pid).children(recursive=True)
    [victim] = [each for each in family if "TransferQueueController" in " ".join(each.cmdline())]
    victim.kill()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.startswith("error: ")
    assert "TransferQueueController is dead" in errors
    assert errors.count("\n") == 1
    _, left = psutil.wait_procs(family, timeout=10)
    assert not left


# test_resume.py stops a run as a SIGTERM does, and test_signals.py checks what a SIGTERM requests.
@pytest.mark.long
def test_sigterm_ends_a_run_after_a_checkpoint_with_status_0(command):
    changes = {"grpo.num_steps": 500, "checkpointing.every_steps": 100}
    process = command(changes, until="step    2")
    status, output, errors = terminate(process)
    assert (status, errors) == (0, "")
    done = len(metrics_of(process.folder))
    advice = f"to continue: grpo-trainer resume {process.folder}"
    assert f"stopped after step {done}; {advice}" in output
    assert names(process.folder / "checkpoints") == [f"step-{done:06d}"]


@pytest.mark.long
def test_sigterm_after_the_last_checkpoint_ends_with_status_0(command):
    process = command({"grpo.num_steps": 1})
    checkpoint = process.folder / "checkpoints" / "step-000001"
    wait_until(lambda: checkpoint.exists() or process.poll() is not None)
    status, output, errors = terminate(process)
    assert (status, errors) == (0, "")
    assert "stopped after" not in output
    assert (process.folder / "reward.png").exists()


def test_sigterm_while_ray_starts_ends_with_143_and_no_process(command, processes_of):
    process = command({}, until="")
    started = wait_until(lambda: processes_of(f"{command.temp_dir}/"))
    status, _, errors = terminate(process)
    assert (status, errors) == (143, "")
    family = {*started, *processes_of(f"{command.temp_dir}/")}
    _, left = psutil.wait_procs(family, timeout=20)
    assert not left
