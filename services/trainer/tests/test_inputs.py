"""What a run reads is refused before it starts, also what only a second turn would say."""

from __future__ import annotations

import json
import shutil

import pytest

from grpo_trainer.errors import ConfigurationError
from grpo_trainer.inputs import read_inputs
from grpo_trainer.tokenizer import load_tokenizer

PLAIN = {"prompt": "1=", "answer": "1"}
ASKED_MORE = {**PLAIN, "prompt": "2=", "follow_ups": [{"prompt": "3=", "answer": "3"}]}


@pytest.fixture
def inputs(configure, tmp_path):
    """Reads the inputs of a run on the given records."""

    def read(records, changes, key="data.train"):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        plain = tmp_path / "plain.jsonl"
        plain.write_text(json.dumps(PLAIN))
        data = {"data.train": str(plain), "data.validation": str(plain), key: str(path)}
        return read_inputs(configure({**data, **changes}))

    return read


@pytest.fixture
def chat_model(model_folder, tmp_path):
    """A model whose tokenizer has a chat template; called with the template."""

    def save(template):
        folder = shutil.copytree(model_folder, tmp_path / "chat")
        tokenizer = load_tokenizer(str(folder))
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        return {"kind": "pretrained", "name": str(folder), "use_chat_template": True}

    return save


ASKED = "({{ messages[0].content }})="
UNFIT = {
    "{% for m in messages %}({{ m.content }}){% endfor %}=": (
        "does not end a response with '<eos>', the tokenizer's end token"
    ),
    ASKED: "renders no second question after a response",
    "{% if messages[2] %}{{ raise_exception('one\nonly') }}{% endif %}" + ASKED: (
        "cannot render a second question: TemplateError: one only"
    ),
}
FIT = "{% for m in messages %}({{ m.content }}<eos>){% endfor %}="


@pytest.mark.parametrize("key", ["data.train", "data.validation"])
@pytest.mark.parametrize(("template", "told"), UNFIT.items(), ids=["end", "question", "error"])
def test_follow_ups_that_the_chat_template_cannot_ask_are_refused_with_the_reason(
    inputs, chat_model, tmp_path, template, told, key
):
    model = chat_model(template)
    with pytest.raises(ConfigurationError) as caught:
        inputs([PLAIN, ASKED_MORE], {"policy.model": model}, key)
    assert str(caught.value) == (
        f"policy.model.use_chat_template: found True; the chat template of {model['name']!r} {told}"
        f", so the follow-ups of data set {tmp_path / 'prompts.jsonl'} cannot be asked; expected "
        "data without them"
    )
    assert len(inputs([PLAIN], {"policy.model": model}).training) == 1
    raw = {**model, "use_chat_template": False}
    assert len(inputs([PLAIN, ASKED_MORE], {"policy.model": raw}).training) == 2


def test_follow_ups_are_taken_with_a_chat_template_that_ends_its_responses(inputs, chat_model):
    model = chat_model(FIT)
    assert len(inputs([PLAIN, ASKED_MORE], {"policy.model": model}).training) == 2


@pytest.mark.parametrize("key", ["env.correct", "env.wrong"])
def test_what_the_environment_says_needs_characters_of_a_random_model(inputs, key):
    with pytest.raises(ConfigurationError, match=rf"^{key}: '!Z' not in policy.model.characters$"):
        inputs([PLAIN, ASKED_MORE], {key: "ok!Z"})
    assert inputs([PLAIN], {key: "ok!Z"}).training, "nobody is told it without follow-ups"
    assert inputs([PLAIN, ASKED_MORE], {key: ""}).training
