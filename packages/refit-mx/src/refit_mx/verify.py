"""Comparing what arrived in scratch with what was published, byte for byte, by digests.

The manifest has a digest of every block of every shard. Blocks that were read whole are checked
against these. What was read in part, such as half of the columns, has no digest there: its source
is asked for the digest of exactly these ranges, and refuses when it no longer holds the version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from refit_mx.digests import digest_of_reads, host_block_digests
from refit_mx.errors import DigestMismatchError, ProtocolError
from refit_mx.manifest import BLOCK_BYTES, DIGEST_BYTES
from refit_mx.plan.planner import Plan
from refit_mx.plan.shards import ShardTable
from refit_mx.reads import ReadTable

_CHUNK_BYTES = 4 << 20
"""Of strided memory that is gathered at a time."""


@dataclass(frozen=True, eq=False)
class RowChecks:
    """How the reads of one fetch are checked. Depends on the plan alone, so it is kept with it.

    Attributes:
        source: index of the manifest.
        shard: int64 (reads,), row of the source's shards.
        blocks: int64 (reads, 5): of the blocks that the read has whole, the first byte of their
            digests in the manifest and the byte behind the last; the bytes of the read before its
            first such block; all bytes of the read; and where in scratch it begins, -1 if it is
            strided there. No such block if the first two are equal.
        rest: what has to be asked for, as reads.
        rest_row: int64 (len(rest),), the read that each is from.
    """

    source: int
    shard: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    rest: ReadTable
    rest_row: npt.NDArray[np.int64]


def row_checks(shards: ShardTable, plan: Plan) -> tuple[RowChecks, ...]:
    """How each fetch of a plan is checked."""
    return tuple(
        _checks(shards, source, reads, shard_of_read)
        for (source, reads), shard_of_read in zip(plan.fetches, plan.shard_of_read, strict=True)
    )


def _checks(
    shards: ShardTable, source: int, reads: ReadTable, shard_of_read: npt.NDArray[np.int32]
) -> RowChecks:
    shard = shard_of_read.astype(np.int64)
    src, dst, run, n1, src1, _, n2, src2, _ = reads.rows.T
    size = shards.boxes(source).nbytes[shard]
    begin = src - shards.arena_offsets[source][shard]
    length = run * n1 * n2
    blocks = -(-size // BLOCK_BYTES)
    first = -(-begin // BLOCK_BYTES)
    stop = np.where(begin + length == size, blocks, (begin + length) // BLOCK_BYTES)
    one_run = (n1 == 1) & (n2 == 1)
    in_one_piece = ((n1 == 1) | (src1 == run)) & ((n2 == 1) | (src2 == run * n1))
    skip = first * BLOCK_BYTES - begin
    after = begin + length - np.minimum(stop * BLOCK_BYTES, size)
    # What is strided in scratch is not cut at the edges of blocks: all of it is asked for.
    here = in_one_piece & (stop > first) & (one_run | ((skip == 0) & (after == 0)))
    before = shards.boxes(source).blocks_before[shard]
    blocks_read = np.stack(
        [
            np.where(here, before + first, 0) * DIGEST_BYTES,
            np.where(here, before + stop, 0) * DIGEST_BYTES,
            np.where(here, skip, 0),
            length,
            np.where(run == length, dst, -1),
        ],
        axis=1,
    )

    parts, rows = [reads.rows[~here]], [np.flatnonzero(~here)]
    for wanted, start, count in (
        (here & (skip > 0), np.zeros_like(skip), skip),
        (here & (after > 0), length - after, after),
    ):
        index = np.flatnonzero(wanted)
        cut = reads.rows[index].copy()
        cut[:, 0] += start[index]
        cut[:, 1] += start[index]
        cut[:, 2] = count[index]
        parts.append(cut)
        rows.append(index)
    return RowChecks(
        source,
        shard,
        blocks_read,
        ReadTable(np.concatenate(parts)),
        np.concatenate(rows),
    )


class Verifier:
    """Checks the bytes of one receive.

    Args:
        shards: of the version that was read.
        plan: that was carried out.
        checks: of the plan, in its order.
        scratch: that it was read into.
    """

    def __init__(
        self,
        shards: ShardTable,
        plan: Plan,
        checks: Sequence[RowChecks],
        scratch: torch.Tensor,
    ) -> None:
        self._shards = shards
        self._plan = plan
        self._checks = checks
        self._scratch = scratch
        self._bytes = scratch.numpy().data if scratch.device.type == "cpu" else None

    def check_rows(self, fetch: int, first: int, stop: int) -> None:
        """Check the whole blocks of some reads that have arrived.

        Args:
            fetch: index of the plan's fetch.
            first: row of its reads.
            stop: the row behind the last one.

        Raises:
            DigestMismatchError: they are not what was published; names the tensor and the worker.
        """
        checks = self._checks[fetch]
        digests = self._shards.manifests[checks.source].digests
        # Called for every few megabytes, holding the interpreter's lock: no arithmetic on arrays.
        for row, (begin, end, skip, length, at) in enumerate(
            checks.blocks[first:stop].tolist(), first
        ):
            if begin == end:
                continue
            behind = min(length, skip + (end - begin) // DIGEST_BYTES * BLOCK_BYTES)
            if at >= 0 and self._bytes is not None:
                found = host_block_digests(self._bytes, at + skip, at + behind)
            else:
                found = self._digests_of(self._plan.fetches[fetch][1].rows[row], skip, behind)
            if found != digests[begin:end]:
                raise self._mismatch(fetch, row)

    def _digests_of(self, row: npt.NDArray[np.int64], skip: int, stop: int) -> bytes:
        """Digests of the blocks of a read, of its bytes ``skip`` to ``stop``."""
        found, current, held = [], xxhash.xxh3_128(), 0
        for piece in self._pieces(row, skip, stop):
            at = 0
            while at < len(piece):
                taken = min(len(piece) - at, BLOCK_BYTES - held)
                current.update(piece[at : at + taken])
                at, held = at + taken, held + taken
                if held == BLOCK_BYTES:
                    found.append(current.digest())
                    current, held = xxhash.xxh3_128(), 0
        if held:
            found.append(current.digest())
        return b"".join(found)

    def _pieces(self, row: npt.NDArray[np.int64], skip: int, stop: int) -> Iterator[memoryview]:
        """The bytes ``skip`` to ``stop`` of a read, as they lie at the source, in pieces."""
        _, dst, run, n1, _, dst1, n2, _, dst2 = row.tolist()
        if run == n1 * n2 * run:
            for at in range(skip, stop, _CHUNK_BYTES):
                part = self._scratch[dst + at : dst + min(at + _CHUNK_BYTES, stop)]
                yield part.cpu().numpy().data
            return
        # Strided reads are checked whole, so skip is 0 and stop is the length.
        runs = max(1, _CHUNK_BYTES // run)
        begin = self._scratch.storage_offset() + dst
        for j in range(n2):
            for i in range(0, n1, runs):
                count = min(runs, n1 - i)
                view = torch.as_strided(
                    self._scratch, (count, run), (dst1, 1), begin + j * dst2 + i * dst1
                )
                yield view.contiguous().cpu().numpy().reshape(-1).data

    def has_rest(self, fetch: int) -> bool:
        """Whether `check_rest` has something to ask for."""
        return len(self._checks[fetch].rest) > 0

    def check_rest(self, fetch: int, ask: Callable[[ReadTable], bytes]) -> int:
        """Check what a source has to be asked for. All of the fetch has arrived.

        Args:
            fetch: index of the plan's fetch.
            ask: asks the source for the digests of ranges of its arena.

        Returns:
            Bytes that were checked.

        Raises:
            DigestMismatchError: they are not what the source holds.
            ProtocolError: the source answered with a wrong number of digests.
        """
        checks = self._checks[fetch]
        if not len(checks.rest):
            return 0
        told = ask(checks.rest)
        if len(told) != len(checks.rest) * DIGEST_BYTES:
            raise ProtocolError(
                f"{len(told)} bytes of digests for {len(checks.rest)} ranges from worker "
                f"{self._shards.manifests[checks.source].worker_id}; "
                f"expected {len(checks.rest) * DIGEST_BYTES}"
            )
        found = digest_of_reads(self._scratch, checks.rest, side="scratch")
        if found != told:
            wrong = np.frombuffer(found, np.uint8).reshape(-1, DIGEST_BYTES) != np.frombuffer(
                told, np.uint8
            ).reshape(-1, DIGEST_BYTES)
            raise self._mismatch(fetch, int(checks.rest_row[np.flatnonzero(wrong.any(axis=1))[0]]))
        return checks.rest.nbytes

    def _mismatch(self, fetch: int, row: int) -> DigestMismatchError:
        checks = self._checks[fetch]
        manifest = self._shards.manifests[checks.source]
        boxes = self._shards.boxes(checks.source)
        tensor = self._shards.tensors.names[int(boxes.tensor[checks.shard[row]])]
        return DigestMismatchError(
            f"{tensor}: bytes from worker {manifest.worker_id} ({manifest.endpoint}) are not those "
            f"that it published as version {manifest.version_id}",
            (manifest.worker_id,),
        )
