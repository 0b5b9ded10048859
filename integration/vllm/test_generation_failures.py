"""Two real vLLM servers behind one `VllmGeneration`; one of them fails.

The order of the tests matters: the last ones kill the second server.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from integration.vllm.prompts import (
    await_load,
    back_end,
    batch_of,
    counter_of,
    random_prompts,
    responses_of,
    stable_load,
)
from integration.vllm.server import VllmServer, running_server
from transformers import AutoModelForCausalLM

from dataplane_core import DeadlineExceededError, UnavailableError

ROWS = 8
LONG = 200
PROMPTS = random_prompts((4,) * ROWS)


@pytest.fixture(scope="module")
def second_server(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    """Start a server for this module that reports the log-probabilities it sampled from."""
    with running_server(
        tiny_model, tmp_path_factory.mktemp("vllm"), "--logprobs-mode", "processed_logprobs"
    ) as server:
        yield server


@contextmanager
def paused(server: VllmServer) -> Iterator[None]:
    """Pause a server during the block, so that no request finishes."""
    httpx.post(f"{server.address}/pause?mode=keep", timeout=60).raise_for_status()
    try:
        yield
    finally:
        httpx.post(f"{server.address}/resume", timeout=60).raise_for_status()


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """Suspend a process during the block."""
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def answered(server: VllmServer) -> int:
    """Return the number of requests that the server's engine has completed."""
    return counter_of(server.address, "request_success_total")


@pytest.fixture
def expected(vllm_server: VllmServer) -> list[tuple[list[int], list[float]]]:
    """Return the responses of a healthy server; with equal seeds, all servers draw the same."""
    output = back_end(vllm_server.address, max_new_tokens=LONG).generate(
        batch_of(PROMPTS), greedy=False
    )
    return responses_of(output)


def tokens(responses: list[tuple[list[int], list[float]]]) -> list[list[int]]:
    return [token_ids for token_ids, _ in responses]


def test_rows_are_balanced_between_servers(
    vllm_server: VllmServer,
    second_server: VllmServer,
    expected: list[tuple[list[int], list[float]]],
) -> None:
    before = [answered(vllm_server), answered(second_server)]
    generation = back_end(vllm_server.address, second_server.address, max_new_tokens=LONG)
    output = generation.generate(batch_of(PROMPTS), greedy=False)
    assert tokens(responses_of(output)) == tokens(expected)
    after = [answered(vllm_server), answered(second_server)]
    assert [end - start for start, end in zip(before, after, strict=True)] == [4, 4]


def test_processed_logprobs_follow_the_temperature(
    second_server: VllmServer, tiny_model: Path
) -> None:
    output = back_end(second_server.address, temperature=0.5).generate(
        batch_of(PROMPTS), greedy=False
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for prompt, (token_ids, logprobs) in zip(PROMPTS, responses_of(output), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
        drawn = (logits / 0.5).log_softmax(-1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), drawn, atol=1e-4, rtol=0)


def test_rows_of_a_silent_server_move(
    vllm_server: VllmServer,
    second_server: VllmServer,
    expected: list[tuple[list[int], list[float]]],
) -> None:
    generation = back_end(
        vllm_server.address, second_server.address, max_new_tokens=LONG, server_timeout_s=10.0
    )
    with ThreadPoolExecutor(1) as thread, paused(second_server):
        load = stable_load(second_server.address)
        answer = thread.submit(generation.generate, batch_of(PROMPTS), greedy=False)
        await_load(second_server.address, load + ROWS // 2)
        with stopped(psutil.Process(second_server.process.pid)):
            assert tokens(responses_of(answer.result(120))) == tokens(expected)
            metrics = generation.get_logger_metrics()
            assert (metrics["retries"], metrics["lost_servers"]) == (ROWS // 2, 1)
            # The server stays lost for the rest of the rollout; the next one retries it.
            generation.generate(batch_of(PROMPTS[:1]), greedy=False)
            assert generation.get_logger_metrics()["lost_servers"] == 1
    before = answered(second_server)
    generation.clear_logger_metrics()
    generation.generate(batch_of(PROMPTS), greedy=False)
    generation.generate(batch_of(PROMPTS), greedy=False)
    assert answered(second_server) > before
    assert generation.get_logger_metrics()["lost_servers"] == 0


def test_stopped_engine_is_named_at_the_deadline(second_server: VllmServer) -> None:
    # /v1/models and /health answer without the engine.
    generation = back_end(second_server.address, timeout_s=10.0)
    engine = next(
        process for process in second_server.processes() if "EngineCore" in process.name()
    )
    with stopped(engine), pytest.raises(DeadlineExceededError) as raised:
        generation.generate(batch_of(PROMPTS), greedy=False)
    assert f"{second_server.address} is healthy and has {ROWS} unanswered requests" in str(
        raised.value
    )


def test_rows_of_a_killed_server_move(
    vllm_server: VllmServer,
    second_server: VllmServer,
    expected: list[tuple[list[int], list[float]]],
) -> None:
    generation = back_end(vllm_server.address, second_server.address, max_new_tokens=LONG)
    httpx.post(f"{second_server.address}/pause?mode=keep", timeout=60).raise_for_status()
    with ThreadPoolExecutor(1) as thread:
        load = stable_load(second_server.address)
        answer = thread.submit(generation.generate, batch_of(PROMPTS), greedy=False)
        await_load(second_server.address, load + ROWS // 2)
        for process in second_server.processes():
            process.send_signal(signal.SIGKILL)
        assert tokens(responses_of(answer.result(120))) == tokens(expected)
    metrics = generation.get_logger_metrics()
    assert (metrics["retries"], metrics["lost_servers"]) == (ROWS // 2, 1)


def test_error_names_every_lost_server(vllm_server: VllmServer, second_server: VllmServer) -> None:
    generation = back_end(vllm_server.address, second_server.address, server_timeout_s=10.0)
    with (
        stopped(psutil.Process(vllm_server.process.pid)),
        pytest.raises(UnavailableError, match="every server is lost") as raised,
    ):
        generation.generate(batch_of(PROMPTS), greedy=False)
    assert f"{vllm_server.address} is lost: /v1/models did not answer within 10 s" in str(
        raised.value
    )
    assert f"{second_server.address} is lost: /v1/models: ConnectError" in str(raised.value)
    # The next call retries all servers.
    assert len(responses_of(generation.generate(batch_of(PROMPTS), greedy=False))) == ROWS
