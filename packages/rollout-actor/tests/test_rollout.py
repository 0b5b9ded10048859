"""Effects of a turn on a row, in the synchronous and the asynchronous form."""

import copy

import pytest
import torch
from rollout_doubles import (
    Adder,
    Arithmetic,
    AsyncAdder,
    CharTokenizer,
    Local,
    Scripted,
    batch_of,
    logprobs_of,
    roll_out,
    texts,
    tokens_of,
    turn,
)

from dataplane_core import InvalidRequestError, MissingDataError
from rollout_actor import run_async_multi_turn_rollout, run_multi_turn_rollout


def prompts_by_turn(generator, count):
    """Return the prompts of each turn, for both forms of the rollout."""
    prompts = [prompt for call in generator.seen for prompt in call["prompts"]]
    return [
        sorted(prompt for prompt in prompts if prompt.count("+") == turn + 1)
        for turn in range(count)
    ]


def test_a_turn_appends_the_response_and_the_observation(rollout):
    batch, _ = rollout(batch_of(["1+2="], more=["4+4="]))
    assert texts(batch["message_log"][0]) == [
        ("user", "1+2="),
        ("assistant", "3. So it is."),
        ("environment", " 4+4="),
        ("assistant", "8. So it is."),
        ("environment", ""),
    ]
    response = batch["message_log"][0][1]
    assert torch.equal(response["token_ids"], tokens_of("3. So it is."))
    assert torch.equal(response["generation_logprobs"], logprobs_of(response["token_ids"]))
    assert response["generation_logprobs"].dtype == torch.float32
    assert batch["message_log"][0][4]["token_ids"].dtype == torch.int64


def test_rewards_accumulate_over_turns(rollout):
    batch, metrics = rollout(batch_of(["1+2="], more=["4+4=", "5+5="]))
    assert batch["total_reward"].tolist() == [3.0]
    assert batch["total_reward"].dtype == torch.float32
    assert metrics["mean_total_reward"] == 3.0
    assert [metrics[f"turn_{n}/mean_reward"] for n in (1, 2, 3)] == [1.0, 1.0, 1.0]


def test_only_active_rows_are_generated(rollout):
    questions = batch_of(["1+2=", "3+4=", "5+6="])
    questions["extra_env_info"] = [{"more": []}, {"more": ["1+1="]}, {"more": ["2+2=", "3+3="]}]
    batch, metrics = rollout(questions)
    assert [len(turn) for turn in prompts_by_turn(rollout.generator, 3)] == [3, 2, 1]
    assert batch["total_reward"].tolist() == [1.0, 2.0, 3.0]
    assert [metrics[f"turn_{n}/active_samples"] for n in (1, 2, 3)] == [3, 2, 1]
    assert metrics["natural_termination_rate"] == 1.0


def test_a_row_ends_at_the_maximum_of_turns(rollout):
    batch, metrics = rollout(batch_of(["1+2="], more=["1+1="] * 9), max_rollout_turns=2)
    roles = [turn["role"] for turn in batch["message_log"][0]]
    assert roles == ["user", "assistant", "environment", "assistant", "environment"]
    assert batch["truncated"].tolist() == [False]
    assert metrics["max_turns_reached_rate"] == 1.0
    assert metrics["natural_termination_rate"] == 0.0


@pytest.mark.parametrize(("free", "observed"), [(5, 5), (2, 2), (0, 0)])
def test_observation_that_fills_the_sequence_ends_the_row(rollout, free, observed):
    length = len("1+2=3. So it is.")
    batch, metrics = rollout(batch_of(["1+2="], more=["4+4=", "5+5="]), max_seq_len=length + free)
    log = batch["message_log"][0]
    assert len(log) == 3
    assert torch.equal(log[2]["token_ids"], tokens_of(" 4+4="[:observed]))
    assert batch["truncated"].tolist() == [False]
    assert metrics["truncation_rate"] == 0.0
    assert metrics["sequence_full_rate"] == 1.0
    assert metrics["natural_termination_rate"] == 0.0
    assert metrics["max_turns_reached_rate"] == 0.0


def test_an_observation_that_leaves_space_keeps_the_row_active(rollout):
    length = len("1+2=3. So it is. 4+4=")
    _, metrics = rollout(
        batch_of(["1+2="], more=["4+4="]), max_seq_len=length + 1, max_rollout_turns=1
    )
    assert metrics["sequence_full_rate"] == 0.0


def test_an_observation_after_the_end_truncates_no_row(rollout):
    length = len("1+2=3. So it is.")
    env = Scripted(lambda log, info: {"observation": "well done", "terminated": True})
    batch, metrics = rollout(batch_of(["1+2="]), env, max_seq_len=length + 2)
    assert batch["truncated"].tolist() == [False]
    assert len(batch["message_log"][0][2]["token_ids"]) == 2
    assert metrics["natural_termination_rate"] == 1.0
    assert metrics["sequence_full_rate"] == metrics["truncation_rate"] == 0.0


def test_a_truncated_response_counts_in_a_terminated_row(rollout):
    batch, metrics = rollout(batch_of(["1+2="]), max_new_tokens=2)
    assert batch["truncated"].tolist() == [True]
    assert metrics["natural_termination_rate"] == 0.0


def test_reward_sum_beyond_float32_names_the_row(rollout):
    env = Scripted(
        lambda log, info: {
            "observation": " 4+4=",
            "reward": 3e38 if log[0]["content"] == "3+4=" else 1.0,
            "terminated": len(log) > 2,
        }
    )
    with pytest.raises(InvalidRequestError, match=r"total_reward of row 1 adds up to 6e\+38"):
        rollout(batch_of(["1+2=", "3+4="]), env)


@pytest.mark.parametrize("added", ["^", "$"])
def test_a_tokenizer_that_adds_tokens_to_observations_is_refused(added):
    class Adding(CharTokenizer):
        def __call__(self, text, **options):
            return super().__call__(f"^{text}" if added == "^" else f"{text}$", **options)

    generator = Adder()
    with pytest.raises(
        InvalidRequestError, match=rf"tokenizer Adding returns the tokens \[{ord(added)}\]"
    ):
        run_multi_turn_rollout(
            generator,
            batch_of(["1+2="]),
            Adding(),
            {"sum": Local(Arithmetic())},
            max_seq_len=99,
            max_rollout_turns=2,
        )
    assert generator.events == []


def test_truncated_response_marks_the_row_but_does_not_end_it(rollout):
    batch, metrics = rollout(batch_of(["1+2="], more=["4+4="]), max_new_tokens=2)
    assert batch["truncated"].tolist() == [True]
    assert batch["total_reward"].tolist() == [2.0]
    assert metrics["truncation_rate"] == 1.0
    assert metrics["max_gen_tokens_per_sample"] == 4


def test_stop_strings_are_per_row(rollout):
    batch, _ = rollout(
        batch_of(["1+2=", "3+4=", "5+6="], stop_strings=[["."], None, [" So"]]),
    )
    responses = [log[1]["content"] for log in batch["message_log"]]
    assert responses == ["3.", "7. So it is.", "11. So"]


@pytest.mark.parametrize("stop_strings", ["END", b"END", ["END", 7], 7, ["END", ""]])
def test_malformed_stop_strings_are_refused_by_row(rollout, stop_strings):
    with pytest.raises(InvalidRequestError, match=r"stop_strings of row 1 are .*expected a list"):
        rollout(batch_of(["1+2=", "3+4="], stop_strings=[["."], stop_strings]))
    assert rollout.generator.events == []


def test_next_stop_strings_replace_those_of_the_row(rollout):
    env = Scripted(
        lambda log, info: {
            "observation": " 4+4=",
            "stop_strings": ["."] if log[0]["content"] == "1+2=" else None,
            "terminated": len(log) > 2,
        }
    )
    batch, _ = rollout(batch_of(["1+2=", "3+4="], stop_strings=[[" So"], [" So"]]), env)
    assert [log[1]["content"] for log in batch["message_log"]] == ["3. So", "7. So"]
    assert [log[3]["content"] for log in batch["message_log"]] == ["8.", "8. So it is."]


def test_no_next_stop_strings_leave_those_of_the_row(rollout):
    batch, _ = rollout(batch_of(["1+2="], more=["4+4="], stop_strings=[["."]]))
    assert [turn["content"] for turn in batch["message_log"][0][1::2]] == ["3.", "8."]


def test_metadata_returns_to_the_environment_unless_none(rollout):
    env = Scripted(
        lambda log, info: {
            "observation": " 1+1=",
            "metadata": {"seen": len(log)} if len(log) == 2 else None,
            "terminated": len(log) > 4,
        }
    )
    batch, _ = rollout(batch_of(["1+2="]), env)
    assert [infos for _, infos in env.calls] == [[{"more": []}], [{"seen": 2}], [{"seen": 2}]]
    assert batch["extra_env_info"] == [{"seen": 2}]


def test_named_rewards_are_kept_and_summed(rollout):
    env = Scripted(
        lambda log, info: {
            "observation": " 1+1=",
            "reward": {"reward/right": 1.0, "format": 0.5} if len(log) == 2 else {"late": 2.0},
            "terminated": len(log) > 2,
        }
    )
    batch, metrics = rollout(batch_of(["1+2=", "3+4="]), env)
    assert batch["reward/right"].tolist() == [1.0, 1.0]
    assert batch["format"].tolist() == [0.5, 0.5]
    assert batch["late"].tolist() == [2.0, 2.0]
    assert batch["total_reward"].tolist() == [3.5, 3.5]
    assert metrics["reward/right"] == 1.0
    assert not {"format", "late"} & metrics.keys()


def test_task_without_named_rewards_has_zero_components(rollout):
    plain = Scripted(lambda log, info: {"reward": 0.25})
    named = Scripted(lambda log, info: {"reward": {"reward/x": 2.0}})
    batch, metrics = rollout(
        batch_of(["1+2=", "3+4="], tasks=["plain", "named"]), {"plain": plain, "named": named}
    )
    assert batch["reward/x"].tolist() == [0.0, 2.0]
    assert metrics["reward/x"] == 1.0
    assert batch["total_reward"].tolist() == [0.25, 2.0]


def test_a_reward_component_named_like_a_column_is_refused(rollout):
    env = Scripted(lambda log, info: {"reward": {"idx": 1.0}})
    with pytest.raises(InvalidRequestError, match="reward components 'idx'"):
        rollout(batch_of(["1+2="]), env)


def test_rows_go_to_the_environment_of_their_task(rollout):
    envs = {
        name: Scripted(lambda log, info, reward=reward: {"reward": reward})
        for name, reward in (("a", 1.0), ("b", 2.0))
    }
    batch, _ = rollout(batch_of(["1+2=", "3+4=", "5+6="], tasks=["b", "a", "b"]), envs)
    assert batch["total_reward"].tolist() == [2.0, 1.0, 2.0]
    assert sorted(log[0]["content"] for logs, _ in envs["b"].calls for log in logs) == [
        "1+2=",
        "5+6=",
    ]


def test_the_input_batch_is_not_changed(rollout):
    class Writing(Arithmetic):
        def step(self, message_logs, extra_env_info):
            answer = super().step(message_logs, extra_env_info)
            extra_env_info[0]["more"].append("9+9=")
            return answer

    batch = batch_of(["1+2="], more=["4+4="])
    before = copy.deepcopy(dict(batch))
    rollout(batch, Local(Writing()))
    assert texts(batch["message_log"][0]) == texts(before["message_log"][0])
    assert batch["extra_env_info"] == before["extra_env_info"]
    assert batch.keys() == before.keys()


def test_rows_do_not_share_an_info_dict(rollout):
    def script(log, info):
        info["visits"] += 1
        return {"reward": float(info["visits"])}

    batch = batch_of(["1+2=", "1+2="])
    batch["extra_env_info"] = [{"visits": 0}] * 2
    finished, _ = rollout(batch, Scripted(script))
    assert finished["total_reward"].tolist() == [1.0, 1.0]


def test_assistant_history_is_part_of_the_prompt(rollout):
    batch = batch_of(["0+0="])
    batch["message_log"] = [[turn("user", "7+7="), turn("assistant", "14."), turn("user", " 1+1=")]]
    finished, _ = rollout(batch)
    assert rollout.generator.seen[0]["prompts"] == ["7+7=14. 1+1="]
    assert "generation_logprobs" not in finished["message_log"][0][1]


def test_a_turn_without_content_is_empty_text_to_the_environment(rollout):
    batch = batch_of(["1+2="])
    batch["message_log"][0].insert(0, {"role": "system", "token_ids": tokens_of("!")})
    batch, _ = rollout(batch)
    assert texts(batch["message_log"][0])[0] == ("system", "")


def test_generation_gets_padded_prompts_lengths_and_greedy(rollout):
    rollout(batch_of(["1+2=", "13+14="]), greedy=True)
    calls = rollout.generator.seen
    assert all(call["greedy"] is True for call in calls)
    for call in calls:
        assert call["input_ids"].dtype == call["input_lengths"].dtype == torch.int64
        for row, length in zip(call["input_ids"], call["input_lengths"].tolist(), strict=True):
            assert row[length:].eq(CharTokenizer.pad_token_id).all()


def test_generation_gets_the_media_of_the_turns(rollout):
    batch = batch_of(["1+2=", "3+4="])
    pixels = torch.arange(6.0).reshape(2, 3)
    batch["message_log"][0][0]["pixel_values"] = pixels
    rollout(batch)
    media = {
        prompt: value
        for call in rollout.generator.seen
        for prompt, value in zip(call["prompts"], call.get("pixel_values", [None]), strict=False)
    }
    assert torch.equal(media["1+2="], pixels)
    assert media["3+4="] is None


def test_rows_of_a_group_share_equal_media(rollout):
    batch = batch_of(["1+2="] * 3)
    for log in batch["message_log"]:
        log[0]["pixel_values"] = torch.ones(2, 3)
    batch["message_log"][2][0]["pixel_values"] = torch.zeros(2, 3)
    rollout(batch, media_group_size=3)
    media = [value for call in rollout.generator.seen for value in call["pixel_values"]]
    assert len({id(value) for value in media}) == 2


@pytest.mark.parametrize("run", [run_multi_turn_rollout, run_async_multi_turn_rollout])
def test_the_first_routing_of_a_turn_stays(run):
    class Routed(AsyncAdder):
        turns = 0

        def generate(self, data, *, greedy):
            self.turns += 1
            output = super().generate(data, greedy=greedy)
            output["routed_experts"] = torch.full((*output["output_ids"].shape, 2, 1), self.turns)
            return output

    batch, _ = roll_out(run, Routed(), batch_of(["1+2="], more=["4+4="]))
    turns = batch["message_log"][0]
    assert [int(turn["routed_experts"].max()) for turn in turns[:4]] == [1, 1, 2, 2]
    assert turns[1]["routed_experts"].shape == (len(turns[1]["token_ids"]), 2, 1)
    assert "routed_experts" not in turns[4]


def test_a_missing_column_is_named(rollout):
    batch = batch_of(["1+2="])
    del batch["extra_env_info"]
    with pytest.raises(MissingDataError, match="no 'extra_env_info'"):
        rollout(batch)


def test_columns_of_different_lengths_are_refused(rollout):
    with pytest.raises(InvalidRequestError, match="1 message logs with 2 task names"):
        rollout(batch_of(["1+2="]) | {"task_name": ["sum", "sum"]})


def test_a_turn_without_tokens_is_refused_by_its_place(rollout):
    batch = batch_of(["1+2="])
    batch["message_log"][0].append({"role": "user", "content": "hi"})
    with pytest.raises(MissingDataError, match="turn 1 of row 0 has no 'token_ids'"):
        rollout(batch)


@pytest.mark.parametrize("tokens", [torch.tensor([[49, 61]]), torch.tensor([49.7, 61.0])])
def test_tokens_that_are_not_integers_in_a_row_are_refused(rollout, tokens):
    batch = batch_of(["1+2="])
    batch["message_log"][0][0]["token_ids"] = tokens
    with pytest.raises(InvalidRequestError, match="turn 0 of row 0 has token_ids of shape"):
        rollout(batch)
    assert rollout.generator.seen == []


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), 1e10])
def test_step_timeouts_that_no_wait_takes_are_refused_first(rollout, seconds):
    with pytest.raises(InvalidRequestError, match="step_timeout_s is"):
        rollout(batch_of(["1+2="]), step_timeout_s=seconds)
    assert rollout.generator.seen == []


def test_no_turns_are_refused(rollout):
    with pytest.raises(InvalidRequestError, match="max_rollout_turns 0"):
        rollout(batch_of(["1+2="]), max_rollout_turns=0)


def test_metrics_are_plain_numbers_about_the_batch(rollout):
    questions = batch_of(["1+2=", "3+4="])
    questions["extra_env_info"] = [{"more": []}, {"more": ["1+1="]}]
    _, metrics = rollout(questions)
    assert metrics == {
        "total_turns": 3,
        "avg_turns_per_sample": 1.5,
        "max_turns_per_sample": 2,
        "mean_gen_tokens_per_sample": 18.0,
        "max_gen_tokens_per_sample": 24,
        "mean_env_tokens_per_sample": 2.5,
        "mean_total_tokens_per_sample": 24.5,
        "mean_total_reward": 1.5,
        "min_total_reward": 1.0,
        "max_total_reward": 2.0,
        "truncation_rate": 0.0,
        "natural_termination_rate": 1.0,
        "sequence_full_rate": 0.0,
        "max_turns_reached_rate": 0.0,
        "turn_1/active_samples": 2,
        "turn_1/mean_gen_tokens": 12.0,
        "turn_1/mean_env_tokens": 2.5,
        "turn_1/mean_reward": 1.0,
        "turn_2/active_samples": 1,
        "turn_2/mean_gen_tokens": 12.0,
        "turn_2/mean_env_tokens": 0.0,
        "turn_2/mean_reward": 1.0,
    }
    assert all(type(value) in (int, float) for value in metrics.values())
