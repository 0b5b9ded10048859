"""An asynchronous run that is killed and resumed trains each prompt once.

Imports internals: nothing public reads a journal.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from contextlib import contextmanager, suppress

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from integration.killable_run import DRIVER, EVERYTHING, KillableRun, trained_samples
from integration.waiting import wait_until

from grpo_trainer.rollout.journal_file import places

pytestmark = pytest.mark.slow

PROMPTS, GROUP = 4, 4
VICTIMS = [
    EVERYTHING,
    DRIVER,
    "ray::StreamingPolicyWorker",
    "ray::Generator",
    "ray::GenerationWorker",
    "ray::UnitActor",
    "ray::DirectoryActor",
    "raylet",
]
KILLS = st.lists(st.tuples(st.sampled_from(VICTIMS), st.floats(0.0, 4.0)), min_size=10, max_size=10)


class Crashing:
    """A run that is resumed after each kill that ends it."""

    def __init__(self, run, steps):
        self.run, self.steps, self.was_killed = run, steps, False

    def finished_steps(self):
        return sum(event["event"] == "step" for event in self.run.events())

    def advance(self):
        """Wait for the next step, resume if necessary; return False if the run is complete."""
        before = self.finished_steps()

        def advanced():
            return self.finished_steps() > before or self.run.process.poll() is not None

        while True:
            wait_until(advanced, 300, state=self.describe)
            if self.run.process.poll() is None:
                return True
            if self.run.process.returncode == 0:
                return False
            self.resume()
            before = self.finished_steps()

    def resume(self):
        assert self.was_killed, f"the run failed without a kill: {self.describe()}"
        self.was_killed = False
        self.run.start()

    def kill(self, victim, delay_s):
        with suppress(subprocess.TimeoutExpired):
            self.run.process.wait(delay_s)
        if self.run.process.poll() is None:
            self.was_killed |= self.run.kill(victim)

    def finish(self):
        while self.advance():
            pass
        records = (self.run.run_folder / "metrics.jsonl").read_text().splitlines()
        state = json.loads((self.run.checkpoints[self.steps] / "state.json").read_text())["state"]
        return [json.loads(each) for each in records], state

    def describe(self):
        kills = [event for event in self.run.events() if event["event"] in ("kill", "notice")]
        return f"{kills[-5:]} {self.run.log()}"


@pytest.fixture(scope="module")
def crashing(configure_async, tmp_path_factory):
    """Context of a `Crashing` with a journal and a checkpoint."""

    @contextmanager
    def start(steps, every_steps, latency):
        folder = tmp_path_factory.mktemp("crash")
        changes = {
            "run.output": str(folder),
            "grpo.num_steps": steps,
            "checkpointing": {"every_steps": every_steps, "keep_last": 2, "journal": True},
            "policy.generation.simulated_latency": latency,
            "policy.generation.max_new_tokens": 10,
        }
        run = KillableRun(folder, configure_async(changes).model_dump_json())
        crash = Crashing(run, steps)
        try:
            # Without a checkpoint, a run cannot be resumed.
            wait_until(lambda: run.checkpoints or run.process.poll(), 180, state=run.log)
            yield crash
        finally:
            run.close()

    return start


def check_every_prompt_was_trained_once(crash):
    """Check that all prompts taken were trained, or dropped as stale, as without a crash."""
    history, state = crash.finish()
    assert [record["step"] for record in history] == [*range(1, crash.steps + 1)]
    assert state["pending_prompts"] == []
    counts = Counter(trained_samples(crash.run.events()))
    assert set(counts.values()) == {1}
    groups = Counter(int(each.partition("_")[0]) for each in counts)
    assert set(groups.values()) == {GROUP}
    assert len(groups) == crash.steps * PROMPTS
    unused = {*range(state["prompts_position"])} - groups.keys()
    assert len(unused) == sum(record["stale_groups"] for record in history)
    assert max(groups) < state["prompts_position"]
    return history


def half_generated(journal):
    """Return the positions of prompts whose responses have some of their tokens in the journal."""
    finished = {place.position for place in places(journal, "group")}
    lengths = {
        place.position: max(row["end"] for row in place.facts["rows"])
        for place in places(journal, "response")
    }
    return [each for each, length in lengths.items() if length <= 5 and each not in finished]


@pytest.mark.timeout(700)  # two starts of Ray
def test_killed_run_resumes_with_its_groups_and_responses(crashing):
    with crashing(8, 4, {"median_s": 3.0, "sigma": 0.0}) as crash:
        journal = crash.run.run_folder / "journal"
        crash.advance()  # its step has groups in the journal that no checkpoint contains
        wait_until(lambda: half_generated(journal), 60)
        crash.kill(EVERYTHING, 0.0)
        assert crash.was_killed
        history = check_every_prompt_was_trained_once(crash)
    assert sum(record["restored_groups"] for record in history) > 0
    assert sum(record["continued_tokens"] for record in history) > 0


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)  # up to 200 starts of Ray
@settings(
    max_examples=20,
    phases=[Phase.explicit, Phase.generate],  # an example takes minutes: too long to shrink
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@example(kills=[(victim, 1.0) for victim in VICTIMS])
@given(kills=KILLS)
def test_kills_at_any_moments_lose_and_repeat_no_prompt(crashing, kills):
    with crashing(40, 2, {"median_s": 0.2, "sigma": 1.0}) as crash:
        for victim, delay_s in kills:
            crash.kill(victim, delay_s)
            if not crash.advance():
                break
        check_every_prompt_was_trained_once(crash)
