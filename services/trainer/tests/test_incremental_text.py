"""Stop strings and texts of tokens agree with the complete text, at a bounded cost per token.

Imports internals: no run has stop strings, or a tokenizer with characters over several tokens.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, ByteLevel, Fuse, Metaspace, Sequence, Strip
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel as Bytes
from transformers import PreTrainedTokenizerFast

from grpo_trainer.rollout.stop_strings import StopSearch
from grpo_trainer.rollout.token_texts import token_texts

ALPHABET = "ab .\u00e9\u6f22\U0001f600\n"
"""Text of characters of one to four bytes."""


def byte_tokenizer():
    """Tokenizer with a token per byte, as in GPT-2: most characters span tokens."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(Bytes.alphabet()))}
    inner = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    inner.decoder = ByteLevel()
    inner.pre_tokenizer = Bytes(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def piece_tokenizer():
    """Tokenizer with pieces and single bytes, as in Llama 2; it drops a leading space."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "a b", "ab.", " ", "a", "", "."]
    inner = Tokenizer(WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    inner.decoder = Sequence([ByteFallback(), Fuse(), Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner)


TOKENIZERS = {"bytes": byte_tokenizer(), "pieces": piece_tokenizer()}


def first_end(tokenizer, tokens, stops):
    """Return the tokens after which the complete text contains a stop string, or None."""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count], skip_special_tokens=False)
        if any(stop in text for stop in stops):
            return count
    return None


def searched_end(tokenizer, tokens, stops):
    search = StopSearch(tokenizer, stops)
    return next((i for i, token in enumerate(tokens, 1) if search.add(token)), None)


@settings(deadline=None)
@given(st.sampled_from(sorted(TOKENIZERS)), st.data())
def test_the_search_agrees_with_the_complete_text(name, data):
    tokenizer = TOKENIZERS[name]
    characters = st.text(st.sampled_from(ALPHABET), max_size=80)
    if name == "bytes":
        tokens = tokenizer.backend_tokenizer.encode(data.draw(characters)).ids
    else:
        tokens = data.draw(st.lists(st.integers(1, len(tokenizer) - 1), max_size=120))
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    stops = [data.draw(st.text(st.sampled_from(ALPHABET), min_size=1, max_size=4))]
    if text:
        begin = data.draw(st.integers(0, len(text) - 1))
        stops.append(text[begin : begin + data.draw(st.integers(1, 12))])
    assert searched_end(tokenizer, tokens, stops) == first_end(tokenizer, tokens, stops)


def test_a_stop_string_across_many_tokens_is_found():
    tokenizer = TOKENIZERS["bytes"]
    stop = "\u6f22\U0001f600 STOP"
    encode = tokenizer.backend_tokenizer.encode
    before = encode("ab \u00e9" * 500).ids
    end = len(before) + len(stop.encode())
    tokens = before + encode(stop + " and more").ids
    assert searched_end(tokenizer, tokens, [stop]) == end


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_a_token_is_decoded_a_bounded_number_of_times(name):
    tokenizer = TOKENIZERS[name]

    class Counting:
        tokens = 0

        def decode(self, tokens, **options):
            self.tokens += len(tokens)
            return tokenizer.decode(tokens, **options)

    def cost(length):
        counting = Counting()
        search = StopSearch(counting, ["<|never|>"])
        for i in range(length):
            search.add(tokens[i % len(tokens)])
        return counting.tokens / length

    text = "ab \u00e9\u6f22. \U0001f600a"
    tokens = [1 + byte for byte in text.encode()]  # the byte pieces
    if name == "bytes":
        tokens = tokenizer.backend_tokenizer.encode(text).ids

    assert cost(4000) < 1.2 * cost(1000)


def word_tokenizer():
    """Tokenizer with leading spaces in its pieces, as in SentencePiece."""
    pieces = ["<unk>", "\u2581red", "\u2581car", "s"]
    inner = Tokenizer(WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    inner.decoder = Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def test_the_text_of_a_character_is_that_of_its_last_token():
    tokenizer = TOKENIZERS["bytes"]
    tokens = tokenizer.backend_tokenizer.encode("a\U0001f600b").ids
    assert token_texts(tokenizer, tokens) == ["a", "", "", "", "\U0001f600", "b"]
    assert token_texts(tokenizer, tokens[:3]) == ["a", "", "\ufffd"]


def test_the_leading_space_of_a_piece_is_retained():
    assert token_texts(word_tokenizer(), [1, 2, 3, 1]) == ["red", " car", "s", " red"]


@settings(deadline=None)
@given(st.text(st.sampled_from(ALPHABET), max_size=80))
def test_texts_of_tokens_join_to_the_complete_text(text):
    tokenizer = TOKENIZERS["bytes"]
    tokens = tokenizer.backend_tokenizer.encode(text).ids
    assert "".join(token_texts(tokenizer, tokens)) == text


def test_invalid_bytes_hide_no_text_after_them():
    tokenizer = TOKENIZERS["pieces"]
    tokens = [tokenizer.convert_tokens_to_ids(piece) for piece in ("<0x80>", "a", "ab.")]
    assert token_texts(tokenizer, tokens) == ["", "\ufffda", "ab."]
