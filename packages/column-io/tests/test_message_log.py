"""Conversion of conversations to columns and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from column_io import (
    MESSAGE_LOG_BULK_FIELDS,
    BatchedDataDict,
    attach_message_log_view,
    decompose_message_log,
    reconstruct_message_log,
    to_nested_by_length,
)

turns = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool"]),
        "content": st.one_of(st.text(max_size=5), st.lists(st.integers(), max_size=2)),
    },
    optional={"token_ids": st.lists(st.integers(0, 99), min_size=1, max_size=4).map(torch.tensor)},
)
message_logs = st.lists(st.lists(turns, max_size=4), min_size=1, max_size=4)


def padded_tokens(logs: list[list[dict[str, Any]]], extra: int = 0) -> torch.Tensor:
    rows = [
        torch.cat([turn.get("token_ids", torch.tensor([], dtype=torch.int64)) for turn in log])
        if log
        else torch.tensor([], dtype=torch.int64)
        for log in logs
    ]
    padded = torch.full((len(rows), max(map(len, rows)) + extra), -1)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded


def plain(logs: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    return [
        [
            {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in turn.items()}
            for turn in log
        ]
        for log in logs
    ]


@given(logs=message_logs, extra=st.integers(0, 3))
def test_reconstruct_undoes_decompose(logs: list[list[dict[str, Any]]], extra: int) -> None:
    columns = {**decompose_message_log(logs), "input_ids": padded_tokens(logs, extra)}
    assert plain(reconstruct_message_log(columns)) == plain(logs)


@given(logs=message_logs)
def test_reconstruct_reads_jagged_columns_too(logs: list[list[dict[str, Any]]]) -> None:
    columns = decompose_message_log(logs)
    lengths = columns["turn_lengths"].sum(dim=1)
    columns["input_ids"] = to_nested_by_length(padded_tokens(logs), lengths)
    assert plain(reconstruct_message_log(columns)) == plain(logs)


def conversation() -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "q", "token_ids": torch.tensor([1, 2])},
        {"role": "assistant", "content": "", "token_ids": torch.tensor([], dtype=torch.int64)},
        {"role": "assistant", "content": "a", "token_ids": torch.tensor([3, 4, 5])},
        {"role": "tool", "token_ids": [6]},
        {"role": "assistant", "content": "b", "token_ids": torch.tensor([7])},
    ]


def test_decomposed_columns_have_the_documented_form() -> None:
    columns = decompose_message_log([conversation(), [{"role": "user"}]])
    assert columns["turn_lengths"].dtype == torch.int64
    assert columns["turn_lengths"].tolist() == [[2, 0, 3, 1, 1], [0, 0, 0, 0, 0]]
    assert columns["turn_roles"].dtype == object
    assert columns["turn_roles"].tolist()[1] == ["user"]
    assert columns["turn_contents"].tolist() == [["q", "", "a", "", "b"], [""]]
    assert columns["response_token_lengths"].tolist() == [3, 0]


def test_the_columns_of_a_message_log_are_named() -> None:
    assert set(MESSAGE_LOG_BULK_FIELDS) == {"turn_lengths", "turn_roles", "turn_contents"}


def test_empty_logs_are_decomposed() -> None:
    assert decompose_message_log([])["turn_lengths"].shape == (0, 0)
    columns = decompose_message_log([[], []])
    assert columns["turn_lengths"].shape == (2, 0)
    assert columns["turn_roles"].tolist() == [[], []]


def test_a_turn_without_a_role_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="turn 1 of row 0"):
        decompose_message_log([[{"role": "user"}, {"content": "x"}]])


def columns_of_one() -> BatchedDataDict[Any]:
    decomposed = decompose_message_log([conversation()])
    return BatchedDataDict(
        decomposed,
        input_ids=torch.arange(1, 9).unsqueeze(0),
        generation_logprobs=-torch.arange(1.0, 9.0).unsqueeze(0),
    )


def test_token_ids_are_views_of_input_ids() -> None:
    columns = columns_of_one()
    log = reconstruct_message_log(columns)[0]
    columns["input_ids"][0, 2] = 42
    assert log[2]["token_ids"].tolist() == [42, 4, 5]


def test_generation_logprobs_are_on_assistant_turns_only() -> None:
    log = reconstruct_message_log(columns_of_one())[0]
    assert [turn.get("generation_logprobs") is not None for turn in log] == [
        False,
        False,
        True,
        False,
        True,
    ]
    assert log[2]["generation_logprobs"].tolist() == [-3, -4, -5]


def test_turn_lengths_may_be_padded_beyond_the_turns() -> None:
    columns = columns_of_one()
    columns["turn_lengths"] = torch.nn.functional.pad(columns["turn_lengths"], (0, 11))
    assert len(reconstruct_message_log(columns)[0]) == 5


@pytest.mark.parametrize("missing", ["input_ids", *MESSAGE_LOG_BULK_FIELDS])
def test_reconstruct_names_the_missing_column(missing: str) -> None:
    columns = columns_of_one()
    del columns[missing]
    with pytest.raises(KeyError, match=missing):
        reconstruct_message_log(columns)


def test_turns_with_more_tokens_than_ids_are_refused() -> None:
    columns = columns_of_one()
    columns["input_ids"] = columns["input_ids"][:, :6]
    with pytest.raises(ValueError, match="6 token ids"):
        reconstruct_message_log(columns)


@pytest.mark.parametrize(
    ("lengths", "logprobs"), [([3, -2, 1], 6), ([1, 1, 1, 2], 6), ([1, 1, 1], 2)]
)
def test_lengths_and_logprobs_that_do_not_fit_the_tokens_are_refused(
    lengths: list[int], logprobs: int
) -> None:
    columns = {
        "input_ids": torch.arange(6)[None],
        "turn_lengths": torch.tensor([lengths]),
        "turn_roles": [["user", "user", "assistant"]],
        "turn_contents": [["", "", ""]],
        "generation_logprobs": torch.zeros(1, logprobs),
    }
    with pytest.raises(ValueError, match="row 0 has 3 roles"):
        reconstruct_message_log(columns)


def test_contents_that_do_not_fit_the_roles_are_refused() -> None:
    columns = columns_of_one()
    with pytest.raises(ValueError, match="row 0 has 5 roles"):
        reconstruct_message_log({**columns, "turn_contents": [["q"]]})


def test_attaching_is_in_place_and_can_be_repeated() -> None:
    columns = columns_of_one()
    attach_message_log_view(columns)
    first = plain(columns["message_log"])
    attach_message_log_view(columns)
    assert plain(columns["message_log"]) == first
    assert len(first[0]) == 5


@pytest.mark.parametrize("missing", ["input_ids", *MESSAGE_LOG_BULK_FIELDS])
def test_attaching_does_nothing_without_all_columns(missing: str) -> None:
    columns = columns_of_one()
    del columns[missing]
    attach_message_log_view(columns)
    assert "message_log" not in columns


def test_separate_arguments_equal_a_mapping() -> None:
    columns = columns_of_one()
    expected = plain(reconstruct_message_log(columns))
    order = ["input_ids", "turn_lengths", "turn_roles", "turn_contents", "generation_logprobs"]
    in_place = [columns[name] for name in order]
    assert plain(reconstruct_message_log(*in_place)) == expected
    assert plain(reconstruct_message_log(**{name: columns[name] for name in order})) == expected
    without = plain(reconstruct_message_log({name: columns[name] for name in order[:4]}))
    assert plain(reconstruct_message_log(*in_place[:4])) == without


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1]],), "no columns"),
        ((torch.ones(1, 2), torch.ones(1, 1), [["user"]], [["q"]]), "expected integers"),
        ((torch.ones(2, 2), torch.ones(1, 1, dtype=int), [["user"]], [["q"]]), "1 rows; expected"),
        (({"input_ids": 1}, torch.ones(1, 1)), "both a mapping"),
        (([[1]], torch.ones(1, 1, dtype=int), [["user"]], [["q"]]), "input_ids is"),
    ],
)
def test_columns_that_are_no_message_logs_are_refused(
    arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        reconstruct_message_log(*arguments)
