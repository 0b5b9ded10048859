"""A resumed run restores its checkpoint or refuses it; `test_runs.py` runs the steps."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import socket
from contextlib import contextmanager

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import grpo_trainer
from grpo_trainer import DEMO_CONFIG
from grpo_trainer.errors import CheckpointError, ConfigurationError

pytestmark = pytest.mark.slow

PROMPTS = '{"prompt": "1=", "answer": "1"}\n{"prompt": "2=", "answer": "2"}\n'
NEWEST = "checkpoints/step-000002"


@pytest.fixture(scope="module")
def begun(local_ray, configure, tmp_path_factory):
    """Folder and data set of a run that was stopped while it wrote its second checkpoint."""
    data = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    data.write_text(PROMPTS)
    changes = {
        "run.output": str(tmp_path_factory.mktemp("runs")),
        "data.train": str(data),
        "data.validation": str(data),
        "grpo.num_steps": 3,
        "validation.every_steps": 2,
        "checkpointing.every_steps": 1,
    }
    stop = grpo_trainer.GracefulStop()

    def observe(name, direction, what):
        if direction == "sent" and "step-000002" in str(what[0][:1]) and "partial" in str(what[0]):
            stop.requested = True

    result = grpo_trainer.train(configure(changes), stop=stop, observer=observe)
    assert result.was_stopped
    assert [record["step"] for record in result.history] == [1, 2]
    return result.folder, data


@pytest.fixture
def folder(begun, tmp_path):
    """Copy of the run's folder in another place."""
    return shutil.copytree(begun[0], tmp_path / "run")


@pytest.fixture
def dataset(begun):
    yield begun[1]
    begun[1].write_text(PROMPTS)


def edit_state(folder, edit, checkpoint=NEWEST):
    """Change the content of a checkpoint, as another release or run would."""
    file = folder / checkpoint / "state.json"
    body = json.loads(file.read_text())
    del body["digest"]
    edit(body)
    content = json.dumps(body, sort_keys=True).encode()
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    file.write_text(json.dumps({**body, "digest": digest}))


@pytest.fixture
def resumes(accepted, folder):
    """Function that resumes the copy until its processes start, and returns the notices."""

    def resume(*overrides):
        return accepted(lambda display: grpo_trainer.resume(folder, overrides, display=display))

    return resume


def refusal(folder, *overrides, error=ConfigurationError):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(error) as refused:
        grpo_trainer.resume(folder, overrides)
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert {**after, folder / ".lock": b""} == before
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("key", ["data.train", "data.validation"])
@pytest.mark.parametrize(
    "changed",
    [
        PROMPTS + '{"prompt": "3=", "answer": "3"}\n',
        "".join(reversed(PROMPTS.splitlines(keepends=True))),
        PROMPTS.replace('"answer": "2"', '"answer": "3"'),
    ],
    ids=["a line more", "another order", "another answer"],
)
def test_a_data_set_that_changed_is_refused_by_name(folder, tmp_path, key, changed):
    section, name = key.split(".")
    other = tmp_path / "other.jsonl"
    other.write_text(changed)
    edit_state(folder, lambda body: body["state"]["config"][section].update({name: str(other)}))
    assert refusal(folder).startswith(f"{key}: {other}: found prompts of digest ")


def test_a_data_set_with_the_same_prompts_is_accepted(resumes, dataset):
    dataset.write_text("\n" + PROMPTS.replace('"prompt": ', '"prompt":'))
    assert resumes() == []


def test_another_vocabulary_is_refused_by_name(folder):
    def add(body):
        body["state"]["config"]["policy"]["model"]["characters"] += "!"

    edit_state(folder, add)
    message = refusal(folder)
    assert message.startswith("policy.model: random: found a tokenizer and chat template of digest")


@pytest.mark.parametrize("data", [{}, {"data.train": "f" * 32}], ids=["none", "of other things"])
def test_digests_of_an_older_release_are_not_compared(folder, resumes, data):
    edit_state(folder, lambda body: body["state"].update(data=data))
    assert resumes() == []


FREE = """
cluster.address cluster.call_timeout_s cluster.nodes_timeout_s cluster.num_cpus
cluster.placement.environment cluster.placement.generation cluster.placement.policy
cluster.placement.rollout cluster.temp_dir
refit.advertised_host refit.control refit.control_access.tls_ca refit.control_access.tls_name
refit.control_access.token_env refit.control_access.token_file refit.generation_tensor_parallel
refit.host refit.timeout_s refit.transport
tracing.enabled tracing.endpoint tracing.sample_texts tracing.verbose tracking.sinks
checkpointing.every_steps checkpointing.journal checkpointing.keep_last
validation.batch_size validation.every_steps
grpo.num_steps grpo.asynchronous.generators grpo.asynchronous.min_generators
grpo.asynchronous.replace_lost env.step_timeout_s policy.micro_batch_size policy.when_rank_dies
policy.dynamic_batching.max_tokens_per_microbatch
data_plane.ack_timeout_ms data_plane.claim_lease_s data_plane.claim_meta_poll_interval_s
data_plane.global_segment_size data_plane.local_buffer_size data_plane.num_storage_units
data_plane.observability.enabled data_plane.storage_capacity data_plane.unit_resources
""".split()  # noqa: SIM905  # a list would take 40 lines


def leaves(node, path=""):
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def another(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return {"other": 1.0} if isinstance(value, dict) else "other"


def test_only_keys_that_change_the_results_are_refused(folder):
    keys = dict(leaves(json.loads((folder / "config.json").read_text())))
    keys |= {"data_plane.claim_order": None}
    assert set(FREE) <= keys.keys()
    message = refusal(folder, *(f"{key}={json.dumps(another(keys[key]))}" for key in keys))
    refused = re.findall(r"(?:^|; )([\w.]+): found ", message)
    assert sorted(refused) == sorted(keys.keys() - FREE)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("policy.global_batch_size=64", "keeps 8: the key changes the results"),
        ("run.seed=18", "keeps 17: a run keeps its name, folder and seed"),
        ("data.shuffle=false", "keeps True: a run keeps its prompts"),
        ("data_plane.backend=simple", "keeps 'packed': only its sizes, "),
        ("policy.dynamic_batching={enabled: true}", "enabled: found True; a resumed run keeps"),
        ("grpo.num_stepz=3", "--set grpo.num_stepz=3: the configuration has no key"),
    ],
)
def test_a_refusal_says_why(folder, override, reason):
    assert reason in refusal(folder, override)


def test_a_resume_may_change_sizes_and_refit_server(resumes):
    assert not resumes(
        "data_plane.storage_capacity=16384",
        "data_plane.claim_lease_s=30",
        "policy.micro_batch_size=32",
        "policy.dynamic_batching.max_tokens_per_microbatch=4096",
        "refit={control: null, control_access: {tls_ca: null, tls_name: null, token_file: null, "
        "token_env: null}, host: node, advertised_host: null, transport: tcp, "
        "generation_tensor_parallel: 1, timeout_s: 10}",
        "policy.global_batch_size=8",  # as it is
    )


def test_a_resumed_run_may_use_other_vllm_servers(folder, resumes):
    vllm = yaml.safe_load(DEMO_CONFIG.with_name("demo-vllm.yaml").read_text())

    def edit(body):
        body["state"]["config"]["policy"]["generation"] = vllm["policy"]["generation"]

    edit_state(folder, edit)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert not resumes(
            "refit.generation_tensor_parallel=1",
            "policy.generation.servers=0",
            f"policy.generation.addresses=[{address}]",
            "policy.generation.start_timeout_s=60",
        )


def every_key(node, path=""):
    for name, value in node.items():
        yield f"{path}{name}"
        if isinstance(value, dict) and name != "model":
            yield from every_key(value, f"{path}{name}.")


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_keys_missing_in_an_older_checkpoint_get_shipped_values(folder, resumes, data):
    """The small run has other sizes than the shipped ones, but the same keys."""
    state = folder / NEWEST / "state.json"
    before = state.read_text()
    sections = ("cluster.placement", "env", "refit", "tracking", "grpo.clip_low", "grpo.clip_high")
    shipped = yaml.safe_load(DEMO_CONFIG.read_text())
    keys = sorted(key for key in every_key(shipped) if key.startswith(sections))
    removed = data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=4, unique=True))

    def remove(body):
        for key in removed:
            *parents, leaf = key.split(".")
            node = body["state"]["config"]
            for parent in parents:
                node = node.get(parent, {})
            node.pop(leaf, None)

    edit_state(folder, remove)
    [line] = resumes()
    state.write_text(before)
    gone = {key for key in removed if not any(key.startswith(f"{other}.") for other in removed)}
    kind = "keys that it lacks get shipped values"
    assert line.startswith(f"{folder / NEWEST} is of an older release; {kind}: ")
    assert set(re.findall(r"(?:: |, )([a-z_]+(?:\.[a-z_]+)*)=", line)) == gone


def test_keys_an_older_release_ignored_become_null(folder, resumes):
    old = {"max_logprob_error": 2.0, "recompute_prev_logprobs": False}
    edit_state(folder, lambda body: body["state"]["config"]["grpo"].update(old))
    [line] = resumes()
    assert line.endswith("ignored are null now; their saved values: grpo.max_logprob_error=2.0")
    edit_state(
        folder,
        lambda body: body["state"]["config"]["grpo"].update(recompute_prev_logprobs=True),
    )
    assert resumes() == []
    assert "a resumed run keeps 2.0" in refusal(folder, "grpo.max_logprob_error=1")


def test_a_model_of_another_kind_gets_no_key_of_the_shipped_one(folder, resumes, model_folder):
    model = {"kind": "pretrained", "name": str(model_folder), "use_chat_template": False}

    def edit(body):
        body["state"]["config"]["policy"]["model"] = model
        body["state"]["data"] = {}

    edit_state(folder, edit)
    assert resumes() == []


@pytest.mark.parametrize("name", ["state.json", "model/config.json", "optimizer.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
def test_a_damaged_file_is_named_and_the_intact_checkpoint(folder, name, damage):
    path = folder / NEWEST / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if damage == "cut" else content.swapcase())
    message = refusal(folder, error=CheckpointError)
    assert message.startswith(f"checkpoint file {path}: ")
    intact = folder / "checkpoints" / "step-000001"
    assert message.endswith(
        f"; {intact} is intact: move {folder / NEWEST} away to resume from there"
    )


@pytest.mark.parametrize("content", ["[]", "null", "{}", '{"format": 2}'])
def test_a_state_of_another_shape_is_named(folder, content):
    (folder / NEWEST / "state.json").write_text(content)
    shutil.rmtree(folder / "checkpoints" / "step-000001")
    message = refusal(folder, error=CheckpointError)
    assert message.startswith(f"checkpoint file {folder / NEWEST}/state.json: ")


@pytest.mark.parametrize(
    "name", ["model/config.json", "model/model.safetensors", "optimizer.safetensors"]
)
def test_a_checkpoint_without_model_or_optimizer_is_refused(folder, name):
    edit_state(folder, lambda body: body["files"].pop(name))
    part = name.replace("model.safe", "*.safe")
    assert re.search(
        rf"{re.escape(part)}: not among its \d+ files", refusal(folder, error=CheckpointError)
    )


def test_other_folders_are_no_checkpoints(folder):
    shutil.rmtree(folder / "checkpoints")
    for name in ("step-final", ".step-000009.partial", "step-000008-copy"):
        (folder / "checkpoints" / name).mkdir(parents=True)
    (folder / "checkpoints" / "step-000007").write_text("a file")
    message = refusal(folder, error=CheckpointError)
    assert message == f"{folder}: no complete checkpoint below {folder / 'checkpoints'}"


def test_the_folder_of_a_resumed_run_is_absolute(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    resumed = grpo_trainer.resume(folder.relative_to(folder.parent), ["grpo.num_steps=2"])
    assert resumed.folder == folder


def test_a_run_finished_by_another_process_is_returned(folder, monkeypatch):
    """The other process finishes between this one's read of the checkpoint and its lock."""

    @contextmanager
    def late(folder):
        shutil.copytree(folder / NEWEST, folder / "checkpoints/step-000003")
        edit_state(folder, lambda body: body["state"].update(step=3), "checkpoints/step-000003")
        yield

    monkeypatch.setattr("grpo_trainer.run.runs.run_lock", late)
    result = grpo_trainer.resume(folder)
    assert [record["step"] for record in result.history] == [1, 2]  # of the copied checkpoint


def test_a_checkpoint_begins_another_run_with_other_settings(folder, accepted, tmp_path):
    model = f"{{kind: pretrained, name: {folder / NEWEST / 'model'}, use_chat_template: false}}"
    changes = [
        f"policy.model={model}",
        f"run.output={tmp_path}",
        "policy.optimizer.learning_rate=1e-4",
        "grpo.max_logprob_error=2",
    ]
    config = grpo_trainer.load_config(folder / "config.json", changes)
    assert config.policy.optimizer.learning_rate == 1e-4
    assert accepted(lambda display: grpo_trainer.train(config, display=display)) == []
