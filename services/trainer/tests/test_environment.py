"""The environment scores by program and leads through the follow-ups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.environment import VerifierEnvironment, score

words = st.text("ab1", min_size=1, max_size=6)


@given(words)
def test_the_answer_itself_scores_one(answer):
    assert score(answer, answer) == 1.0


@given(st.text("ab1", max_size=8), words)
def test_only_the_answer_scores_one(response, answer):
    points = score(response, answer)
    assert 0.0 <= points <= 1.0
    assert (points == 1.0) == (response == answer)


@given(words, st.data())
def test_a_longer_right_start_scores_more(answer, data):
    places = data.draw(st.lists(st.integers(0, len(answer)), min_size=2, max_size=2, unique=True))
    shorter, longer = sorted(places)
    assert score(answer[:shorter] + "x", answer) < score(answer[:longer] + "x", answer)


@given(words, words)
def test_a_response_that_does_not_stop_scores_less_than_one_that_does(answer, more):
    assert score(answer + more, answer) == len(answer) / (len(answer) + 1)


def play(answers, responses):
    """One conversation; returns rewards, observations and the turn counts."""
    environment = VerifierEnvironment(correct="ok;", wrong="no;")
    info = {"questions": [f"q{i}" for i in range(len(answers))], "answers": answers, "turn": 0}
    rewards, said = [], []
    for response in responses:
        returned = environment.step([[{"role": "assistant", "content": response}]], [info])
        [info] = returned["metadata"]
        rewards.append(float(returned["rewards"][0]))
        said.append(returned["observations"][0]["content"])
        if bool(returned["terminateds"][0]):
            break
    return rewards, said, info["turn"]


@given(st.lists(words, min_size=1, max_size=5))
def test_all_right_sums_to_one_over_the_turns(answers):
    rewards, said, turns = play(answers, [f" {answer}\n" for answer in answers])
    assert sum(rewards) == pytest.approx(1.0)
    assert turns == len(answers)
    assert said == [*(f"ok;q{i}" for i in range(1, len(answers))), ""]


def test_a_wrong_answer_is_told_and_the_conversation_goes_on():
    rewards, said, _ = play(["1", "2"], ["3", "2"])
    assert rewards == [0.0, 0.5]
    assert said == ["no;q1", ""]


def test_rows_at_different_turns_are_judged_each_for_itself():
    environment = VerifierEnvironment(correct="+", wrong="-")
    infos = [{"questions": ["a", "b"], "answers": ["1", "2"], "turn": turn} for turn in (0, 1)]
    logs = [[{"role": "assistant", "content": "1"}], [{"role": "assistant", "content": "2"}]]
    returned = environment.step(logs, infos)
    assert returned["rewards"].tolist() == [0.5, 0.5]
    assert returned["terminateds"].tolist() == [False, True]
    assert infos[0]["turn"] == 0  # the caller's value is not changed
