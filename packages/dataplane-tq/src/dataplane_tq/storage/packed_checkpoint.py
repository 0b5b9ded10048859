"""Checkpoints of the rows of TransferQueue's own clients on the packed backend.

TransferQueue saves its controller, then asks the storage manager for the values. Metas in the
controller name each value by its cell, so a restored block has the cell of the saved one. Rows that
were freed before the save are not stored, and a restore may split a block::

    block 7, rows   a - c -      saved: cell 7, layout of 2 rows, bytes of a and c
    restored        block 20     a c        or, without so large a free extent,
                    block 20, 21 a, c       all with cell 7

A checkpoint is a folder of `dataplane_core.checkpoint.folder`: each file has some blocks of one
partition, and its SHA-256 is in the manifest. The manifest's metadata has the format: in format 2 a
file has only live rows, and each block has its cell. Older checkpoints have no format.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, count
from pathlib import Path

import msgspec
import numpy as np

from dataplane_core import (
    CheckpointError,
    DataPlaneError,
    InvalidRequestError,
    MissingDataError,
    PartitionSummary,
)
from dataplane_core.checkpoint.folder import open_folder, write_folder
from dataplane_core.ledger import SampleState
from dataplane_tq.directory import protocol as p
from dataplane_tq.directory.wire import Link, Session
from dataplane_tq.packed.access import UnitAccess
from dataplane_tq.packed.layout import Block, FieldParts, Indices

_FOLDER = "packed_storage"
_FORMAT = 2
_FILE_BYTES = 64 << 20
"""Minimum size of a full file: a file gets no more blocks once it has this size."""
_MAX_BLOCK_BYTES = 1 << 30
"""Maximum bytes of a saved block of several rows."""
_MAX_VALUE_BYTES = (1 << 32) - 1
"""Maximum bytes of one value in msgpack."""
_SAMPLES_AT_ONCE = 1000


class _File(msgspec.Struct, frozen=True):
    """Rows of one partition, by block, and the bytes of each block's rows."""

    partition_id: str
    blocks: list[p.SavedBlock]
    data: list[bytes]

    def __post_init__(self) -> None:
        if [len(data) for data in self.data] != [saved.layout.nbytes for saved in self.blocks]:
            raise ValueError("the bytes of a block do not have the size of its rows")


def save(link: Link, units: UnitAccess, prefix: str, checkpoint: Path) -> None:
    """Write all rows of the partitions whose id starts with ``prefix``.

    Rows that are put or cleared meanwhile may be missing; of overwritten rows, either value is
    written.

    Args:
        link: connection to the directory.
        units: connections to the units.
        prefix: beginning of the ids.
        checkpoint: folder of TransferQueue's checkpoint.

    Raises:
        CheckpointError: the folder cannot be written, or a row has 4 GiB or more.
        DataPlaneError: a part of the store is gone, or a partition was cleared meanwhile.
    """
    summaries = link.ask("save_checkpoint", p.ListPartitions(), list[PartitionSummary])
    partitions = [each for each in summaries if each.partition_id.startswith(prefix)]
    with write_folder(checkpoint / _FOLDER) as writer:
        numbers = count()
        for partition in partitions:
            for file in _files(link, units, partition.partition_id, partition.present):
                writer.add(f"{next(numbers):06d}.msgpack", msgspec.msgpack.encode(file))
        writer.finish({"format": _FORMAT, "partitions": [each.partition_id for each in partitions]})


def load(link: Link, units: UnitAccess, prefix: str, node: str, checkpoint: Path) -> None:
    """Replace all rows of the partitions whose id starts with ``prefix`` with a checkpoint's.

    The checkpoint is verified first. If the restore fails after that, the partitions are empty.

    Args:
        link: connection to the directory.
        units: connections to the units.
        prefix: beginning of the ids.
        node: this process's node, whose units come first.
        checkpoint: folder that `save` wrote to.

    Raises:
        CheckpointError: a file is missing or changed, or the checkpoint has another format: the
            store is unchanged. Or a file is malformed: the partitions are empty.
        CapacityExceeded: the store has no capacity for what was saved; the partitions are empty.
        DataPlaneError: a part of the store is gone.
    """
    folder = open_folder(checkpoint / _FOLDER)
    stored_format = folder.metadata.get("format", 1)
    if stored_format != _FORMAT:
        raise CheckpointError(
            f"checkpoint {folder.folder}: format {stored_format}; expected {_FORMAT}; load it with "
            "the dataplane-tq that saved it, or save the queue again with this one"
        )
    _clear(link, prefix)
    try:
        for name in folder.files:
            try:
                file = _decoder.decode(folder.read(name))
            except msgspec.MsgspecError as error:
                raise CheckpointError(f"checkpoint file {folder.folder / name}: {error}") from None
            if not file.partition_id.startswith(prefix):
                raise CheckpointError(
                    f"checkpoint file {folder.folder / name}: partition {file.partition_id!r}; "
                    f"expected one that starts with {prefix!r}"
                )
            try:
                _restore(link, units, node, file)
            except InvalidRequestError as error:
                raise CheckpointError(f"checkpoint file {folder.folder / name}: {error}") from None
    except BaseException:  # also on an interrupt: half of a checkpoint would look complete
        with suppress(DataPlaneError):
            _clear(link, prefix)
        raise


_decoder = msgspec.msgpack.Decoder(_File)


def _clear(link: Link, prefix: str) -> None:
    for summary in link.ask("load_checkpoint", p.ListPartitions(), list[PartitionSummary]):
        if summary.partition_id.startswith(prefix):
            with link.session(f"load_checkpoint(partition={summary.partition_id!r})") as session:
                answer = session.ask(
                    p.Clear(summary.partition_id, None, True, link.timeout_s), p.ClearAnswer
                )
                while answer.more:
                    answer = session.ask(p.NextOrphans(), p.ClearAnswer)
                session.ask(p.Dropped(), type(None))


def _files(link: Link, units: UnitAccess, partition_id: str, count: int) -> Iterator[_File]:
    """Yield the first ``count`` rows with their bytes, in files of about `_FILE_BYTES`."""
    blocks: list[p.SavedBlock] = []
    data: list[bytes] = []
    size = 0
    with link.session(f"save_checkpoint(partition={partition_id!r})") as session:
        for listed, fields in _sample_groups(link, partition_id, count):
            # The rows are pinned while their bytes are read.
            sample_ids, answer = _pin(session, partition_id, listed, fields)
            for block, at, rows in chain.from_iterable(map(_pieces, answer.parts)):
                layout, values = units.read_rows(block, rows)
                blocks.append(p.SavedBlock(block.cell, layout, [sample_ids[i] for i in at]))
                data.append(values)
                size += len(values)
                if size >= _FILE_BYTES:
                    yield _File(partition_id, blocks, data)
                    blocks, data, size = [], [], 0
        session.send(p.Unpin())
    if blocks:
        yield _File(partition_id, blocks, data)


def _pieces(parts: FieldParts) -> Iterator[tuple[Block, list[int], Indices]]:
    """Yield each block with the positions in ``parts`` of its rows, and their numbers in it.

    A block of more than `_MAX_BLOCK_BYTES` is yielded several times, each time with other rows.

    Raises:
        CheckpointError: a row is too large for a file.
    """
    source, rows = parts.locate()
    for number, block in enumerate(parts.blocks):
        at = np.flatnonzero(source == number)
        starts, stops = block.layout.row_ranges(rows[at])
        sizes = stops - starts
        if sizes.max() > _MAX_VALUE_BYTES:
            raise CheckpointError(
                f"save_checkpoint: a row of field {block.layout.name!r} has {sizes.max()} bytes; "
                f"expected at most {_MAX_VALUE_BYTES}"
            )
        ends = np.cumsum(sizes)
        row = 0
        while row < len(at):
            # One past the last row that ends within the maximum, counted from the start of `row`.
            limit = ends[row] - sizes[row] + _MAX_BLOCK_BYTES
            stop = max(row + 1, int(ends.searchsorted(limit, side="right")))
            piece = at[row:stop]
            yield block, piece.tolist(), rows[piece]
            row = stop


def _restore(link: Link, units: UnitAccess, node: str, file: _File) -> None:
    with link.session(f"load_checkpoint(partition={file.partition_id!r})") as session:
        request = p.BeginRestore(file.partition_id, file.blocks, node)
        answer = session.ask(request, p.RestoreAnswer)
        units.write_saved(
            (blocks, saved.layout, data)
            for blocks, saved, data in zip(answer.blocks, file.blocks, file.data, strict=True)
        )
        session.ask(p.CommitRestore(), type(None))


def _sample_groups(
    link: Link, partition_id: str, count: int
) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the first ``count`` samples with their fields, in groups with the same fields.

    A clear moves all later samples forward. The last page is read first, so they move to pages that
    are still to be read, and none is missed.
    """
    what = f"save_checkpoint(partition={partition_id!r})"
    fields_of: dict[str, tuple[str, ...]] = {}
    for start in reversed(range(0, count, _SAMPLES_AT_ONCE)):
        request = p.ListSamples(partition_id, start, _SAMPLES_AT_ONCE)
        for sample in reversed(link.ask(what, request, list[SampleState])):
            fields_of[sample.sample_id] = tuple(sorted(sample.fields))
    groups: dict[tuple[str, ...], list[str]] = {}
    for sample_id in reversed(fields_of):
        groups.setdefault(fields_of[sample_id], []).append(sample_id)
    for fields, sample_ids in groups.items():
        for start in range(0, len(sample_ids) if fields else 0, _SAMPLES_AT_ONCE):
            yield sample_ids[start : start + _SAMPLES_AT_ONCE], list(fields)


def _pin(
    session: Session, partition_id: str, sample_ids: list[str], fields: list[str]
) -> tuple[list[str], p.ReadAnswer]:
    """Find and pin the samples that were not cleared since they were listed."""
    while True:
        try:
            return sample_ids, session.ask(p.Read(partition_id, sample_ids, fields), p.ReadAnswer)
        except MissingDataError as error:
            cleared = set(error.sample_ids)
            sample_ids = [each for each in sample_ids if each not in cleared]
