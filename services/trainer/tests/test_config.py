"""A configuration is whole and right, or refused in one error that names each wrong key."""

from __future__ import annotations

import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from dataplane_core import DataPlaneConfig
from grpo_trainer.config import DEMO_CONFIG, TrainerConfig, check_config, load_config
from grpo_trainer.errors import ConfigurationError
from grpo_trainer.sections import PretrainedModel

RAW = yaml.safe_load(DEMO_CONFIG.read_text())


def paths(node, prefix=()):
    for key, value in node.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from paths(value, (*prefix, key))


EVERY_KEY = sorted(".".join(path) for path in paths(RAW))
ANY_NAME = {"data_plane.unit_resources"}
"""Whose keys are names of Ray's custom resources; so are those of each placement."""
ANY_NAME |= {key for key in EVERY_KEY if key.startswith("cluster.placement.")}


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


def test_the_shipped_demo_is_valid():
    assert load_config(DEMO_CONFIG).run.name == "demo"


def fields(model: type[BaseModel], prefix=""):
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from fields(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_every_field_of_the_models_occurs_in_the_shipped_demo():
    optional = {
        "controller_address",
        "claim_lease_s",
        "claim_order",
        "packed_transport",
        "sampler",
    }
    plane = {
        f"data_plane.{name}" for name in DataPlaneConfig.__annotations__ if name not in optional
    }
    assert {*fields(TrainerConfig), *plane} <= set(EVERY_KEY)


def test_no_field_has_a_default():
    pending = [TrainerConfig, PretrainedModel]
    while pending:
        for field in pending.pop().model_fields.values():
            assert field.is_required()
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                pending.append(field.annotation)


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


def test_an_unknown_key_that_is_almost_right_gets_a_suggestion(demo):
    demo["grpo"]["num_step"] = 3
    assert refusal(demo) == "grpo.num_step: unknown key; did you mean 'num_steps'?"


WRONG = {int: "three", float: "fast", bool: 1, str: 7, dict: 3, list: 0.9, type(None): [1]}


@pytest.mark.parametrize("key", EVERY_KEY)
def test_a_wrong_type_is_named_with_its_path(demo, key):
    node, leaf = node_of(demo, key)
    node[leaf] = WRONG[type(node[leaf])]
    message = refusal(demo)
    assert message.startswith(key), message
    if not isinstance(node[leaf], dict):
        assert repr(node[leaf]) in message


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
    for key in ("grpo.num_stepz", "run.seed", "data.shuffle"):
        assert message.count(key) == 1


def test_overrides_change_what_the_file_says():
    config = load_config(
        DEMO_CONFIG,
        ["grpo.num_steps=7", "policy.optimizer.learning_rate=1e-3", "cluster.temp_dir=/t"],
    )
    assert config.grpo.num_steps == 7
    assert config.policy.optimizer.learning_rate == 0.001
    assert str(config.cluster.temp_dir) == "/t"


def test_an_override_can_replace_a_section():
    override = "policy.model={kind: pretrained, name: org/model, use_chat_template: true}"
    assert load_config(DEMO_CONFIG, [override]).policy.model == PretrainedModel(
        kind="pretrained", name="org/model", use_chat_template=True
    )


def test_an_override_can_set_a_key_of_the_data_plane_that_may_be_absent():
    found = load_config(DEMO_CONFIG, ["data_plane.claim_lease_s=30"]).data_plane
    assert found["claim_lease_s"] == 30
    with pytest.raises(ConfigurationError, match=r"data_plane.claim_lease_s: found 'long'"):
        load_config(DEMO_CONFIG, ["data_plane.claim_lease_s=long"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["token_file=token"], "set, while refit.control is null"),
        (["tls_ca=ca.pem"], "set, while refit.control is null"),
        (["token_file=token", "token_env=TOKEN"], "expected one of them"),
        (["tls_name=refit.example"], "tls_name is set without tls_ca"),
    ],
)
def test_access_to_a_refit_server_that_contradicts_itself_is_refused(overrides, message):
    control = [] if "null" in message else ["refit.control=127.0.0.1:50051"]
    told = [f"refit.control_access.{each}" for each in overrides]
    with pytest.raises(ConfigurationError, match=f"refit.control_access: .*{message}"):
        load_config(DEMO_CONFIG, [*control, *told])


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
        load_config(DEMO_CONFIG, [override])


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


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"gone.yaml: cannot be read: No such file"):
        load_config(tmp_path / "gone.yaml")


@given(st.floats(min_value=1e-12, max_value=1e12))
def test_numbers_mean_the_same_in_yaml_and_python(value):
    for text in (repr(value), f"{value:e}", f"{value:.0e}"):
        config = load_config(DEMO_CONFIG, [f"env.step_timeout_s={text}"])
        assert config.env.step_timeout_s == float(text)


def test_a_configuration_survives_its_own_json(demo):
    config = check_config(demo, source="demo")
    assert check_config(config.model_dump(mode="json"), source="json") == config


@pytest.mark.parametrize("role", ["policy", "generation", "rollout", "environment"])
@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"CPU": 1}, "expected the name of a custom resource"),
        ({"": 1}, "expected the name of a custom resource"),
        ({"trainers": 0}, "greater than 0"),
        ({"trainers": "1"}, "valid number"),
        (["trainers"], "valid dictionary"),
    ],
)
def test_a_placement_is_by_amounts_of_custom_resources(demo, role, found, expected):
    demo["cluster"]["placement"][role] = {"trainers": 0.5}
    assert check_config(demo, source="test").cluster.placement
    demo["cluster"]["placement"][role] = found
    message = refusal(demo)
    assert message.startswith(f"cluster.placement.{role}")
    assert expected in message
