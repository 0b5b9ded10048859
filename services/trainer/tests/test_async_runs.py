"""An asynchronous run on Ray: staleness, lost generators, and a resume."""

from __future__ import annotations

import json
import signal
from collections import Counter

import psutil
import pytest

import grpo_trainer
from grpo_trainer import RunDisplay
from grpo_trainer.errors import DynamicSamplingError, WorkerError
from observability.receiver import Receiver

pytestmark = pytest.mark.slow

STEPS, PROMPTS, GROUP, STALENESS = 5, 4, 4, 2
CHECKPOINT = 3


@pytest.fixture(scope="module")
def async_config(local_ray, configure_async):
    """Function that configures a run on this process's Ray; takes dotted keys to change."""
    base = {
        "grpo.num_steps": STEPS,
        "grpo.num_prompts_per_step": PROMPTS,
        "grpo.num_generations_per_prompt": GROUP,
        "grpo.asynchronous.max_staleness": STALENESS,
        "checkpointing": {"every_steps": CHECKPOINT, "keep_last": 9, "journal": False},
    }
    return lambda changes=(): configure_async({**base, **dict(changes)})


class Recorder(RunDisplay):
    """Display that records steps and notices, and kills a process in a phase of a step.

    ``which`` is the place of the killed process among those of its name, ``after`` the number of
    steps before that phase.
    """

    def __init__(self, victim=None, which=-1, phase="train", after=1):
        self.records, self.notices = [], []
        self._victim, self._which, self._phase, self._after = victim, which, phase, after

    def notice(self, text):
        self.notices.append(text)

    def finished_step(self, record):
        self.records.append(record)

    def phase(self, name):
        if self._victim and name == self._phase and len(self.records) == self._after:
            victims = [
                process
                for process in psutil.Process().children(recursive=True)
                if process.cmdline() and process.cmdline()[0].startswith(self._victim)
            ]
            victims[self._which].send_signal(signal.SIGKILL)
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


def test_killed_generator_is_replaced_without_losing_prompts(run):
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


def test_a_resume_generates_pending_prompts_again(run):
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


@pytest.mark.parametrize("phase", [pytest.param("train", marks=pytest.mark.long), "validation"])
def test_validation_survives_the_loss_of_the_first_generator(async_config, phase):
    streams = []

    def observe(name, direction, value):
        if direction == "sent" and name.startswith("generation worker"):
            streams.extend(each for each in value[0] if str(each).startswith("generation worker"))

    display = Recorder("ray::GenerationWorker", which=0, phase=phase)
    changes = {"grpo.num_steps": 2, "validation.every_steps": 2}
    result = grpo_trainer.train(async_config(changes), display=display, observer=observe)
    assert "continuing without" in "".join(display.notices)
    validated = [record["step"] for record in result.history if "validation_reward" in record]
    assert validated == [2]
    assert len(set(streams)) == len(streams) >= 2


def test_run_ends_if_too_few_generators_remain(async_config):
    config = async_config(
        {"grpo.asynchronous.generators": 1, "grpo.asynchronous.min_generators": 1}
    )
    with pytest.raises(WorkerError, match="generation worker died"):
        grpo_trainer.train(config, display=Recorder("ray::GenerationWorker"))


# test_steps.py tests a synchronous run.
@pytest.mark.parametrize("when_short", ["proceed", pytest.param("raise", marks=pytest.mark.long)])
def test_a_step_that_finds_only_equal_rewards_ends(async_config, tmp_path, when_short):
    unsolvable = tmp_path / "train.jsonl"
    # No token has this character, so that no response can begin like the answer.
    unsolvable.write_text(json.dumps({"prompt": "1+1", "answer": "\N{EURO SIGN}"}) + "\n")
    changes = {
        "data.train": str(unsolvable),
        "grpo.num_steps": 2,
        "grpo.dynamic_sampling": {"enabled": True, "max_batches": 2, "when_short": when_short},
    }
    if when_short == "raise":
        with pytest.raises(DynamicSamplingError, match="step 1 were in groups of equal rewards"):
            grpo_trainer.train(async_config(changes))
        return
    with Receiver() as receiver:
        changes |= {"tracing.enabled": True, "tracing.endpoint": receiver.endpoint}
        history = grpo_trainer.train(async_config(changes)).history
        events = receiver.snapshot().events
    steps = {event.attributes.get("rl.step") for event in events if event.name == "dropped"}
    assert 0 in steps <= {0, 1}
    assert [record["samples"] for record in history] == [PROMPTS * GROUP] * 2
    # The second step generates new groups, instead of training on the filler of the first.
    assert all(record["filtered_groups"] > 0 for record in history)
    assert all(record["masked_groups"] > 0 for record in history)
    assert [record["tokens"] for record in history] == [0, 0]
    assert [record["grad_norm"] for record in history] == [0, 0]
