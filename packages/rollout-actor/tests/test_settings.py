"""Reading of the trainer's configuration; `test_actor.py` tests the effect of each key."""

import pytest
from pydantic import BaseModel
from rollout_doubles import DP_CFG, Adder, Arithmetic, CharTokenizer, Local, batch_of, config

from dataplane_core import ConfigError
from rollout_actor import SyncRolloutActor


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
