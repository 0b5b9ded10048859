"""What is read of the trainer's configuration."""

import pytest
from pydantic import BaseModel
from rollout_doubles import config

from dataplane_core import ConfigError, UnsupportedError
from rollout_actor.settings import RolloutSettings


def test_optional_keys_are_off_when_missing():
    settings = RolloutSettings.from_master_config(config(multiple=8))
    assert settings == RolloutSettings(
        max_seq_len=200,
        pad_to_multiple=8,
        max_new_tokens=None,
        max_turns=4,
        async_generation=False,
        router_replay=False,
        share_group_media=False,
        step_timeout_s=300.0,
    )


def test_optional_keys_are_read():
    settings = RolloutSettings.from_master_config(
        config(
            policy={"router_replay": {"enabled": True}},
            grpo={"deduplicate_multimodal_data": True},
            env={"step_timeout_s": 5},
        )
    )
    assert (settings.router_replay, settings.share_group_media) == (True, True)
    assert settings.step_timeout_s == 5.0


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
def test_the_engine_flags_of_the_back_end_pick_the_form(generation, expected):
    master = config(policy={"generation": generation})
    assert RolloutSettings.from_master_config(master).async_generation is expected


def test_a_pydantic_model_serves_as_configuration():
    class Master(BaseModel):
        policy: dict
        grpo: dict
        env: dict

    assert RolloutSettings.from_master_config(
        Master(**config())
    ) == RolloutSettings.from_master_config(config())


def test_nemo_gym_is_refused():
    with pytest.raises(UnsupportedError, match=r"env\.should_use_nemo_gym is true"):
        RolloutSettings.from_master_config(config(env={"should_use_nemo_gym": True}))


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
    ],
)
def test_a_wrong_key_is_named_by_its_path(sections, message):
    with pytest.raises(ConfigError, match=message):
        RolloutSettings.from_master_config(config(**sections))


def test_something_else_than_a_mapping_is_refused():
    with pytest.raises(ConfigError, match="found list; expected a mapping"):
        RolloutSettings.from_master_config([])
