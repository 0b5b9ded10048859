"""Inputs of a run are accepted unchanged, or refused before anything of the run exists.

Imports internals: prompts are encoded without a run.
"""

from __future__ import annotations

import json
import random
import shutil
import string

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from integration.ports import address_of, hold_port
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

import grpo_trainer
from grpo_trainer import DEMO_CONFIG
from grpo_trainer.config.sections import PretrainedModel
from grpo_trainer.errors import ConfigurationError, WorkerError
from grpo_trainer.model.tokenizer import (
    build_character_tokenizer,
    prompt_encoder,
)
from grpo_trainer.rollout import prompts
from grpo_trainer.rollout.prompts import (
    Prompt,
    PromptRecord,
    PromptStream,
)
from refit_mx import ControlClient, EmbeddedControlServer

PLAIN = {"prompt": "1=", "answer": "1"}
WITH_MORE = {**PLAIN, "prompt": "2=", "follow_ups": [{"prompt": "3=", "answer": "3"}]}


@pytest.fixture
def config(configure, tmp_path):
    """Function that configures a run with given lines of prompts; validation has plain ones."""

    def make(changes=(), lines=('{"prompt": "1=", "answer": "1"}',), key="data.train"):
        paths = {key: tmp_path / "prompts.jsonl", "plain": tmp_path / "plain.jsonl"}
        paths[key].write_text("\n".join(lines), encoding="utf-8")
        paths["plain"].write_text(json.dumps(PLAIN))
        plain = dict.fromkeys(("data.train", "data.validation"), str(paths["plain"]))
        files = {**plain, key: str(paths[key]), "run.output": str(tmp_path / "runs")}
        return configure({**files, **dict(changes)})

    return make


@pytest.fixture
def begin_run(accepted, tmp_path):
    """Function that begins a run and returns the folder of its initial model."""

    def begin(config):
        assert accepted(lambda display: grpo_trainer.train(config, display=display)) == []
        *_, newest = sorted((tmp_path / "runs" / "demo").iterdir())
        return newest / "initial_model"

    return begin


def refusal(config, error=ConfigurationError):
    with pytest.raises(error) as caught:
        grpo_trainer.train(config)
    assert "\n" not in str(caught.value)
    assert not config.run.output.exists()
    return str(caught.value)


def test_no_shipped_prompt_is_both_trained_on_and_held_out():
    train, held_out = (
        {json.loads(line)["prompt"] for line in path.read_text().splitlines()}
        for path in (DEMO_CONFIG.parents[1] / "prompts").glob("*.jsonl")
    )
    assert train
    assert held_out
    assert not train & held_out


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "7",
        '{"prompt": "1"}',
        '{"prompt": "1", "answer": 3}',
        '{"prompt": "", "answer": "2"}',
        '{"prompt": "1", "answer": " "}',
        '{"prompt": "1", "answer": "2", "more": 1}',
        '{"prompt": "1", "answer": "2", "follow_ups": [{"prompt": "c"}]}',
        '{"prompt": "1", "answer": "2", "follow_ups": [{"prompt": "!", "answer": "2"}]}',
    ],
)
def test_a_malformed_line_is_named_by_number(config, line):
    lines = [json.dumps(PLAIN), "", line, json.dumps(PLAIN)]
    config = config(lines=lines)
    assert refusal(config).startswith(f"data set {config.data.train}, line 3: ")


def test_a_data_set_that_is_no_text_is_named(config):
    config = config()
    config.data.train.write_bytes(b"\xff\xfe")
    assert refusal(config).startswith(f"data set {config.data.train}: cannot be read: ")


def test_only_a_newline_ends_a_line(config, begin_run):
    text = "a\u2028\u0085\x1c\u00e9"
    line = json.dumps({"prompt": text, "answer": f" {text} "}, ensure_ascii=False)
    begin_run(config({"policy.model.characters": f"1=;okn{text}"}, [line, "", "  "]))


ALPHABET = string.ascii_letters + string.digits + "+-=(),;? \n\t\u00e9\u20ac"


def test_a_random_model_is_a_function_of_the_seed(config, begin_run):
    changes = {"policy.model.characters": ALPHABET + ALPHABET}
    torch.manual_seed(4)
    folders = [begin_run(config({**changes, "run.seed": seed})) for seed in (1, 1, 2)]
    drawn = torch.rand(3)
    torch.manual_seed(4)
    assert torch.equal(drawn, torch.rand(3))  # the global randomness is as it was
    model, same, other = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(torch.equal(model[name], same[name]) for name in model)
    assert any(not torch.equal(model[name], other[name]) for name in model)
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    ids = tokenizer(ALPHABET)["input_ids"]
    assert len(set(ids)) == len(ids) == len(tokenizer) - 2
    assert tokenizer.decode(ids) == ALPHABET


def pretrained(name, *, chat=False):
    return {"policy.model": {"kind": "pretrained", "name": str(name), "use_chat_template": chat}}


def test_a_model_folder_is_found_from_anywhere(
    config, begin_run, model_folder, tmp_path, monkeypatch
):
    (tmp_path / "mine").symlink_to(model_folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("mine", "~/mine"):
        begin_run(config(pretrained(name)))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "~/nowhere", "a/b/c", "not a name"])
def test_a_missing_model_is_refused_at_once(config, name):
    expected = f"policy.model.name: {name!r}: " + ("no such folder" if "/" in name else "")
    assert refusal(config(pretrained(name))).startswith(expected)


@pytest.fixture
def model_copy(model_folder, tmp_path):
    return shutil.copytree(model_folder, tmp_path / "model")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_without_a_model_is_refused(config, model_copy, missing):
    (model_copy / missing).unlink()
    message = refusal(config(pretrained(model_copy)))
    assert message.startswith(f"policy.model.name: '{model_copy}': ")


@pytest.mark.parametrize("content", ["", "{", "{}"])
def test_a_broken_tokenizer_is_refused(config, model_copy, content):
    (model_copy / "tokenizer.json").write_text(content)
    message = refusal(config(pretrained(model_copy)))
    assert message.startswith(f"policy.model.name: tokenizer of '{model_copy}': ")


def test_a_tokenizer_needs_an_end_token_and_gets_padding(config, begin_run, model_copy):
    file = model_copy / "tokenizer_config.json"
    original = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in original.items() if k != "eos_token"}))
    assert refusal(config(pretrained(model_copy))).endswith("has no end token")
    file.write_text(json.dumps({k: v for k, v in original.items() if k != "pad_token"}))
    begin_run(config(pretrained(model_copy)))


def test_a_missing_chat_template_is_refused(config, model_folder):
    message = refusal(config(pretrained(model_folder, chat=True)))
    assert message.startswith("policy.model.use_chat_template: found True; the tokenizer of ")


ONCE = "({{ messages[0].content }})="
UNFIT = {
    "{% for m in messages %}({{ m.content }}){% endfor %}=": (
        "does not end a response with '<eos>', the tokenizer's end token"
    ),
    "{% for m in messages %}{{ m.content }}[end]<eos>{% endfor %}": (
        "does not end a response with '<eos>', the tokenizer's end token"
    ),
    ONCE: "renders no second question after a response",
    "{% if messages[2] %}{{ raise_exception('one\nonly') }}{% endif %}" + ONCE: (
        "cannot render a second question: TemplateError: one only"
    ),
}


@pytest.mark.parametrize("key", ["data.train", "data.validation"])
@pytest.mark.parametrize(("template", "reason"), UNFIT.items(), ids=range(len(UNFIT)))
def test_follow_ups_the_chat_template_cannot_ask_are_refused(
    config, begin_run, tokenizer, model_copy, template, reason, key
):
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model_copy)
    tokenizer.chat_template = None
    chat, lines = pretrained(model_copy, chat=True), [json.dumps(PLAIN), json.dumps(WITH_MORE)]
    unfit = config(chat, lines, key)
    assert refusal(unfit) == (
        "policy.model.use_chat_template: found True; the chat template of "
        f"{str(model_copy)!r} {reason}, so the follow-ups of data set "
        f"{getattr(unfit.data, key.removeprefix('data.'))} cannot be asked; expected data without "
        "them"
    )
    begin_run(config(chat))
    begin_run(config(pretrained(model_copy), lines, key))


@pytest.mark.parametrize("key", ["env.correct", "env.wrong"])
def test_environment_texts_use_the_random_model_s_characters(config, begin_run, key):
    more = [json.dumps(PLAIN), json.dumps(WITH_MORE)]
    message = refusal(config({key: "ok!Z"}, more))
    assert message == f"{key}: '!Z' not in policy.model.characters"
    begin_run(config({key: "ok!Z"}))  # not used without follow-ups
    begin_run(config({key: ""}, more))


GRACE = "grpo_trainer.refit.settings.CONTROL_GRACE_S"


def test_a_refit_server_that_does_not_answer_is_named(config, begin_run, monkeypatch):
    with EmbeddedControlServer() as server:
        begin_run(config({"refit.control": server.address}))
    shutil.rmtree(config().run.output)
    monkeypatch.setattr(GRACE, 0.3)
    with hold_port() as holder:
        address = address_of(holder)
        message = refusal(config({"refit.control": address}), WorkerError)
    assert message.startswith(f"refit: control plane at {address}: ")


def test_a_missing_refit_server_token_is_reported_at_once(config, monkeypatch):
    monkeypatch.setattr(GRACE, 1e9)
    with EmbeddedControlServer(token="0123456789abcdef-0123456789abcdef") as server:
        message = refusal(config({"refit.control": server.address}), WorkerError)
    assert "a valid bearer token is required" in message


def test_a_refit_server_that_starts_late_is_retried(config, begin_run, monkeypatch):
    holder = hold_port()
    servers = []

    class Late(ControlClient):
        def close(self):
            super().close()
            if not servers:
                servers.append(EmbeddedControlServer(port=holder.getsockname()[1]))

    monkeypatch.setattr("grpo_trainer.refit.settings.connect", lambda where, access: Late(where))
    monkeypatch.setattr(GRACE, 60)
    try:
        begin_run(config({"refit.control": address_of(holder)}))
        assert len(servers) == 1
    finally:
        holder.close()
        for server in servers:
            server.close()


def model_section(*, chat=False):
    return PretrainedModel(kind="pretrained", name="m", use_chat_template=chat)


@pytest.mark.parametrize("text", ["", "a", "b a", "a<eos>", "<pad>b"])
@pytest.mark.parametrize(
    ("template", "begin"),
    [
        ("$A", []),
        ("$A <eos>", []),
        ("<pad> $A", ["<pad>"]),
        ("<pad> $A <eos>", ["<pad>"]),
        ("<eos> $A <eos> <pad>", ["<eos>"]),
    ],
)
def test_a_prompt_keeps_the_begin_token_and_gets_no_end_token(template, begin, text):
    tokenizer = build_character_tokenizer("ab0 ")
    ids = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<eos>", "<pad>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=ids
    )
    own = build_character_tokenizer("ab0 ")(text)["input_ids"]
    encoded = prompt_encoder(tokenizer, model_section())(text)
    assert encoded == tokenizer.convert_tokens_to_ids(begin) + own


@pytest.mark.parametrize("chat", [False, True])
def test_a_tokenizer_that_always_adds_tokens_is_refused(chat):
    class Always:
        chat_template = "{{ messages[0]['content'] }}"

        def __call__(self, text, **options):
            return {"input_ids": [7, *text.encode(), 9]}

    with pytest.raises(ConfigurationError, match=r"tokenizer of 'm': returns tokens \[7, 9\]"):
        prompt_encoder(Always(), model_section(chat=chat))


def stream(size, position=0, *, seed=1, shuffle=True):
    prompts = [
        Prompt(record=PromptRecord(prompt=str(i), answer="a"), token_ids=[i]) for i in range(size)
    ]
    return PromptStream(prompts, seed=seed, shuffle=shuffle, position=position)


def numbers(stream, count):
    return [prompt.token_ids[0] for prompt in stream.take(count)]


@given(st.integers(1, 9), st.booleans(), st.lists(st.integers(0, 20), max_size=6))
def test_prompts_come_epoch_by_epoch_from_any_position(size, shuffle, counts):
    order = numbers(stream(size, shuffle=shuffle), sum(counts) + size)
    for start in range(0, len(order) - size, size):
        epoch = order[start : start + size]
        assert sorted(epoch) == [*range(size)]
        assert shuffle or epoch == [*range(size)]
    position = 0
    for count in counts:  # each by a resumed run
        part = stream(size, position, shuffle=shuffle)
        assert numbers(part, count) == order[position : position + count]
        position = part.position


def test_an_epoch_is_shuffled_once(monkeypatch):
    shuffled = []

    class Random(random.Random):
        def shuffle(self, values):
            shuffled.append(len(values))
            super().shuffle(values)

    monkeypatch.setattr(prompts.random, "Random", Random)
    endless = stream(4)
    for position in range(12):
        assert endless.take(1) == [endless.at(position)]
    assert shuffled == [4, 4, 4]


def test_the_order_of_prompts_differs_by_epoch_and_seed():
    order = numbers(stream(30), 60)
    assert order[:30] != order[30:]
    assert numbers(stream(30, seed=2), 30) != order[:30]
