"""Tokenizers, and what can be said of a model before it is loaded.

Nothing here loads weights, so a wrong name ends a run within seconds. ``AutoConfig`` and
``AutoTokenizer`` are imported where they are used: they bring torch, which a random model's
tokenizer does not need.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any  # Any: transformers' tokenizers have no usable static types

from huggingface_hub import get_hf_file_metadata, hf_hub_url
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from grpo_trainer.errors import ConfigurationError
from grpo_trainer.sections import PretrainedModel, RandomModel

PAD, EOS = "<pad>", "<eos>"

_PROBE_S = 10.0
_PROBES = ("a", "A", "0")
_WEIGHTS = ("*.safetensors", "*.bin")

# Bars of loading would tear the run's own display apart, and what fails is reported once, by us.
transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()
logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def build_character_tokenizer(characters: str) -> Any:
    """A tokenizer with a token per character of ``characters``, besides padding and end."""
    vocabulary = [PAD, EOS, *dict.fromkeys(characters)]
    tokenizer = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token=PAD)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
    )


def model_source(name: str) -> str:
    """A model's folder as an absolute path, or its hub name, after a look at its configuration.

    Raises:
        ConfigurationError: there is no such folder or hub model, or it holds no model.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        name = str(path.resolve())
        if not any(found for pattern in _WEIGHTS for found in path.glob(pattern)):
            raise ConfigurationError(f"policy.model.name: {name!r}: the folder has no weights")
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigurationError(f"policy.model.name: {name!r}: no such folder")
    else:
        _check_hub(name)

    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"policy.model.name: {name!r}: {_first_line(error)}") from None
    return name


def _check_hub(name: str) -> None:
    """Look for the model in the local cache, then once on the hub; loading would retry long."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        try:
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_PROBE_S)
        except Exception as error:  # noqa: BLE001  # the hub's transport errors differ by version
            raise ConfigurationError(
                f"policy.model.name: {name!r}: no such folder, not in the local cache, and the hub "
                f"does not give it: {_first_line(error)}"
            ) from None


def load_tokenizer(name: str) -> Any:
    """The tokenizer, with a padding token.

    Raises:
        ConfigurationError: there is none, or it has neither a padding nor an end token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # noqa: BLE001  # the tokenizers library raises plain Exception
        raise ConfigurationError(
            f"policy.model.name: tokenizer of {name!r}: {_first_line(error)}"
        ) from None
    if tokenizer.eos_token_id is None:
        raise ConfigurationError(f"policy.model.name: tokenizer of {name!r} has no end token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def tokenizer_digest(tokenizer: Any, model: RandomModel | PretrainedModel) -> str:
    """Of the vocabulary, and of the chat template if ``model`` asks for it."""
    chat = isinstance(model, PretrainedModel) and model.use_chat_template
    content = [tokenizer.get_vocab(), tokenizer.chat_template if chat else None]
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def prompt_encoder(
    tokenizer: Any, model: RandomModel | PretrainedModel
) -> Callable[[str], list[int]]:
    """How the text of a prompt becomes token ids.

    A begin token that the tokenizer puts before a text stays; what it puts after one, such as its
    end token, does not: a response follows a prompt, and nothing has come to its end.

    The function raises ValueError for a text that the model has no tokens for.

    Raises:
        ConfigurationError: a chat template is asked for, and the tokenizer has none; or the
            tokenizer adds tokens to a text although it is told not to.
    """
    if isinstance(model, RandomModel):
        known = set(model.characters)

        def encode_characters(text: str) -> list[int]:
            unknown = "".join(dict.fromkeys(c for c in text if c not in known))
            if unknown:
                raise ValueError(f"{unknown!r} not in policy.model.characters")
            return list(tokenizer(text)["input_ids"])

        return encode_characters
    _check_adds_nothing(tokenizer, model.name)
    if not model.use_chat_template:
        appended = _appended_tokens(tokenizer, model.name)

        def encode_text(text: str) -> list[int]:
            ids = list(tokenizer(text)["input_ids"])
            return ids[: len(ids) - appended]

        return encode_text
    if tokenizer.chat_template is None:
        raise ConfigurationError(
            "policy.model.use_chat_template: found True; the tokenizer of "
            f"{model.name!r} has no chat template"
        )

    def encode_chat(text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])

    return encode_chat


def _check_adds_nothing(tokenizer: Any, name: str) -> None:
    """Refuse a tokenizer that adds tokens to a text although it is told not to."""
    alone = list(tokenizer("", add_special_tokens=False)["input_ids"])
    if alone:
        raise ConfigurationError(
            f"policy.model.name: tokenizer of {name!r}: makes the tokens {alone} of an empty text, "
            "called with add_special_tokens=False; expected none, since what it adds would stand "
            "around every turn of a conversation"
        )


def _appended_tokens(tokenizer: Any, name: str) -> int:
    """Count the tokens that ``tokenizer`` puts after every text.

    Raises:
        ConfigurationError: a text's own tokens are not among those with special tokens.
    """
    for probe in _PROBES:
        own = list(tokenizer(probe, add_special_tokens=False)["input_ids"])
        whole = list(tokenizer(probe)["input_ids"])
        for start in range(len(whole) - len(own) + 1 if own else 0):
            if whole[start : start + len(own)] == own:
                return len(whole) - start - len(own)
    raise ConfigurationError(
        f"policy.model.name: tokenizer of {name!r}: makes the tokens {whole} of {probe!r}, and "
        f"{own} with add_special_tokens=False; expected the second within the first"
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
