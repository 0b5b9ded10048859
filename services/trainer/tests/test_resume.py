"""What a resumed run takes from its checkpoint and from its folder, and what it does to them.

The steps themselves are left out: `test_runs.py` does them.
"""

from __future__ import annotations

import json
import shutil

import pytest
import yaml

import grpo_trainer
from grpo_trainer.checkpoint import (
    RunState,
    latest_checkpoint,
    load_state,
    save_checkpoint,
    written_files,
)
from grpo_trainer.config import DEMO_CONFIG
from grpo_trainer.errors import ConfigurationError, OutputError, WorkerError
from grpo_trainer.run_folder import create_run_folder
from grpo_trainer.signals import GracefulStop
from grpo_trainer.tokenizer import build_character_tokenizer, load_tokenizer


class Notices(grpo_trainer.RunDisplay):
    def __init__(self):
        self.told = []

    def notice(self, text):
        self.told.append(text)


def write_something(folder):
    (folder / "model").mkdir()
    for name in ("model/config.json", "model/model.safetensors", "optimizer.safetensors"):
        (folder / name).write_bytes(b"12345")
    return written_files(folder)


@pytest.fixture
def interrupted(configure, tmp_path):
    """The folder of a run with a checkpoint after its first step; called with more of its state."""
    config = configure({"run.output": str(tmp_path), "grpo.num_steps": 3})

    def make(**more):
        folder = create_run_folder(config)
        saved = {"config": config.model_dump(mode="json"), "prompts_position": 4, **more}
        state = RunState(step=1, history=[{"step": 1}], **saved)
        save_checkpoint(folder / "checkpoints", state, write_something, keep_last=1)
        return folder

    make.config = config
    return make


@pytest.fixture
def begun(monkeypatch):
    """What `run_steps` is called with, as keyword arguments; it does nothing."""
    calls = []

    def run_steps(config, inputs, folder, state, **more):
        calls.append({"config": config, "inputs": inputs, "folder": folder, "state": state, **more})
        return state.history

    monkeypatch.setattr("grpo_trainer.training.run_steps", run_steps)
    return calls


def test_an_overridden_configuration_is_the_run_s_from_then_on(interrupted, begun):
    folder = interrupted()
    grpo_trainer.resume(folder, ["cluster.call_timeout_s=900", "grpo.num_steps=5"])
    [call] = begun
    assert call["config"].cluster.call_timeout_s == 900
    assert call["state"].config == call["config"].model_dump(mode="json")


def test_a_refused_override_leaves_everything_as_it_is(interrupted, begun):
    folder = interrupted()
    before = (folder / "config.json").read_bytes()
    with pytest.raises(ConfigurationError, match=r"^run.seed: found 3"):
        grpo_trainer.resume(folder, ["cluster.call_timeout_s=900", "run.seed=3"])
    assert not begun
    assert (folder / "config.json").read_bytes() == before


def test_an_older_checkpoint_without_a_key_is_resumed_and_told_in_one_line(interrupted, begun):
    config = interrupted.config.model_dump(mode="json")
    del config["cluster"]["nodes_timeout_s"]
    folder = interrupted(config=config)
    display = Notices()
    grpo_trainer.resume(folder, display=display)
    shipped = yaml.safe_load(DEMO_CONFIG.read_text())["cluster"]["nodes_timeout_s"]
    [line] = display.told
    assert line.endswith(f"keys that it lacks: cluster.nodes_timeout_s={float(shipped)}")
    assert begun[0]["state"].config["cluster"]["nodes_timeout_s"] == shipped


def test_what_an_older_release_ignored_is_null_and_told_in_one_line(interrupted, begun):
    config = interrupted.config.model_dump(mode="json")
    config["grpo"] |= {"max_logprob_error": 2.0, "recompute_prev_logprobs": False}
    display = Notices()
    grpo_trainer.resume(interrupted(config=config), display=display)
    assert begun[0]["config"].grpo.max_logprob_error is None
    [line] = display.told
    assert line.endswith("ignored, which are null now: grpo.max_logprob_error=2.0")


def test_what_is_not_ignored_is_kept(interrupted, begun):
    config = interrupted.config.model_dump(mode="json")
    config["grpo"]["max_logprob_error"] = 2.0
    display = Notices()
    grpo_trainer.resume(interrupted(config=config), display=display)
    assert begun[0]["config"].grpo.max_logprob_error == 2.0
    assert not display.told


def test_the_folder_of_a_resumed_run_is_absolute(interrupted, begun, monkeypatch):
    folder = interrupted()
    monkeypatch.chdir(folder.parent)
    result = grpo_trainer.resume(folder.relative_to(folder.parent))
    assert result.folder == begun[0]["folder"] == folder
    assert begun[0]["checkpoint"].is_absolute()


class Fakes:
    """Stands for everything of a run that is a process; ``save`` writes a checkpoint's files."""

    def __init__(self):
        self.steps, self.saved, self.seen = [], [], []
        self.on_step = self.on_save = lambda step: None

    def install(self, monkeypatch):
        def save_model(model, folder, **more):
            folder.mkdir()

        for name in ("RunActors", "GRPOStep", "Policy"):
            monkeypatch.setattr(f"grpo_trainer.training.{name}", lambda *_, **more: self.made(more))
        monkeypatch.setattr("grpo_trainer.training.save_random_model", save_model)
        monkeypatch.setattr("grpo_trainer.training.save_reward_picture", lambda *_, **more: None)
        return self

    def made(self, more):
        self.prompts = more.get("prompts")
        return self

    calls = policy_workers = data_plane = weight_sync = None

    def close(self):
        pass

    def load(self, checkpoint):
        pass

    def see(self, folder):
        self.seen.append((folder, list(self.steps)))

    def run(self, step, report):
        self.prompts.take(4)
        report.metrics["reward"] = 0.0
        self.steps.append(step + 1)
        self.on_step(step + 1)

    def validate(self, step, prompts, report):
        return 0.0

    def save(self, folder):
        self.saved.append(self.steps[-1])
        self.on_save(self.steps[-1])
        return write_something(folder)


@pytest.fixture
def fakes(monkeypatch):
    return Fakes().install(monkeypatch)


@pytest.mark.parametrize(
    ("every", "asked_in", "saved"),
    [
        (2, "save", [2]),  # while the checkpoint is written
        (2, "step", [2]),  # of a step that is due
        (3, "step", [2]),  # of a step that is not due: saved before the end
        (1, "step", [1, 2]),
        (0, "step", []),  # a run that writes none
    ],
)
def test_a_stop_that_is_asked_in_the_second_step_or_its_checkpoint_ends_the_run_with_it(
    configure, tmp_path, fakes, every, asked_in, saved
):
    stop = GracefulStop()

    def ask(step):
        stop.asked = stop.asked or step == 2

    setattr(fakes, f"on_{asked_in}", ask)
    changes = {"checkpointing.every_steps": every, "grpo.num_steps": 6, "validation.every_steps": 0}
    config = configure({"run.output": str(tmp_path), **changes})
    result = grpo_trainer.train(config, stop=stop)
    assert (fakes.steps, fakes.saved) == ([1, 2], saved)
    assert result.stopped_early
    last = latest_checkpoint(result.folder / "checkpoints")
    assert (last and load_state(last).step) == (2 if every else None)


def test_a_stop_that_is_asked_in_the_last_checkpoint_ends_a_run_that_is_complete(
    configure, tmp_path, fakes
):
    stop = GracefulStop()
    fakes.on_save = lambda step: setattr(stop, "asked", True)
    changes = {"checkpointing.every_steps": 9, "grpo.num_steps": 3, "validation.every_steps": 0}
    result = grpo_trainer.train(configure({"run.output": str(tmp_path), **changes}), stop=stop)
    assert fakes.saved == [3]
    assert not result.stopped_early


@pytest.fixture
def begin(configure, tmp_path, fakes):
    """Trains two steps, with a checkpoint after each; returns the run's folder."""
    changes = {"run.output": str(tmp_path), "grpo.num_steps": 2, "checkpointing.every_steps": 1}
    return lambda more: grpo_trainer.train(configure({**changes, **more})).folder


@pytest.fixture
def dataset(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "1=", "answer": "1"}\n{"prompt": "2=", "answer": "2"}\n')
    return path


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text + '{"prompt": "3=", "answer": "3"}\n',
        lambda text: "".join(reversed(text.splitlines(keepends=True))),
        lambda text: text.replace('"answer": "2"', '"answer": "3"'),
    ],
    ids=["a line more", "another order", "another answer"],
)
@pytest.mark.parametrize("key", ["data.train", "data.validation"])
def test_a_data_set_that_changed_is_refused_by_name(dataset, fakes, begin, key, edit):
    folder = begin({key: str(dataset)})
    dataset.write_text(edit(dataset.read_text()))
    with pytest.raises(ConfigurationError) as refused:
        grpo_trainer.resume(folder, ["grpo.num_steps=3"])
    assert str(refused.value).startswith(f"{key}: {dataset}: found prompts of digest ")
    assert fakes.steps == [1, 2]


def test_a_data_set_that_has_the_same_prompts_is_taken(dataset, fakes, begin):
    folder = begin({"data.train": str(dataset), "validation.every_steps": 0})
    dataset.write_text("\n" + dataset.read_text().replace('"prompt": ', '"prompt":'))
    grpo_trainer.resume(folder, ["grpo.num_steps=3", "validation.every_steps=9"])
    assert fakes.steps == [1, 2, 3]
    checkpoint = latest_checkpoint(folder / "checkpoints")
    digests = load_state(checkpoint).data
    assert digests.keys() == {"data.train", "data.validation", "policy.model"}


OTHER_DIGESTS = {"data.train": "f" * 32, "data.validation": "0" * 32}


@pytest.mark.parametrize("data", [{}, OTHER_DIGESTS], ids=["none", "of other things"])
def test_a_checkpoint_of_a_release_with_other_digests_is_resumed(interrupted, begun, data):
    grpo_trainer.resume(interrupted(data=data))
    found = begun[0]["state"].data
    assert found.keys() == {"data.train", "data.validation", "policy.model"}
    assert not set(found.values()) & set(data.values())


CHAT = "{% for m in messages %}({{ m.content }}){% endfor %}="
TELLS_TIME = "{{ strftime_now('%f') }}" + CHAT


@pytest.fixture
def chat_model(model_folder, tmp_path):
    """A model on disk whose chat template tells the time; the function gives it another."""
    folder = shutil.copytree(model_folder, tmp_path / "chat")

    def set_template(template):
        tokenizer = load_tokenizer(str(folder))
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)

    set_template(TELLS_TIME)
    set_template.model = {"kind": "pretrained", "name": str(folder), "use_chat_template": True}
    return set_template


@pytest.fixture
def begin_chat(dataset, chat_model, begin):
    """Begins a run with the model."""
    data = {"data.train": str(dataset), "data.validation": str(dataset)}
    return lambda more=(): begin({**data, "policy.model": {**chat_model.model, **dict(more)}})


def test_a_run_whose_prompts_tell_the_date_is_resumed_on_another_day(fakes, begin_chat):
    folder = begin_chat()
    grpo_trainer.resume(folder, ["grpo.num_steps=3"])
    assert fakes.steps == [1, 2, 3]


def test_another_chat_template_is_refused_by_name(chat_model, fakes, begin_chat):
    folder = begin_chat()
    chat_model(CHAT)
    with pytest.raises(ConfigurationError) as refused:
        grpo_trainer.resume(folder, ["grpo.num_steps=3"])
    name = chat_model.model["name"]
    told = f"policy.model: {name}: found a tokenizer and chat template of digest "
    assert str(refused.value).startswith(told)
    assert fakes.steps == [1, 2]


def test_another_vocabulary_is_refused_by_name(chat_model, fakes, begin_chat):
    folder = begin_chat({"use_chat_template": False})
    chat_model(CHAT)  # which is not asked for
    grpo_trainer.resume(folder, ["grpo.num_steps=3"])
    build_character_tokenizer("=21").save_pretrained(chat_model.model["name"])
    with pytest.raises(ConfigurationError, match=r"^policy.model: .*: found a tokenizer and chat"):
        grpo_trainer.resume(folder, ["grpo.num_steps=4"])
    assert fakes.steps == [1, 2, 3]


def test_a_checkpoint_of_a_run_has_the_tokenizer(begin):
    model = latest_checkpoint(begin({}) / "checkpoints") / "model"
    assert {"tokenizer.json", "tokenizer_config.json"} <= {path.name for path in model.iterdir()}


def test_one_process_at_a_time_runs_a_run(fakes, begin):
    folder, tried = begin({}), []

    def resume_too(step):
        before = sorted(folder.rglob("*"))
        with pytest.raises(OutputError, match=f"^{folder}: another process runs this run; wait"):
            grpo_trainer.resume(folder, ["grpo.num_steps=9"])
        assert sorted(folder.rglob("*")) == before
        tried.append(step)

    fakes.on_save = fakes.on_step = resume_too
    grpo_trainer.resume(folder, ["grpo.num_steps=4"])
    assert tried == [3, 3, 4, 4]


def test_a_run_that_begins_is_held_as_well(fakes, begin, tmp_path):
    told = []

    def resume_too(step):
        [folder] = (tmp_path / "demo").iterdir()
        if latest_checkpoint(folder / "checkpoints"):
            with pytest.raises(OutputError, match="another process runs this run"):
                grpo_trainer.resume(folder)
            told.append(step)

    fakes.on_step = resume_too
    begin({})
    assert told == [2]


def test_a_run_that_failed_can_be_resumed_at_once(fakes, begin, tmp_path):
    def fail(step):
        if step == 2:
            raise WorkerError("generation worker died")

    fakes.on_step = fail
    with pytest.raises(WorkerError):
        begin({})
    fakes.on_step = lambda step: None
    [folder] = (tmp_path / "demo").iterdir()
    grpo_trainer.resume(folder)
    assert fakes.steps == [1, 2, 2]


def test_the_configuration_on_disk_is_that_of_the_process_that_ran_last(fakes, begin, tmp_path):
    def fail(step):
        if step == 2:
            raise WorkerError("generation worker died")

    def on_disk():
        return json.loads((folder / "config.json").read_text())["cluster"]["call_timeout_s"]

    fakes.on_step = fail
    with pytest.raises(WorkerError):
        begin({"cluster.call_timeout_s": 120})
    [folder] = (tmp_path / "demo").iterdir()
    with pytest.raises(WorkerError):
        grpo_trainer.resume(folder, ["cluster.call_timeout_s=900"])
    assert on_disk() == 900
    fakes.on_step = lambda step: None
    grpo_trainer.resume(folder)
    assert on_disk() == 120


def test_a_folder_that_a_policy_worker_does_not_see_ends_the_run_before_a_step(
    fakes, begin, tmp_path
):
    def refuse(folder):
        raise WorkerError(f"policy worker 1: {folder}: no such folder on there")

    fakes.see = refuse
    with pytest.raises(WorkerError, match=r"^policy worker 1: .*: no such folder"):
        begin({})
    assert not fakes.steps


def test_policy_workers_look_for_a_folder_that_they_write_to_only(fakes, begin):
    folder = begin({})
    assert fakes.seen == [(folder, [])]
    begin({"checkpointing.every_steps": 0})
    assert len(fakes.seen) == 1


def test_a_finished_run_on_storage_that_cannot_be_written_is_returned(fakes, begin):
    folder = begin({})
    (folder / ".lock").unlink()
    before = sorted(folder.rglob("*"))
    result = grpo_trainer.resume(folder)
    assert [record["step"] for record in result.history] == [1, 2]
    assert sorted(folder.rglob("*")) == before


def test_a_run_that_another_process_finished_meanwhile_is_returned(fakes, begin, monkeypatch):
    folder = begin({})
    found = []

    def load_slowly(checkpoint):
        found.append(checkpoint.name)
        if len(found) == 1:
            grpo_trainer.resume(folder, ["grpo.num_steps=3"])
        return load_state(checkpoint)

    monkeypatch.setattr("grpo_trainer.run.load_state", load_slowly)
    result = grpo_trainer.resume(folder, ["grpo.num_steps=3"])
    assert fakes.steps == [1, 2, 3]
    assert len(result.history) == 3
    assert found == ["step-000002", "step-000002", "step-000003"]
