"""What a resumed run takes from its checkpoint, from the command, and from its folder.

The steps themselves are left out: `test_runs.py` does them.
"""

from __future__ import annotations

import copy
import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

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
from grpo_trainer.resumed_config import CHANGEABLE, resumed_config
from grpo_trainer.run_folder import create_run_folder
from grpo_trainer.signals import GracefulStop

DEMO = grpo_trainer.load_config().model_dump(mode="json")


def leaves(node, path=""):
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def every_key(node, path=""):
    for name, value in node.items():
        yield f"{path}{name}"
        if isinstance(value, dict) and name != "model":
            yield from every_key(value, f"{path}{name}.")


def another(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return {"other": 1.0} if isinstance(value, dict) else "other"


FIXED = ("run", "policy", "grpo", "data", "env", "data_plane")
LEAVES = dict(leaves(DEMO))


@pytest.mark.parametrize("key", sorted(LEAVES))
def test_a_key_that_changes_what_is_computed_is_refused_by_name_and_no_other(key):
    override = f"{key}={json.dumps(another(LEAVES[key]))}"
    free = any(key == one or key.startswith(f"{one}.") for one in CHANGEABLE)
    assert free or key.split(".")[0] in FIXED
    told = ""
    try:
        resumed_config(DEMO, [override], source="checkpoint")
    except ConfigurationError as error:
        told = str(error)  # of a key that may change: that the other value does not fit
    refused = told.startswith(f"{key}: found {another(LEAVES[key])!r}; a resumed run keeps ")
    assert refused != free, told


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("policy.global_batch_size=64", "keeps 128: it changes what is computed"),
        ("run.seed=18", "keeps 17: a run keeps its name, folder and seed"),
        ("data.train=mine.jsonl", "keeps None: a run keeps its prompts"),
        ("data_plane.backend=simple", "keeps 'packed': only its sizes, "),
        ("policy.dynamic_batching={enabled: true}", "enabled: found True; a resumed run keeps"),
        ("grpo.num_stepz=3", "--set grpo.num_stepz=3: the configuration has no key"),
    ],
)
def test_a_refusal_says_why(override, told):
    with pytest.raises(ConfigurationError) as refused:
        resumed_config(DEMO, [override], source="checkpoint")
    assert told in str(refused.value)


def test_what_ends_runs_that_are_too_small_can_be_raised():
    overrides = [
        "cluster.call_timeout_s=900",
        "data_plane.storage_capacity=16384",
        "data_plane.global_segment_size=1073741824",
        "data_plane.ack_timeout_ms=120000",
        "policy.micro_batch_size=32",
        "policy.dynamic_batching.max_tokens_per_microbatch=4096",
        "refit={control: '10.0.0.2:50051', control_access: {tls_ca: null, tls_name: null, "
        "token_file: null, token_env: null}, host: node, advertised_host: null, transport: tcp, "
        "generation_tensor_parallel: 1, timeout_s: 10}",
        "grpo.num_steps=90",
        "policy.global_batch_size=128",  # as it is
    ]
    config = resumed_config(DEMO, overrides, source="checkpoint").config
    assert config.cluster.call_timeout_s == 900
    assert config.data_plane["storage_capacity"] == 16384
    assert config.refit.control == "10.0.0.2:50051"
    assert config.grpo.num_steps == 90


@given(st.data())
def test_keys_that_an_older_checkpoint_lacks_take_the_shipped_values(data):
    saved = copy.deepcopy(DEMO)
    removed = data.draw(st.lists(st.sampled_from(sorted(every_key(DEMO))), max_size=4, unique=True))
    gone = {}
    for key in sorted(removed, key=len, reverse=True):
        *parents, leaf = key.split(".")
        node = saved
        for parent in parents:
            node = node[parent]
        for below in [name for name in gone if name.startswith(f"{key}.")]:
            del gone[below]
        del node[leaf]
        gone[key] = None
    resumed = resumed_config(saved, [], source="checkpoint")
    assert resumed.added.keys() == gone.keys()
    assert resumed.config.model_dump(mode="json") == DEMO


def test_a_model_of_another_kind_gets_no_key_of_the_shipped_one():
    saved = copy.deepcopy(DEMO)
    saved["policy"]["model"] = {"kind": "pretrained", "name": "a/b", "use_chat_template": True}
    resumed = resumed_config(saved, [], source="checkpoint")
    assert not resumed.added
    assert resumed.config.policy.model.name == "a/b"


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
    assert json.loads((folder / "config.json").read_text()) == call["state"].config


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


def test_the_folder_of_a_resumed_run_is_absolute(interrupted, begun, monkeypatch):
    folder = interrupted()
    monkeypatch.chdir(folder.parent)
    result = grpo_trainer.resume(folder.relative_to(folder.parent))
    assert result.folder == begun[0]["folder"] == folder
    assert begun[0]["checkpoint"].is_absolute()


class Fakes:
    """Stands for everything of a run that is a process; ``save`` writes a checkpoint's files."""

    def __init__(self):
        self.steps, self.saved = [], []
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
    assert str(refused.value).startswith(f"{key}: {dataset}: found prompts or tokens of digest ")
    assert fakes.steps == [1, 2]


def test_a_data_set_that_has_the_same_prompts_is_taken(dataset, fakes, begin):
    folder = begin({"data.train": str(dataset), "validation.every_steps": 0})
    dataset.write_text("\n" + dataset.read_text().replace('"prompt": ', '"prompt":'))
    grpo_trainer.resume(folder, ["grpo.num_steps=3", "validation.every_steps=9"])
    assert fakes.steps == [1, 2, 3]
    checkpoint = latest_checkpoint(folder / "checkpoints")
    assert load_state(checkpoint).data.keys() == {"data.train", "data.validation"}


def test_a_checkpoint_of_a_release_that_kept_no_digests_is_resumed(interrupted, begun):
    grpo_trainer.resume(interrupted(data={}))
    assert begun[0]["state"].data.keys() == {"data.train", "data.validation"}


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
