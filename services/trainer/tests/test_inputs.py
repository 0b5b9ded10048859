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
    """A model whose tokenizer has a chat template."""
    folder = shutil.copytree(model_folder, tmp_path / "chat")
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = "{% for m in messages %}({{ m.content }}){% endfor %}="
    tokenizer.save_pretrained(folder)
    return {"kind": "pretrained", "name": str(folder), "use_chat_template": True}


@pytest.mark.parametrize("key", ["data.train", "data.validation"])
def test_a_chat_template_with_follow_ups_is_refused(inputs, chat_model, tmp_path, key):
    with pytest.raises(ConfigurationError) as caught:
        inputs([PLAIN, ASKED_MORE], {"policy.model": chat_model}, key)
    assert str(caught.value).startswith(
        "policy.model.use_chat_template: found True; expected false with data set "
        f"{tmp_path / 'prompts.jsonl'}, which has follow-ups, to '2=' first: "
    )
    assert "\n" not in str(caught.value)


def test_a_chat_template_without_follow_ups_and_follow_ups_without_one_are_taken(
    inputs, chat_model
):
    assert len(inputs([PLAIN], {"policy.model": chat_model}).training) == 1
    raw = {**chat_model, "use_chat_template": False}
    assert len(inputs([PLAIN, ASKED_MORE], {"policy.model": raw}).training) == 2


@pytest.mark.parametrize("key", ["env.correct", "env.wrong"])
def test_what_the_environment_says_needs_characters_of_a_random_model(inputs, key):
    with pytest.raises(ConfigurationError, match=rf"^{key}: '!Z' not in policy.model.characters$"):
        inputs([PLAIN, ASKED_MORE], {key: "ok!Z"})
    assert inputs([PLAIN], {key: "ok!Z"}).training, "nobody is told it without follow-ups"
    assert inputs([PLAIN, ASKED_MORE], {key: ""}).training
