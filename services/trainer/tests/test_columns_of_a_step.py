"""A training step computes the same from columns of the data plane as from tensors in memory."""

from __future__ import annotations

import pytest
import torch

from column_io import kv_first_write, read_columns, write_columns
from dataplane_core import GLOBAL_FORWARD_PAD_SEQLEN, InMemoryDataPlaneClient
from grpo_trainer.loss import grpo_loss, token_logprobs

LENGTHS = [5, 3, 7, 6]
WIDTH = 16


def loss_and_gradient(network, batch, credit):
    network.zero_grad()
    logprobs = token_logprobs(network, batch["input_ids"], batch["input_lengths"], temperature=1.0)
    mask = batch["token_mask"].float() * batch["sample_mask"][:, None]
    sums = grpo_loss(
        logprobs,
        logprobs.detach(),
        credit,
        mask,
        clip_low=0.2,
        clip_high=0.2,
        reference_logprobs=None,
        kl_coefficient=0.0,
    )
    (sums.loss / mask.sum()).backward()
    return sums.loss.detach(), torch.cat([p.grad.flatten() for p in network.parameters()])


@pytest.mark.parametrize("shape", [(4,), (4, 1)], ids=str)
def test_a_column_per_sample_gives_the_gradient_it_has_in_memory(network, shape):
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    batch = {
        "input_ids": torch.randint(1, 9, mask.shape) * mask,
        "input_lengths": torch.tensor(LENGTHS),
        "token_mask": (mask & (torch.arange(mask.shape[1]) > 1)).long(),
        "sample_mask": torch.ones(4),
    }
    credit = torch.tensor([1.0, -2.0, 0.5, 3.0]).reshape(shape)
    expected, gradient = loss_and_gradient(network, batch, credit)
    with InMemoryDataPlaneClient() as client:
        client.register_partition("train", list(batch), 4, ["train"])
        meta = kv_first_write(
            batch, sample_ids=list("abcd"), dp_client=client, partition_id="train"
        )
        write_columns(client, meta, {"credit": credit})
        meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = WIDTH
        read = read_columns(client, meta, [*batch, "credit"])
    assert read["input_ids"].shape == (4, WIDTH)
    loss, found = loss_and_gradient(network, read, read["credit"])
    assert gradient.abs().max() > 0
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, gradient)
