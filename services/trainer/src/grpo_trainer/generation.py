"""The generation worker: a Ray actor with a model of its own.

Weights reach it through `WeightSync`. Randomness follows from the run's seed, the name of the
stream that the driver began, and the number of the call in it: a resumed run draws the same tokens,
whether or not a validation pass came in between.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Any  # Any: batches, and transformers' models

import torch

from grpo_trainer.model import load_model
from grpo_trainer.node_address import keep_to_own_interface, node_address
from grpo_trainer.refit_target import RefitTarget, start_target
from grpo_trainer.reporting import Reporting, ReportingActor
from grpo_trainer.sampling import sample_responses
from grpo_trainer.tokenizer import load_tokenizer
from observability import emit, traced
from refit_mx import RefitConfigError


def call_seed(seed: int, stream: str, call: int) -> int:
    """The seed of one generate call; equal arguments give equal seeds on every machine."""
    digest = hashlib.blake2b(f"{seed}:{stream}:{call}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class GenerationWorker(ReportingActor):
    """A Ray actor's class.

    Args:
        model: folder or hub name of the model and tokenizer.
        max_new_tokens: tokens of one response at most.
        max_total_sequence_length: tokens of a conversation at most.
        temperature: divides the logits.
        seed: the run's.
        num_threads: CPU threads of torch.
        device: "cpu" or "cuda".
        reporting: how to report, None not to.
    """

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
        reporting: Reporting | None = None,
    ) -> None:
        self._report(reporting, "grpo.generation")
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
        """Returns once the model is loaded."""

    def begin(self, stream: str) -> None:
        """Start a stream of randomness; its name decides what the calls that follow draw."""
        self._stream = stream
        self._calls = 0

    @traced(bucket="productive")
    def generate(self, data: Mapping[str, Any], *, greedy: bool) -> dict[str, Any]:
        """One response per row; see `rollout_actor.GenerationInterface.generate`."""
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

    def node_address(self) -> str:
        """By which Ray knows this process's machine."""
        return node_address()

    def join_refit(self, settings: Mapping[str, Any]) -> None:
        """Get ready to receive weights.

        Args:
            settings: `RefitSettings` as a dict.
        """
        keep_to_own_interface()
        self._refit = start_target(settings, self._model.state_dict())

    @traced(bucket="overhead")
    def install_weights(self, version_id: str) -> dict[str, float]:
        """Replace the model's parameters and buffers by a published version; all or none.

        Returns:
            ``bytes`` moved, ``seconds`` of all of it, and ``transfer_s`` of the bytes alone.

        Raises:
            RefitError: the version cannot be had in time or does not fit; the model is as it was.
        """
        if self._refit is None:
            raise RefitConfigError("the generation worker has not joined a refit")
        done = self._refit.refit(version_id)
        emit("refit_installed", bytes=done.nbytes)
        return {
            "bytes": done.nbytes,
            "seconds": done.total_seconds,
            "transfer_s": done.seconds["fetch"],
        }

    def metrics(self) -> dict[str, Any]:
        """Tokens and seconds since `clear_metrics`."""
        rate = self._tokens / self._seconds if self._seconds else 0.0
        return {"tokens": self._tokens, "seconds": self._seconds, "tokens_per_s": rate}

    def clear_metrics(self) -> None:
        """Start counting anew."""
        self._tokens = 0
        self._seconds = 0.0

    def release_memory(self) -> None:
        """Give cached device memory back."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
