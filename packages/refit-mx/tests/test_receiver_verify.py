"""Any byte that is not the one that was published is noticed, wherever it lies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from refit_fixtures import Meddling, a_world, zeros
from refit_processes import fsdp_shards, same, slice_of, targets_of, weights

from refit_mx.errors import DigestMismatchError
from refit_mx.manifest import BLOCK_BYTES
from refit_mx.receiver import MxV2RefitReceiver
from refit_mx.settings import ReceiverSettings
from refit_mx.shard_sources import LocalShard
from refit_mx.tensor_types import Box
from refit_mx.transports.tcp import TcpTransport

# A shard of several blocks, one of a block, small ones, and one without axes.
SHAPES = {
    "large": ("float32", (1200, 700)),
    "block": ("float32", (512, 512)),
    "small": ("float32", (9, 5)),
    "scale": ("float32", ()),
}
LAYOUTS = {
    "whole": {},
    "rows": {"axis": 0, "ranks": 3, "rank": 1},
    "columns": {"axis": 1, "ranks": 2, "rank": 1},
}


@pytest.fixture(scope="module")
def world():
    with a_world(retention=100) as made:
        publishers = [made.publisher(f"fsdp-{rank}") for rank in range(2)]
        made.version("v1", ["fsdp-0", "fsdp-1"])
        for rank, publisher in enumerate(publishers):
            publisher.publish("v1", fsdp_shards(weights(1, SHAPES), 2, rank))
        yield made


def receiver_of(world, layout, after=None, **settings) -> MxV2RefitReceiver:
    return world.receiver(
        targets_of(SHAPES, **layout),
        transport=Meddling(TcpTransport(), after=after),
        settings=ReceiverSettings(**settings),
    )


@pytest.mark.parametrize("beside", [1, 1 << 40])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_published_is_accepted(world, layout, beside):
    receiver = receiver_of(world, LAYOUTS[layout], verify_beside_bytes=beside)
    with receiver, receiver.receive_weights_scratch("v1") as got:
        assert same(dict(got), slice_of(weights(1, SHAPES), **LAYOUTS[layout]))


def test_whole_blocks_need_no_question_and_columns_do(world):
    with receiver_of(world, {}) as receiver, receiver.receive_weights_scratch("v1") as got:
        assert got.stats.asked_bytes == 0
    with (
        receiver_of(world, LAYOUTS["columns"]) as receiver,
        receiver.receive_weights_scratch("v1") as got,
    ):
        assert got.stats.asked_bytes == got.stats.nbytes - got["scale"].nbytes


def test_only_the_edges_of_blocks_are_asked_for(world):
    layout = {"axis": 0, "ranks": 5, "rank": 2}
    with receiver_of(world, layout) as receiver, receiver.receive_weights_scratch("v1") as got:
        # A part of 672 kB has no whole block at all; of the large one of 1.6 MB one was checked.
        assert 0 < got.stats.asked_bytes <= got.stats.nbytes


def test_a_block_in_the_middle_of_a_read_is_checked_against_the_manifest(world):
    # Rows 0 to 600 of "large" are one source's, of 1.6 blocks: the first is whole.
    layout = {"axis": 0, "ranks": 2, "rank": 0}
    with receiver_of(world, layout) as receiver, receiver.receive_weights_scratch("v1") as got:
        assert got.stats.asked_bytes == 0
    shapes = {"large": SHAPES["large"]}
    wanted = targets_of(shapes, axis=0, ranks=4, rank=1)
    with (
        world.receiver(wanted) as receiver,
        receiver.receive_weights_scratch("v1") as got,
    ):
        # Rows 300 to 600 begin at byte 840,000 of the shard, which ends at 1,680,000.
        assert got.stats.asked_bytes == BLOCK_BYTES - 840_000


def columns_of(whole, ranks, rank):
    """What one of several tensor-parallel trainers holds: contiguous, and strided in the whole."""
    shards = []
    for name, tensor in whole.items():
        if tensor.dim() < 2:
            continue
        part = tensor.chunk(ranks, 1)[rank].contiguous()
        first = sum(each.shape[1] for each in tensor.chunk(ranks, 1)[:rank])
        box = Box((0, first, *[0] * (tensor.dim() - 2)), tuple(part.shape))
        shards.append(LocalShard(name, tuple(tensor.shape), box, part))
    return shards


@pytest.mark.parametrize("beside", [1, 1 << 40])
def test_whole_shards_that_come_to_lie_apart_are_checked_against_the_manifest(beside):
    shapes = {name: spec for name, spec in SHAPES.items() if len(spec[1]) == 2}
    shapes["wide"] = ("uint8", (7, 3, 5 << 18))  # rows longer than a piece that is gathered
    whole = weights(1, shapes)
    flips = []

    def flip(scratch, fetches):
        if flips:
            rows = fetches[flips[0] % len(fetches)].reads.rows
            row = rows[flips[0] % len(rows)]
            last = row[1] + (row[3] - 1) * row[5] + (row[6] - 1) * row[8] + row[2] - 1
            scratch[int(last)] ^= 1

    with a_world() as world:
        world.version("v1", ["tp-0", "tp-1"])
        for rank in range(2):
            world.publisher(f"tp-{rank}").publish("v1", columns_of(whole, 2, rank))
        receiver = world.receiver(
            targets_of(shapes),
            transport=Meddling(TcpTransport(), after=flip),
            settings=ReceiverSettings(verify_beside_bytes=beside),
        )
        with receiver.receive_weights_scratch("v1") as got:
            assert same(dict(got), whole)
            assert got.stats.asked_bytes == 0
        for number in range(8):
            flips[:] = [number]
            with pytest.raises(DigestMismatchError):
                receiver.receive_weights_scratch("v1", attempts=1)


@pytest.mark.parametrize("beside", [1, 1 << 40])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_changed_byte_is_noticed(world, layout, beside):
    random = np.random.default_rng(7)
    at = [0]

    def change(scratch, fetches):
        rows = np.concatenate([fetch.reads.rows for fetch in fetches])
        _, dst, run, n1, _, dst1, n2, _, dst2 = rows[at[0] % len(rows)].tolist()
        place = dst + random.integers(n2) * dst2 + random.integers(n1) * dst1 + random.integers(run)
        scratch[int(place)] ^= 1 << int(random.integers(8))

    with receiver_of(world, LAYOUTS[layout], change, verify_beside_bytes=beside) as receiver:
        for number in range(12):
            at[0] = number
            with pytest.raises(DigestMismatchError, match="are not those that it published"):
                receiver.receive_weights_scratch("v1", attempts=1)


def swap(view: torch.Tensor, one: int, other: int) -> None:
    view[[one, other]] = view[[other, one]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["large", "small"])
def test_two_swapped_rows_are_noticed(world, layout, name):
    """Also two within 4 KiB, which ModelExpress's own digest does not notice."""
    settings = LAYOUTS[layout]
    expected = slice_of(weights(1, SHAPES), **settings)[name]

    def swap_rows(scratch, fetches):
        data = expected.contiguous().view(torch.uint8).reshape(-1)
        found = scratch.numpy().tobytes().find(data.numpy().tobytes())
        assert found >= 0
        place = scratch[found : found + len(data)].view(torch.float32).view(expected.shape)
        swap(place, 0, 1)

    receiver = receiver_of(world, settings, swap_rows)
    with receiver, pytest.raises(DigestMismatchError, match=name):
        receiver.receive_weights_scratch("v1", attempts=1)


def test_a_tensor_in_the_place_of_another_is_noticed(world):
    shapes = {"a": ("float32", (8, 4)), "b": ("float32", (8, 4))}
    publisher = world.publisher()
    world.version("twins")
    publisher.publish("twins", weights(1, shapes))

    def exchange(scratch, fetches):
        halves = scratch[:512].view(2, 256)
        swap(halves, 0, 1)

    transport = Meddling(TcpTransport(), after=exchange)
    receiver = world.receiver(targets_of(shapes), transport=transport)
    with receiver, pytest.raises(DigestMismatchError):
        receiver.receive_weights_scratch("twins", attempts=1)


def test_bytes_that_were_wrong_once_are_read_again(world):
    times = []

    def change_once(scratch, fetches):
        times.append(1)
        if len(times) == 1:
            scratch[5] ^= 1

    receiver = receiver_of(world, {}, change_once)
    with receiver, receiver.receive_weights_scratch("v1") as got:
        assert same(dict(got), weights(1, SHAPES))
        assert got.stats.attempts == 2


def test_a_source_that_is_wrong_twice_is_left_out_for_a_replica():
    with a_world() as world:
        publishers = [world.publisher() for _ in range(2)]
        world.version("v1")
        for publisher in publishers:
            publisher.publish("v1", weights(1))
        bad = publishers[0].worker_id

        def change(scratch, fetches):
            for fetch in fetches:
                if fetch.source.worker_id == bad:
                    scratch[int(fetch.reads.rows[0, 1])] ^= 1

        live = zeros()
        transport = Meddling(TcpTransport(), after=change)
        stats = world.receiver(transport=transport).refit("v1", live)
        assert same(live, weights(1))
        assert stats.attempts == 3
        assert bad not in stats.sources


def test_memory_that_a_publisher_changed_under_a_version_is_noticed():
    """What a real read brings is compared with what was published, not with what is there now."""
    with a_world() as world:
        publisher = world.publisher()
        manifest = world.publish([publisher], "v1", 1)
        assert manifest
        arena = publisher._arenas.arena_of("v1")
        arena.memory[100] ^= 1
        live = zeros()
        with pytest.raises(DigestMismatchError):
            world.receiver().refit("v1", live, timeout_s=20)
        assert same(live, zeros())


def test_wrong_bytes_are_told_also_where_another_source_is_gone():
    """A source that died stays listed for a while; that it is lost is not why nothing came."""
    with a_world() as world:
        dead, bad = (world.publisher() for _ in range(2))
        world.version("v1")
        for publisher in (dead, bad):
            publisher.publish("v1", weights(1))
        dead._manifests.close()
        bad._arenas.arena_of("v1").memory[100] ^= 1
        with pytest.raises(DigestMismatchError) as wrong:
            world.receiver().refit("v1", zeros(), timeout_s=20)
        assert wrong.value.worker_ids == (bad.worker_id,)
