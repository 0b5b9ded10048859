"""A step of two-turn conversations with a chat template, on a real Ray with two ranks.

It has two optimiser steps; in the second one the gradient of one rank is no number.
"""

from __future__ import annotations

import itertools
import math
import shutil
import tempfile

import pytest
import ray
import torch

from grpo_trainer.errors import GradientError
from grpo_trainer.policy import Policy
from grpo_trainer.prompts import FollowUp, Prompt, PromptRecord, PromptStream
from grpo_trainer.run_actors import ROLLOUT, RunActors
from grpo_trainer.step import GRPOStep, StepReport
from grpo_trainer.tokenizer import load_tokenizer, prompt_encoder

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}({{ m.content }})={% else %}"
    "{{ m.content }}<eos>{% endif %}{% endfor %}"
)
FIRST, SECOND = "1+1=", "2+2="
RANKS, SAMPLES, ROWS_PER_STEP = 2, 16, 4


class Played:
    """What a step left: its conversations, and what became of each rank."""

    def __init__(self, actors, step, tokenizer, seen):
        self.tokenizer = tokenizer
        ranks = [actors.calls.handle(name) for name in actors.policy_workers]
        for rank, worker in enumerate(ranks):
            ray.get(worker.__ray_call__.remote(spoil, rank == 1))
        with pytest.raises(GradientError) as raised:
            step.run(0, StepReport())
        self.message = str(raised.value)
        self.ranks = [ray.get(worker.__ray_call__.remote(what_became_of)) for worker in ranks]
        sent = [what for _, direction, what in seen if direction == "sent"]
        self.shards = [what[0][0].sample_ids for what in sent if "rows_per_step" in what[1]]
        [meta] = [what[0] for name, way, what in seen if (name, way) == (ROLLOUT, "received")]
        columns = actors.data_plane.get_samples(
            meta.sample_ids, "train", ["input_ids", "token_mask"]
        )
        ids, masks = columns["input_ids"].unbind(), columns["token_mask"].unbind()
        self.conversations = [
            self.turns(row.tolist(), mask.tolist()) for row, mask in zip(ids, masks, strict=True)
        ]

    def turns(self, ids, mask):
        """The texts of a conversation, end tokens included; each second one is a response."""
        pairs = itertools.groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
        found = [(bool(said), [token for token, _ in turn]) for said, turn in pairs]
        assert [said for said, _ in found] == [False, True, False, True]
        return [self.tokenizer.decode(tokens) for _, tokens in found]


def spoil(worker, bad):
    """Remembers what is told of training; ``bad``: no number from the second gradient on."""
    from grpo_trainer import policy_worker

    worker.told, worker.gradients = [], 0
    policy_worker.trained = lambda client, meta, field: worker.told.extend(meta.sample_ids)

    def count(gradient):
        worker.gradients += 1
        return gradient + math.nan if bad and worker.gradients > 1 else gradient

    next(worker._model.parameters()).register_hook(count)


def what_became_of(worker):
    steps = {int(state["step"]) for state in worker._optimizer.state.values()}
    weights = {name: tensor.clone() for name, tensor in worker._model.state_dict().items()}
    return {"told": worker.told, "gradients": worker.gradients, "steps": steps, "weights": weights}


@pytest.fixture(scope="module")
def played(configure, model_folder, tmp_path_factory):
    folder = shutil.copytree(model_folder, tmp_path_factory.mktemp("chat") / "model")
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    temp_dir = tempfile.mkdtemp(prefix="gt-")
    model = {"kind": "pretrained", "name": str(folder), "use_chat_template": True}
    config = configure(
        {
            "cluster.temp_dir": temp_dir,
            "policy.model": model,
            "policy.data_parallel": RANKS,
            "policy.global_batch_size": RANKS * ROWS_PER_STEP,
            "policy.micro_batch_size": ROWS_PER_STEP,
            "policy.generation.max_new_tokens": 8,
            "grpo.kl_coefficient": 0,
        }
    )
    assert config.samples_per_step == SAMPLES
    seen = []
    actors = RunActors(
        config, model=str(folder), tokenizer=tokenizer, observer=lambda *call: seen.append(call)
    )
    try:
        follow_up = FollowUp(prompt=SECOND, answer="4")
        record = PromptRecord(prompt=FIRST, answer="2", follow_ups=[follow_up])
        prompt = Prompt(
            record=record, token_ids=prompt_encoder(tokenizer, config.policy.model)(FIRST)
        )
        step = GRPOStep(
            config,
            calls=actors.calls,
            data_plane=actors.data_plane,
            policy=Policy(actors.calls, actors.policy_workers, config.policy),
            weight_sync=actors.weight_sync,
            prompts=PromptStream([prompt], seed=1, shuffle=False),
            run_id="test",
        )
        yield Played(actors, step, tokenizer, seen)
    finally:
        actors.close()
        shutil.rmtree(temp_dir)


def test_a_conversation_is_what_the_template_makes_of_it_with_each_response_ended_once(played):
    ended = 0
    for question, response, turn, _ in played.conversations:
        assert question == f"({FIRST})="
        comes_to_its_end = response.endswith("<eos>")
        ended += comes_to_its_end
        assert response.count("<eos>") == comes_to_its_end
        said = turn.removeprefix("" if comes_to_its_end else "<eos>")
        assert said in {f"(ok;{SECOND})=", f"(no;{SECOND})="}
    assert 0 < ended < SAMPLES


def test_the_ranks_agree_on_a_gradient_that_is_no_number_on_one_of_them(played):
    assert played.message.startswith("step 1: the gradient's norm is nan; ")
    one, other = played.ranks
    assert one["gradients"] == other["gradients"] == 2
    assert one["steps"] == other["steps"] == {1}
    for name, tensor in one["weights"].items():
        assert tensor.isfinite().all()
        assert torch.equal(tensor, other["weights"][name])


def test_only_samples_of_optimiser_steps_that_were_taken_are_told_as_trained(played):
    for rank, shard in zip(played.ranks, played.shards, strict=True):
        assert len(shard) == SAMPLES / RANKS
        assert rank["told"] == shard[:ROWS_PER_STEP]
