"""Each kind of bad input ends the program at once, in one error that names the thing.

Nothing is started and nothing is written before all input was read.
"""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
from pathlib import Path

import pytest

from grpo_trainer.checkpoint import RunState, save_checkpoint, written_files

GOOD = '{"prompt": "1=", "answer": "1"}\n'
PRETRAINED = {"kind": "pretrained", "use_chat_template": False}


@pytest.fixture
def refused(command_line, processes_of, tmp_path):
    """Runs the program, checks that it failed well, and returns its message."""
    temp_dir = tempfile.mkdtemp(prefix="gt-")

    def run(*arguments):
        before = sorted(tmp_path.rglob("*"))
        ran = command_line.run(*arguments)
        assert ran.returncode == 1, ran
        assert ran.stdout == ""
        assert ran.stderr.startswith("error: ")
        assert ran.stderr.count("\n") == 1, ran.stderr
        assert ran.seconds < 30
        assert not processes_of(temp_dir)
        assert sorted(tmp_path.rglob("*")) == before, "something was left behind"
        return ran.stderr.removeprefix("error: ").rstrip("\n")

    run.temp_dir = temp_dir
    yield run
    Path(temp_dir).rmdir()  # and nothing was left in there either


@pytest.fixture
def refused_config(refused, config_file):
    def run(changes=(), *, edit=None, more=()):
        changes = {"cluster.temp_dir": refused.temp_dir, **dict(changes)}
        return refused("train", "--config", config_file(changes, edit=edit), *more)

    return run


def add_key(raw):
    raw["grpo"]["num_stepz"] = 3


def remove_key(raw):
    del raw["policy"]["optimizer"]["eps"]


def test_an_unknown_key(refused_config):
    message = refused_config(edit=add_key)
    assert message.endswith(": grpo.num_stepz: unknown key; did you mean 'num_steps'?")


def test_a_missing_key(refused_config):
    message = refused_config(edit=remove_key)
    assert message.endswith(": policy.optimizer.eps: missing; every key must be set")


def test_a_wrong_type(refused_config):
    assert ": grpo.num_steps: found 'three'; " in refused_config({"grpo.num_steps": "three"})


def test_a_group_size_that_does_not_divide(refused_config):
    message = refused_config({"grpo.num_generations_per_prompt": 5})
    assert "policy.global_batch_size: 8 does not divide the 20 samples" in message


def test_an_override_of_a_key_that_is_not_there(refused_config):
    message = refused_config(more=["--set", "grpo.num_stepz=3"])
    assert message == "--set grpo.num_stepz=3: the configuration has no key 'grpo.num_stepz'"


def test_a_configuration_that_is_not_there(refused):
    assert refused("train", "--config", "gone.yaml") == (
        "gone.yaml: cannot be read: No such file or directory"
    )


def test_an_empty_data_set(refused_config, tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text("\n")
    assert refused_config({"data.train": str(path)}) == f"data set {path}: holds no prompt"


def test_a_data_set_that_is_not_there(refused_config, tmp_path):
    path = tmp_path / "1: [a] folder" / "gone.jsonl"
    message = refused_config(more=["--dataset", path])
    assert message.startswith(f"data set {path}: cannot be read: ")


def test_a_malformed_line_is_named_by_number(refused_config, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(GOOD + '{"prompt": "1="\n' + GOOD)
    assert f"data set {path}, line 2: " in refused_config({"data.validation": str(path)})


def test_a_prompt_longer_than_the_limit(refused_config, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(GOOD + json.dumps({"prompt": "1" * 48, "answer": "1"}))
    message = refused_config({"data.train": str(path)})
    assert message.startswith(
        f"data set {path}, line 2: the prompt has 48 tokens; expected 1 to 47"
    )


def test_a_model_path_that_does_not_exist(refused_config, tmp_path):
    model = {**PRETRAINED, "name": str(tmp_path / "model")}
    message = refused_config({"policy.model": model})
    assert message == f"policy.model.name: {str(tmp_path / 'model')!r}: no such folder"


def test_a_name_that_is_neither_a_folder_nor_a_model_of_the_hub(refused_config):
    message = refused_config({"policy.model": {**PRETRAINED, "name": "no/such-model"}})
    assert message.startswith("policy.model.name: 'no/such-model': no such folder, not in the ")


def test_a_cluster_that_is_not_there(refused_config):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        message = refused_config({"cluster.address": address})
    assert message.startswith(f"cluster.address: {address!r}: ")


def test_ray_address_is_refused_while_a_run_starts_its_own_ray(
    refused_config, command_line, monkeypatch
):
    monkeypatch.setitem(command_line.environment, "RAY_ADDRESS", "10.9.9.9:6379")
    assert refused_config() == (
        "RAY_ADDRESS: found '10.9.9.9:6379', while cluster.address is null, which starts a Ray for "
        "the run; unset RAY_ADDRESS, or join that cluster with --set cluster.address=auto"
    )


def test_auto_honours_ray_address(refused_config, command_line, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setitem(command_line.environment, "RAY_ADDRESS", address)
        message = refused_config({"cluster.address": "auto"})
    assert message.startswith(f"RAY_ADDRESS: {address!r}: ")


def test_an_output_that_is_a_file(refused_config, tmp_path):
    (tmp_path / "runs").write_text("")
    assert refused_config().startswith(f"run.output: {tmp_path / 'runs' / 'demo'}")


def test_a_run_that_cannot_be_resumed(refused, tmp_path):
    assert refused("resume", tmp_path) == (
        f"{tmp_path}: no complete checkpoint below {tmp_path / 'checkpoints'}"
    )


@pytest.fixture
def saved(raw_config, tmp_path):
    """A checkpoint of a run whose folder is ``tmp_path``."""
    state = RunState(step=1, prompts_position=4, history=[], config=raw_config())

    def write(folder):
        (folder / "model").mkdir()
        for name in ("model/config.json", "model/model.safetensors", "optimizer.safetensors"):
            (folder / name).write_bytes(b"12345")
        return written_files(folder)

    return save_checkpoint(tmp_path / "checkpoints", state, write, keep_last=1)


def test_a_damaged_checkpoint(refused, saved, tmp_path):
    (saved / "optimizer.safetensors").write_bytes(b"1234")
    assert refused("resume", tmp_path) == (
        f"checkpoint file {saved / 'optimizer.safetensors'}: its content changed since it was saved"
    )


def test_a_damaged_newest_checkpoint_names_the_intact_one(refused, saved, tmp_path):
    newest = saved.with_name("step-000003")
    for name in ("step-000002", newest.name):
        shutil.copytree(saved, saved.with_name(name))
        (saved.with_name(name) / "optimizer.safetensors").write_bytes(b"1234")
    assert refused("resume", tmp_path) == (
        f"checkpoint file {newest / 'optimizer.safetensors'}: its content changed since it was "
        f"saved; {saved} is intact: move {newest} away to resume from there"
    )


def test_a_key_that_a_resumed_run_keeps(refused, saved, tmp_path):
    arguments = ["--set", "cluster.call_timeout_s=600", "--set", "grpo.clip_low=0.3"]
    assert refused("resume", tmp_path, *arguments) == (
        "grpo.clip_low: found 0.3; a resumed run keeps 0.2: it changes what is computed"
    )


def test_a_configuration_error_needs_no_torch(command_line):
    ran = command_line.run("train", "--set", "grpo.num_steps=none", timeout=20)
    assert ran.returncode == 1
    assert ran.seconds < 10
