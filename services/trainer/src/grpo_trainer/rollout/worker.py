"""Generation worker: a Ray actor that holds a model.

A refit installs its weights. Randomness follows from the run's seed, the name of the driver's
current stream, and the number of the call in that stream. So a resumed run draws the same tokens,
with or without a validation in between.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Any  # Any: batches, and transformers' models

import torch

from grpo_trainer.actors.address import bind_to_node_interface
from grpo_trainer.actors.telemetry import RunActor, TelemetrySettings
from grpo_trainer.model.load import load_model
from grpo_trainer.model.tokenizer import load_tokenizer
from grpo_trainer.refit.settings import RefitSettings
from grpo_trainer.refit.target import RefitTarget
from grpo_trainer.rollout.sampling import sample_responses
from observability import emit, traced
from refit_mx import RefitConfigError


def call_seed(seed: int, stream: str, call: int) -> int:
    """Return the seed of one generate call; equal arguments give equal seeds on every machine."""
    digest = hashlib.blake2b(f"{seed}:{stream}:{call}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class GenerationWorker(RunActor):
    """Class of a Ray actor; ``model`` is the folder or hub name of a model and its tokenizer."""

    def __init__(
        self,
        model: str,
        *,
        max_new_tokens: int,
        max_total_sequence_length: int,
        temperature: float,
        seed: int,
        num_threads: int,
        device: str,
        telemetry: TelemetrySettings | None = None,
    ) -> None:
        self._start_telemetry(telemetry, "grpo.generation")
        torch.set_num_threads(num_threads)
        self._device = torch.device(device)
        self._model = load_model(model, self._device).eval()
        self._tokenizer = load_tokenizer(model)
        self._max_new_tokens = max_new_tokens
        self._max_length = max_total_sequence_length
        self._temperature = temperature
        self._seed = seed
        self._refit: RefitTarget | None = None
        self.begin("")
        self.clear_metrics()

    def ready(self) -> None:
        """Return once the model is loaded."""

    def begin(self, stream: str) -> None:
        """Start a random stream; its name determines what the following calls draw."""
        self._stream = stream
        self._calls = 0

    @traced(bucket="productive")
    def generate(self, data: Mapping[str, Any], *, greedy: bool) -> dict[str, Any]:
        """Generate one response per row; see `rollout_actor.GenerationInterface.generate`."""
        started = time.perf_counter()
        input_ids, lengths = data["input_ids"], data["input_lengths"].tolist()
        rows = [ids[:length] for ids, length in zip(input_ids, lengths, strict=True)]
        generator = torch.Generator(self._device).manual_seed(
            call_seed(self._seed, self._stream, self._calls)
        )
        self._calls += 1
        responses = sample_responses(
            self._model,
            self._tokenizer,
            rows,
            max_new_tokens=[
                max(0, min(self._max_new_tokens, self._max_length - length)) for length in lengths
            ],
            temperature=self._temperature,
            greedy=greedy,
            stop_strings=data.get("stop_strings"),
            generator=generator,
        )
        totals = [
            length + len(response.token_ids)
            for length, response in zip(lengths, responses, strict=True)
        ]
        output_ids = torch.full((len(rows), max(totals)), self._tokenizer.pad_token_id)
        logprobs = torch.zeros((len(rows), max(totals)))
        for i, (row, response) in enumerate(zip(rows, responses, strict=True)):
            output_ids[i, : len(row)] = row
            output_ids[i, len(row) : totals[i]] = response.token_ids
            logprobs[i, len(row) : totals[i]] = response.logprobs
        generated = [len(response.token_ids) for response in responses]
        self._tokens += sum(generated)
        self._seconds += time.perf_counter() - started
        return {
            "output_ids": output_ids,
            "generation_lengths": torch.tensor(generated),
            "unpadded_sequence_lengths": torch.tensor(totals),
            "logprobs": logprobs,
            "truncated": torch.tensor([response.truncated for response in responses]),
        }

    def join_refit(self, settings: RefitSettings) -> None:
        """Prepare to receive weights."""
        bind_to_node_interface()
        self._refit = RefitTarget(settings, self._model.state_dict())

    @traced(bucket="overhead")
    def install_weights(self, version_id: str) -> None:
        """Replace all of the model's parameters and buffers by a published version.

        Raises:
            RefitError: the version is not available in time or does not fit; the model is
                unchanged.
        """
        if self._refit is None:
            raise RefitConfigError("the generation worker has not joined a refit")
        emit("refit_installed", bytes=self._refit.refit(version_id).nbytes)

    def metrics(self) -> dict[str, Any]:
        """Return tokens and seconds since `clear_metrics`."""
        return {"tokens": self._tokens, "seconds": self._seconds}

    def clear_metrics(self) -> None:
        """Reset the metrics."""
        self._tokens = 0
        self._seconds = 0.0

    def release_memory(self) -> None:
        """Release cached device memory."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
