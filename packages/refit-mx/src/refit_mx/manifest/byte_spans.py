"""The bytes of a `ReadTable` as one stream, as a server sends it and a client stores it.

Both sides cut the stream into the same chunks, based on ``run``, ``n1`` and ``n2`` only. A chunk is
a list of boxes, each a part of a row. Contiguous bytes and long runs are used in place; the rest
goes through a small buffer that fits the processor's cache.

    rows      | row 0: 3 runs | row 1: 1 run | row 2: 2.5 MiB in 5 runs            | row 3 |
    stream      r r r           r              rrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrr  r
    chunks    | rows 0 and 1, together       | 2 runs: 1 MiB | 1 MiB | 0.5 MiB     | row 3 ...

A row larger than a chunk is cut into boxes by `refit_mx.manifest.reads.row_parts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from refit_mx.errors import RefitConfigError
from refit_mx.manifest.reads import Int64s, ReadTable, row_parts

CHUNK_BYTES = 1 << 20
"""Size limit of a chunk; both sides of a connection must agree on it."""
DIRECT_RUN_BYTES = 16 << 10
"""Runs of at least this size are used in place."""

Side = Literal["source", "scratch"]
Bytes = npt.NDArray[np.uint8]


class RunBox(NamedTuple):
    """``n2`` by ``n1`` runs of ``run`` bytes in one memory, starting at ``at``."""

    at: int
    run: int
    n1: int
    stride1: int
    n2: int
    stride2: int

    @property
    def nbytes(self) -> int:
        """Number of bytes in the box."""
        return self.run * self.n1 * self.n2


def check_reads(reads: ReadTable, nbytes: int, side: Side) -> None:
    """Refuse a table that reaches outside a memory, even if products of its numbers overflow.

    The table is untrusted; ``side`` says which of its addresses refer to this memory.

    Raises:
        ValueError: a row reaches outside the memory; the message has the row.
    """
    if not len(reads):
        return
    at, stride1, stride2 = (reads.rows[:, column] for column in _COLUMNS[side])
    run, n1, n2 = (reads.rows[:, column] for column in (2, 3, 6))
    wrong = (reads.rows < 0).any(axis=1) | (run < 1) | (n1 < 1) | (n2 < 1)
    # Floats, since int64 may overflow. They are exact below 2**53; no memory is larger than that.
    counts = run.astype(np.float64) * n1 * n2
    ends = at.astype(np.float64) + (n1 - 1.0) * stride1 + (n2 - 1.0) * stride2 + run
    wrong |= (ends > nbytes) | (counts > nbytes)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        numbers = " ".join(str(value) for value in reads.rows[row].tolist())
        raise ValueError(
            f"read {row} of {len(reads)} ({numbers}) is not inside the {side} of {nbytes} bytes"
        )


def host_bytes(memory: torch.Tensor) -> Bytes:
    """Return a view of a CPU tensor's bytes.

    Raises:
        RefitConfigError: the memory is not a contiguous uint8 tensor of one axis on the CPU.
    """
    if (
        memory.device.type != "cpu"
        or memory.dtype != torch.uint8
        or memory.dim() != 1
        or not memory.is_contiguous()
    ):
        raise RefitConfigError(
            f"memory: {memory.dtype} {tuple(memory.shape)} on {memory.device}; "
            "expected one contiguous uint8 tensor of one axis on the CPU"
        )
    array: Bytes = memory.detach().numpy()
    return array


class Chunk(NamedTuple):
    """A part of the stream: either boxes, or ranges that are contiguous on this side."""

    nbytes: int  # size of the chunk, at most `CHUNK_BYTES`
    boxes: list[RunBox]  # empty if there are ranges
    ranges: list[tuple[int, int]]  # first byte of each range, and the byte after its last


def contiguous(reads: ReadTable, side: Side) -> npt.NDArray[np.bool_]:
    """Return for each row whether it is one contiguous range in this memory."""
    _, stride1, stride2 = (reads.rows[:, column] for column in _COLUMNS[side])
    run, n1, n2 = (reads.rows[:, column] for column in (2, 3, 6))
    flat: npt.NDArray[np.bool_] = (n1 == 1) | (stride1 == run)
    flat &= (n2 == 1) | (stride2 == run * n1)
    return flat


def host_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return uninitialized bytes on the host for copies from or to a device.

    The CUDA driver copies pinned memory fast.
    """
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def boxes(row: list[int], side: Side) -> Iterator[RunBox]:
    """Yield the boxes of at most `CHUNK_BYTES` that a row is cut into, in stream order."""
    at, stride1, stride2 = _COLUMNS[side]
    for part in row_parts(row, CHUNK_BYTES):
        yield RunBox(part[at], part[2], part[3], part[stride1], part[6], part[stride2])


def chunks(reads: ReadTable, side: Side) -> Iterator[Chunk]:
    """Yield all chunks in stream order; each has the same bytes on both sides."""
    sizes = reads.sizes
    done = 0
    for large in [*np.flatnonzero(sizes > CHUNK_BYTES).tolist(), len(reads)]:
        yield from _small_chunks(ReadTable(reads.rows[done:large]), sizes[done:large], side)
        if large < len(reads):
            for box in boxes(reads.rows[large].tolist(), side):
                yield Chunk(box.nbytes, [box], [])
        done = large + 1


def _small_chunks(reads: ReadTable, sizes: Int64s, side: Side) -> Iterator[Chunk]:
    """Yield chunks of as many complete rows as fit; no row is larger than a chunk."""
    ends = np.cumsum(sizes)
    flat = contiguous(reads, side)
    at, stride1, stride2 = _COLUMNS[side]
    first, before = 0, 0
    while first < len(reads):
        last = int(np.searchsorted(ends, before + CHUNK_BYTES, side="right"))
        nbytes = int(ends[last - 1]) - before
        rows = reads.rows[first:last]
        if flat[first:last].all():
            starts = rows[:, at]
            stops = starts + sizes[first:last]
            breaks = np.flatnonzero(stops[:-1] != starts[1:])
            starts = starts[np.concatenate([[0], breaks + 1])].tolist()
            stops = stops[np.concatenate([breaks, [-1]])].tolist()
            yield Chunk(nbytes, [], list(zip(starts, stops, strict=True)))
        else:
            columns = rows[:, (at, 2, 3, stride1, 6, stride2)].tolist()
            yield Chunk(nbytes, [RunBox(*row) for row in columns], [])
        first, before = last, before + nbytes


class ByteSpans:
    """View of a memory as buffers to send from or receive into, one chunk at a time.

    The memory is one contiguous uint8 tensor of one axis, on the CPU or a CUDA device.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._host: Bytes | None = host_bytes(memory) if memory.device.type == "cpu" else None
        self._view = None if self._host is None else self._host.data
        # Allocated on first use: contiguous reads of CPU memory never need it.
        self._bounce: Bytes | None = None

    def buffers(self, chunk: Chunk, *, load: bool) -> list[memoryview]:
        """Return the buffers of a chunk from `chunks` in order; valid until the next call.

        With ``load``, staged buffers are filled from the memory. Without it, the caller fills the
        buffers, and `store` copies staged bytes to their place.
        """
        view = self._view
        if view is not None and chunk.ranges:
            return [view[start:stop] for start, stop in chunk.ranges]
        buffers: list[memoryview] = []
        used = 0
        follows_staged = False
        for box in _boxes_of(chunk):
            if self._used_in_place(box):
                assert view is not None
                at, run, n1, stride1, n2, stride2 = _joined(box)
                # A stride may be 0: a client's reads may repeat the same bytes.
                for j in range(n2):
                    first = at + j * stride2
                    starts = [first + i * stride1 for i in range(n1)]
                    buffers += [view[start : start + run] for start in starts]
                follows_staged = False
                continue
            staged = self._staging()[used : used + box.nbytes]
            if load:
                self._load(box, staged)
            if follows_staged:  # adjacent staged boxes are one buffer
                buffers[-1] = self._staging()[used - len(buffers[-1]) : used + box.nbytes].data
            else:
                buffers.append(staged.data)
            used += box.nbytes
            follows_staged = True
        return buffers

    def store(self, chunk: Chunk) -> None:
        """Copy the staged bytes of ``chunk`` to their place in the memory."""
        if self._view is not None and chunk.ranges:
            return
        used = 0
        for box in _boxes_of(chunk):
            if not self._used_in_place(box):
                self._store(box, self._staging()[used : used + box.nbytes])
                used += box.nbytes

    def _used_in_place(self, box: RunBox) -> bool:
        return self._view is not None and _joined(box).run >= min(DIRECT_RUN_BYTES, box.nbytes)

    def _staging(self) -> Bytes:
        if self._bounce is None:
            self._bounce = host_buffer(CHUNK_BYTES, self._memory.device).numpy()
        return self._bounce

    def _load(self, box: RunBox, staged: Bytes) -> None:
        if self._host is not None:
            staged.reshape(box.n2, box.n1, box.run)[:] = _strided(self._host, box)
        else:
            torch.from_numpy(staged).view(box.n2, box.n1, box.run).copy_(self._device_box(box))

    def _store(self, box: RunBox, staged: Bytes) -> None:
        if self._host is not None:
            _strided(self._host, box)[:] = staged.reshape(box.n2, box.n1, box.run)
        else:
            self._device_box(box).copy_(torch.from_numpy(staged).view(box.n2, box.n1, box.run))

    def _device_box(self, box: RunBox) -> torch.Tensor:
        offset = self._memory.storage_offset() + box.at
        return torch.as_strided(
            self._memory, (box.n2, box.n1, box.run), (box.stride2, box.stride1, 1), offset
        )


_COLUMNS: dict[Side, tuple[int, int, int]] = {"source": (0, 4, 7), "scratch": (1, 5, 8)}


def _boxes_of(chunk: Chunk) -> list[RunBox]:
    return chunk.boxes or [RunBox(at, stop - at, 1, 0, 1, 0) for at, stop in chunk.ranges]


def _joined(box: RunBox) -> RunBox:
    """Return the same bytes as a box with the longest possible runs."""
    at, run, n1, stride1, n2, stride2 = box
    if n1 == 1 or stride1 == run:
        run, n1, stride1 = run * n1, 1, 0
        if n2 == 1 or stride2 == run:
            run, n2, stride2 = run * n2, 1, 0
    return RunBox(at, run, n1, stride1, n2, stride2)


def _strided(array: Bytes, box: RunBox) -> Bytes:
    shape, strides = (box.n2, box.n1, box.run), (box.stride2, box.stride1, 1)
    # Unlike `as_strided`, this checks the bounds, and it is faster.
    return np.ndarray(shape, np.uint8, array, box.at, strides)
