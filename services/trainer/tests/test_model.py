"""Models and tokenizers: random ones follow from the seed, wrong names are refused at once."""

from __future__ import annotations

import json
import shutil
import string

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing

from grpo_trainer.errors import ConfigurationError
from grpo_trainer.model import load_model, save_random_model
from grpo_trainer.sections import PretrainedModel
from grpo_trainer.tokenizer import (
    build_character_tokenizer,
    load_tokenizer,
    model_source,
    prompt_encoder,
)


def weights(configure, folder, seed):
    save_random_model(configure().policy.model, folder, seed=seed, max_length=48)
    return load_file(folder / "model.safetensors")


def test_a_random_model_is_a_function_of_the_seed(configure, tmp_path):
    torch.manual_seed(99)
    one = weights(configure, tmp_path / "one", 1)
    torch.manual_seed(98)
    same, other = weights(configure, tmp_path / "same", 1), weights(configure, tmp_path / "o", 2)
    assert one.keys() == same.keys()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_building_a_model_leaves_the_global_randomness_alone(configure, tmp_path):
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    weights(configure, tmp_path / "m", 1)
    assert torch.equal(torch.rand(3), expected)


def test_what_was_saved_is_loaded_in_float32(model_folder, network):
    assert load_model(str(model_folder), torch.device("cpu")).dtype == torch.float32
    saved = load_file(model_folder / "model.safetensors")
    loaded = network.state_dict()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


ALPHABET = string.ascii_letters + string.digits + "+-=(),;? \n\t\u00e9\u20ac"


@settings(max_examples=50)
@given(st.text(ALPHABET, max_size=30))
def test_text_survives_the_character_tokenizer_from_disk(character_folder, text):
    loaded = load_tokenizer(str(character_folder))
    built = build_character_tokenizer(ALPHABET)
    ids = built(text)["input_ids"]
    assert loaded(text)["input_ids"] == ids
    assert len(ids) == len(text)
    assert loaded.decode(ids) == built.decode(ids) == text


@pytest.fixture(scope="session")
def character_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("characters")
    build_character_tokenizer(ALPHABET).save_pretrained(folder)
    return folder


def test_repeated_characters_are_one_token():
    assert len(build_character_tokenizer("aab")) == 4


def test_a_character_without_a_token_is_refused(configure):
    model = configure().policy.model
    encode = prompt_encoder(build_character_tokenizer(model.characters), model)
    assert len(encode("1+1=")) == 4
    with pytest.raises(ValueError, match=r"'zZ' not in policy.model.characters"):
        encode("1zZz")


def pretrained(name, *, chat=False):
    return PretrainedModel(kind="pretrained", name=str(name), use_chat_template=chat)


def test_a_chat_template_wraps_the_prompt(tokenizer, model_folder):
    plain = prompt_encoder(tokenizer, pretrained(model_folder))
    tokenizer.chat_template = "{% for m in messages %}({{ m.content }}){% endfor %}="
    try:
        chat = prompt_encoder(tokenizer, pretrained(model_folder, chat=True))
        assert chat("1+1") == plain("(1+1)=")
    finally:
        tokenizer.chat_template = None


def test_a_chat_template_that_is_not_there_is_refused(tokenizer, model_folder):
    with pytest.raises(ConfigurationError, match=r"policy.model.use_chat_template: found True"):
        prompt_encoder(tokenizer, pretrained(model_folder, chat=True))


def test_a_model_folder_is_found_from_anywhere(model_folder, tmp_path, monkeypatch):
    (tmp_path / "mine").symlink_to(model_folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_source("mine") == model_source("~/mine") == str(model_folder.resolve())


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "~/nowhere", "a/b/c"])
def test_a_folder_that_is_not_there_is_refused_at_once(name):
    with pytest.raises(ConfigurationError, match=r"policy.model.name: '.*': no such folder"):
        model_source(name)


def test_a_name_that_cannot_be_on_the_hub_is_refused():
    with pytest.raises(ConfigurationError, match=r"policy.model.name: 'not a name'"):
        model_source("not a name")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_without_a_model_is_refused(model_folder, tmp_path, missing):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / missing).unlink()
    with pytest.raises(ConfigurationError) as caught:
        model_source(str(folder))
    assert str(caught.value).startswith(f"policy.model.name: '{folder}': ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "{}"])
def test_a_broken_tokenizer_is_refused(model_folder, tmp_path, content):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"policy.model.name: tokenizer of '.*': "):
        load_tokenizer(str(folder))


def test_a_tokenizer_without_an_end_is_refused_and_padding_is_supplied(tmp_path, model_folder):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    settings_file = folder / "tokenizer_config.json"
    original = json.loads(settings_file.read_text())
    settings_file.write_text(json.dumps({k: v for k, v in original.items() if k != "pad_token"}))
    assert load_tokenizer(str(folder)).pad_token_id is not None
    settings_file.write_text(json.dumps({k: v for k, v in original.items() if k != "eos_token"}))
    with pytest.raises(ConfigurationError, match="has no end token"):
        load_tokenizer(str(folder))


def with_special_tokens(template):
    """The character tokenizer, which puts special tokens around every text."""
    tokenizer = build_character_tokenizer("ab0 ")
    ids = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<eos>", "<pad>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=ids
    )
    return tokenizer


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
    tokenizer = with_special_tokens(template)
    own = build_character_tokenizer("ab0 ")(text)["input_ids"]
    ids = prompt_encoder(tokenizer, pretrained("m"))(text)
    assert ids == tokenizer.convert_tokens_to_ids(begin) + own


@pytest.mark.parametrize("chat", [False, True])
def test_a_tokenizer_that_always_adds_tokens_is_refused(chat):
    class Always:
        chat_template = "{{ messages[0]['content'] }}"

        def __call__(self, text, **options):
            return {"input_ids": [7, *text.encode(), 9]}

    with pytest.raises(ConfigurationError, match=r"tokenizer of 'm': makes the tokens \[7, 9\]"):
        prompt_encoder(Always(), pretrained("m", chat=chat))
