"""A generation backend's output is checked against the request."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollout_doubles import AsyncAdder, batch_of, roll_out, tokens_of

from dataplane_core import InvalidRequestError, MissingDataError
from rollout_actor import run_async_multi_turn_rollout, run_multi_turn_rollout

FORMS = [run_multi_turn_rollout, run_async_multi_turn_rollout]


class Altering(AsyncAdder):
    """An `AsyncAdder` whose correct output is changed by ``alter(output, data)``."""

    def __init__(self, alter, **options):
        super().__init__(**options)
        self.alter = alter

    def generate(self, data, *, greedy):
        output = super().generate(data, greedy=greedy)
        self.alter(output, data)
        return output


def run_rollout(alter, questions=("1+2=", "13+4="), *, form=run_multi_turn_rollout, **options):
    return roll_out(form, Altering(alter), batch_of(list(questions)), **options)


def insert(output, row, place, token, logprob):
    """Insert a token into a row, and count it in ``unpadded_sequence_lengths``."""
    for name, value in (("output_ids", token), ("logprobs", logprob)):
        column = torch.nn.functional.pad(output[name], (0, 1))
        column[row, place + 1 :] = output[name][row, place:]
        column[row, place] = value
        output[name] = column
    output["unpadded_sequence_lengths"][row] += 1


def begin_token(output, row, start, stop):
    insert(output, row, 0, 7, 0.0)


def begin_token_counted(output, row, start, stop):
    insert(output, row, 0, 7, 0.0)
    output["generation_lengths"][row] += 1


def other_prompt_token(output, row, start, stop):
    output["output_ids"][row, start - 1] += 1


def shifted_log_probabilities(output, row, start, stop):
    output["logprobs"][row] = output["logprobs"][row].roll(-1)


def prompt_log_probability(value):
    return lambda output, row, start, stop: output["logprobs"][row, 0:1].fill_(value)


def log_probability(value):
    return lambda output, row, start, stop: output["logprobs"][row, stop - 1 : stop].fill_(value)


def longer_response_than_reported(output, row, start, stop):
    output["generation_lengths"][row] -= 1


def longer_than_its_columns(output, row, start, stop):
    more = output["output_ids"].shape[1] + 1 - stop
    output["generation_lengths"][row] += more
    output["unpadded_sequence_lengths"][row] += more


def shorter_than_its_prompt(output, row, start, stop):
    output["unpadded_sequence_lengths"][row] = start - 1
    output["generation_lengths"][row] = -1


def negative_token(output, row, start, stop):
    output["output_ids"][row, stop - 1] = -100


def beyond_float32(output, row, start, stop):
    output["logprobs"] = output["logprobs"].double()
    output["logprobs"][row, stop - 1] = -1e39


FAULTS = {
    "begin token": (begin_token, r"expected unpadded_sequence_lengths = .* \+ prompt"),
    "begin token, counted": (begin_token_counted, "token 7 at index 0 of the prompt; expected 49"),
    "other prompt token": (other_prompt_token, "of the prompt; expected 61, as in the request"),
    "shifted": (shifted_log_probabilities, "of the prompt; expected 0"),
    "prompt scored": (prompt_log_probability(-0.5), "-0.5 at index 0 of the prompt; expected 0"),
    "prompt NaN": (prompt_log_probability(math.nan), "nan at index 0 of the prompt; expected 0"),
    "NaN": (log_probability(math.nan), "log-probability nan at index .*expected a finite"),
    "infinite": (log_probability(math.inf), "log-probability inf at index"),
    "impossible": (log_probability(-math.inf), "log-probability -inf at index"),
    "beyond float32": (beyond_float32, r"log-probability -1e\+39 at index"),
    "positive": (log_probability(0.25), "log-probability 0.25 at index .*of at most 0"),
    "lengths": (
        longer_response_than_reported,
        r"generation_lengths .* = generation_lengths \+ prompt",
    ),
    "too wide": (longer_than_its_columns, "wide; expected at least"),
    "too short": (shorter_than_its_prompt, "generation_lengths -1"),
    "negative token": (negative_token, "token -100 at index"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_answer_is_refused_by_backend_and_row(form, fault):
    alter, message = FAULTS[fault]
    wrong = "11+3="

    def alter_one(output, data):
        for row, length in enumerate(data["input_lengths"].tolist()):
            if data["input_ids"][row, :length].tolist() == tokens_of(wrong).tolist():
                alter(output, row, length, int(output["unpadded_sequence_lengths"][row]))

    with pytest.raises(
        InvalidRequestError, match=f"^generation backend Altering: row 2: .*{message}"
    ):
        run_rollout(alter_one, ["1+2=", "20+30=", wrong, "3+4="], form=form)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.integers(0, 9),
    st.sampled_from([math.nan, math.inf, 5.0, -1.0]),
    st.sampled_from([-1, 5]),
)
def test_padding_of_an_output_is_not_checked(digits, more, logprob, token):
    def fill_padding(output, data):
        for name, value in (("output_ids", token), ("logprobs", logprob)):
            column = torch.nn.functional.pad(output[name], (0, more))
            beyond = torch.arange(column.shape[1]) >= output["unpadded_sequence_lengths"][:, None]
            output[name] = column.masked_fill(beyond, value)

    questions = [f"{10**digit}+1=" for digit in digits]
    batch, _ = run_rollout(fill_padding, questions)
    expected, _ = run_rollout(lambda output, data: None, questions)
    assert (
        batch["total_reward"].tolist() == expected["total_reward"].tolist() == [1.0] * len(digits)
    )
    for log, other in zip(batch["message_log"], expected["message_log"], strict=True):
        assert torch.equal(log[1]["token_ids"], other[1]["token_ids"])
        assert torch.equal(log[1]["generation_logprobs"], other[1]["generation_logprobs"])


@pytest.mark.parametrize("logprob", [0.0, -0.0, 1e-4])
def test_a_log_probability_rounded_above_zero_is_kept(logprob):
    batch, _ = run_rollout(lambda output, data: output["logprobs"][0, 5:6].fill_(logprob))
    assert batch["message_log"][0][1]["generation_logprobs"][1] == torch.tensor(logprob)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("limits", "budget"),
    [
        ({"max_new_tokens": 8}, 8),
        ({"max_seq_len": 14}, 9),
        ({"max_seq_len": 14, "max_new_tokens": 40}, 9),
        ({"max_seq_len": 3}, 0),
    ],
)
def test_a_response_beyond_its_budget_is_refused(form, limits, budget):
    with pytest.raises(
        InvalidRequestError,
        match=f"Altering: row 0: a response of 13 tokens; expected at most {budget}, see",
    ):
        run_rollout(lambda output, data: None, ["13+4="], form=form, **limits)


def test_a_response_of_exactly_its_budget_is_accepted():
    batch, _ = run_rollout(lambda output, data: None, ["13+4="], max_new_tokens=13, max_seq_len=18)
    assert len(batch["message_log"][0][1]["token_ids"]) == 13
    assert batch["truncated"].tolist() == [False]


def test_the_actor_takes_the_budget_from_the_configuration(actor_of):
    actor = actor_of(policy={"generation": {"backend": "vllm", "max_new_tokens": 8}})
    with pytest.raises(InvalidRequestError, match="13 tokens; expected at most 8"):
        actor.rollout_to_tq(batch_of(["13+4="]), partition_id="train")


def test_backend_may_write_to_its_request():
    def overwrite(output, data):
        data["input_ids"].zero_()
        data["input_lengths"].zero_()

    batch, _ = run_rollout(overwrite)
    assert batch["total_reward"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        ("output_ids", lambda it: it.float(), r"output_ids has floats \(torch.float32\)"),
        ("output_ids", lambda it: it[:1], r"of shape \(1, .*for the n = 2 rows"),
        ("output_ids", lambda it: it[0], r"output_ids has integers .*of shape \(\d+,\)"),
        ("output_ids", lambda it: [[1], [1, 2]], "output_ids is a list, not a tensor"),
        ("logprobs", lambda it: it[..., None], r"of shape \(2, \d+, 1\)"),
        ("logprobs", lambda it: it.long(), "logprobs has integers"),
        ("logprobs", lambda it: it.to_sparse(), "is not a dense tensor"),
        ("logprobs", lambda it: torch.nested.as_nested_tensor(list(it)), "is not a dense tensor"),
        ("generation_lengths", lambda it: it.float(), "generation_lengths has floats"),
        ("generation_lengths", lambda it: it[:, None], r"of shape \(2, 1\); expected integers"),
        ("unpadded_sequence_lengths", lambda it: it[:1], r"of shape \(1,\)"),
        ("truncated", lambda it: it[:1], r"truncated has booleans .*of shape \(1,\)"),
        ("truncated", lambda it: it.long(), "truncated has integers"),
        ("truncated", lambda it: it[:, None], r"truncated .*of shape \(2, 1\)"),
    ],
)
def test_a_column_of_another_kind_is_refused_by_name(name, column, message):
    with pytest.raises(InvalidRequestError, match=f"^generation backend Altering: .*{message}"):
        run_rollout(lambda output, data: output.update({name: column(output[name])}))


@pytest.mark.parametrize(
    "name", ["output_ids", "generation_lengths", "unpadded_sequence_lengths", "logprobs"]
)
def test_a_missing_column_is_named(name):
    with pytest.raises(MissingDataError, match=f"backend Altering: no '{name}' in its output"):
        run_rollout(lambda output, data: output.pop(name))


def test_an_answer_without_truncated_marks_no_row():
    batch, metrics = run_rollout(lambda output, data: output.pop("truncated"))
    assert batch["truncated"].tolist() == [False, False]
    assert metrics["truncation_rate"] == 0.0


@pytest.mark.parametrize("places", [[], [1], [0, 0]])
def test_async_output_for_another_row_is_refused(places):
    class Misplaced(AsyncAdder):
        async def generate_async(self, data, *, greedy):
            for place in places:
                yield place, self.generate(data, greedy=greedy)

    with pytest.raises(InvalidRequestError, match=r"Misplaced: row 0: .*expected \[0\]"):
        roll_out(run_async_multi_turn_rollout, Misplaced(), batch_of(["1+2="]))


@pytest.mark.parametrize(
    "borders", [[], [(1, 9)], [(0, 3), (4, 9)], [(0, 3), (2, 9)], [(0, 8)], [(0, 9), (9, 9)]]
)
def test_weight_versions_that_leave_tokens_out_are_refused(borders):
    def alter(output, data):
        length = int(output["generation_lengths"][0])
        spans = [
            {"version": "a", "start": start, "end": end - 9 + length}
            if end > 4
            else {"version": "a", "start": start, "end": end}
            for start, end in borders
        ]
        output["weight_versions"] = [spans, None]

    with pytest.raises(InvalidRequestError, match="Altering: row 0: weight_versions"):
        run_rollout(alter)


@pytest.mark.parametrize("convert", [np.int64, torch.tensor], ids=["numpy", "torch"])
def test_weight_versions_are_returned_with_plain_ints(convert):
    def alter(output, data):
        output["weight_versions"] = [
            [{"version": "a", "start": convert(0), "end": convert(int(length))}]
            for length in output["generation_lengths"]
        ]

    batch, _ = run_rollout(alter)
    (span,) = batch["weight_versions"][0]
    assert (type(span["start"]), type(span["end"])) == (int, int)


@pytest.mark.parametrize(
    "versions",
    [
        7,
        [None],
        [7, None],
        [["a"], None],
        [[{"start": 0, "end": 9}], None],
        [[{"version": "a", "start": 0, "end": "9"}], None],
        [[{"version": "a", "start": 0.5, "end": 9}], None],
    ],
)
def test_weight_versions_of_another_form_are_refused(versions):
    with pytest.raises(InvalidRequestError, match=r"Altering: .*weight_versions is "):
        run_rollout(lambda output, data: output.update(weight_versions=versions))
