"""A checkpoint is whole or not there, and a run goes on from it as if it had never stopped."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_trainer.checkpoint import (
    RunState,
    latest_checkpoint,
    load_state,
    save_checkpoint,
    written_files,
)
from grpo_trainer.config import load_config
from grpo_trainer.errors import CheckpointError, OutputError
from grpo_trainer.inputs import read_inputs
from grpo_trainer.model import load_model
from grpo_trainer.policy_state import load_optimizer, load_weights, save_policy, save_tokenizer
from grpo_trainer.run_folder import append_record, create_run_folder, write_history


def state(step=1):
    return RunState(step=step, prompts_position=4 * step, history=[{"step": step}], config={"a": 1})


def write_something(folder):
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"width": 1}')
    (folder / "model" / "model.safetensors").write_bytes(b"0" * 1000)
    (folder / "optimizer.safetensors").write_bytes(b"0" * 1000)
    return written_files(folder)


def names(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


class Trained:
    """A model and its optimiser, and batches that only the step number decides."""

    def __init__(self, source):
        self.model = load_model(str(source), torch.device("cpu")).eval()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.1)

    def train(self, start, stop):
        for step in range(start, stop):
            generator = torch.Generator().manual_seed(step)
            ids = torch.randint(2, 20, (2, 6), generator=generator)
            self.optimizer.zero_grad()
            self.model(input_ids=ids).logits.log_softmax(-1)[..., 3].sum().backward()
            self.optimizer.step()

    def tensors(self):
        found = {f"model/{name}": t for name, t in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                found[f"{name}/{key}"] = value
        return {name: tensor.clone() for name, tensor in found.items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        assert torch.equal(one[name], other[name]), name


def test_training_goes_on_bit_for_bit(model_folder, tmp_path):
    whole = Trained(model_folder)
    whole.train(0, 3)
    saved = save_checkpoint(
        tmp_path, state(), lambda f: save_policy(f, whole.model, whole.optimizer), keep_last=1
    )
    resumed = Trained(model_folder)
    load_weights(saved, resumed.model)
    load_optimizer(saved, resumed.model, resumed.optimizer)
    assert_same(resumed.tensors(), whole.tensors())
    whole.train(3, 6)
    resumed.train(3, 6)
    assert_same(resumed.tensors(), whole.tensors())


def test_an_optimiser_that_never_stepped_round_trips(model_folder, tmp_path):
    fresh = Trained(model_folder)
    save_policy(tmp_path, fresh.model, fresh.optimizer)
    load_optimizer(tmp_path, fresh.model, fresh.optimizer)
    assert not fresh.optimizer.state


def save_all(folder, trained, tokenizer):
    written = save_policy(folder, trained.model, trained.optimizer)
    save_tokenizer(folder, tokenizer)
    return written


def test_model_and_tokenizer_of_a_checkpoint_are_loaded_from_one_folder(
    model_folder, tokenizer, tmp_path
):
    trained = Trained(model_folder)
    trained.train(0, 1)
    saved = save_checkpoint(
        tmp_path, state(), lambda f: save_all(f, trained, tokenizer), keep_last=1
    )
    load_state(saved)
    there = AutoTokenizer.from_pretrained(saved / "model")
    text = "max(1,2)="
    assert there(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert (there.pad_token_id, there.eos_token_id) == (
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
    )
    model = AutoModelForCausalLM.from_pretrained(saved / "model")
    assert_same(dict(model.state_dict()), dict(trained.model.state_dict()))


def test_a_tokenizer_that_cannot_be_written_is_told(model_folder, tokenizer, tmp_path):
    older = save_checkpoint(tmp_path, state(1), write_something, keep_last=1)

    def write(folder):
        written = write_something(folder)
        with file_size_limit(100):
            save_tokenizer(folder, tokenizer)
        return written

    with pytest.raises(CheckpointError, match=r"step-000002.*the tokenizer cannot be written: "):
        save_checkpoint(tmp_path, state(2), write, keep_last=1)
    assert names(tmp_path) == [older.name]


def test_every_file_is_safetensors_or_json(model_folder, tokenizer, tmp_path):
    trained = Trained(model_folder)
    trained.train(0, 1)
    saved = save_checkpoint(
        tmp_path, state(), lambda f: save_all(f, trained, tokenizer), keep_last=1
    )
    files = [path for path in saved.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors", ".json"}
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_text())


def test_an_optimiser_of_another_model_is_refused_by_name(model_folder, tmp_path):
    trained = Trained(model_folder)
    trained.train(0, 1)
    save_policy(tmp_path, trained.model, trained.optimizer)
    other = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"optimizer.safetensors: no parameter '"):
        load_optimizer(tmp_path, other, torch.optim.AdamW(other.parameters()))


def test_state_round_trips(tmp_path):
    saved = save_checkpoint(tmp_path, state(12), write_something, keep_last=1)
    assert saved.name == "step-000012"
    assert latest_checkpoint(tmp_path) == saved
    assert load_state(saved) == state(12)


@given(st.lists(st.integers(0, 3 * 10**6), min_size=1, max_size=6, unique=True), st.integers(1, 4))
def test_the_newest_stay(tmp_path_factory, steps, keep_last):
    folder = tmp_path_factory.mktemp("c") / "checkpoints"
    for step in sorted(steps):
        save_checkpoint(folder, state(step), write_something, keep_last=keep_last)
    kept = sorted(steps)[-keep_last:]
    assert names(folder) == sorted(f"step-{step:06d}" for step in kept)
    assert load_state(latest_checkpoint(folder)).step == max(steps)


def test_other_folders_are_no_checkpoints(tmp_path):
    for name in ("step-final", ".step-000009.partial", "step-000008-copy"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000007").write_text("a file")
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "nowhere") is None


def test_what_a_killed_process_left_is_removed(tmp_path):
    (tmp_path / ".step-000001.partial").mkdir()
    save_checkpoint(tmp_path, state(2), write_something, keep_last=1)
    assert names(tmp_path) == ["step-000002"]


def test_what_cannot_be_removed_is_told_and_ends_no_run(tmp_path, monkeypatch):
    """As on NFS, where a file that some process has open stays under another name."""
    rmtree = shutil.rmtree

    def busy(path, ignore_errors=False):
        kept = [name for name in ("step-000001", "step-000002") if name in str(path)]
        if kept and not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        if not kept:
            rmtree(path, ignore_errors=ignore_errors)

    save_checkpoint(tmp_path, state(1), write_something, keep_last=1)
    (tmp_path / ".step-000002.partial").mkdir()  # of a process that was killed
    monkeypatch.setattr(shutil, "rmtree", busy)
    told = []
    saved = save_checkpoint(tmp_path, state(2), write_something, keep_last=1, notice=told.append)
    assert load_state(saved) == state(2)
    assert list(tmp_path.glob("step-*")) == [saved]
    assert len(told) == 2
    assert all("cannot be removed: [Errno 39] Directory not empty" in line for line in told)
    monkeypatch.undo()
    save_checkpoint(tmp_path, state(3), write_something, keep_last=1, notice=told.append)
    assert names(tmp_path) == ["step-000003"]
    assert len(told) == 2


def test_a_resumed_run_holds_no_file_of_its_checkpoint(model_folder, tmp_path):
    trained = Trained(model_folder)
    trained.train(0, 1)
    save_policy(tmp_path, trained.model, trained.optimizer)
    resumed = Trained(model_folder)
    load_weights(tmp_path, resumed.model)
    load_optimizer(tmp_path, resumed.model, resumed.optimizer)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_checkpoint_begins_another_run_with_other_settings(
    configure, model_folder, tokenizer, tmp_path
):
    trained = Trained(model_folder)
    trained.train(0, 1)
    folder = create_run_folder(configure({"run.output": str(tmp_path)}))
    saved = save_checkpoint(
        folder / "checkpoints", state(), lambda f: save_all(f, trained, tokenizer), keep_last=1
    )
    model = f"{{kind: pretrained, name: {saved / 'model'}, use_chat_template: false}}"
    changes = ["policy.optimizer.learning_rate=1e-4", "grpo.max_logprob_error=2"]
    config = load_config(folder / "config.json", [f"policy.model={model}", *changes])
    assert config.policy.optimizer.learning_rate == 1e-4
    assert config.grpo.max_logprob_error == 2
    inputs = read_inputs(config)
    assert inputs.training[0].token_ids == tokenizer(inputs.training[0].record.prompt)["input_ids"]
    begun = load_model(inputs.model, torch.device("cpu"))
    assert_same(dict(begun.state_dict()), dict(trained.model.state_dict()))


def test_a_checkpoint_is_never_replaced(tmp_path):
    save_checkpoint(tmp_path, state(), write_something, keep_last=1)
    with pytest.raises(CheckpointError, match="step-000001: exists already"):
        save_checkpoint(tmp_path, state(), write_something, keep_last=1)
    assert load_state(tmp_path / "step-000001") == state()


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        CheckpointError("rank 0 died"),
        KeyboardInterrupt(),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_a_failing_writer_leaves_nothing_and_the_older_one_intact(tmp_path, failure):
    older = save_checkpoint(tmp_path, state(1), write_something, keep_last=1)

    def fail(folder):
        write_something(folder)
        raise failure

    expected = CheckpointError if isinstance(failure, OSError) else type(failure)
    with pytest.raises(expected):
        save_checkpoint(tmp_path, state(2), fail, keep_last=1)
    assert names(tmp_path) == ["step-000001"]
    assert load_state(older) == state(1)


def elsewhere(folder, tmp_path, kept=lambda name: False):
    """What rank 0 says of a folder of another machine, of which some files are here as well."""
    other = tmp_path / "other machine"
    other.mkdir()
    written = write_something(other)
    for name in filter(kept, written):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(other / name, folder / name)
    return written


@pytest.mark.parametrize("here", ["", "model/*", "*.safetensors"])
def test_a_checkpoint_that_rank_0_wrote_elsewhere_is_refused_and_the_older_one_stays(
    tmp_path, here
):
    folder = tmp_path / "checkpoints"
    older = save_checkpoint(folder, state(1), write_something, keep_last=1)
    kept = partial(fnmatch, pat=here)
    with pytest.raises(
        CheckpointError,
        match=r"step-000002.*rank 0 wrote \d+ bytes, the driver finds no file; run.output has to",
    ):
        save_checkpoint(folder, state(2), lambda f: elsewhere(f, tmp_path, kept), keep_last=1)
    assert names(folder) == ["step-000001"]
    assert load_state(older) == state(1)


def test_a_file_that_is_shorter_than_rank_0_wrote_it_is_refused(tmp_path):
    def write(folder):
        return write_something(folder) | {"optimizer.safetensors": 1001}

    with pytest.raises(CheckpointError, match=r"wrote 1001 bytes, the driver finds 1000 bytes; "):
        save_checkpoint(tmp_path, state(), write, keep_last=1)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["model/config.json", "model/model.safetensors", "optimizer.safetensors"]
)
def test_a_checkpoint_without_model_or_optimiser_is_neither_saved_nor_loaded(tmp_path, name):
    def write(folder):
        write_something(folder)
        (folder / name).unlink()
        return written_files(folder)

    older = save_checkpoint(tmp_path, state(1), write_something, keep_last=1)
    expected = name.replace("model.safe", "*.safe")
    with pytest.raises(CheckpointError, match=rf"{re.escape(expected)}: not among its 2 files"):
        save_checkpoint(tmp_path, state(2), write, keep_last=1)
    assert names(tmp_path) == ["step-000001"]
    file = older / "state.json"
    body = {key: value for key, value in json.loads(file.read_text()).items() if key != "digest"}
    del body["files"][name]
    content = json.dumps(body, sort_keys=True).encode()
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    file.write_text(json.dumps({**body, "digest": digest}))
    with pytest.raises(CheckpointError, match=rf"{re.escape(expected)}: not among its 2 files"):
        load_state(older)


def test_rank_0_writes_nothing_where_the_driver_made_no_folder(model_folder, tmp_path):
    trained = Trained(model_folder)
    with pytest.raises(CheckpointError, match=r"no such folder on .*; run.output has to"):
        save_policy(tmp_path / "there", trained.model, trained.optimizer)
    assert names(tmp_path) == []
    with pytest.raises(CheckpointError, match=r"no such folder on .*; run.output has to"):
        load_weights(tmp_path / "there", trained.model)


def test_the_folder_itself_is_on_disk_before_it_is_renamed(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync

    def remember(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def write(folder):
        written = write_something(folder)
        synced.clear()
        return written

    monkeypatch.setattr(os, "fsync", remember)
    save_checkpoint(tmp_path, state(), write, keep_last=1)
    of_it = [path.partition(".partial")[2] for path in synced if ".partial" in path]
    assert {"", "/state.json", "/model", "/model/config.json"} <= set(of_it)


def test_a_run_s_folder_is_absolute_wherever_its_output_is(configure, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = create_run_folder(configure({"run.output": "runs"}))
    assert folder.is_absolute()
    assert folder.parent == tmp_path / "runs" / "demo"


@contextmanager
def file_size_limit(limit):
    """Files of this process may be ``limit`` bytes long, as if the disk were full after that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit", [10, 30_000, 80_000], ids=["json", "model", "optimiser"])
def test_a_disk_that_fills_up_leaves_the_older_checkpoint(model_folder, tmp_path, limit):
    trained = Trained(model_folder)
    trained.train(0, 1)
    sizes = {}

    def write(folder):
        written = save_policy(folder, trained.model, trained.optimizer)
        sizes.update({name.split("/")[-1]: size for name, size in written.items()})
        return written

    older = save_checkpoint(tmp_path, state(1), write, keep_last=1)
    assert sizes["model.safetensors"] < 80_000 < sizes["optimizer.safetensors"]
    with file_size_limit(limit), pytest.raises(CheckpointError, match=r"step-000002.*cannot be"):
        save_checkpoint(tmp_path, state(2), write, keep_last=1)
    assert names(tmp_path) == ["step-000001"]
    assert load_state(older) == state(1)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own with 250 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=250k", "tmpfs", folder], capture_output=True
    )
    if mounted.returncode:
        told = mounted.stderr.decode().strip()
        pytest.skip(f"needs the capability CAP_SYS_ADMIN to mount: {told}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_really_full_disk_leaves_the_older_checkpoint(model_folder, small_disk):
    trained = Trained(model_folder)
    trained.train(0, 1)

    def write(folder):
        return save_policy(folder, trained.model, trained.optimizer)

    older = save_checkpoint(small_disk, state(1), write, keep_last=2)
    with pytest.raises(CheckpointError, match="step-000002"):
        save_checkpoint(small_disk, state(2), write, keep_last=2)
    assert names(small_disk) == ["step-000001"]
    assert load_state(older) == state(1)


@pytest.mark.parametrize("name", ["state.json", "model/config.json", "optimizer.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
def test_a_damaged_file_is_named(tmp_path, name, damage):
    saved = save_checkpoint(tmp_path, state(), write_something, keep_last=1)
    path = saved / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[:-1])
    else:
        path.write_bytes(content.replace(b"1", b"2").replace(b"0", b"1"))
    with pytest.raises(CheckpointError) as caught:
        load_state(saved)
    assert str(caught.value).startswith(f"checkpoint file {path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["[]", "null", "{}", '{"format": 2}'])
def test_a_state_of_another_shape_is_named(tmp_path, content):
    saved = save_checkpoint(tmp_path, state(), write_something, keep_last=1)
    (saved / "state.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"checkpoint file .*state.json: "):
        load_state(saved)


def test_a_checkpoint_is_found_after_its_folder_moved(tmp_path):
    saved = save_checkpoint(tmp_path / "a", state(), write_something, keep_last=1)
    shutil.move(saved.parent, tmp_path / "b")
    assert load_state(latest_checkpoint(tmp_path / "b")) == state()


def test_metrics_on_a_full_disk_keep_their_whole_lines(tmp_path):
    write_history(tmp_path, [{"step": 1}])
    size = os.path.getsize(tmp_path / "metrics.jsonl")
    with file_size_limit(size + 5), pytest.raises(OutputError, match=r"metrics.jsonl: cannot be"):
        append_record(tmp_path, {"step": 2})
    append_record(tmp_path, {"step": 3})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 1}, {"step": 3}]


def test_rewritten_metrics_on_a_full_disk_stay_the_old_ones(tmp_path):
    write_history(tmp_path, [{"step": 1}])
    with file_size_limit(5), pytest.raises(OutputError, match=r"metrics.jsonl: cannot be"):
        write_history(tmp_path, [{"step": 1}, {"step": 2}])
    assert names(tmp_path) == ["metrics.jsonl"]
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
