"""Tokenizers, and checks of a model before its weights are loaded.

No function here loads weights, so a wrong name ends a run within seconds. ``AutoConfig`` and
``AutoTokenizer`` are imported where they are used: they import torch, which a random model's
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

from grpo_trainer.config.sections import PretrainedModel, RandomModel
from grpo_trainer.errors import ConfigurationError, first_line

PAD, EOS = "<pad>", "<eos>"

_PROBE_S = 10.0
_PROBES = ("a", "A", "0")
_WEIGHTS = ("*.safetensors", "*.bin")

# Progress bars would break the run's display, and the trainer reports each failure itself.
transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()
logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def build_character_tokenizer(characters: str) -> Any:
    """Return a tokenizer with a token per character of ``characters``, plus padding and end."""
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
    """Return a model's absolute folder or its hub name, after reading its configuration.

    Raises:
        ConfigurationError: there is no such folder or hub model, or it holds no model.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        name = str(path.resolve())
        if not any(file for pattern in _WEIGHTS for file in path.glob(pattern)):
            raise ConfigurationError(f"policy.model.name: {name!r}: the folder has no weights")
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigurationError(f"policy.model.name: {name!r}: no such folder")
    else:
        _check_hub(name)

    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"policy.model.name: {name!r}: {first_line(error)}") from None
    return name


def _check_hub(name: str) -> None:
    """Check that the model is in the local cache or, with one request, on the hub.

    Loading it from a hub that does not answer would retry for minutes.
    """
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        try:
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_PROBE_S)
        except Exception as error:  # noqa: BLE001  # the hub's transport errors differ by version
            raise ConfigurationError(
                f"policy.model.name: {name!r}: no such folder, not in the local cache, and not "
                f"available from the hub: {first_line(error)}"
            ) from None


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer; without a padding token, the end token serves as one.

    Raises:
        ConfigurationError: there is no tokenizer, or it has no end token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # noqa: BLE001  # the tokenizers library raises plain Exception
        raise ConfigurationError(
            f"policy.model.name: tokenizer of {name!r}: {first_line(error)}"
        ) from None
    if tokenizer.eos_token_id is None:
        raise ConfigurationError(f"policy.model.name: tokenizer of {name!r} has no end token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def tokenizer_digest(tokenizer: Any, model: RandomModel | PretrainedModel) -> str:
    """Return a digest of the vocabulary, and of the chat template if ``model`` uses it."""
    chat = isinstance(model, PretrainedModel) and model.use_chat_template
    content = [tokenizer.get_vocab(), tokenizer.chat_template if chat else None]
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def prompt_encoder(
    tokenizer: Any, model: RandomModel | PretrainedModel
) -> Callable[[str], list[int]]:
    """Return a function from the text of a prompt to token ids.

    A begin token that the tokenizer prepends stays. Tokens that it appends, such as the end token,
    are removed: a response follows the prompt.

    The function raises ValueError for a text that the model has no tokens for.

    Raises:
        ConfigurationError: the tokenizer lacks the chat template that ``model`` uses, or adds
            tokens even with ``add_special_tokens=False``.
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
    """Refuse a tokenizer that adds tokens even with ``add_special_tokens=False``."""
    alone = list(tokenizer("", add_special_tokens=False)["input_ids"])
    if alone:
        raise ConfigurationError(
            f"policy.model.name: tokenizer of {name!r}: returns tokens {alone} for an empty text "
            "with add_special_tokens=False; expected none, because every turn of a conversation "
            "would get them"
        )


def _appended_tokens(tokenizer: Any, name: str) -> int:
    """Count the tokens that ``tokenizer`` appends to every text.

    Raises:
        ConfigurationError: special tokens change the other tokens of a text.
    """
    for probe in _PROBES:
        plain = list(tokenizer(probe, add_special_tokens=False)["input_ids"])
        special = list(tokenizer(probe)["input_ids"])
        for start in range(len(special) - len(plain) + 1 if plain else 0):
            if special[start : start + len(plain)] == plain:
                return len(special) - start - len(plain)
    raise ConfigurationError(
        f"policy.model.name: tokenizer of {name!r}: returns tokens {special} for {probe!r}, and "
        f"{plain} with add_special_tokens=False; expected the first to contain the second"
    )
