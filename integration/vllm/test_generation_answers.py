"""Responses of a real vLLM through `VllmGeneration`."""

from __future__ import annotations

import asyncio
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from integration.vllm.conftest import SpanCollector
from integration.vllm.prompts import (
    PAD,
    await_load,
    back_end,
    batch_of,
    completions,
    counter_of,
    random_prompts,
    responses_of,
    stable_load,
)
from integration.vllm.server import MAX_MODEL_LEN, VllmServer
from integration.vllm.tiny_model import EOS, VOCABULARY, build_tokenizer
from opentelemetry.sdk.trace import TracerProvider
from transformers import AutoModelForCausalLM

from column_io import BatchedDataDict
from dataplane_core import (
    ConfigError,
    DeadlineExceededError,
    InvalidRequestError,
    UnsupportedError,
)
from rollout_actor import (
    EnvironmentReturn,
    run_async_multi_turn_rollout,
    run_multi_turn_rollout,
)

LENGTHS = (1, 3, 17, 100, 300)


def post(server: VllmServer, path: str, **json: Any) -> None:
    httpx.post(f"{server.address}{path}", json=json or None, timeout=60).raise_for_status()


def test_greedy_response_equals_that_of_completions(vllm_server: VllmServer) -> None:
    prompts = random_prompts(LENGTHS)
    output = back_end(vllm_server.address).generate(batch_of(prompts), greedy=True)
    assert responses_of(output) == completions(
        vllm_server.address, prompts, max_tokens=24, temperature=0
    )
    for row, prompt in enumerate(prompts):
        assert output["output_ids"][row, : len(prompt)].tolist() == prompt
        assert not output["logprobs"][row, : len(prompt)].any()
        total = int(output["unpadded_sequence_lengths"][row])
        assert (output["output_ids"][row, total:] == PAD).all()
        ended = int(output["output_ids"][row, total - 1]) == VOCABULARY.index(EOS)
        assert bool(output["truncated"][row]) is not ended


def test_sampled_logprobs_are_the_models(vllm_server: VllmServer, tiny_model: Path) -> None:
    prompts = random_prompts(LENGTHS, seed=1)
    output = back_end(vllm_server.address).generate(batch_of(prompts), greedy=False)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for prompt, (tokens, logprobs) in zip(prompts, responses_of(output), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)


def test_equal_seeds_draw_equal_tokens_in_any_order(vllm_server: VllmServer) -> None:
    prompts = [*random_prompts((9, 40)), *random_prompts((9, 40))]  # groups of two

    def draw(seed: int, stream: str, order: list[int]) -> list[list[int]]:
        generation = back_end(vllm_server.address, seed=seed)
        generation.begin(stream)
        output = generation.generate(batch_of([prompts[i] for i in order]), greedy=False)
        return [tokens for tokens, _ in responses_of(output)]

    first = draw(7, "train 0", [0, 1, 2, 3])
    assert draw(7, "train 0", [1, 0, 3, 2]) == [first[i] for i in (1, 0, 3, 2)]
    assert first[0] != first[2]
    assert first[1] != first[3]
    assert draw(8, "train 0", [0, 1, 2, 3]) != first
    assert draw(7, "train 1", [0, 1, 2, 3]) != first


def test_rollouts_of_a_stream_draw_new_tokens(vllm_server: VllmServer) -> None:
    generation = back_end(vllm_server.address)
    batch = batch_of(random_prompts((9,)))
    first = responses_of(generation.generate(batch, greedy=False))
    generation.clear_logger_metrics()
    assert responses_of(generation.generate(batch, greedy=False)) != first
    copy = pickle.loads(pickle.dumps(generation))
    assert responses_of(copy.generate(batch, greedy=False)) == first


def test_stop_string_ends_a_response_after_it(vllm_server: VllmServer) -> None:
    prompt = random_prompts((20,), seed=3)
    tokenizer = build_tokenizer()
    ((tokens, _),) = completions(vllm_server.address, prompt, max_tokens=24, temperature=0)
    stop = next(  # a text of one token that comes neither first nor last
        (index, text)
        for index, text in enumerate(map(tokenizer.decode, tokens))
        if 2 < index < 20 and text.isascii() and text not in tokenizer.decode(tokens[:index])
    )
    generation = back_end(vllm_server.address)
    output = generation.generate(batch_of(prompt, [["never", stop[1]]]), greedy=True)
    assert responses_of(output)[0][0] == tokens[: stop[0] + 1]
    assert not output["truncated"].any()
    # The budget's last token completes the stop string: stopped, not truncated.
    exact = back_end(vllm_server.address, max_new_tokens=stop[0] + 1)
    output = exact.generate(batch_of(prompt, [[stop[1]]]), greedy=True)
    assert output["generation_lengths"].tolist() == [stop[0] + 1]
    assert not output["truncated"].any()
    # An empty list and None both mean no stop strings.
    for stops in ([], None):
        output = generation.generate(batch_of(prompt, [stops]), greedy=True)
        assert responses_of(output)[0][0] == tokens


def test_prompts_near_the_limit_get_the_remaining_tokens(vllm_server: VllmServer) -> None:
    lengths = (MAX_MODEL_LEN - 3, MAX_MODEL_LEN - 1, MAX_MODEL_LEN)
    output = back_end(vllm_server.address).generate(batch_of(random_prompts(lengths)), greedy=False)
    assert output["generation_lengths"].tolist() == [3, 1, 0]
    assert output["truncated"].tolist() == [True, True, True]
    assert output["weight_versions"][2] == []
    only_full = back_end(vllm_server.address).generate(
        batch_of(random_prompts((MAX_MODEL_LEN,))), greedy=True
    )
    assert only_full["generation_lengths"].tolist() == [0]


def test_async_form_answers_the_same(vllm_server: VllmServer) -> None:
    prompts = random_prompts(LENGTHS, seed=4)
    expected = responses_of(back_end(vllm_server.address).generate(batch_of(prompts), greedy=False))

    async def row(generation: Any, prompt: list[int]) -> list[Any]:
        stream = generation.generate_async(batch_of([prompt]), greedy=False)
        return [(index, responses_of(output)) async for index, output in stream]

    async def all_rows() -> list[Any]:
        generation = back_end(vllm_server.address)
        return await asyncio.gather(*(row(generation, prompt) for prompt in prompts))

    assert asyncio.run(all_rows()) == [[(0, [response])] for response in expected]


def test_cancelled_async_caller_aborts_its_requests(vllm_server: VllmServer) -> None:
    address, load = vllm_server.address, stable_load(vllm_server.address)
    generation = back_end(address, max_new_tokens=MAX_MODEL_LEN)

    async def abandon() -> None:
        stream = generation.generate_async(batch_of(random_prompts((4,) * 8)), greedy=False)
        task = asyncio.ensure_future(anext(stream))
        await asyncio.to_thread(await_load, address, load + 8)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    post(vllm_server, "/pause?mode=keep")  # so that nothing finishes meanwhile
    try:
        asyncio.run(abandon())
        generation.close()
        before = counter_of(address, "generation_tokens_total")
    finally:
        post(vllm_server, "/resume")
    back_end(address).generate(batch_of(random_prompts((5,))), greedy=True)
    # The server may continue for a few steps until it notices.
    assert counter_of(address, "generation_tokens_total") - before < 24 + 8 * 24


def test_paused_server_keeps_requests_until_it_resumes(vllm_server: VllmServer) -> None:
    prompts = random_prompts(LENGTHS, seed=5)
    expected = completions(vllm_server.address, prompts, max_tokens=24, temperature=0)
    load = stable_load(vllm_server.address)
    post(vllm_server, "/pause?mode=keep")
    with ThreadPoolExecutor(1) as thread:
        try:
            generation = back_end(vllm_server.address)
            answer = thread.submit(generation.generate, batch_of(prompts), greedy=True)
            await_load(vllm_server.address, load + len(prompts))
        finally:
            post(vllm_server, "/resume")
        assert responses_of(answer.result(120)) == expected
    assert generation.get_logger_metrics()["retries"] == 0


def test_deadline_passes_during_a_pause(vllm_server: VllmServer) -> None:
    generation = back_end(vllm_server.address, timeout_s=10.0)
    batch = batch_of(random_prompts((5, 6, MAX_MODEL_LEN)))
    post(vllm_server, "/pause?mode=keep")
    try:
        with pytest.raises(DeadlineExceededError, match="2 of 2 responses are missing") as raised:
            generation.generate(batch, greedy=True)
        assert f"{vllm_server.address} is healthy and has 2 unanswered requests" in str(
            raised.value
        )
    finally:
        post(vllm_server, "/resume")
    output = back_end(vllm_server.address).generate(batch, greedy=True)
    assert output["generation_lengths"].tolist() == [24, 24, 0]


def test_requests_aborted_by_the_server_are_retried(vllm_server: VllmServer) -> None:
    prompts = random_prompts(LENGTHS, seed=6)
    expected = completions(vllm_server.address, prompts, max_tokens=24, temperature=0)
    load = stable_load(vllm_server.address)
    generation = back_end(vllm_server.address)
    post(vllm_server, "/pause?mode=keep")
    with ThreadPoolExecutor(1) as thread:
        try:
            answer = thread.submit(generation.generate, batch_of(prompts), greedy=True)
            await_load(vllm_server.address, load + len(prompts))
            post(vllm_server, "/abort_requests", request_ids=[])
        finally:
            post(vllm_server, "/resume")
        assert responses_of(answer.result(120)) == expected
    assert generation.get_logger_metrics()["retries"] == len(prompts)


def test_concurrent_requests_are_bounded(vllm_server: VllmServer) -> None:
    generation = back_end(vllm_server.address, max_requests_per_server=3)
    load = stable_load(vllm_server.address)
    post(vllm_server, "/pause?mode=keep")
    with ThreadPoolExecutor(1) as thread:
        try:
            answer = thread.submit(generation.generate, batch_of([[1]] * 30), greedy=False)
            await_load(vllm_server.address, load + 3)
            assert stable_load(vllm_server.address) == load + 3  # the other 27 are not sent yet
        finally:
            post(vllm_server, "/resume")
        assert len(responses_of(answer.result(120))) == 30


def test_response_of_two_weight_versions_reports_both(vllm_server: VllmServer) -> None:
    generation = back_end(vllm_server.address, max_new_tokens=400)
    deadline, number, mixed = time.monotonic() + 120, 0, []
    with ThreadPoolExecutor(1) as thread:
        while not mixed:  # until the version changes during a response
            assert time.monotonic() < deadline
            batch = batch_of(random_prompts((5,) * 8, seed=number))
            answer = thread.submit(generation.generate, batch, greedy=False)
            while not answer.done():
                number += 1
                post(vllm_server, "/pause?mode=keep")
                post(vllm_server, "/update_weight_version", new_version=f"step {number}")
                post(vllm_server, "/resume")
            output = answer.result()
            for spans, length in zip(
                output["weight_versions"], output["generation_lengths"].tolist(), strict=True
            ):
                borders = [0, *(span["end"] for span in spans)]
                assert [span["start"] for span in spans] == borders[:-1]
                assert borders[-1] == length
                steps = [int(span["version"].removeprefix("step ")) for span in spans[1:]]
                assert steps == sorted(set(steps))
                mixed += [spans] * (len(spans) > 1)


class TwoTurns:
    """An environment that answers once and then ends the row."""

    step: Any

    def __init__(self) -> None:
        self.step = self

    def remote(self, logs: list[Any], extra_env_info: list[Any]) -> EnvironmentReturn:
        ends = [sum(turn["role"] == "assistant" for turn in log) == 2 for log in logs]
        observations = [{"role": "environment", "content": "next"} for _ in logs]
        return EnvironmentReturn(
            observations, None, None, torch.ones(len(logs)), torch.tensor(ends)
        )


@pytest.mark.parametrize("play", [run_multi_turn_rollout, run_async_multi_turn_rollout])
def test_rollout_reports_the_versions_of_each_row(vllm_server: VllmServer, play: Any) -> None:
    post(vllm_server, "/update_weight_version", new_version="step 3")
    prompts = random_prompts((6, 6, 9, 9))
    batch, metrics = play(
        back_end(vllm_server.address),
        {
            "message_log": [
                [{"role": "user", "content": "", "token_ids": torch.tensor(prompt)}]
                for prompt in prompts
            ],
            "task_name": ["two turns"] * len(prompts),
            "extra_env_info": [None] * len(prompts),
        },
        build_tokenizer(),
        {"two turns": TwoTurns()},
        max_seq_len=MAX_MODEL_LEN,
        max_rollout_turns=2,
        max_new_tokens=24,
    )
    for log, spans in zip(batch["message_log"], batch["weight_versions"], strict=True):
        borders = torch.tensor([0] + [len(turn["token_ids"]) for turn in log]).cumsum(0).tolist()
        assert [turn["role"] for turn in log] == ["user", *["assistant", "environment"] * 2]
        assert spans == [
            {"version": "step 3", "start": borders[turn], "end": borders[turn + 1]}
            for turn in (1, 3)
        ]
    assert metrics["mixed_weight_version_rate"] == 0


def test_server_spans_join_the_callers_trace(
    vllm_server: VllmServer, vllm_spans: SpanCollector
) -> None:
    tracer = TracerProvider().get_tracer("test")
    with tracer.start_as_current_span("step") as step:
        back_end(vllm_server.address).generate(batch_of(random_prompts((4, 5))), greedy=True)
    own = step.get_span_context()
    spans = vllm_spans.wait_for(own.trace_id, 2)
    assert {span.name for span in spans} == {"llm_request"}
    assert {span.parent_span_id for span in spans} == {own.span_id.to_bytes(8, "big")}


def test_raw_logprobs_of_another_temperature_are_refused(vllm_server: VllmServer) -> None:
    for sampling in ({"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 20}):
        with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
            back_end(vllm_server.address, **sampling).generate(
                batch_of(random_prompts((4,))), greedy=False
            )


def test_model_with_a_smaller_length_limit_is_refused(vllm_server: VllmServer) -> None:
    with pytest.raises(ConfigError, match=f"--max-model-len {MAX_MODEL_LEN + 1}"):
        back_end(vllm_server.address, max_total_sequence_length=MAX_MODEL_LEN + 1).generate(
            batch_of(random_prompts((4,))), greedy=True
        )


def test_refused_request_names_server_and_reason(vllm_server: VllmServer) -> None:
    with pytest.raises(InvalidRequestError, match="Token id 9999 is out of vocabulary"):
        back_end(vllm_server.address).generate(batch_of([[1], [9999]]), greedy=True)
    with pytest.raises(UnsupportedError, match="'pixel_values'"):
        back_end(vllm_server.address).generate(
            BatchedDataDict({**batch_of([[1]]), "pixel_values": [torch.ones(2)]}), greedy=True
        )
