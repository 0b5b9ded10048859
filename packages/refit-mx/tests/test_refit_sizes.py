"""A refit of more than 2 GiB from one source, with offsets that need more than 31 bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from refit_fixtures import TRANSPORTS, a_world

from refit_mx import Box, LocalShard, TensorSpec, replicated_target

pytestmark = [pytest.mark.slow, pytest.mark.long]

COLUMNS = 1 << 14
ROWS = (1 << 15) + 1024
"""Rows of int32: 2 GiB and another 64 MiB."""
BAND = 1024
TAIL = 12345


def rows(first: int, stop: int) -> torch.Tensor:
    """Return rows of the large tensor, without computing the others; all numbers differ."""
    numbers = torch.arange(first * COLUMNS, stop * COLUMNS, dtype=torch.int32)
    return (numbers * -1640531527).view(stop - first, COLUMNS)


def tail() -> torch.Tensor:
    return torch.arange(TAIL, dtype=torch.int32) * 40503


def shards() -> list[LocalShard]:
    """Return two shards of the large tensor; the second has the last rows."""
    first = ROWS - BAND
    return [
        LocalShard("large", (ROWS, COLUMNS), Box((at, 0), (stop - at, COLUMNS)), rows(at, stop))
        for at, stop in ((0, first), (first, ROWS))
    ]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_more_than_2_gib_arrive_byte_for_byte(transport):
    # Hold no further copies: the arena and the scratch memory take 2 GiB each.
    with a_world() as world:
        publisher = world.publisher(transports=[transport])
        world.version("v1")
        manifest = publisher.publish("v1", {"large": shards(), "tail": tail()}, timeout_s=120)
        assert np.frombuffer(manifest.shards.offset, "<i8").max() > 1 << 31
        targets = [
            replicated_target(TensorSpec("large", "int32", (ROWS, COLUMNS))),
            replicated_target(TensorSpec("tail", "int32", (TAIL,))),
        ]
        receiver = world.receiver(targets, transport=transport)
        with receiver.receive_weights_scratch("v1", timeout_s=200) as got:
            assert got.stats.nbytes == 4 * (ROWS * COLUMNS + TAIL)
            assert got.stats.attempts == 1
            for first in range(0, ROWS, BAND):
                assert torch.equal(got["large"][first : first + BAND], rows(first, first + BAND))
            assert torch.equal(got["tail"], tail())
        # Reuse the same buffer from its beginning.
        with receiver.receive_weights_scratch("v1", names=["tail"], timeout_s=60) as got:
            assert torch.equal(got["tail"], tail())
