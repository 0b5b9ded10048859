"""A step through the data plane equals a step in plain PyTorch.

The plain step uses neither Ray nor a data plane nor the rollout actor: one process, lists of token
ids, one padded batch. It shares with the trainer the model, the tokenizer, the prompts, the scoring
of an answer, the loss's token log-probabilities, and the sampling with its seeds, so that both draw
the same random numbers. Everything else is written out here. Imports internals: a run shows neither
gradients nor log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import ray
import torch

from column_io import read_columns
from dataplane_core import DataPlaneClient
from grpo_trainer import TrainerConfig
from grpo_trainer.model.load import load_model, save_random_model
from grpo_trainer.model.tokenizer import load_tokenizer, prompt_encoder
from grpo_trainer.policy.driver import Policy
from grpo_trainer.policy.loss import token_logprobs
from grpo_trainer.rollout.environment import score
from grpo_trainer.rollout.prompts import SHIPPED, Prompt, PromptStream, load_prompts
from grpo_trainer.rollout.remote_generation import GENERATION
from grpo_trainer.rollout.sampling import sample_responses
from grpo_trainer.rollout.worker import call_seed
from grpo_trainer.run.processes import RunActors
from grpo_trainer.run.step import GRPOStep, StepReport

COLUMNS = [
    "input_ids",
    "input_lengths",
    "token_mask",
    "generation_logprobs",
    "prev_logprobs",
    "reference_policy_logprobs",
    "advantages",
    "sample_mask",
]


@dataclass
class Outcome:
    columns: dict[str, torch.Tensor]
    loss: float
    kl: float
    grad_norm: float
    weights: dict[str, torch.Tensor]


class ReadingClient:
    """A client that reads a step's columns just before the step clears them."""

    def __init__(self, inner: DataPlaneClient) -> None:
        self._inner = inner
        self.columns: dict[str, torch.Tensor] = {}
        self.meta: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def clear_samples(self, sample_ids: list[str], partition_id: str) -> None:
        self.meta.sample_ids = list(sample_ids)
        self.columns = dict(read_columns(self._inner, self.meta, COLUMNS))
        self._inner.clear_samples(sample_ids, partition_id)


def through_the_data_plane(
    config: TrainerConfig, model: str, tokenizer: Any, prompts: list[Prompt]
) -> Outcome:
    actors = RunActors(config, model=model, tokenizer=tokenizer)
    try:
        policy = Policy(actors.calls, actors.policy_ranks, config.policy)
        client = ReadingClient(actors.data_plane)
        train = policy.train

        def remember(meta: Any, **kwargs: Any) -> dict[str, float]:
            client.meta = meta
            return train(meta, **kwargs)

        policy.train = remember  # type: ignore[method-assign]
        step = GRPOStep(
            config,
            calls=actors.calls,
            data_plane=client,  # type: ignore[arg-type]
            policy=policy,
            weight_sync=actors.weight_sync,
            prompts=PromptStream(prompts, seed=config.run.seed, shuffle=True),
            run_id="test",
            tokenizer=tokenizer,
        )
        report = StepReport()
        step.run(0, report)
        actors.weight_sync.sync(1)
        weights, served = ray.get(
            [
                actors.calls.actors[name].__ray_call__.remote(weights_of)
                for name in (actors.policy_workers[0], GENERATION)
            ]
        )
        assert {name: tensor.numpy().tobytes() for name, tensor in served.items()} == {
            name: tensor.numpy().tobytes() for name, tensor in weights.items()
        }, "the generator's weights differ from the trained ones"
    finally:
        actors.close()
    metrics = report.metrics
    return Outcome(client.columns, metrics["loss"], metrics["kl"], metrics["grad_norm"], weights)


def weights_of(worker: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in worker._model.state_dict().items()}


def play(config: TrainerConfig, model: Any, tokenizer: Any, prompts: list[Prompt]) -> list[dict]:
    """Return every conversation: token ids, mask of generated ones, log-probabilities, reward."""
    rows = [
        {
            "ids": list(prompt.token_ids),
            "mask": [0] * len(prompt.token_ids),
            "logprobs": [0.0] * len(prompt.token_ids),
            "reward": 0.0,
            "record": prompt.record,
        }
        for prompt in prompts
        for _ in range(config.grpo.num_generations_per_prompt)
    ]
    active, turn = rows, 0
    while active:
        generator = torch.Generator().manual_seed(call_seed(config.run.seed, "train 0", turn))
        responses = sample_responses(
            model,
            tokenizer,
            [torch.tensor(row["ids"]) for row in active],
            max_new_tokens=[config.policy.generation.max_new_tokens] * len(active),
            temperature=1.0,
            generator=generator,
        )
        ongoing = []
        for row, response in zip(active, responses, strict=True):
            answers = row["record"].answers
            text = tokenizer.decode(response.token_ids, skip_special_tokens=True)
            points = score(text.strip(), answers[turn])
            row["ids"] += response.token_ids.tolist()
            row["mask"] += [1] * len(response.token_ids)
            row["logprobs"] += response.logprobs.tolist()
            row["reward"] += points / len(answers)
            if turn + 1 < len(answers):
                feedback = config.env.correct if points == 1 else config.env.wrong
                question = tokenizer(feedback + row["record"].questions[turn + 1])["input_ids"]
                row["ids"] += question
                row["mask"] += [0] * len(question)
                row["logprobs"] += [0.0] * len(question)
                ongoing.append(row)
        active, turn = ongoing, turn + 1
    return rows


def in_plain_pytorch(
    config: TrainerConfig, folder: str, tokenizer: Any, prompts: list[Prompt]
) -> Outcome:
    torch.set_num_threads(1)
    grpo, optimizer = config.grpo, config.policy.optimizer
    stream = PromptStream(prompts, seed=config.run.seed, shuffle=True)
    model = load_model(folder, torch.device("cpu")).eval()
    rows = play(config, model, tokenizer, stream.take(grpo.num_prompts_per_step))
    width = max(len(row["ids"]) for row in rows)
    width += -width % config.policy.make_sequence_length_divisible_by

    def padded(name: str, pad: float) -> torch.Tensor:
        return torch.tensor([row[name] + [pad] * (width - len(row[name])) for row in rows])

    ids, lengths = padded("ids", tokenizer.pad_token_id), [len(row["ids"]) for row in rows]
    mask, generated = padded("mask", 0), padded("logprobs", 0.0)
    size = grpo.num_generations_per_prompt
    reward = torch.tensor([row["reward"] for row in rows])
    advantages = []
    for start in range(0, len(rows), size):
        group = reward[start : start + size]
        for i in range(size):
            others = torch.cat([group[:i], group[i + 1 :]])
            advantages.append((group[i] - others.mean()) / (group.std() + 1e-4))
    advantage = torch.stack(advantages)

    def score_tokens() -> torch.Tensor:
        return token_logprobs(model, ids, torch.tensor(lengths), temperature=1.0)

    with torch.no_grad():
        before = score_tokens()
    adamw = torch.optim.AdamW(
        model.parameters(),
        lr=optimizer.learning_rate / optimizer.warmup_steps,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
    )
    now = score_tokens()
    ratio = (now - before).exp()
    low, high = 1 - grpo.clip_low, 1 + grpo.clip_high
    gain = torch.minimum(ratio * advantage[:, None], ratio.clamp(low, high) * advantage[:, None])
    drift = before - now  # the reference is the policy before its first step
    kl = ((drift.exp() - drift - 1) * mask).sum() / mask.sum()
    loss = -(gain * mask).sum() / mask.sum() + grpo.kl_coefficient * kl
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.max_grad_norm)
    adamw.step()
    return Outcome(
        {
            "input_ids": ids,
            "input_lengths": torch.tensor(lengths),
            "token_mask": mask,
            "generation_logprobs": generated,
            "prev_logprobs": before,
            "reference_policy_logprobs": before,
            "advantages": advantage,
            "sample_mask": torch.ones(len(rows)),
        },
        loss.item(),
        kl.item(),
        float(norm),
        {name: tensor.detach() for name, tensor in model.state_dict().items()},
    )


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_step_equals_plain_pytorch(
    cluster: None, make_config: Callable[..., TrainerConfig], tmp_path: Any, ranks: int
) -> None:
    config = make_config(
        grpo__num_prompts_per_step=8,
        grpo__num_generations_per_prompt=8,
        policy__global_batch_size=64,
        policy__micro_batch_size=64,
        policy__data_parallel=ranks,
        policy__generation__num_threads=1,
    )
    # An untrained model rarely earns a reward; take the first seed with some rewarded samples.
    for seed in range(50):
        folder = tmp_path / f"model-{seed}"
        model = config.policy.model
        save_random_model(model, folder, seed=seed, max_length=48)  # type: ignore[arg-type]
        tokenizer = load_tokenizer(str(folder))
        encode = prompt_encoder(tokenizer, config.policy.model)
        prompts = load_prompts(SHIPPED / "train.jsonl", encode, max_length=48)
        plain = in_plain_pytorch(config, str(folder), tokenizer, prompts)
        if len(set(plain.columns["advantages"].tolist())) > 4:
            break
    else:
        pytest.fail("no seed gives samples with different rewards")

    distributed = through_the_data_plane(config, str(folder), tokenizer, prompts)

    # Sampling and computations per row are equal to the last bit.
    for name in ("input_ids", "input_lengths", "token_mask", "sample_mask"):
        assert torch.equal(distributed.columns[name].long(), plain.columns[name].long()), name
    assert torch.equal(
        distributed.columns["generation_logprobs"], plain.columns["generation_logprobs"]
    )
    # Sums over rows depend on their order: the baseline sums a group at once, each rank scores half
    # of the batch with other matrix shapes, and the ranks' gradients are added at the end.
    close = {"rtol": 0.0, "atol": 2e-6}
    for name in ("advantages", "prev_logprobs", "reference_policy_logprobs"):
        torch.testing.assert_close(distributed.columns[name], plain.columns[name], **close)
    assert distributed.loss == pytest.approx(plain.loss, abs=1e-6)
    assert distributed.kl == pytest.approx(plain.kl, abs=1e-6)
    assert distributed.grad_norm == pytest.approx(plain.grad_norm, rel=1e-5)
    # Adam divides by the gradient's magnitude, so a tiny gradient's rounding error can become a
    # fraction of the learning rate, which is 2e-4 here.
    for name, tensor in plain.weights.items():
        torch.testing.assert_close(distributed.weights[name], tensor, rtol=0.0, atol=5e-5, msg=name)
