"""Verification of received bytes in scratch against the published digests.

The manifest has a digest of every block of every shard, which verifies blocks that were read in
full. Partial blocks, such as half of the columns, have no digest there. The source is asked for
digests of exactly these ranges, and refuses if it no longer holds the version.

    shard     | block 0      | block 1      | block 2      | block 3 |
    read            |--------|--------------|-------|
              begin ^  skip    in manifest    after         requested: skip and after
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from refit_mx.errors import DigestMismatchError
from refit_mx.manifest.byte_spans import contiguous, host_buffer
from refit_mx.manifest.digests import digest_of_reads, host_block_digests
from refit_mx.manifest.format import BLOCK_BYTES, DIGEST_BYTES
from refit_mx.manifest.reads import Int64s, ReadTable
from refit_mx.memory.cuda import on_separate_stream
from refit_mx.plan.planner import Plan
from refit_mx.plan.shards import ShardTable

_BUFFER_BYTES = 4 << 20
"""Size of strided memory to gather at a time."""


@dataclass(frozen=True, eq=False)
class RowChecks:
    """Checks of the reads from one source. They depend only on the plan and are stored with it."""

    source: int  # index of the source's manifest
    shard: Int64s  # (reads,), row of the source's shards
    # (reads, 5). Columns 0 and 1: first byte of the manifest's digests for the blocks that the read
    # contains in full, and the byte after the last; equal if there is no such block. Column 2:
    # bytes of the read before its first such block. Column 3: length of the read. Column 4: its
    # start in scratch, or -1 if it is strided there.
    blocks: Int64s
    rest: ReadTable  # ranges whose digests must be requested, as reads
    rest_row: Int64s  # (len(rest),), the read that each range belongs to


def row_checks(shards: ShardTable, plan: Plan) -> tuple[RowChecks, ...]:
    """Return the checks of each source of a plan."""
    return tuple(
        _checks(shards, source, reads, shard_of_read)
        for (source, reads), shard_of_read in zip(
            plan.source_reads, plan.shard_of_read, strict=True
        )
    )


def _checks(
    shards: ShardTable, source: int, reads: ReadTable, shard_of_read: npt.NDArray[np.int32]
) -> RowChecks:
    shard = shard_of_read.astype(np.int64)
    src, dst, run, n1, _, _, n2, _, _ = reads.rows.T
    size = shards.boxes(source).nbytes[shard]
    begin = src - shards.arena_offsets[source][shard]
    length = reads.sizes
    # Blocks ``first`` to ``stop`` - 1 of the shard are complete in the read; the shard's last block
    # may be short.
    blocks = -(-size // BLOCK_BYTES)
    first = -(-begin // BLOCK_BYTES)
    stop = np.where(begin + length == size, blocks, (begin + length) // BLOCK_BYTES)
    one_run = (n1 == 1) & (n2 == 1)
    skip = first * BLOCK_BYTES - begin
    after = begin + length - np.minimum(stop * BLOCK_BYTES, size)
    # Reads of several runs are not cut at blocks: unless they consist of complete blocks, request
    # digests of all their bytes.
    full_blocks = one_run | ((skip == 0) & (after == 0))
    in_manifest = contiguous(reads, "source") & (stop > first) & full_blocks
    before = shards.boxes(source).blocks_before[shard]
    blocks_read = np.stack(
        [
            np.where(in_manifest, before + first, 0) * DIGEST_BYTES,
            np.where(in_manifest, before + stop, 0) * DIGEST_BYTES,
            np.where(in_manifest, skip, 0),
            length,
            np.where(run == length, dst, -1),
        ],
        axis=1,
    )

    parts, rows = [reads.rows[~in_manifest]], [np.flatnonzero(~in_manifest)]
    # The remaining ranges of reads with blocks in the manifest: before the first block, after the
    # last.
    for wanted, start, count in (
        (in_manifest & (skip > 0), np.zeros_like(skip), skip),
        (in_manifest & (after > 0), length - after, after),
    ):
        index = np.flatnonzero(wanted)
        cut = reads.rows[index].copy()
        cut[:, 0] += start[index]
        cut[:, 1] += start[index]
        cut[:, 2] = count[index]
        parts.append(cut)
        rows.append(index)
    rest = ReadTable(np.concatenate(parts))
    return RowChecks(source, shard, blocks_read, rest, np.concatenate(rows))


class Verifier:
    """Verification of the bytes of one receive."""

    def __init__(
        self, shards: ShardTable, plan: Plan, checks: Sequence[RowChecks], scratch: torch.Tensor
    ) -> None:
        self._shards = shards
        self._plan = plan
        self._checks = checks
        self._scratch = scratch
        self._bytes = scratch.numpy().data if scratch.device.type == "cpu" else None

    def _on_host(self, part: torch.Tensor) -> memoryview:
        """Return the bytes of a contiguous part of the scratch, copied if it is on a device."""
        if self._bytes is None:
            part = host_buffer(part.numel(), part.device).copy_(part.reshape(-1))
        return part.numpy().reshape(-1).data

    def check_rows(self, index: int, first: int, stop: int) -> None:
        """Check the complete blocks of a source's reads, from ``first`` up to ``stop``.

        Raises:
            DigestMismatchError: bytes differ from the published ones; the message names the tensor.
        """
        checks = self._checks[index]
        digests = self._shards.manifests[checks.source].digests
        # Called every few megabytes while holding the interpreter's lock: no array arithmetic.
        for row, (begin, end, skip, length, at) in enumerate(
            checks.blocks[first:stop].tolist(), first
        ):
            if begin == end:
                continue
            blocks_end = min(length, skip + (end - begin) // DIGEST_BYTES * BLOCK_BYTES)
            if at >= 0 and self._bytes is not None:
                actual = host_block_digests(self._bytes, at + skip, at + blocks_end)
            else:
                read = self._plan.source_reads[index][1].rows[row]
                with on_separate_stream(self._scratch.device):
                    actual = self._digests_of(read, skip, blocks_end)
            if actual != digests[begin:end]:
                raise self._mismatch(index, row)

    def _digests_of(self, row: Int64s, skip: int, stop: int) -> bytes:
        """Return the digests of a read's blocks between its bytes ``skip`` and ``stop``."""
        digests, current, filled = [], xxhash.xxh3_128(), 0
        for buffer in self._host_buffers(row, skip, stop):
            at = 0
            while at < len(buffer):
                count = min(len(buffer) - at, BLOCK_BYTES - filled)
                current.update(buffer[at : at + count])
                at, filled = at + count, filled + count
                if filled == BLOCK_BYTES:
                    digests.append(current.digest())
                    current, filled = xxhash.xxh3_128(), 0
        if filled:
            digests.append(current.digest())
        return b"".join(digests)

    def _host_buffers(self, row: Int64s, skip: int, stop: int) -> Iterator[memoryview]:
        """Yield buffers of a read's bytes from ``skip`` to ``stop`` in the source's order."""
        _, dst, run, n1, _, dst1, n2, _, dst2 = row.tolist()
        if run == n1 * n2 * run:
            for at in range(skip, stop, _BUFFER_BYTES):
                part = self._scratch[dst + at : dst + min(at + _BUFFER_BYTES, stop)]
                yield self._on_host(part)
            return
        # Strided reads are checked in full, so skip is 0 and stop is the length.
        runs = max(1, _BUFFER_BYTES // run)
        begin = self._scratch.storage_offset() + dst
        for j in range(n2):
            for i in range(0, n1, runs):
                count = min(runs, n1 - i)
                view = torch.as_strided(
                    self._scratch, (count, run), (dst1, 1), begin + j * dst2 + i * dst1
                )
                yield self._on_host(view.contiguous())

    def has_rest(self, index: int) -> bool:
        """Return whether `check_rest` has digests to request."""
        return len(self._checks[index].rest) > 0

    def check_rest(self, index: int, ask: Callable[[ReadTable], bytes]) -> int:
        """Check the bytes that need digests from the source, after the fetch; return their number.

        The function ``ask`` requests one digest for each of the given ranges of the source's arena.

        Raises:
            DigestMismatchError: bytes differ from those at the source.
        """
        checks = self._checks[index]
        digests = ask(checks.rest)
        with on_separate_stream(self._scratch.device):
            actual = digest_of_reads(self._scratch, checks.rest, side="scratch")
        if actual != digests:
            wrong = np.frombuffer(actual, np.uint8).reshape(-1, DIGEST_BYTES) != np.frombuffer(
                digests, np.uint8
            ).reshape(-1, DIGEST_BYTES)
            raise self._mismatch(index, int(checks.rest_row[np.flatnonzero(wrong.any(axis=1))[0]]))
        return checks.rest.nbytes

    def _mismatch(self, index: int, row: int) -> DigestMismatchError:
        checks = self._checks[index]
        manifest = self._shards.manifests[checks.source]
        boxes = self._shards.boxes(checks.source)
        tensor = self._shards.tensors.names[int(boxes.tensor[checks.shard[row]])]
        return DigestMismatchError(
            f"{tensor}: bytes from worker {manifest.worker_id} ({manifest.endpoint}) differ from "
            f"those that it published as version {manifest.version_id}",
            (manifest.worker_id,),
        )
