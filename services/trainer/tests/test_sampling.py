"""Sampling draws from the trained model, and stops at the right token.

`test_steps.py` tests sampling in runs, which use neither greedy choice nor stop strings.
So internals are imported.
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

from grpo_trainer.policy.loss import token_logprobs
from grpo_trainer.rollout import response_journal
from grpo_trainer.rollout.sampling import Drawn, sample_responses
from grpo_trainer.rollout.worker import GenerationWorker

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
    complete = [torch.cat([row, r.token_ids]) for row, r in zip(rows, responses, strict=True)]
    lengths = torch.tensor([len(row) for row in complete])
    with torch.no_grad():
        scored = token_logprobs(network, padded(complete), lengths, temperature=temperature)
    for i, (row, response) in enumerate(zip(rows, responses, strict=True)):
        expected = scored[i, len(row) : len(complete[i])]
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
    complete = text(free[0].token_ids)
    places = st.integers(0, len(complete) - 1)
    begin = data.draw(places, label="begin")
    stop = complete[begin : begin + data.draw(st.integers(1, 9), label="length")]
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


@settings(max_examples=25)
@given(st.lists(st.tuples(tokens, st.integers(0, 7)), min_size=1, max_size=3), st.data())
def test_a_begun_response_continues_to_the_uninterrupted_one(network, tokenizer, pairs, data):
    rows = as_rows([prompt for prompt, _ in pairs])
    free = sample_responses(
        network, tokenizer, rows, max_new_tokens=[7] * len(rows), temperature=1.0, greedy=True
    )
    stop = data.draw(st.sampled_from([None, *tokenizer.decode(free[0].token_ids)]), label="stop")

    def sample(**options):
        return sample_responses(
            network,
            tokenizer,
            rows,
            max_new_tokens=[budget for _, budget in pairs],
            temperature=1.0,
            greedy=True,
            stop_strings=None if stop is None else [[stop]] * len(rows),
            **options,
        )

    complete = sample()
    prefixes = []
    for response in complete:
        cut = data.draw(st.none() | st.integers(0, len(response.token_ids)), label="prefix")
        prefixes.append(
            None if cut is None else Drawn(response.token_ids[:cut], response.logprobs[:cut])
        )
    for stored, response in zip(sample(prefixes=complete), complete, strict=True):
        assert stored.token_ids.tolist() == response.token_ids.tolist()
        assert stored.truncated is response.truncated
    snapshots = []

    def before_token(so_far):
        snapshots.append(so_far())
        return False

    again = sample(prefixes=prefixes, before_token=before_token)
    remaining = [
        len(response.token_ids) - (0 if each is None else len(each.token_ids))
        for response, each in zip(complete, prefixes, strict=True)
    ]
    assert len(snapshots) == max(remaining)  # no token is drawn twice
    for row, (response, expected) in enumerate(zip(again, complete, strict=True)):
        assert response.token_ids.tolist() == expected.token_ids.tolist()
        assert response.truncated is expected.truncated
        torch.testing.assert_close(response.logprobs, expected.logprobs, atol=1e-4, rtol=0)
        for drawn_tokens, snapshot in enumerate(snapshots):
            start = len(expected.token_ids) - remaining[row]
            until = start + min(drawn_tokens, remaining[row])
            assert snapshot[row].token_ids.tolist() == expected.token_ids[:until].tolist()
            assert torch.equal(snapshot[row].logprobs, response.logprobs[:until])


def test_tokens_after_the_end_of_a_begun_response_are_left_out(network, tokenizer):
    end = tokenizer.eos_token_id
    prefixes = Drawn(torch.tensor([5, end, 6]), torch.tensor([-1.0, -2.0, -3.0]))
    options = {"temperature": 1.0, "prefixes": [prefixes]}
    [ended] = sample_responses(
        network, tokenizer, [torch.tensor([4])], max_new_tokens=[9], **options
    )
    assert (ended.token_ids.tolist(), ended.truncated) == ([5, end], False)
    assert ended.logprobs.tolist() == [-1.0, -2.0]
    [cut] = sample_responses(network, tokenizer, [torch.tensor([4])], max_new_tokens=[1], **options)
    assert (cut.token_ids.tolist(), cut.truncated) == ([5], True)


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


@pytest.fixture
def recorded(model_folder, tmp_path, monkeypatch):
    """Function that returns an asynchronous worker with a journal, which records every token."""
    monkeypatch.setattr(response_journal, "RECORD_EVERY_S", 0.0)

    def start(folder=tmp_path, **changes):
        generation = worker(model_folder, asynchronous=True, partial_rollouts=True, **changes)
        generation.open_journal(str(folder))
        return generation

    return start


def recorded_batch():
    """Two prompts of a rollout with two rows each, and a row of an unknown prompt."""
    ids = [[4, 5, 6, 0], [4, 5, 6, 0], [7, 8, 9, 10], [7, 8, 9, 10], [11, 0, 0, 0]]
    return {
        "input_ids": torch.tensor(ids),
        "input_lengths": torch.tensor([3, 3, 4, 4, 1]),
        "stop_strings": [None] * 5,
        "positions": [0, 0, 7, 7, None],
    }


def responses_of(answer, data):
    starts, stops = data["input_lengths"].tolist(), answer["unpadded_sequence_lengths"].tolist()
    return [
        (answer["output_ids"][i, start:stop].tolist(), answer["logprobs"][i, start:stop].tolist())
        for i, (start, stop) in enumerate(zip(starts, stops, strict=True))
    ]


@pytest.mark.parametrize("seed", range(4))
def test_a_worker_continues_what_a_killed_one_recorded(recorded, network, tmp_path, seed):
    first = recorded(seed=seed)
    data = recorded_batch()
    lost = responses_of(first.generate(data, greedy=False), data)
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])  # as if killed half way
    answer = recorded(seed=seed).generate(data, greedy=False)
    continued, lengths = 0, []
    for (tokens, logprobs), (lost_tokens, lost_logprobs) in zip(
        responses_of(answer, data), lost, strict=True
    ):
        equal = [a == b for a, b in zip(logprobs, lost_logprobs, strict=False)]
        count = equal.index(False) if False in equal else len(equal)
        assert tokens[:count] == lost_tokens[:count]
        continued += count
        lengths.append(len(tokens))
    assert 0 < answer["journal"]["continued_tokens"] <= continued
    assert answer["journal"]["continued_tokens"] < sum(map(len, (tokens for tokens, _ in lost)))
    spans = [span[-1]["end"] for span in answer["weight_versions"]]
    assert spans == lengths
    complete = answer["output_ids"]
    with torch.no_grad():
        scored = token_logprobs(
            network, complete, answer["unpadded_sequence_lengths"], temperature=1.0
        )
    for i, (_, logprobs) in enumerate(responses_of(answer, data)):
        start = data["input_lengths"][i]
        expected = scored[i, start : start + len(logprobs)]
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)


def test_a_finished_response_is_returned_unchanged(recorded):
    data = recorded_batch()
    data["positions"][4] = 9
    first = recorded()
    lost = first.generate(data, greedy=False)
    after = recorded()
    again = after.generate(data, greedy=False)
    assert responses_of(again, data) == responses_of(lost, data)
    assert again["truncated"].tolist() == lost["truncated"].tolist()
    assert again["journal"]["continued_tokens"] == int(lost["generation_lengths"].sum())
    assert after.metrics()["tokens"] == 0


def test_a_conversation_continues_in_its_second_turn(recorded, tmp_path):
    first = recorded(max_total_sequence_length=30)
    data = recorded_batch()
    lost = first.generate(data, greedy=False)
    rows, lengths = [1, 2], lost["unpadded_sequence_lengths"][[1, 2]]
    follow_ups = torch.full((2, int(lengths.max()) + 2), 9)
    for ids, row, length in zip(follow_ups, rows, lengths.tolist(), strict=True):
        ids[:length] = lost["output_ids"][row, :length]
    second = {
        "input_ids": follow_ups,
        "input_lengths": lengths + 2,
        "stop_strings": [None] * 2,
        "positions": [0, 7],
    }
    lost_again = first.generate(second, greedy=False)
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1])  # the last record is lost, with one token
    after = recorded(max_total_sequence_length=30)
    known = [response[0] for response in responses_of(lost, data)][:4]
    again = after.generate(data, greedy=False)
    assert [response[0] for response in responses_of(again, data)][:4] == known
    answer = after.generate(second, greedy=False)
    for response, lost_response in zip(
        responses_of(answer, second), responses_of(lost_again, second), strict=True
    ):
        tokens, lost_tokens = response[0], lost_response[0]
        assert tokens[: len(lost_tokens) - 1] == lost_tokens[:-1]
    expected = int(lost_again["generation_lengths"].sum()) - 1
    assert answer["journal"]["continued_tokens"] == expected


@pytest.mark.parametrize("changes", [{"greedy": True}, {"positions": None}])
def test_greedy_calls_and_validation_are_not_recorded(recorded, tmp_path, changes):
    data = recorded_batch()
    if "positions" in changes:
        del data["positions"]
    recorded().generate(data, greedy=changes.get("greedy", False))
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0]
