"""Sampling draws from the trained model, and stops at the right token.

`test_steps.py` tests sampling in runs, which use neither greedy choice nor stop strings.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from grpo_trainer.policy.loss import token_logprobs  # noqa: TID251  # see above
from grpo_trainer.rollout.sampling import sample_responses  # noqa: TID251  # see above
from grpo_trainer.rollout.worker import GenerationWorker  # noqa: TID251  # see above

tokens = st.lists(st.integers(2, 20), min_size=1, max_size=8)
prompts = st.lists(tokens, min_size=1, max_size=4)
few = settings(max_examples=10)


def as_rows(prompts):
    return [torch.tensor(prompt) for prompt in prompts]


def padded(rows):
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


@few
@given(
    st.lists(st.tuples(tokens, st.integers(0, 6)), min_size=1, max_size=4),
    st.sampled_from([0.7, 1.0, 2.0]),
    st.integers(0, 99),
    st.booleans(),
)
def test_rows_keep_their_budgets_and_are_scored_as_in_training(
    network, tokenizer, pairs, temperature, seed, greedy
):
    rows = as_rows([prompt for prompt, _ in pairs])
    budgets = [budget for _, budget in pairs]
    responses = sample_responses(
        network,
        tokenizer,
        rows,
        max_new_tokens=budgets,
        temperature=temperature,
        greedy=greedy,
        generator=torch.Generator().manual_seed(seed),
    )
    whole = [torch.cat([row, r.token_ids]) for row, r in zip(rows, responses, strict=True)]
    lengths = torch.tensor([len(row) for row in whole])
    with torch.no_grad():
        scored = token_logprobs(network, padded(whole), lengths, temperature=temperature)
    for i, (row, response) in enumerate(zip(rows, responses, strict=True)):
        expected = scored[i, len(row) : len(whole[i])]
        torch.testing.assert_close(response.logprobs, expected, atol=1e-4, rtol=0)
        drawn = response.token_ids.tolist()
        assert len(drawn) <= budgets[i]
        assert tokenizer.eos_token_id not in drawn[:-1]
        ended = drawn[-1:] == [tokenizer.eos_token_id]
        assert response.truncated is not ended
        assert ended or len(drawn) == budgets[i]


@few
@given(prompts)
def test_greedy_is_the_chain_of_likeliest_tokens(network, tokenizer, prompts):
    rows = as_rows(prompts)
    responses = sample_responses(
        network, tokenizer, rows, max_new_tokens=[5] * len(rows), temperature=1.0, greedy=True
    )
    for row, response in zip(rows, responses, strict=True):
        chain = row
        while len(chain) < len(row) + 5:
            with torch.no_grad():
                likeliest = network(chain[None]).logits[0, -1].argmax()
            chain = torch.cat([chain, likeliest[None]])
            if likeliest == tokenizer.eos_token_id:
                break
        assert response.token_ids.tolist() == chain[len(row) :].tolist()


def word_tokenizer(words):
    """Tokenizer with a token per word that decodes without gaps, plus padding and end."""
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", *words])}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    inner.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


@settings(max_examples=25)
@given(st.data(), st.integers(0, 99))
def test_a_response_ends_in_the_token_completing_a_stop_string(network, data, seed):
    size = network.config.vocab_size - 2
    words = [f"{'abc'[i % 3]}.{'xyz'[i // 3 % 3]}{i}." for i in range(size)]
    tokenizer = word_tokenizer(words)
    rows = [torch.tensor([3, 4])] * 3
    options = {"max_new_tokens": [7] * 3, "temperature": 3.0}

    def sample(stop_strings):
        generator = torch.Generator().manual_seed(seed)
        return sample_responses(
            network, tokenizer, rows, **options, generator=generator, stop_strings=stop_strings
        )

    def text(ids):
        return tokenizer.decode(ids, skip_special_tokens=False)

    free = sample(None)
    whole = text(free[0].token_ids)
    places = st.integers(0, len(whole) - 1)
    begin = data.draw(places, label="begin")
    stop = whole[begin : begin + data.draw(st.integers(1, 9), label="length")]
    stopped = sample([["never", stop], None, [stop]])
    for row in (0, 2):
        ids = free[row].token_ids
        ends = [n for n in range(1, len(ids) + 1) if stop in text(ids[:n])]
        length = ends[0] if ends else len(ids)
        assert stopped[row].token_ids.tolist() == ids[:length].tolist()
        assert stopped[row].truncated is (not ends and free[row].truncated)
    assert stopped[1].token_ids.tolist() == free[1].token_ids.tolist()


def test_an_empty_stop_string_is_refused(network, tokenizer):
    with pytest.raises(ValueError, match="stop_strings: found an empty string"):
        sample_responses(
            network,
            tokenizer,
            [torch.tensor([4, 5])],
            max_new_tokens=[3],
            temperature=1.0,
            stop_strings=[["a", ""]],
        )


def worker(model_folder, **changes):
    options = {
        "max_new_tokens": 6,
        "max_total_sequence_length": 12,
        "temperature": 1.0,
        "seed": 5,
        "num_threads": 1,
        "device": "cpu",
    }
    return GenerationWorker(str(model_folder), **{**options, **changes})


def batch():
    return {
        "input_ids": torch.tensor([[4, 5, 6, 0], [7, 8, 9, 10], [11, 0, 0, 0]]),
        "input_lengths": torch.tensor([3, 4, 1]),
    }


def drawn(generation, times=1):
    return [generation.generate(batch(), greedy=False)["output_ids"].tolist() for _ in range(times)]


def test_a_stream_is_independent_of_earlier_draws(model_folder):
    generation = worker(model_folder)
    generation.begin("train 3")
    alone = drawn(generation, 2)
    generation.begin("validation 3")
    other = drawn(generation, 2)
    generation.begin("train 3")
    assert drawn(generation, 2) == alone
    assert alone[0] != alone[1]
    assert alone != other


def test_a_result_has_prompt_response_and_padding_in_place(model_folder, tokenizer):
    data = batch()
    answer = worker(model_folder).generate(data, greedy=False)
    starts, stops = data["input_lengths"], answer["unpadded_sequence_lengths"]
    assert (stops - starts).tolist() == answer["generation_lengths"].tolist()
    for i, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        assert answer["output_ids"][i, :start].tolist() == data["input_ids"][i, :start].tolist()
        assert (answer["output_ids"][i, stop:] == tokenizer.pad_token_id).all()
        assert (answer["logprobs"][i, :start] == 0).all()
        assert (answer["logprobs"][i, start:stop] < 0).all()
        assert (answer["logprobs"][i, stop:] == 0).all()


def test_a_conversation_never_grows_past_its_limit(model_folder):
    answer = worker(model_folder, max_total_sequence_length=4).generate(batch(), greedy=False)
    assert answer["unpadded_sequence_lengths"].max() <= 4
    assert answer["generation_lengths"][1] == 0
    assert answer["truncated"][1]
