"""The environment scores responses and asks follow-ups as a chat template renders them.

A script takes the model's place: it sets each response, and whether the response is truncated.
Imports internals: a run does not show single turns.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.config.sections import PretrainedModel
from grpo_trainer.model.chat_turn import EndKeepingTokenizer, chat_turn
from grpo_trainer.model.tokenizer import (
    build_character_tokenizer,
    prompt_encoder,
)
from grpo_trainer.rollout.environment import (
    VerifierEnvironment,
    score,
)
from rollout_actor import run_multi_turn_rollout

MODEL = PretrainedModel(kind="pretrained", name="m", use_chat_template=True)
TEMPLATES = {
    "roles": "[be good]{% for m in messages %}[{{ m.role }}:{{ m.content }}<eos>]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant:{% endif %}",
    "no prompt": "{% for m in messages %}{% if m.role == 'user' %}[q {{ m.content }} /q]"
    "{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}",
    "reasoning": "{% for m in messages %}[{{ m.role }}:{% if m.role == 'assistant' and loop.last %}"
    "[think]{% endif %}{{ m.content }}<eos>]{% endfor %}"
    "{% if add_generation_prompt %}[assistant:{% endif %}",
}
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789[]:/;- \n"


class ScriptedBackend:
    """Generation backend with scripted responses: text, and whether it ends."""

    def __init__(self, tokenizer, script):
        self.tokenizer = tokenizer
        self.script = iter(script)

    def generate(self, data, *, greedy):
        text, ended = next(self.script)
        ids = self.tokenizer(text)["input_ids"] + [self.tokenizer.eos_token_id] * ended
        length = int(data["input_lengths"][0])
        output = torch.cat([data["input_ids"][0, :length], torch.tensor(ids).long()])
        return {
            "output_ids": output[None],
            "generation_lengths": torch.tensor([len(ids)]),
            "unpadded_sequence_lengths": torch.tensor([len(output)]),
            "logprobs": torch.zeros(1, len(output)),
            "truncated": torch.tensor([not ended]),
        }


class Local:
    """Environment that is called in this process."""

    def __init__(self, environment):
        self.step = self
        self.remote = environment.step


def run_conversation(template, answers, script):
    """Return the tokenizer, and the token ids and the reward of a finished conversation."""
    tokenizer = build_character_tokenizer(CHARACTERS)
    tokenizer.chat_template = template
    turn = chat_turn(tokenizer, MODEL)
    environment = VerifierEnvironment(correct="ok;", wrong="no;", chat_turn=turn)
    questions = [f"q{i}" for i in range(len(answers))]
    log = [
        {
            "role": "user",
            "content": questions[0],
            "token_ids": torch.tensor(prompt_encoder(tokenizer, MODEL)(questions[0])),
        }
    ]
    batch = {
        "message_log": [log],
        "task_name": ["t"],
        "extra_env_info": [{"questions": questions, "answers": answers, "turn": 0}],
    }
    finished, _ = run_multi_turn_rollout(
        ScriptedBackend(tokenizer, script),
        batch,
        EndKeepingTokenizer(tokenizer),
        {"t": Local(environment)},
        max_seq_len=10_000,
        max_rollout_turns=len(answers),
    )
    ids = torch.cat([each["token_ids"] for each in finished["message_log"][0]]).tolist()
    return tokenizer, ids, float(finished["total_reward"][0])


words = st.text("abc1", min_size=1, max_size=5)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@given(script=st.lists(st.tuples(words, st.booleans()), min_size=2, max_size=4))
def test_a_conversation_equals_the_rendered_template(template, script):
    """Check truncated responses too, which the next turn completes."""
    answers = ["a" if i % 2 else said for i, (said, _) in enumerate(script)]
    tokenizer, ids, reward = run_conversation(template, answers, script)
    messages = []
    right = False
    for number, (said, _) in enumerate(script):
        before = "" if number == 0 else ("ok;" if right else "no;")
        messages.append({"role": "user", "content": f"{before}q{number}"})
        if number + 1 < len(script):
            messages.append({"role": "assistant", "content": said})
        right = said == answers[number]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    last, ended = script[-1]
    rendered += last + tokenizer.eos_token * ended
    assert ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert reward >= sum(i % 2 == 0 for i in range(len(script))) / len(script) - 1e-6


@given(st.text("ab1", max_size=8), st.text("ab1", min_size=1, max_size=6))
def test_a_score_is_the_correct_share_before_the_first_mistake(response, answer):
    right = max(n for n in range(len(answer) + 1) if response[:n] == answer[:n])
    expected = 1.0 if response == answer else right / (len(answer) + 1)
    assert score(response, answer) == expected


def test_rows_at_different_turns_are_scored_separately():
    environment = VerifierEnvironment(correct="+", wrong="-")
    infos = [{"questions": ["a", "b"], "answers": ["1", "2"], "turn": turn} for turn in (0, 1)]
    logs = [[{"role": "assistant", "content": said}] for said in (" 1\n", "2")]
    returned = environment.step(logs, infos)
    parts = {name: values.tolist() for name, values in returned["rewards"].items()}
    assert parts == {"reward/turn_1": [0.5, 0.0], "reward/turn_2": [0.0, 0.5]}
    assert returned["terminateds"].tolist() == [False, True]
    assert [observation["content"] for observation in returned["observations"]] == ["+b", ""]
    assert [info["turn"] for info in returned["metadata"]] == [1, 2]
    assert infos[0]["turn"] == 0  # the caller's value is not changed
