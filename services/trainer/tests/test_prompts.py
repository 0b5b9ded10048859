"""Prompts are read line by line, and taken in an order that only seed and position decide."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.errors import ConfigurationError
from grpo_trainer.prompts import SHIPPED, Prompt, PromptRecord, PromptStream, load_prompts
from grpo_trainer.rollout_batch import rollout_batch


def encode(text):
    return list(text.encode())


def write(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


GOOD = '{"prompt": "1+1=", "answer": "2"}'


def refusal(path, max_length=20):
    with pytest.raises(ConfigurationError) as caught:
        load_prompts(path, encode, max_length=max_length)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["train.jsonl", "validation.jsonl"])
def test_the_shipped_prompts_can_be_read(name):
    assert load_prompts(SHIPPED / name, encode, max_length=40)


def test_no_shipped_prompt_is_both_trained_on_and_held_out():
    train, held_out = (
        {p.record.prompt for p in load_prompts(SHIPPED / name, encode, max_length=40)}
        for name in ("train.jsonl", "validation.jsonl")
    )
    assert not train & held_out


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "7",
        '{"prompt": "a"}',
        '{"prompt": "a", "answer": 3}',
        '{"prompt": "", "answer": "b"}',
        '{"prompt": "a", "answer": " "}',
        '{"prompt": "a", "answer": "b", "more": 1}',
        '{"prompt": "a", "answer": "b", "follow_ups": [{"prompt": "c"}]}',
    ],
)
def test_a_malformed_line_is_named_by_number(tmp_path, line):
    assert ", line 3: " in refusal(write(tmp_path, GOOD, "", line, GOOD))


def test_a_prompt_as_long_as_the_limit_is_named_by_number(tmp_path):
    longest = json.dumps({"prompt": "x" * 19, "answer": "y"})
    over = json.dumps({"prompt": "x" * 20, "answer": "y"})
    assert len(load_prompts(write(tmp_path, longest), encode, max_length=20)) == 1
    message = refusal(write(tmp_path, longest, over))
    assert ", line 2: the prompt has 20 tokens; expected 1 to 19" in message


def test_a_text_without_tokens_is_named_by_number(tmp_path):
    def refuse(text):
        if "z" in text:
            raise ValueError("'z' not in the vocabulary")
        return encode(text)

    line = json.dumps(
        {"prompt": "a", "answer": "b", "follow_ups": [{"prompt": "z", "answer": "b"}]}
    )
    with pytest.raises(ConfigurationError, match=r"line 2: 'z' not in the vocabulary"):
        load_prompts(write(tmp_path, GOOD, line), refuse, max_length=20)


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
def test_a_data_set_without_prompts_is_refused(tmp_path, content):
    assert refusal(write(tmp_path, content)).endswith("holds no prompt")


def test_a_data_set_that_is_not_there_is_named(tmp_path):
    assert "cannot be read" in refusal(tmp_path / "gone.jsonl")


def test_a_data_set_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe")
    assert "cannot be read" in refusal(path)


text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@given(st.lists(st.tuples(text, text.filter(str.strip)), min_size=1, max_size=5), st.booleans())
def test_any_text_survives_the_file(tmp_path_factory, pairs, ascii_only):
    lines = [
        json.dumps({"prompt": prompt, "answer": answer}, ensure_ascii=ascii_only)
        for prompt, answer in pairs
    ]
    path = write(tmp_path_factory.mktemp("p"), *lines)
    read = [p.record for p in load_prompts(path, encode, max_length=10**6)]
    assert [(r.prompt, r.answer) for r in read] == [(p, a.strip()) for p, a in pairs]


def prompts_numbered(count):
    return [
        Prompt(record=PromptRecord(prompt=str(i), answer="a"), token_ids=[i]) for i in range(count)
    ]


def taken(stream, counts):
    return [p.token_ids[0] for count in counts for p in stream.take(count)]


streams = st.tuples(st.integers(1, 9), st.integers(0, 5), st.booleans())


@given(streams, st.lists(st.integers(0, 20), max_size=6))
def test_the_stream_does_not_depend_on_the_batch_sizes(which, counts):
    size, seed, shuffle = which
    prompts = prompts_numbered(size)
    one = PromptStream(prompts, seed=seed, shuffle=shuffle)
    other = PromptStream(prompts, seed=seed, shuffle=shuffle)
    assert taken(one, counts) == taken(other, [sum(counts)])
    assert one.position == other.position == sum(counts)


@given(streams, st.integers(0, 30), st.integers(0, 30))
def test_a_stream_goes_on_from_its_position(which, before, after):
    size, seed, shuffle = which
    prompts = prompts_numbered(size)
    whole = PromptStream(prompts, seed=seed, shuffle=shuffle)
    taken(whole, [before])
    resumed = PromptStream(prompts, seed=seed, shuffle=shuffle, position=before)
    assert taken(resumed, [after]) == taken(whole, [after])


@given(streams, st.integers(1, 5))
def test_every_epoch_takes_each_prompt_once(which, epochs):
    size, seed, shuffle = which
    stream = PromptStream(prompts_numbered(size), seed=seed, shuffle=shuffle)
    for _ in range(epochs):
        assert Counter(taken(stream, [size])) == Counter(range(size))


def test_shuffling_differs_by_epoch_and_seed_and_can_be_off():
    prompts = prompts_numbered(30)
    shuffled = PromptStream(prompts, seed=1, shuffle=True)
    first, second = taken(shuffled, [30]), taken(shuffled, [30])
    assert first != second
    assert taken(PromptStream(prompts, seed=2, shuffle=True), [30]) != first
    assert taken(PromptStream(prompts, seed=1, shuffle=False), [60]) == [*range(30)] * 2


@given(st.integers(1, 4), st.integers(1, 4))
def test_a_batch_repeats_each_prompt_group_size_times_in_a_row(count, group_size):
    batch = rollout_batch(prompts_numbered(count), group_size=group_size)
    assert batch["idx"] == [i for i in range(count) for _ in range(group_size)]
    assert batch["length"].tolist() == [1] * (count * group_size)
    assert {len(column) for column in batch.values()} == {count * group_size}
