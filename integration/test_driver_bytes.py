"""The driver moves metas and a few numbers per sample; it never holds a bulk tensor.

The test constructs the step with a data-plane client that records the driver's transfers. Imports
internals: a run creates its client itself, so the step is made from its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray.cloudpickle
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dataplane_core import DataPlaneClient
from grpo_trainer import TrainerConfig
from grpo_trainer.model.tokenizer import build_character_tokenizer, load_tokenizer, prompt_encoder
from grpo_trainer.policy.driver import Policy
from grpo_trainer.policy.logprob_gap import BINS
from grpo_trainer.rollout.prompts import SHIPPED, PromptStream, load_prompts
from grpo_trainer.run.processes import RunActors
from grpo_trainer.run.step import GRPOStep, StepReport
from observability import MetricsDataPlaneClient

PROMPTS, GROUP, LENGTH = 4, 8, 768


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor inside ``value``, at any depth."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif hasattr(value, "items"):
        for item in dict(value).values():
            yield from tensors(item)
    elif hasattr(value, "__dict__"):
        yield from tensors(vars(value))


def save_talkative_model(folder: Path, characters: str) -> None:
    """Save a model that rarely ends a response: one in four thousand tokens is its end."""
    tokenizer = build_character_tokenizer(characters)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=LENGTH,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_driver_moves_a_small_fraction_of_the_bulk_bytes(
    cluster: None,
    make_config: Callable[..., TrainerConfig],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    folder = tmp_path / "model"
    save_talkative_model(folder, "0123456789+=,()?; maxinodykt")
    config = make_config(
        policy__model={"kind": "pretrained", "name": str(folder), "use_chat_template": False},
        policy__max_total_sequence_length=LENGTH,
        policy__generation__max_new_tokens=LENGTH // 2,
        policy__global_batch_size=16,
        policy__micro_batch_size=4,
        grpo__num_prompts_per_step=PROMPTS,
        grpo__num_generations_per_prompt=GROUP,
    )
    tokenizer = load_tokenizer(str(folder))
    prompts = load_prompts(
        SHIPPED / "train.jsonl",
        prompt_encoder(tokenizer, config.policy.model),
        max_length=LENGTH,
    )
    passed = 0
    largest = 0

    def observe(name: str, direction: str, message: Any) -> None:
        nonlocal passed, largest
        passed += len(ray.cloudpickle.dumps(message))
        largest = max([largest, *(tensor.numel() for tensor in tensors(message))])

    own_events: list[dict[str, Any]] = []
    bulk_bytes = 0

    class BulkCountingClient(MetricsDataPlaneClient):
        """A client that counts the bytes of the step's samples before it clears them."""

        def clear_samples(
            self, sample_ids: list[str] | None, partition_id: str, *, force: bool = False
        ) -> None:
            nonlocal bulk_bytes
            for name in config_fields:
                held = inner.get_samples(list(sample_ids or []), partition_id, [name])[name]
                values = held.values() if held.is_nested else held
                bulk_bytes += values.numel() * values.element_size()
            super().clear_samples(sample_ids, partition_id, force=force)

    config_fields = [
        "input_ids",
        "token_mask",
        "generation_logprobs",
        "prev_logprobs",
        "reference_policy_logprobs",
    ]
    actors = RunActors(config, model=str(folder), tokenizer=tokenizer, observer=observe)
    inner: DataPlaneClient = actors.data_plane
    try:
        step = GRPOStep(
            config,
            calls=actors.calls,
            data_plane=BulkCountingClient(inner, own_events.append),
            policy=Policy(actors.calls, actors.policy_ranks, config.policy),
            weight_sync=actors.weight_sync,
            prompts=PromptStream(prompts, seed=1, shuffle=True),
            run_id="test",
            tokenizer=tokenizer,
        )
        step.run(0, StepReport())
    finally:
        actors.close()

    samples = PROMPTS * GROUP
    driver_bytes = passed + sum(event["n_bytes"] for event in own_events if event["op"] != "clear")
    record_property("driver_bytes", driver_bytes)
    record_property("bulk_bytes", bulk_bytes)
    assert bulk_bytes > samples * LENGTH // 4 * 20, "the rollouts are too short for this test"
    # The size of a worker's histogram does not depend on the number of tokens.
    assert largest <= max(samples, BINS, *(len(prompt.token_ids) for prompt in prompts))
    assert {event["op"] for event in own_events if event["n_bytes"]} <= {"put", "clear"}
    assert driver_bytes < 0.1 * bulk_bytes
