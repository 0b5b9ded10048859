"""Sampling draws from the model that is trained, and stops where it should."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from grpo_trainer.generation import GenerationWorker, call_seed
from grpo_trainer.loss import token_logprobs
from grpo_trainer.refit_settings import RefitSettings
from grpo_trainer.refit_source import slot, start_source
from grpo_trainer.sampling import sample_responses
from grpo_trainer.sections import ControlAccessSection
from grpo_trainer.tokenizer import EOS, PAD
from refit_mx import ControlClient, EmbeddedControlServer, LayoutError

tokens = st.lists(st.integers(2, 20), min_size=1, max_size=8)
prompts = st.lists(tokens, min_size=1, max_size=4)
few = settings(max_examples=10)


def as_rows(prompts):
    return [torch.tensor(prompt) for prompt in prompts]


def padded(rows):
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


@few
@given(prompts, st.sampled_from([0.7, 1.0, 1.5]), st.integers(0, 99), st.booleans())
def test_log_probabilities_are_those_of_the_training_forward(
    network, tokenizer, prompts, temperature, seed, greedy
):
    rows = as_rows(prompts)
    responses = sample_responses(
        network,
        tokenizer,
        rows,
        max_new_tokens=[6] * len(rows),
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


@few
@given(st.lists(st.tuples(tokens, st.integers(0, 6)), min_size=1, max_size=4), st.integers(0, 99))
def test_each_row_keeps_its_budget_and_says_whether_it_ended_itself(
    network, tokenizer, pairs, seed
):
    rows = as_rows([prompt for prompt, _ in pairs])
    budgets = [budget for _, budget in pairs]
    responses = sample_responses(
        network,
        tokenizer,
        rows,
        max_new_tokens=budgets,
        temperature=2.0,
        generator=torch.Generator().manual_seed(seed),
    )
    for budget, response in zip(budgets, responses, strict=True):
        drawn = response.token_ids.tolist()
        assert len(drawn) == len(response.logprobs) <= budget
        assert tokenizer.eos_token_id not in drawn[:-1]
        ended = bool(drawn) and drawn[-1] == tokenizer.eos_token_id
        assert response.truncated is not ended
        assert ended or len(drawn) == budget


@few
@given(prompts, st.integers(0, 99))
def test_the_same_seed_draws_the_same_tokens(network, tokenizer, prompts, seed):
    first, second = (
        sample_responses(
            network,
            tokenizer,
            as_rows(prompts),
            max_new_tokens=[6] * len(prompts),
            temperature=1.0,
            generator=torch.Generator().manual_seed(seed),
        )
        for _ in range(2)
    )
    assert [r.token_ids.tolist() for r in first] == [r.token_ids.tolist() for r in second]


def test_a_row_ends_at_its_own_stop_string(network, tokenizer):
    row = torch.tensor(tokenizer("max(1,2)=")["input_ids"])
    options = {"max_new_tokens": [6, 6], "temperature": 1.0, "greedy": True}
    free = sample_responses(network, tokenizer, [row, row], **options)
    text = tokenizer.decode(free[0].token_ids)
    stop = text[:3]
    stopped = sample_responses(
        network, tokenizer, [row, row], stop_strings=[["never", stop], None], **options
    )
    assert tokenizer.decode(stopped[0].token_ids) == stop
    assert not stopped[0].truncated
    assert stopped[1].token_ids.tolist() == free[1].token_ids.tolist()


def word_tokenizer(words):
    """A tokenizer with a token per word, besides padding and end, that decodes without gaps."""
    vocabulary = [PAD, EOS, *words]
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=PAD))
    inner.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=PAD, eos_token=EOS)


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


def test_a_response_that_stops_at_its_limit_is_not_truncated(network, tokenizer):
    row = torch.tensor(tokenizer("max(1,2)=")["input_ids"])
    options = {"max_new_tokens": [3], "temperature": 1.0, "greedy": True}
    [free] = sample_responses(network, tokenizer, [row], **options)
    text = tokenizer.decode(free.token_ids)
    [stopped] = sample_responses(network, tokenizer, [row], stop_strings=[[text]], **options)
    assert stopped.token_ids.tolist() == free.token_ids.tolist()
    assert (free.truncated, stopped.truncated) == (True, False)


def test_an_empty_stop_string_is_refused(network, tokenizer):
    with pytest.raises(ValueError, match="stop_strings: found an empty one"):
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


def test_a_stream_draws_the_same_whatever_was_drawn_before(model_folder):
    generation = worker(model_folder)
    generation.begin("train 3")
    alone = drawn(generation, 2)
    generation.begin("validation 3")
    other = drawn(generation, 2)
    generation.begin("train 3")
    assert drawn(generation, 2) == alone
    assert alone[0] != alone[1]
    assert alone != other


@given(st.integers(0, 3), st.text(max_size=3), st.integers(0, 3))
def test_call_seeds_fit_a_generator_and_differ(seed, stream, call):
    found = call_seed(seed, stream, call)
    assert 0 <= found < 2**63
    assert found == call_seed(seed, stream, call)
    assert len({found, call_seed(seed + 1, stream, call), call_seed(seed, stream, call + 1)}) == 3


def test_an_answer_has_prompt_response_and_padding_in_their_places(model_folder, tokenizer):
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


def test_metrics_count_the_tokens_since_they_were_cleared(model_folder):
    generation = worker(model_folder)
    generation.clear_metrics()
    lengths = generation.generate(batch(), greedy=False)["generation_lengths"]
    assert generation.metrics()["tokens"] == int(lengths.sum())
    assert generation.metrics()["tokens_per_s"] > 0
    generation.clear_metrics()
    assert generation.metrics() == {"tokens": 0, "seconds": 0.0, "tokens_per_s": 0.0}


class Refits:
    """A policy worker's and a generation worker's end of a refit in one process."""

    def __init__(self, generation, server, ranks=2):
        self.generation = generation
        self.control = ControlClient(server.address)
        settings = RefitSettings(
            control=server.address,
            control_access=ControlAccessSection(
                tls_ca=None, tls_name=None, token_file=None, token_env=None
            ),
            model_name="m",
            transport="tcp",
            host="127.0.0.1",
            advertised_host=None,
            tensor_parallel=2,
            timeout_s=30.0,
        ).model_dump()
        self.sources = [start_source(settings, rank=rank, world=ranks) for rank in range(ranks)]
        generation.join_refit(settings)

    def refit(self, version_id, weights):
        slots = [slot(rank) for rank in range(len(self.sources))]
        self.control.create_version("m", slots, idempotency_key=version_id, version_id=version_id)
        for source in self.sources:
            source.publish(version_id, weights)
        return self.generation.install_weights(version_id)

    def close(self):
        self.generation._refit.close()
        for source in self.sources:
            source.close()
        self.control.close()


@pytest.fixture
def refits(model_folder):
    with EmbeddedControlServer() as server:
        made = Refits(worker(model_folder), server)
        yield made
        made.close()


def test_installed_weights_are_what_generates(refits, network):
    generation = refits.generation
    before = generation.generate(batch(), greedy=True)["output_ids"].tolist()
    weights = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    negated = {
        name: -tensor if name == "lm_head.weight" else tensor for name, tensor in weights.items()
    }
    refits.refit("v1", negated)
    assert generation.generate(batch(), greedy=True)["output_ids"].tolist() != before
    moved = refits.refit("v2", weights)
    assert generation.generate(batch(), greedy=True)["output_ids"].tolist() == before
    assert moved["bytes"] == sum(tensor.nbytes for tensor in weights.values())


def test_the_sources_share_every_weight_and_publish_no_row_twice(refits, network):
    weights = network.state_dict()
    for name, tensor in weights.items():
        parts = [part for source in refits.sources for part in source.shards({name: tensor})]
        assert torch.equal(torch.cat([part.tensor for part in parts]), tensor)


@pytest.mark.parametrize("how", ["missing", "shape", "dtype"])
def test_weights_that_do_not_fit_are_refused_by_name_and_change_nothing(refits, network, how):
    weights = {name: torch.zeros_like(tensor) for name, tensor in network.state_dict().items()}
    name = "lm_head.weight"
    if how == "missing":
        del weights[name]
    elif how == "shape":
        weights[name] = weights[name][:-1]
    else:
        weights[name] = weights[name].double().to(torch.float16)
    generation = refits.generation
    before = generation.generate(batch(), greedy=True)["output_ids"].tolist()
    with pytest.raises(LayoutError, match=name):
        refits.refit("v7", weights)
    assert generation.generate(batch(), greedy=True)["output_ids"].tolist() == before
