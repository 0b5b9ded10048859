"""An asynchronous run on Ray: staleness, lost generators, and a resume without lost prompts."""

from __future__ import annotations

import json
import random
import signal
import subprocess
from collections import Counter
from contextlib import suppress

import psutil
import pytest
from integration.waiting import wait_until

import grpo_trainer
from grpo_trainer import RunDisplay
from grpo_trainer.errors import DynamicSamplingError, WorkerError
from grpo_trainer.rollout.journal_file import places  # noqa: TID251  # what a run has recorded

pytestmark = pytest.mark.slow

STEPS, PROMPTS, GROUP, STALENESS = 5, 4, 4, 2
CHECKPOINT = 3


@pytest.fixture(scope="module")
def async_config(local_ray, configure, model_folder, questions, tmp_path_factory):
    """Function that configures an asynchronous run; takes dotted keys to change."""
    prompts = tmp_path_factory.mktemp("data") / "train.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": q, "answer": a}) + "\n" for q, a in questions.items())
    )
    return lambda changes=(): configure(
        {
            "run.output": str(tmp_path_factory.mktemp("runs")),
            "data.train": str(prompts),
            "policy.model": {
                "kind": "pretrained",
                "name": str(model_folder),
                "use_chat_template": False,
            },
            "policy.data_parallel": 2,
            "grpo.mode": "async",
            "grpo.num_steps": STEPS,
            "grpo.num_prompts_per_step": PROMPTS,
            "grpo.num_generations_per_prompt": GROUP,
            "grpo.asynchronous.max_staleness": STALENESS,
            "grpo.asynchronous.generators": 2,
            "grpo.asynchronous.prompts_per_rollout": 1,
            "grpo.asynchronous.concurrent_rollouts": 2,
            "grpo.asynchronous.prompts_per_claim": 1,
            "policy.generation.simulated_latency": {"median_s": 0.05, "sigma": 1.0},
            "checkpointing": {"every_steps": CHECKPOINT, "keep_last": 9, "journal": False},
            "validation.every_steps": 0,
            **dict(changes),
        }
    )


class Recorder(RunDisplay):
    """Display that records steps and notices, and kills a process in the second step."""

    def __init__(self, victim=None):
        self.records, self.notices, self._victim = [], [], victim

    def notice(self, text):
        self.notices.append(text)

    def finished_step(self, record):
        self.records.append(record)

    def phase(self, name):
        if self._victim and name == "train" and len(self.records) == 1:
            victims = [
                process
                for process in psutil.Process().children(recursive=True)
                if process.cmdline() and process.cmdline()[0].startswith(self._victim)
            ]
            victims[-1].send_signal(signal.SIGKILL)
            self._victim = None


def positions(sample_ids):
    return Counter(int(each.partition("_")[0]) for each in sample_ids)


@pytest.fixture(scope="module")
def run(async_config):
    """A run that lost a generation worker, with the ids that it trained by step."""
    display, trained = Recorder("ray::GenerationWorker"), []

    def observe(name, direction, value):
        if direction == "received" and hasattr(value, "sample_ids"):
            trained.append(value.sample_ids)

    result = grpo_trainer.train(async_config(), display=display, observer=observe)
    return result, display, trained


def test_no_trained_sample_is_too_stale(run):
    result, _, _ = run
    assert len(result.history) == STEPS
    for step, record in enumerate(result.history):
        assert 0 <= record["staleness"] <= record["staleness_max"] <= min(step, STALENESS)
        assert record["samples"] == PROMPTS * GROUP


def test_a_killed_generator_is_replaced_and_its_prompts_are_played(run):
    result, display, _ = run
    assert [each for each in display.notices if each.startswith("continuing without")]
    assert 1 in [record["generators"] for record in result.history[1:]]
    assert "generation worker" in "".join(display.notices)


def test_each_prompt_is_trained_once_and_complete(run):
    _, _, trained = run
    counts = positions(each for ids in trained for each in ids)
    assert set(counts.values()) == {GROUP}
    assert len(counts) == STEPS * PROMPTS
    ids = [each for part in trained for each in part]
    assert len(ids) == len(set(ids))


def test_every_taken_prompt_is_trained_dropped_or_pending(run):
    result, _, trained = run
    [path] = (result.folder / "checkpoints").glob(f"step-*{CHECKPOINT}/state.json")
    state = json.loads(path.read_text())["state"]
    ranks = 2
    until = [each for part in trained[: CHECKPOINT * ranks] for each in part]
    done, pending = set(positions(until)), set(state["pending_prompts"])
    dropped = sum(record["stale_groups"] for record in state["history"])
    assert not done & pending
    assert len(done) + len(pending) + dropped == state["prompts_position"]
    assert done | pending <= set(range(state["prompts_position"]))


def test_a_resume_plays_pending_prompts_again(run):
    result, _, _ = run
    folder = result.folder
    # The last checkpoint is that of the last step; go back to the one before.
    [newest] = (folder / "checkpoints").glob(f"step-*{STEPS}")
    [path] = (folder / "checkpoints").glob(f"step-*{CHECKPOINT}/state.json")
    state = json.loads(path.read_text())["state"]
    newest.rename(folder / "newest")
    display = Recorder()
    again = grpo_trainer.resume(folder, display=display)
    assert [record["step"] for record in display.records] == [*range(CHECKPOINT + 1, STEPS + 1)]
    assert again.history[:CHECKPOINT] == state["history"]
    assert all(record["staleness_max"] <= STALENESS for record in display.records)


class Crash:
    """A run of eight steps in a separate process, with a separate Ray cluster."""

    def __init__(self, config, folder, command_line):
        self._command_line = command_line
        path = folder / "config.yaml"
        path.write_text(config.model_dump_json())
        self.process = command_line.start("train", "--config", path)
        try:
            wait_until(lambda: [*folder.glob("demo/*/checkpoints/step-*2")], 180)
        except BaseException:
            self.kill_all()
            raise
        [self.folder] = folder.glob("demo/*")

    def kill(self, name):
        """Kill the processes whose command begins with ``name``."""
        for each in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                command = each.cmdline()
                if command and command[0].rpartition("/")[2].startswith(name):
                    each.kill()

    def kill_all(self):
        """Kill the driver and its Ray cluster at once."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.communicate()
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.kill()

    def finish(self):
        """Resume the run if it failed; return its records and the state of its last checkpoint."""
        if self.process.poll() is None:
            self.process.communicate(timeout=300)
        if self.process.returncode != 0:
            done = self._command_line.run("resume", self.folder, timeout=300)
            assert done.returncode == 0, done.stderr
        records = (self.folder / "metrics.jsonl").read_text().splitlines()
        [newest] = self.folder.glob("checkpoints/step-*8/state.json")
        return [json.loads(each) for each in records], json.loads(newest.read_text())["state"]


@pytest.fixture
def crashing(async_config, command_line, tmp_path):
    """Function that starts a `Crash`, with a journal, and returns it after two steps."""
    started = []

    def start(changes=()):
        changes = {
            "run.output": str(tmp_path),
            "grpo.num_steps": 8,
            "checkpointing": {"every_steps": 2, "keep_last": 2, "journal": True},
            **dict(changes),
        }
        started.append(Crash(async_config(changes), tmp_path, command_line))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.kill_all()


def check_every_prompt_was_trained_once(history, state):
    """A position that was neither trained nor dropped would be pending."""
    assert [record["step"] for record in history] == [*range(1, 9)]
    dropped = sum(record["stale_groups"] for record in history)
    assert state["pending_prompts"] == []
    assert state["prompts_position"] == 8 * PROMPTS + dropped


@pytest.mark.timeout(700)  # two starts of Ray
def test_a_killed_run_generates_no_finished_group_again(crashing):
    crash = crashing()
    crash.kill_all()
    assert [*(crash.folder / "journal").iterdir()]
    history, state = crash.finish()
    assert sum(record["restored_groups"] for record in history) > 0
    check_every_prompt_was_trained_once(history, state)


@pytest.mark.timeout(700)  # two starts of Ray
def test_a_resume_continues_responses_that_were_half_generated(crashing):
    latency = {"median_s": 3.0, "sigma": 0.0}
    crash = crashing(
        {"policy.generation.simulated_latency": latency, "policy.generation.max_new_tokens": 10}
    )
    journal = crash.folder / "journal"

    def is_half_generated():
        finished = {place.position for place in places(journal, "group")}
        lengths = {
            place.position: max(row["end"] for row in place.facts["rows"])
            for place in places(journal, "response")
        }
        return any(length <= 5 for each, length in lengths.items() if each not in finished)

    wait_until(is_half_generated, 60)
    crash.kill_all()
    history, state = crash.finish()
    assert sum(record["continued_tokens"] for record in history) > 0
    check_every_prompt_was_trained_once(history, state)


@pytest.mark.long
@pytest.mark.timeout(700)
@pytest.mark.parametrize("seed", range(20))
def test_a_kill_at_any_moment_loses_and_repeats_no_prompt(crashing, seed):
    draw = random.Random(seed)
    victim = draw.choice(["all", "ray::Streaming", "ray::Generator", "ray::Generation", "raylet"])
    delay_s = draw.uniform(0.0, 6.0)
    crash = crashing()
    with suppress(subprocess.TimeoutExpired):
        crash.process.wait(delay_s)
    if crash.process.poll() is None:
        crash.kill_all() if victim == "all" else crash.kill(victim)
    check_every_prompt_was_trained_once(*crash.finish())


def test_run_ends_if_too_few_generators_remain(async_config):
    config = async_config(
        {"grpo.asynchronous.generators": 1, "grpo.asynchronous.min_generators": 1}
    )
    with pytest.raises(WorkerError, match="generation worker died"):
        grpo_trainer.train(config, display=Recorder("ray::GenerationWorker"))


@pytest.mark.parametrize("when_short", ["proceed", "raise"])
def test_a_step_that_finds_only_equal_rewards_ends(async_config, tmp_path, when_short):
    unsolvable = tmp_path / "train.jsonl"
    unsolvable.write_text(json.dumps({"prompt": "1+1", "answer": "none of these"}) + "\n")
    config = async_config(
        {
            "data.train": str(unsolvable),
            "grpo.num_steps": 2,
            "grpo.dynamic_sampling": {"enabled": True, "max_batches": 2, "when_short": when_short},
        }
    )
    if when_short == "raise":
        with pytest.raises(DynamicSamplingError, match="step 1 were in groups of equal rewards"):
            grpo_trainer.train(config)
        return
    history = grpo_trainer.train(config).history
    assert [record["samples"] for record in history] == [PROMPTS * GROUP] * 2
    # The second step tries again, instead of training on what filled the first.
    assert all(record["filtered_groups"] > 0 for record in history)
    assert all(record["masked_groups"] > 0 for record in history)
    assert [record["tokens"] for record in history] == [0, 0]
    assert [record["grad_norm"] for record in history] == [0, 0]
