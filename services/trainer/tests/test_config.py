"""A configuration is complete and valid, or refused in one error that names each wrong key."""

from __future__ import annotations

import copy
import json
import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from dataplane_core import DataPlaneConfig
from grpo_trainer import DEMO_CONFIG, TrainerConfig, check_config, load_config
from grpo_trainer.errors import ConfigurationError

RAW = yaml.safe_load(DEMO_CONFIG.read_text())
VLLM_DEMO = DEMO_CONFIG.with_name("demo-vllm.yaml")
RAW_VLLM = yaml.safe_load(VLLM_DEMO.read_text())


def paths(node, prefix=()):
    for key, value in node.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from paths(value, (*prefix, key))


EVERY_KEY = sorted(".".join(path) for path in paths(RAW))
ANY_NAME = {"data_plane.unit_resources"}
"""Mappings whose keys are names of Ray's custom resources, like those of each placement."""
ANY_NAME |= {key for key in EVERY_KEY if key.startswith("cluster.placement.")}


@pytest.fixture
def demo():
    return copy.deepcopy(RAW)


def node_of(raw, key):
    *parents, leaf = key.split(".")
    for parent in parents:
        raw = raw[parent]
    return raw, leaf


def value_of(raw, key):
    node, leaf = node_of(raw, key)
    return node[leaf]


def refusal(raw):
    with pytest.raises(ConfigurationError) as caught:
        check_config(raw, source="here.yaml")
    message = str(caught.value)
    assert message.startswith("here.yaml: ")
    assert "\n" not in message
    return message.removeprefix("here.yaml: ")


def fields(model: type[BaseModel], prefix=""):
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from fields(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_every_key_is_in_the_shipped_demo():
    """Check the keys of the data plane too, except those that most runs omit."""
    plane = {f"data_plane.{name}" for name in DataPlaneConfig.__annotations__}
    absent = {*fields(TrainerConfig), *plane} - set(EVERY_KEY)
    assert absent == {
        f"data_plane.{name}"
        for name in (
            "controller_address",
            "claim_order",
            "packed_transport",
            "sampler",
            "transfer_queue_mirror",
        )
    }


@pytest.mark.parametrize("key", EVERY_KEY)
def test_each_missing_key_is_named_with_its_path(demo, key):
    node, leaf = node_of(demo, key)
    del node[leaf]
    assert re.match(rf"{re.escape(key)}: missing|{re.escape(key)}: Field required", refusal(demo))


@pytest.mark.parametrize(
    "section",
    ["", *(k for k in EVERY_KEY if isinstance(value_of(RAW, k), dict) and k not in ANY_NAME)],
)
def test_an_unknown_key_is_named_in_every_section(demo, section):
    key = f"{section}.surprise" if section else "surprise"
    node, leaf = node_of(demo, key)
    node[leaf] = 1
    assert refusal(demo).startswith(f"{key}: unknown key")


WRONG = {int: "three", float: "fast", bool: 1, str: 7, dict: 3, list: 0.9, type(None): [1]}


@pytest.mark.parametrize("key", EVERY_KEY)
def test_a_wrong_type_is_named_with_its_path(demo, key):
    node, leaf = node_of(demo, key)
    node[leaf] = WRONG[type(node[leaf])]
    message = refusal(demo)
    assert message.startswith(key), message
    if not isinstance(node[leaf], dict):
        assert repr(node[leaf]) in message


@pytest.fixture(scope="module")
def schema(command_line):
    return Draft202012Validator(json.loads(command_line.run("schema").stdout))


@pytest.mark.parametrize("raw", [RAW, RAW_VLLM])
def test_the_schema_accepts_the_demos(schema, raw):
    schema.check_schema(schema.schema)
    schema.validate(raw)


@pytest.mark.parametrize("key", EVERY_KEY)
def test_the_schema_refuses_missing_unknown_and_mistyped_keys(schema, demo, key):
    node, leaf = node_of(demo, key)
    value = node.pop(leaf)
    assert not schema.is_valid(demo)
    node[leaf] = WRONG[type(value)]
    assert not schema.is_valid(demo)
    node[leaf] = value
    assert schema.is_valid(demo)
    node["surprise"] = 1
    assert not schema.is_valid(demo)


def test_the_schema_describes_keys(schema):
    section = schema.schema["$defs"]["GRPOSection"]
    assert section["properties"]["clip_low"]["description"].startswith("the ratio is clipped")
    assert section["description"].startswith("Settings of GRPO. The algorithm")
    plane = schema.schema["$defs"]["DataPlaneConfig"]["properties"]
    assert plane["claim_order"]["description"].startswith("``module:function``")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("grpo.num_steps", "3"),
        ("grpo.num_steps", 3.5),
        ("grpo.num_steps", True),
        ("policy.optimizer.eps", True),
        ("policy.optimizer.eps", float("inf")),
        ("policy.optimizer.eps", float("nan")),
        ("data.shuffle", "yes"),
        ("policy.optimizer.betas", [0.9, 1.0]),
        ("policy.optimizer.betas", [0.9]),
        ("policy.model.head_dim", 23),
        ("policy.model.kind", "huge"),
        ("policy.num_gpus_per_worker", 1.5),
        ("policy.generation.num_gpus", 1e-5),
        ("cluster.placement.policy", {"trainers": 1e-5}),
        ("run.name", "a/b"),
        ("run.name", ".."),
        ("run.name", ""),
        ("run.seed", -1),
        ("grpo.num_generations_per_prompt", 1),
        ("data_plane.enabled", False),
        ("data_plane.impl", "in_memory"),
        ("data_plane.storage_capacity", 0),
    ],
)
def test_a_value_that_does_not_fit_is_refused(demo, key, value):
    node, leaf = node_of(demo, key)
    node[leaf] = value
    assert refusal(demo).startswith(key)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"grpo.num_generations_per_prompt": 15}, ["policy.global_batch_size: 128", "480"]),
        ({"policy.data_parallel": 3}, ["policy.data_parallel: 3"]),
        ({"policy.generation.max_new_tokens": 48}, ["policy.generation.max_new_tokens: 48"]),
        ({"data_plane.storage_capacity": 1023}, ["data_plane.storage_capacity: 1023", "1024"]),
        (
            {"data_plane.backend": "yuanrong", "refit.transport": "auto"},
            [
                "refit.transport: found 'auto'; expected 'shm' or 'tcp' with data_plane.backend "
                "'yuanrong'"
            ],
        ),
        (
            {"grpo.max_logprob_error": 0.5, "grpo.recompute_prev_logprobs": False},
            [
                "grpo.max_logprob_error: found 0.5; expected null with "
                "grpo.recompute_prev_logprobs false"
            ],
        ),
        (
            {"grpo.mode": "async", "policy.dynamic_batching.enabled": True},
            ["policy.dynamic_batching.enabled: found True; expected False with grpo.mode async"],
        ),
        (
            {
                "policy.dynamic_batching.enabled": True,
                "policy.dynamic_batching.max_tokens_per_microbatch": 40,
            },
            ["policy.dynamic_batching.max_tokens_per_microbatch: 40"],
        ),
    ],
)
def test_values_that_do_not_fit_each_other_are_refused(demo, changes, names):
    for key, value in changes.items():
        node, leaf = node_of(demo, key)
        node[leaf] = value
    message = refusal(demo)
    for name in names:
        assert name in message


def test_all_problems_are_in_one_error(demo):
    demo["grpo"]["num_stepz"] = 3
    del demo["run"]["seed"]
    demo["data"]["shuffle"] = "no"
    message = refusal(demo)
    for problem in (
        "grpo.num_stepz: unknown key; did you mean 'num_steps'?",
        "run.seed: missing",
        "data.shuffle: found 'no'",
    ):
        assert message.count(problem) == 1


def test_an_override_can_set_an_optional_data_plane_key():
    """The tests of docs/trainer.md cover the other overrides."""
    with pytest.raises(ConfigurationError, match=r"data_plane.claim_lease_s: found 'long'"):
        load_config(overrides=["data_plane.claim_lease_s=long"])
    assert str(load_config(overrides=["cluster.temp_dir=/t"]).cluster.temp_dir) == "/t"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["token_file=token"], "set, while refit.control is null"),
        (["tls_ca=ca.pem"], "set, while refit.control is null"),
        (["token_file=token", "token_env=TOKEN"], "expected one of them"),
        (["tls_name=refit.example"], "tls_name is set without tls_ca"),
    ],
)
def test_contradictory_refit_server_access_is_refused(overrides, message):
    control = [] if "null" in message else ["refit.control=127.0.0.1:50051"]
    access = [f"refit.control_access.{override}" for override in overrides]
    with pytest.raises(ConfigurationError, match=f"refit.control_access: .*{message}"):
        load_config(overrides=[*control, *access])


@pytest.mark.parametrize(
    "override",
    [
        "grpo.num_stepz=3",
        "grpo.claim_lease_s=3",
        "data_plane.lease=3",
        "grpo",
        "nothing.there=1",
        "run.name.deep=1",
        "run.name=[",
        "=",
    ],
)
def test_an_override_that_cannot_apply_is_named(override):
    with pytest.raises(ConfigurationError, match=re.escape(f"--set {override}: ")):
        load_config(overrides=[override])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"run: [", "not valid YAML"),
        (b"\xff\xfe\x00", "not valid YAML"),
        (b"- 1", "found list; expected a mapping"),
        (b"", "found NoneType; expected a mapping"),
        (b"run: !!python/object:os.system {}", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_mapping_is_named(tmp_path, content, message):
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


@given(st.floats(min_value=1e-12, max_value=1e12))
def test_numbers_mean_the_same_in_yaml_and_python(value):
    for text in (repr(value), f"{value:e}", f"{value:.0e}"):
        config = load_config(overrides=[f"env.step_timeout_s={text}"])
        assert config.env.step_timeout_s == float(text)


def test_a_configuration_survives_its_own_json(demo):
    config = check_config(demo, source="demo")
    assert check_config(config.model_dump(mode="json"), source="json") == config


@pytest.mark.parametrize("role", ["policy", "generation", "rollout", "environment"])
@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({"CPU": 1}, "expected the name of a custom resource"),
        ({"": 1}, "expected the name of a custom resource"),
        ({"trainers": 0}, "greater than or equal to 0.0001"),
        ({"trainers": "1"}, "valid number"),
        (["trainers"], "valid dictionary"),
    ],
)
def test_a_placement_accepts_only_amounts_of_custom_resources(demo, role, resources, expected):
    demo["cluster"]["placement"][role] = {"trainers": 0.5}
    assert check_config(demo, source="test").cluster.placement
    demo["cluster"]["placement"][role] = resources
    message = refusal(demo)
    assert message.startswith(f"cluster.placement.{role}")
    assert expected in message


def test_the_demos_differ_only_in_what_vllm_needs(demo):
    vllm = copy.deepcopy(RAW_VLLM)
    for raw in (demo, vllm):
        del raw["policy"]["generation"], raw["policy"]["model"]["head_dim"], raw["run"]["name"]
        del raw["refit"]["transport"], raw["refit"]["generation_tensor_parallel"]
        for batching in ("prompts_per_rollout", "concurrent_rollouts"):
            del raw["grpo"]["asynchronous"][batching]
    assert vllm == demo


@pytest.mark.parametrize("key", sorted({*RAW_VLLM["policy"]["generation"]} - {"backend"}))
def test_a_missing_key_of_vllm_is_named(key):
    raw = copy.deepcopy(RAW_VLLM)
    del raw["policy"]["generation"][key]
    assert refusal(raw).startswith(f"policy.generation.{key}: missing")


ADDRESS = "http://127.0.0.1:8000"
EITHER = "expected addresses of running servers, or a number to start"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["backend=sglang"], "backend: found 'sglang'; expected 'transformers', 'vllm'"),
        (["servers=0"], f"servers: found 0 with 0 policy.generation.addresses; {EITHER}"),
        (
            [f"addresses=[{ADDRESS}]"],
            f"servers: found 1 with 1 policy.generation.addresses; {EITHER}",
        ),
        (["command=[]"], "command: found []; expected the command"),
        (
            ["arguments=[--max_model_len=9]"],
            "arguments: found '--max_model_len=9'; the trainer sets",
        ),
        (
            ["servers=2", "num_gpus=3"],
            "num_gpus: found 3; expected a multiple of policy.generation.servers",
        ),
        (
            ["start_timeout_s=300"],
            "start_timeout_s: found 300; expected less than cluster.call_timeout_s 300",
        ),
        (
            ["servers=0", f"addresses=[{ADDRESS}]", "num_gpus=1"],
            "num_gpus: found 1; expected 0 with policy.generation.addresses",
        ),
        *(
            (
                ["servers=0", f"addresses=[{address}]"],
                f"addresses: found '{address}'; expected http",
            )
            for address in ("127.0.0.1:8000", "http://a:8000/v1", "http://a:port")
        ),
        (["servers=0", f"addresses=[{ADDRESS}, {ADDRESS}]"], "addresses: found a duplicate in"),
    ],
)
def test_a_wrong_value_of_vllm_is_named(overrides, message):
    overrides = [f"policy.generation.{override}" for override in overrides]
    with pytest.raises(ConfigurationError) as caught:
        load_config(VLLM_DEMO, overrides)
    assert str(caught.value).startswith(f"{VLLM_DEMO}: policy.generation.{message}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["refit.generation_tensor_parallel=2"],
            "refit.generation_tensor_parallel: found 2; expected 1 with policy.generation.backend",
        ),
        (
            ["policy.generation.servers=0", "policy.generation.addresses=[http://10.0.0.7:8000]"],
            "refit.host: 127.0.0.1 is reachable from one machine only, and http://10.0.0.7:8000 "
            "of policy.generation.addresses may be on another; set refit.host to 'node'",
        ),
    ],
)
def test_a_refit_that_does_not_fit_vllm_is_refused(overrides, message):
    with pytest.raises(ConfigurationError) as caught:
        load_config(VLLM_DEMO, overrides)
    assert str(caught.value).startswith(f"{VLLM_DEMO}: {message}")
