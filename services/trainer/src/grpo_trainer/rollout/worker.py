"""Generation worker: a Ray actor that holds a model.

A refit replaces the model's weights, even while responses are generated: see `WeightGate`. In a
synchronous step, random numbers depend only on the run's seed, the name of the driver's current
stream, and the number of the call in that stream. So a resumed run draws the same tokens, with or
without a validation in between.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any  # Any: batches, and transformers' models

import torch
from torch.nn.utils.rnn import pad_sequence

from grpo_trainer.actors.address import bind_to_node_interface
from grpo_trainer.actors.telemetry import RunActor, TelemetrySettings
from grpo_trainer.model.load import load_model
from grpo_trainer.model.tokenizer import load_tokenizer
from grpo_trainer.refit.settings import RefitSettings
from grpo_trainer.refit.target import RefitTarget
from grpo_trainer.rollout.latency import Pace, SimulatedLatency
from grpo_trainer.rollout.remote_generation import JOURNAL, POSITIONS
from grpo_trainer.rollout.response_journal import CallRecorder, ResponseJournal, response_keys
from grpo_trainer.rollout.sampling import SoFar, sample_responses
from grpo_trainer.rollout.weight_gate import WeightGate
from observability import emit, traced
from refit_mx import RefitConfigError

if TYPE_CHECKING:
    from rollout_actor import WeightVersionSpan


def call_seed(seed: int, stream: str, call: int) -> int:
    """Return the seed of one generate call; equal arguments give equal seeds on every machine."""
    digest = hashlib.blake2b(f"{seed}:{stream}:{call}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def version_spans(versions: Sequence[str]) -> list[WeightVersionSpan]:
    """Return the spans of equal versions; ``versions`` has the version of each token."""
    spans: list[WeightVersionSpan] = []
    for index, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = index + 1
        else:
            spans.append({"version": version, "start": index, "end": index + 1})
    return spans


def _await(pace: Pace | None) -> None:
    """Wait until a finished response is no longer early."""
    if pace is not None:
        time.sleep(pace.ahead_s())


class GenerationWorker(RunActor):
    """Class of a Ray actor, whose calls may overlap.

    Args:
        model: folder or hub name of a model and its tokenizer.
        max_new_tokens, temperature, num_threads: as in the configuration.
        max_total_sequence_length: maximum tokens of a prompt with its response.
        seed: the run's seed.
        device: device of the model.
        asynchronous: report which version of the weights generated which tokens.
        partial_rollouts: install new weights between two tokens of a response; else between
            responses.
        latency: minimum duration of a response, for benchmarks; None for no minimum.
        telemetry: the run's telemetry.
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
        asynchronous: bool = False,
        partial_rollouts: bool = False,
        latency: SimulatedLatency | None = None,
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
        self._gate = WeightGate()
        self._asynchronous = asynchronous
        self._partial_rollouts = partial_rollouts
        self._latency = latency
        self._journal: ResponseJournal | None = None
        self._version = ""
        self._install_s = 0.0
        self._counters = threading.Lock()
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
        with self._counters:
            call, self._calls = self._calls, self._calls + 1
        input_ids, lengths = data["input_ids"], data["input_lengths"].tolist()
        rows = [ids[:length] for ids, length in zip(input_ids, lengths, strict=True)]
        budgets = [
            max(0, min(self._max_new_tokens, self._max_length - length)) for length in lengths
        ]
        versions: list[str] = []
        is_recorded = POSITIONS in data and not greedy
        recorder = CallRecorder(
            self._journal if is_recorded else None,
            response_keys(data, rows) if is_recorded else [None] * len(rows),
            installed=self._version,
        )
        prefixes = recorder.partial
        seed = call_seed(self._seed, self._stream + recorder.stream, call)
        pace: Pace | None = None
        if self._latency is not None:
            prefix_lengths = [0 if each is None else len(each.token_ids) for each in prefixes]
            pace = self._latency.pace(seed, budgets, prefix_lengths)

        def before_token(so_far: SoFar) -> bool:
            ahead_s = pace.ahead_s(len(versions)) if pace is not None else 0.0
            changed = False
            if self._partial_rollouts:
                changed = self._gate.pause(ahead_s)
            else:
                time.sleep(ahead_s)
            recorder.record_if_due(so_far, versions)
            versions.append(self._version)
            return changed

        with self._gate.using():
            responses = sample_responses(
                self._model,
                self._tokenizer,
                rows,
                max_new_tokens=budgets,
                temperature=self._temperature,
                greedy=greedy,
                stop_strings=data.get("stop_strings"),
                prefixes=prefixes,
                generator=torch.Generator(self._device).manual_seed(seed),
                before_token=before_token,
            )
            if not self._partial_rollouts:  # the weights stay until the response is finished
                _await(pace)
        recorder.record(responses, versions)
        if versions or not any(prefixes):  # not if all responses were finished before the call
            _await(pace)
        pairs = list(zip(rows, responses, strict=True))
        output_ids = [torch.cat([row, response.token_ids]) for row, response in pairs]
        logprobs = [torch.cat([torch.zeros(len(row)), each.logprobs]) for row, each in pairs]
        generated = [len(response.token_ids) for response in responses]
        continued = recorder.continued_tokens(responses)
        with self._counters:
            self._tokens += sum(generated) - continued
            self._seconds += time.perf_counter() - started
        output: dict[str, Any] = {
            "output_ids": pad_sequence(
                output_ids, batch_first=True, padding_value=self._tokenizer.pad_token_id
            ),
            "generation_lengths": torch.tensor(generated),
            "unpadded_sequence_lengths": torch.tensor([len(row) for row in output_ids]),
            "logprobs": pad_sequence(logprobs, batch_first=True),
            "truncated": torch.tensor([response.truncated for response in responses]),
        }
        if self._asynchronous:
            output["weight_versions"] = [
                version_spans([*([] if each is None else each.versions), *versions][:length])
                for each, length in zip(prefixes, generated, strict=True)
            ]
        if POSITIONS in data:
            output[JOURNAL] = {"continued_tokens": continued, "seconds": recorder.seconds}
        return output

    def open_journal(self, folder: str) -> None:
        """Record the responses of calls with `POSITIONS`; continue responses of a crashed run.

        Only for an asynchronous run with partial rollouts: a continued response has tokens of
        several versions of the weights.
        """
        self._journal = ResponseJournal(Path(folder))

    def rotate_journal(self) -> str:
        """Append to a new file of the journal from now on; return its name."""
        if self._journal is None:
            raise AssertionError("the generation worker keeps no journal")
        return self._journal.rotate()

    def join_refit(self, settings: RefitSettings) -> None:
        """Prepare to receive weights."""
        bind_to_node_interface()
        self._refit = RefitTarget(settings, self._model.state_dict())
        self._install_s = settings.timeout_s

    @traced(bucket="overhead")
    def install_weights(self, version_id: str) -> None:
        """Replace all of the model's parameters and buffers by a published version.

        Raises:
            RefitError: the version is not available in time or does not fit; the model is
                unchanged.
        """
        if self._refit is None:
            raise RefitConfigError("the generation worker has not joined a refit")
        with self._gate.replacing(self._install_s):
            installed = self._refit.refit(version_id)
            self._version = version_id
        emit("refit_installed", bytes=installed.nbytes)

    def weight_version(self) -> str:
        """Return the version id of the installed weights; empty before the first refit."""
        return self._version

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
