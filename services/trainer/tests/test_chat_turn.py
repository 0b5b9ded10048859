"""A conversation with follow-ups is, token by token, what the chat template makes of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.chat_turn import EndKeepingTokenizer, chat_turn
from grpo_trainer.environment import VerifierEnvironment
from grpo_trainer.sections import PretrainedModel
from grpo_trainer.tokenizer import build_character_tokenizer, prompt_encoder
from rollout_actor.rollout import run_multi_turn_rollout

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


def tokenizer_with(template):
    tokenizer = build_character_tokenizer(CHARACTERS)
    tokenizer.chat_template = template
    return tokenizer


class Says:
    """A generation back end with the responses of a script: text, and whether it ends."""

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


class Near:
    """An environment that is asked in this process."""

    def __init__(self, environment):
        self.step = self
        self.remote = environment.step


def play(template, answers, script):
    """The rows of one conversation after it was played, and its metrics."""
    tokenizer = tokenizer_with(template)
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
    played, _ = run_multi_turn_rollout(
        Says(tokenizer, script),
        batch,
        EndKeepingTokenizer(tokenizer),
        {"t": Near(environment)},
        max_seq_len=10_000,
        max_rollout_turns=len(answers),
    )
    ids = torch.cat([each["token_ids"] for each in played["message_log"][0]]).tolist()
    return tokenizer, ids, float(played["total_reward"][0])


words = st.text("abc1", min_size=1, max_size=5)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@given(script=st.lists(st.tuples(words, st.booleans()), min_size=2, max_size=4))
def test_a_conversation_is_what_the_template_makes_of_it(template, script):
    """Also where a response was cut before its end: the next turn ends it."""
    answers = ["a" if i % 2 else said for i, (said, _) in enumerate(script)]
    tokenizer, ids, reward = play(template, answers, script)
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


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}[end]<eos>{% endfor %}",
        "{{ messages[0].content }}<eos>",
        "{% if messages[2] %}{{ raise_exception('one question only') }}{% endif %}",
    ],
)
def test_a_template_that_does_not_end_responses_as_generation_does_has_no_turn(template):
    assert isinstance(chat_turn(tokenizer_with(template), MODEL), str)


def test_a_model_without_a_template_is_asked_the_text_itself():
    raw = PretrainedModel(kind="pretrained", name="m", use_chat_template=False)
    assert chat_turn(tokenizer_with(TEMPLATES["roles"]), raw) is None
