"""Each kind of bad input ends the program at once, in one error that names the input.

Nothing is started or written before all input has been read.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from integration.ports import address_of, hold_port

pytestmark = pytest.mark.slow

GOOD = '{"prompt": "1=", "answer": "1"}\n'


@pytest.fixture
def refused(command_line, processes_of, tmp_path):
    """Function that runs the program, checks that it fails at once, and returns its message."""
    temp_dir = tempfile.mkdtemp(prefix="gt-")

    def run(*arguments, status=2):
        before = sorted(tmp_path.rglob("*"))
        ran = command_line.run(*arguments)
        assert ran.returncode == status, ran
        assert ran.stdout == ""
        assert ran.stderr.startswith("error: ")
        assert ran.stderr.count("\n") == 1, ran.stderr
        assert ran.seconds < 30
        assert not processes_of(temp_dir)
        assert sorted(tmp_path.rglob("*")) == before, "something was left behind"
        return ran.stderr.removeprefix("error: ").rstrip("\n")

    run.temp_dir = temp_dir
    yield run
    Path(temp_dir).rmdir()  # fails unless the folder is empty


@pytest.fixture
def refused_config(refused, config_file):
    def run(changes=(), *more):
        changes = {"cluster.temp_dir": refused.temp_dir, **dict(changes)}
        return refused("train", "--config", config_file(changes), *more)

    return run


@pytest.fixture
def unused():
    """Address on which no process listens or can listen."""
    with hold_port() as holder:
        yield address_of(holder)


def test_a_missing_configuration_is_named(refused):
    assert refused("train", "--config", "gone.yaml") == (
        "gone.yaml: cannot be read: No such file or directory"
    )


@pytest.mark.parametrize(
    ("key", "lines", "message"),
    [
        ("data.train", "\n", ": holds no prompt"),
        ("data.validation", GOOD + '{"prompt": "1="}\n' + GOOD, ", line 2: answer: Field required"),
        (
            "data.train",
            GOOD + json.dumps({"prompt": "1" * 48, "answer": "1"}),
            ", line 2: the prompt has 48 tokens; expected 1 to 47",
        ),
    ],
)
def test_a_data_set_and_its_line_are_named(refused_config, tmp_path, key, lines, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(lines)
    assert refused_config({key: str(path)}).startswith(f"data set {path}{message}")


def test_a_missing_data_set_is_named(refused_config, tmp_path):
    path = tmp_path / "1: [a] folder" / "gone.jsonl"
    message = refused_config({}, "--dataset", path)
    assert message.startswith(f"data set {path}: cannot be read: ")


def test_a_missing_model_is_named_with_the_places_searched(refused_config):
    model = {"kind": "pretrained", "name": "no/such-model", "use_chat_template": False}
    assert refused_config({"policy.model": model}).startswith(
        "policy.model.name: 'no/such-model': no such folder, not in the local cache, and not "
        "available from the hub"
    )


def test_an_address_without_a_cluster_is_named(refused_config, unused):
    assert refused_config({"cluster.address": unused}).startswith(f"cluster.address: {unused!r}: ")


def test_ray_address_is_refused_while_a_run_starts_its_own_ray(
    refused_config, command_line, monkeypatch, unused
):
    monkeypatch.setitem(command_line.environment, "RAY_ADDRESS", unused)
    assert refused_config() == (
        f"RAY_ADDRESS: found {unused!r}, while cluster.address is null, which starts a new "
        "cluster; unset RAY_ADDRESS, or join its cluster with --set cluster.address=auto"
    )
    message = refused_config({"cluster.address": "auto"})
    assert message.startswith(f"RAY_ADDRESS: {unused!r}: ")


def test_an_output_that_is_a_file_is_refused(refused_config, tmp_path):
    (tmp_path / "runs").write_text("")
    assert refused_config().startswith(f"run.output: {tmp_path / 'runs' / 'demo'}")


def test_a_resume_without_a_checkpoint_is_refused(refused, tmp_path):
    assert refused("resume", tmp_path, status=1) == (
        f"{tmp_path}: no complete checkpoint below {tmp_path / 'checkpoints'}"
    )
    assert refused("resume") == "FOLDER: missing; see grpo-trainer resume --help"


def test_wrong_options_are_reported_together_without_torch(command_line, config_file):
    wrong = ["--seed", "x", "--set", "nothing", "--set", "grpo.steps=1", "--set", "grpo.clip_low=x"]
    ran = command_line.run("train", "--config", config_file(), *wrong, timeout=20)
    assert (ran.returncode, ran.stdout) == (2, "")
    seed, rest = ran.stderr.splitlines()
    assert seed.startswith("error: --seed: ")
    for named in ("--set nothing: ", "no key 'grpo.steps'", "grpo.clip_low: found 'x'"):
        assert named in rest
    assert ran.seconds < 10
