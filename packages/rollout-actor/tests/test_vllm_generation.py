"""The vLLM backend: arguments, and answers that a real vLLM cannot be made to give.

What vLLM can be made to do is tested on vLLM itself, in ``integration/vllm``.
"""

import asyncio
import json
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
import torch

from column_io import BatchedDataDict
from dataplane_core import (
    ClosedError,
    ConfigError,
    DeadlineExceededError,
    InvalidRequestError,
    UnavailableError,
)
from rollout_actor.vllm import VllmGeneration

LIMITS = {"pad_token_id": 0, "max_total_sequence_length": 16, "max_new_tokens": 4}
BATCH = BatchedDataDict(
    input_ids=torch.tensor([[1, 2, 3], [4, 5, 0]]), input_lengths=torch.tensor([3, 2])
)


def answer_of(*tokens, logprob=-0.5, **choice):
    """vLLM 0.32's answer."""
    content = [{"token_id": token, "logprob": logprob} for token in tokens]
    return 200, {
        "choices": [
            {
                "token_ids": list(tokens),
                "logprobs": {"content": content},
                "finish_reason": "stop",
                **choice,
            }
        ]
    }


def probe_answer(spread):
    """Return the answer to a request that checks the log-probabilities."""
    top = [{"logprob": -spread * place / 4} for place in range(5)]
    return 200, {"choices": [{"logprobs": {"content": [{"top_logprobs": top}]}}]}


HANGING = object()
NOT_GZIP = (200, b"not gzip", "content-encoding: gzip")


class Handler:
    """An HTTP server that answers generation with the next of ``answers``, then repeats the last.

    An answer of None closes the connection; after `HANGING` the client has to. Requests
    for health succeed while ``health`` is 200; those for the model get ``models``.
    """

    health = 200
    models = [{"max_model_len": 16}]  # noqa: RUF012  # not changed

    def __init__(self, answers):
        self.answers = list(answers)
        self.bodies = []

    async def __call__(self, reader, writer):
        while request := await reader.readline():
            length = 0
            while (header := await reader.readline()) != b"\r\n":
                if header.lower().startswith(b"content-length:"):
                    length = int(header.split(b":")[1])
            body = await reader.readexactly(length)
            status, answer, *headers = self.health, {"data": self.models}
            if b"generate" in request:
                self.bodies.append(json.loads(body))
                next_answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                if next_answer is None:
                    break
                if next_answer is HANGING:
                    await reader.read()
                    break
                status, answer, *headers = next_answer
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            lines = [f"HTTP/1.1 {status} -", f"content-length: {len(content)}", *headers]
            writer.write("\r\n".join([*lines, "\r\n"]).encode() + content)
            await writer.drain()
        writer.close()


@contextmanager
def serving(*answers, **changes):
    """Return a backend with one row at a time, and the requests that its server gets."""
    handler = answers[0] if isinstance(answers[0], Handler) else Handler(answers)
    ready, finished = threading.Event(), asyncio.Event()
    address = []

    async def serve():
        server = await asyncio.start_server(handler, "127.0.0.1", 0)
        address.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        loop.append(asyncio.get_running_loop())
        ready.set()
        await finished.wait()
        server.close()

    loop = []
    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    arguments = {**LIMITS, "timeout_s": 20, "max_requests_per_server": 1, **changes}
    generation = VllmGeneration(address, **arguments)
    try:
        yield generation, handler.bodies
    finally:
        generation.close()
        loop[0].call_soon_threadsafe(finished.set)
        thread.join(10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"addresses": []}, "expected a list of at least one"),
        ({"addresses": "http://localhost:1"}, "expected a list of at least one"),
        ({"addresses": ["http://a:1", "http://a:1"]}, "expected each once"),
        ({"addresses": ["http://a:1", "HTTP://A:1/"]}, "expected each once"),
        ({"addresses": ["http://[::1"]}, "expected http"),
        ({"addresses": ["localhost:8000"]}, "expected http"),
        ({"addresses": ["http://localhost:8000/v1"]}, "expected http"),
        ({"max_new_tokens": 0}, "max_new_tokens 0; expected a number above 0"),
        ({"temperature": 0.0}, "temperature 0.0; expected a number above 0"),
        ({"timeout_s": float("inf")}, "timeout_s inf; expected a number above 0"),
        ({"top_p": 1.5}, "top_p 1.5"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(ConfigError, match=message):
        VllmGeneration(**{"addresses": ["http://localhost:8000"], **LIMITS, **arguments})


def test_unused_backend_starts_no_thread():
    before = threading.active_count()
    pickle.loads(pickle.dumps(VllmGeneration(["http://localhost:8000"], **LIMITS)))
    assert threading.active_count() == before


@pytest.mark.parametrize("failure", [None, (429, {}), (500, {}), (503, {}), (200, None), NOT_GZIP])
def test_unanswered_requests_are_sent_again(failure):
    aborted = answer_of(finish_reason="abort")
    with serving(aborted if failure == (200, None) else failure, answer_of(7)) as (backend, sent):
        output = backend.generate(BATCH, greedy=True)
        assert backend.get_logger_metrics()["retries"] == 1
    assert output["output_ids"].tolist() == [[1, 2, 3, 7], [4, 5, 7, 0]]
    assert len(sent) == 3
    assert sent[0] in sent[1:]


def test_server_that_keeps_failing_is_named_with_its_message():
    with serving((500, {"error": {"message": "out of blocks"}})) as (backend, sent):
        with pytest.raises(UnavailableError, match=r"failed row . 4 times.*500 out of blocks"):
            backend.generate(BATCH, greedy=True)
        assert len(sent) <= 8


def test_missing_route_names_the_server_option():
    with (
        serving((404, {"detail": "Not Found"})) as (backend, _),
        pytest.raises(ConfigError, match="--enable-scale-out"),
    ):
        backend.generate(BATCH, greedy=True)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (answer_of(7, logprob=-9999.0), "log-probability of token 0 of the response is -9999.0"),
        (answer_of(7, logprob=None), "log-probability of token 0 of the response is None"),
        (answer_of(7, logprobs=None), "no log-probabilities for 1 tokens"),
        (answer_of(7, token_ids=["7"]), "token_ids is"),
        (answer_of(7, weight_versions=[{"start": 0}]), "expected version, start and end"),
        ((200, {"choices": []}), "expected one choice"),
        ((200, b"<html>"), "the answer is not JSON"),
    ],
)
def test_answers_that_training_cannot_use_are_refused(answer, message):
    with serving(answer) as (backend, _), pytest.raises(InvalidRequestError, match=message):
        backend.generate(BATCH, greedy=True)


def test_server_that_reports_no_weight_versions_gives_no_column():
    spans = [{"version": "a", "start": 0, "end": 1}]
    with serving(answer_of(7, weight_versions=spans), answer_of(8)) as (backend, _):
        assert "weight_versions" not in backend.generate(BATCH, greedy=True)
    with serving(answer_of(7, weight_versions=spans)) as (backend, _):
        assert backend.generate(BATCH, greedy=True)["weight_versions"] == [spans, spans]


def test_server_that_hung_at_its_first_check_is_checked_again():
    probes = probe_answer(1.0), probe_answer(10.0)
    with serving(HANGING, *probes, answer_of(7), temperature=0.5, timeout_s=2.0) as (backend, _):
        with pytest.raises((DeadlineExceededError, UnavailableError)):
            backend.generate(BATCH, greedy=True)
        with suppress(DeadlineExceededError, UnavailableError):  # the check may still be running
            backend.generate(BATCH, greedy=True)
        output = backend.generate(BATCH, greedy=True)
    assert output["output_ids"].tolist() == [[1, 2, 3, 7], [4, 5, 7, 0]]


def test_server_whose_first_check_fails_unexpectedly_is_refused():
    handler = Handler([answer_of(7)])
    handler.models = ["a name"]
    with (
        serving(handler) as (backend, _),
        pytest.raises(ConfigError, match="unexpected answer"),
    ):
        backend.generate(BATCH, greedy=True)


def test_server_that_cannot_be_used_is_named_although_others_have_capacity():
    small = Handler([answer_of(7)])
    small.models = [{"max_model_len": 8}]
    limits = {"max_requests_per_server": 2}
    with serving(answer_of(7), **limits) as (first, _), serving(small, **limits) as (second, _):
        addresses = [*first.__reduce__()[1][0], *second.__reduce__()[1][0]]
        backend = VllmGeneration(addresses, **LIMITS, **limits, timeout_s=20)
        with pytest.raises(ConfigError, match="supports sequences of 8 tokens"):
            backend.generate(BATCH, greedy=True)
        backend.close()


def wait_for_request(sent):
    deadline = time.monotonic() + 20
    while not sent:
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def collect(backend):
    return [output async for output in backend.generate_async(BATCH, greedy=True)]


@pytest.mark.parametrize(
    "call",
    [
        lambda backend: backend.generate(BATCH, greedy=True),
        lambda backend: asyncio.run(collect(backend)),
    ],
    ids=["sync", "async"],
)
def test_closing_ends_a_running_call_with_a_typed_error(call):
    with serving(HANGING) as (backend, sent), ThreadPoolExecutor(1) as threads:
        running = threads.submit(call, backend)
        wait_for_request(sent)
        backend.close()
        with pytest.raises(ClosedError, match="closed while a call was running"):
            running.result(20)


def test_a_backend_that_is_used_after_close_notices_a_lost_server():
    handler = Handler([answer_of(7), answer_of(7), HANGING])
    with serving(handler, max_requests_per_server=2) as (backend, sent):
        backend.generate(BATCH, greedy=True)
        backend.close()
        sent.clear()
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(backend.generate, BATCH, greedy=True)
            wait_for_request(sent)
            handler.health = 503
            with pytest.raises(UnavailableError, match="/health answered 503"):
                running.result(20)


def test_server_with_an_unreadable_first_check_is_lost():
    with (
        serving(NOT_GZIP, temperature=0.5) as (backend, _),
        pytest.raises(UnavailableError, match=r"is lost: DecodingError"),
    ):
        backend.generate(BATCH, greedy=True)
