"""The asynchronous form returns the same as the synchronous one."""

import asyncio

import pytest
import torch
from rollout_doubles import (
    Adder,
    Arithmetic,
    AsyncAdder,
    Local,
    Threaded,
    batch_of,
    roll_out,
    texts,
)

from rollout_actor import run_async_multi_turn_rollout, run_multi_turn_rollout


@pytest.mark.parametrize("kind", [Local, Threaded])
def test_asynchronous_form_returns_the_same_as_the_synchronous(kind):
    def run(form, generator):
        questions = batch_of(
            [f"{n}+{n * 3}=" for n in range(9)], stop_strings=[None, ["."], []] * 3
        )
        questions["extra_env_info"] = [{"more": [f"{n}+1="] * (n % 4)} for n in range(9)]
        env = kind(Arithmetic())
        return roll_out(form, generator, questions, env, max_seq_len=60, max_rollout_turns=3)

    batch, metrics = run(run_multi_turn_rollout, Adder(max_new_tokens=11))
    other, other_metrics = run(run_async_multi_turn_rollout, AsyncAdder(max_new_tokens=11))
    assert metrics == other_metrics
    assert batch.keys() == other.keys()
    for name, column in batch.items():
        if isinstance(column, torch.Tensor):
            assert torch.equal(column, other[name])
        elif name != "message_log":
            assert column == other[name]
    for log, other_log in zip(batch["message_log"], other["message_log"], strict=True):
        assert texts(log) == texts(other_log)
        for turn, other_turn in zip(log, other_log, strict=True):
            assert turn.keys() == other_turn.keys()
            for name in turn.keys() - {"role", "content"}:
                assert torch.equal(turn[name], other_turn[name])


def test_async_rows_proceed_independently():
    class Gated(AsyncAdder):
        gate = None

        async def generate_async(self, data, *, greedy):
            self.gate = self.gate or asyncio.Event()
            output = self.generate(data, greedy=greedy)
            if self.seen[-1]["prompts"] == ["1+2="]:
                await asyncio.wait_for(self.gate.wait(), timeout=30)
            if len(self.seen) == 3:
                self.gate.set()
            yield 0, output

    generator = Gated()
    questions = batch_of(["1+2=", "3+4="])
    questions["extra_env_info"][1] = {"more": ["1+1="]}
    roll_out(run_async_multi_turn_rollout, generator, questions)
    assert len(generator.seen) == 3


def test_the_asynchronous_form_works_inside_a_running_loop():
    async def notebook():
        env = Threaded(Arithmetic())
        return roll_out(run_async_multi_turn_rollout, AsyncAdder(), batch_of(["1+2="]), env)

    batch, _ = asyncio.run(notebook())
    assert batch["total_reward"].tolist() == [1.0]
