"""Flat columns have the same content as their message logs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollout_doubles import tokens_of, turn

from column_io import BatchedDataDict, reconstruct_message_log
from dataplane_core import InvalidRequestError, MissingDataError
from rollout_actor import flatten_rollout_message_log

PAD = 0


def generated(text, **more):
    logprobs = -torch.arange(1.0, len(text) + 1)
    return turn("assistant", text, generation_logprobs=logprobs, **more)


@st.composite
def message_logs(draw):
    """Rows of a prompt, maybe with history, and turns of responses and observations."""
    texts = st.text(st.characters(min_codepoint=1, max_codepoint=300), max_size=6)
    prompt_turn = st.builds(turn, st.sampled_from(["system", "user", "assistant"]), texts)
    played_turn = st.one_of(
        st.builds(generated, texts),
        st.builds(turn, st.sampled_from(["environment", "user", "assistant"]), texts),
    )
    logs, lengths = [], []
    for _ in range(draw(st.integers(1, 5))):
        prompt = draw(st.lists(prompt_turn, max_size=3))
        logs.append(prompt + draw(st.lists(played_turn, max_size=5)))
        lengths.append(sum(len(turn["token_ids"]) for turn in prompt))
    return logs, lengths


def flat(logs, lengths, *, multiple=1, **options):
    return flatten_rollout_message_log(
        logs,
        torch.tensor(lengths),
        pad_token_id=PAD,
        make_sequence_length_divisible_by=multiple,
        **options,
    )


@given(message_logs(), st.integers(1, 9))
def test_columns_are_consistent_with_the_message_logs(drawn, multiple):
    logs, prompt_lengths = drawn
    payload, input_lengths, carried = flat(logs, prompt_lengths, multiple=multiple)
    width = payload["input_ids"].shape[1]
    assert width % multiple == 0
    assert int(input_lengths.max()) <= width < int(input_lengths.max()) + multiple
    for name, dtype in (
        ("input_ids", torch.int64),
        ("token_mask", torch.int64),
        ("generation_logprobs", torch.float32),
    ):
        assert payload[name].shape == (len(logs), width)
        assert payload[name].dtype == dtype
    for row, log in enumerate(logs):
        ids = [token for turn in log for token in turn["token_ids"].tolist()]
        mask = [int("generation_logprobs" in turn) for turn in log for _ in turn["token_ids"]]
        logprobs = [
            logprob
            for turn in log
            for logprob in turn.get("generation_logprobs", torch.zeros(len(turn["token_ids"])))
        ]
        padding = [0] * (width - len(ids))
        assert payload["input_ids"][row].tolist() == ids + padding
        assert payload["token_mask"][row].tolist() == mask + padding
        assert payload["generation_logprobs"][row].tolist() == logprobs + padding
        assert input_lengths[row] == len(ids)
        assert payload["content"][row] == [turn["content"] for turn in log]
        prompt = carried["prompt_ids_for_adv"][row]
        length = prompt_lengths[row]
        assert prompt.tolist() == ids[:length] + [PAD] * (len(prompt) - length)


@given(message_logs())
def test_the_message_logs_can_be_rebuilt_from_the_columns(drawn):
    logs, prompt_lengths = drawn
    payload, _, _ = flat(logs, prompt_lengths)
    rebuilt = reconstruct_message_log(payload)
    for log, other in zip(logs, rebuilt, strict=True):
        assert [turn["role"] for turn in log] == [turn["role"] for turn in other]
        for before, after in zip(log, other, strict=True):
            ids = after.get("token_ids", torch.empty(0, dtype=torch.int64))
            assert torch.equal(before["token_ids"], ids)


def test_logprobs_of_non_assistant_turns_are_ignored():
    log = [turn("user", "a"), generated("b") | {"role": "tool"}]
    payload, _, _ = flat([log], [1])
    assert payload["token_mask"].tolist() == [[0, 0]]
    assert payload["generation_logprobs"].tolist() == [[0, 0]]


def test_prompt_ends_with_the_turn_that_reaches_its_length():
    log = [turn("system", "ab"), turn("user", "cd"), turn("user", "ef"), generated("g")]
    _, _, carried = flat([log], [3])
    assert carried["prompt_ids_for_adv"].tolist() == [tokens_of("abcd").tolist()]


def test_rows_of_media_keep_their_shapes():
    logs = [
        [turn("user", "a", same=torch.ones(2, 3), ragged=torch.ones(row + 1, 3)), generated("b")]
        for row in range(3)
    ]
    payload, _, _ = flat(logs, [1, 1, 1])
    assert [row.shape for row in payload["same"].unbind()] == [(2, 3)] * 3
    assert [row.shape for row in payload["ragged"].unbind()] == [(1, 3), (2, 3), (3, 3)]


def test_media_of_several_turns_are_joined():
    log = [turn("user", "a", pixel_values=torch.zeros(1, 3)), generated("b")]
    log += [turn("user", "c", pixel_values=torch.ones(2, 3))]
    payload, _, _ = flat([log], [1])
    assert payload["pixel_values"][0].tolist() == [[0.0] * 3, [1.0] * 3, [1.0] * 3]


def test_a_row_without_media_has_no_items():
    logs = [[turn("user", "a", pixel_values=torch.ones(2, 4)), generated("b")], [turn("user", "a")]]
    payload, _, _ = flat(logs, [1, 1])
    assert [row.shape for row in payload["pixel_values"].unbind()] == [(2, 4), (0, 4)]


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([[torch.ones(1, 3)], [torch.ones(3)]], "row 1 are torch.float32 of 1 dimensions"),
        ([[torch.ones(1, 3)], [torch.ones(1, 3).int()]], "row 1 are torch.int32 of 2 dimensions"),
        ([[torch.ones(1, 3), torch.ones(1, 4)]], r"row 0 have items of shapes \(3,\) and \(4,\)"),
    ],
    ids=["dimensions", "dtype", "one row"],
)
def test_inconsistent_media_are_refused_by_name(rows, named):
    logs = [[turn("user", "a", image=image) for image in images] for images in rows]
    with pytest.raises(ValueError, match=f"media 'image' of {named}"):
        flat(logs, [1] * len(logs))


def routing(text, value):
    return torch.full((len(text), 2, 3), value, dtype=torch.int16)


def test_a_generated_turn_without_routing_is_refused():
    routed = [turn("user", "a"), generated("b", routed_experts=routing("b", 5))]
    with pytest.raises(MissingDataError, match="generated turn of row 1 has no 'routed_experts'"):
        flat([routed, [turn("user", "a"), generated("b")]], [1, 1], routed_experts=True)


def test_routed_experts_are_aligned_and_zero_if_missing():
    log = [
        turn("user", "ab", routed_experts=routing("ab", 5)),
        generated("c", routed_experts=routing("c", 6)),
        turn("environment", "d"),
    ]
    payload, _, _ = flat([log], [2], routed_experts=True)
    assert payload["routed_experts"].shape == (1, 4, 2, 3)
    assert payload["routed_experts"].dtype == torch.int16
    assert payload["routed_experts"][0, :, 0, 0].tolist() == [5, 5, 6, 0]


def test_logprobs_of_another_length_than_the_tokens_are_refused():
    log = [turn("user", "ab"), generated("c") | {"generation_logprobs": torch.zeros(2)}]
    with pytest.raises(InvalidRequestError, match="row 0 has 2 generation_logprobs in a turn of 1"):
        flat([log], [2])


def test_a_prompt_length_per_row_is_required():
    with pytest.raises(InvalidRequestError, match="1 prompt lengths for 2 message logs"):
        flat([[turn("user", "a")], [turn("user", "b")]], [1])


def test_the_carried_part_has_the_texts_and_response_lengths():
    log = [turn("user", "ab"), generated("cde"), turn("environment", "f"), generated("gh")]
    _, _, carried = flat([log], [2])
    assert isinstance(carried, BatchedDataDict)
    assert carried["response_token_lengths"].tolist() == [3]
    assert carried["generated_tokens"].tolist() == [5]
    assert carried["turn_roles"].tolist() == [["user", "assistant", "environment", "assistant"]]
    assert carried["turn_contents"].tolist() == [["ab", "cde", "f", "gh"]]
