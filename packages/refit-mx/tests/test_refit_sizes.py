"""A refit of more than 2 GiB from one source: offsets beyond what 31 bits can say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from refit_fixtures import TRANSPORTS, a_world

from refit_mx.plan.targets import replicated_target
from refit_mx.shard_sources import LocalShard
from refit_mx.tensor_types import Box, TensorSpec

pytestmark = [pytest.mark.slow, pytest.mark.long]

COLUMNS = 1 << 14
ROWS = (1 << 15) + 1024
"""Of int32: 2 GiB, and 64 MiB behind them."""
BAND = 1024
TAIL = 12345


def rows(first: int, stop: int) -> torch.Tensor:
    """Any row of the large tensor, without the others: no number comes twice."""
    numbers = torch.arange(first * COLUMNS, stop * COLUMNS, dtype=torch.int32)
    return (numbers * -1640531527).view(stop - first, COLUMNS)


def tail() -> torch.Tensor:
    return torch.arange(TAIL, dtype=torch.int32) * 40503


def shards() -> list[LocalShard]:
    """The last rows are a shard of their own, and another tensor comes behind them."""
    first = ROWS - BAND
    return [
        LocalShard("large", (ROWS, COLUMNS), Box((at, 0), (stop - at, COLUMNS)), rows(at, stop))
        for at, stop in ((0, first), (first, ROWS))
    ]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_more_than_2_gib_of_one_source_come_byte_for_byte(transport):
    # Nothing is held that is not needed: the arena and the scratch memory take 2 GiB each.
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
        # The same buffer again, from its beginning.
        with receiver.receive_weights_scratch("v1", names=["tail"], timeout_s=60) as got:
            assert torch.equal(got["tail"], tail())
