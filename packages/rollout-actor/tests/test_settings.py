"""Reading of the trainer's configuration; `test_actor.py` tests the effect of each key.

Imports internals: the settings' classes and their JSON schema.
"""

import pytest
from pydantic import BaseModel
from rollout_doubles import DP_CFG, Adder, Arithmetic, CharTokenizer, Local, batch_of, config

from dataplane_core import ConfigError
from dataplane_core.json_schema import json_schema
from rollout_actor import SyncRolloutActor
from rollout_actor.settings import MasterConfig, RolloutSettings


def configured(master):
    return SyncRolloutActor(Adder(), CharTokenizer(), {"sum": Local(Arithmetic())}, master, DP_CFG)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"backend": "vllm", "vllm_cfg": {"async_engine": True}}, True),
        ({"backend": "vllm", "vllm_cfg": {"async_engine": False}}, False),
        ({"backend": "vllm"}, False),
        ({"backend": "torch", "async_engine": True}, True),
        ({"backend": "torch", "vllm_cfg": {"async_engine": True}}, False),
        ({"backend": "sglang", "sglang_cfg": {"async_engine": True}}, True),
        ({"vllm_cfg": {"async_engine": True}}, True),
        (None, False),
    ],
)
def test_async_engine_flags_select_the_rollout_form(store, generation, expected):
    master = config(policy={"generation": generation})
    if expected:
        with pytest.raises(ConfigError, match="Adder has no generate_async"):
            configured(master)
    else:
        configured(master).shutdown()


def test_a_pydantic_model_serves_as_configuration(store):
    class Master(BaseModel):
        policy: dict
        grpo: dict
        env: dict

    actor = configured(Master(**config(multiple=8)))
    meta, *_ = actor.rollout_to_tq(batch_of(["1+2="]), partition_id="train")
    assert meta.extra_info["pad_to_multiple"] == 8
    actor.shutdown()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"policy": {"max_total_sequence_length": None}}, r"policy\.max_total_sequence_length is"),
        ({"grpo": {"max_rollout_turns": 0}}, r"grpo\.max_rollout_turns: found 0"),
        ({"grpo": {"max_rollout_turns": "4"}}, r"grpo\.max_rollout_turns: found '4'"),
        (
            {"policy": {"make_sequence_length_divisible_by": True}},
            r"policy\.make_sequence_length_divisible_by: found True",
        ),
        ({"policy": {"router_replay": True}}, r"policy\.router_replay: found True"),
        ({"env": {"step_timeout_s": 0}}, r"env\.step_timeout_s: found 0"),
        ({"env": {"step_timeout_s": 1e10}}, r"env\.step_timeout_s: found 10000000000.0"),
    ],
)
def test_a_wrong_key_is_named_by_its_path(store, sections, message):
    with pytest.raises(ConfigError, match=message):
        configured(config(**sections))


def test_a_configuration_that_is_no_mapping_is_refused(store):
    with pytest.raises(ConfigError, match="found list; expected a mapping"):
        configured([])


def keys_of(section, path=()):
    """Return the path of every key of a schema's section, through optional sections."""
    for name, key in section.get("properties", {}).items():
        [inner] = [each for each in key.get("anyOf", [key]) if each.get("type") != "null"]
        yield *path, name
        yield from keys_of(
            SCHEMA["$defs"].get(inner.get("$ref", "").rpartition("/")[2], {}), (*path, name)
        )


SCHEMA = json_schema(MasterConfig)


@pytest.mark.parametrize("path", [*keys_of(SCHEMA)], ids=".".join)
def test_every_key_of_the_schema_is_read(path):
    master = config()
    section = master
    for name in path[:-1]:
        section = section.setdefault(name, {})
    section[path[-1]] = "wrong"
    with pytest.raises(ConfigError, match=rf"{'.'.join(path)}: found 'wrong'"):
        RolloutSettings.from_master_config(master)
