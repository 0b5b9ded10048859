"""Checkpoints of the rows of TransferQueue's own clients on the packed backend.

TransferQueue saves its controller, then asks the storage manager for the values. Metas in the
controller name each value by its block's number, so a restored block keeps its number. Rows that
were freed before the save are not stored, and a restore frees their memory::

    block 7, rows   a - c -      saved: layout of 4 rows, rows [0, 2], bytes of a and c
    restored        a . c .      rows 0 and 2 of block 7 are valid; 1 and 3 are free

A checkpoint is a folder of `dataplane_core.checkpoint.folder`: each file has some blocks of one
partition, and its SHA-256 is in the manifest. The manifest's metadata has the format of the metas:
in format 2 a cell is a block's number. Older checkpoints have no format; their metas fit no cell.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import msgspec
import numpy as np

from dataplane_core import CheckpointError, DataPlaneError, InvalidRequestError, PartitionSummary
from dataplane_core.checkpoint.folder import open_folder, write_folder
from dataplane_core.ledger import SampleState
from dataplane_tq.directory import protocol as p
from dataplane_tq.directory.wire import Link
from dataplane_tq.packed.access import UnitAccess
from dataplane_tq.packed.layout import Block, Indices

_FOLDER = "packed_storage"
_FORMAT = 2
_FILE_BYTES = 64 << 20
"""Minimum size of a full file: a file gets no more blocks once it has this size."""
_SAMPLES_AT_ONCE = 1000


class _File(msgspec.Struct, frozen=True):
    """Blocks of one partition, and the bytes of the live rows of each."""

    partition_id: str
    blocks: list[p.SavedBlock]
    data: list[bytes]

    def __post_init__(self) -> None:
        sizes = [saved.layout.take(saved.live_rows()).nbytes for saved in self.blocks]
        if [len(data) for data in self.data] != sizes:
            raise ValueError("the bytes of a block do not have the size of its rows")


class _Live(msgspec.Struct):
    """Live rows of one block, by number, each with its sample."""

    block: Block
    samples: dict[int, str]


def save(link: Link, units: UnitAccess, prefix: str, checkpoint: Path) -> None:
    """Write all rows of the partitions whose id starts with ``prefix``.

    Args:
        link: connection to the directory.
        units: connections to the units.
        prefix: beginning of the ids.
        checkpoint: folder of TransferQueue's checkpoint.

    Raises:
        CheckpointError: the folder cannot be written, or rows were overwritten meanwhile.
        DataPlaneError: a part of the store is gone, or rows were cleared meanwhile.
    """
    summaries = link.ask("save_checkpoint", p.ListPartitions(), list[PartitionSummary])
    partition_ids = [
        each.partition_id for each in summaries if each.partition_id.startswith(prefix)
    ]
    with write_folder(checkpoint / _FOLDER) as writer:
        numbers = count()
        for partition_id in partition_ids:
            for file in _files(link, units, partition_id):
                writer.add(f"{next(numbers):06d}.msgpack", msgspec.msgpack.encode(file))
        writer.finish({"format": _FORMAT, "partitions": partition_ids})


def load(link: Link, units: UnitAccess, prefix: str, node: str, checkpoint: Path) -> None:
    """Replace all rows of the partitions whose id starts with ``prefix`` by a checkpoint's.

    The checkpoint is verified first. If the restore fails after that, the partitions are empty.

    Args:
        link: connection to the directory.
        units: connections to the units.
        prefix: beginning of the ids.
        node: this process's node, whose units come first.
        checkpoint: folder that `save` wrote to.

    Raises:
        CheckpointError: a file is missing or changed, or the checkpoint has another format, and the
            store is as before; or a file is malformed, and the partitions are empty.
        CapacityExceeded: the store is smaller than what was saved.
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


def _files(link: Link, units: UnitAccess, partition_id: str) -> Iterator[_File]:
    """Yield the partition's blocks with their bytes, in files of about `_FILE_BYTES`."""
    what = f"save_checkpoint(partition={partition_id!r})"
    blocks: list[p.SavedBlock] = []
    data: list[bytes] = []
    size = 0
    with link.session(what) as session:
        for samples, live in _block_groups(_live_blocks(link, partition_id)):
            # The rows are pinned while their bytes are read.
            fields = list({each.block.layout.name: None for each in live})
            answer = session.ask(p.Read(partition_id, samples, fields), p.ReadAnswer)
            current = {block.id for parts in answer.parts for block in parts.blocks}
            if current != {each.block.id for each in live}:
                raise CheckpointError(f"{what}: rows were overwritten during the save")
            for each in live:
                saved, rows = _saved(each)
                blocks.append(saved)
                data.append(units.read_rows(each.block, rows))
                size += len(data[-1])
                if size >= _FILE_BYTES:
                    yield _File(partition_id, blocks, data)
                    blocks, data, size = [], [], 0
        session.send(p.Unpin())
    if blocks:
        yield _File(partition_id, blocks, data)


def _live_blocks(link: Link, partition_id: str) -> list[_Live]:
    """Return the partition's blocks with their live rows."""
    live: dict[int, _Live] = {}
    with link.session(f"save_checkpoint(partition={partition_id!r})") as session:
        for sample_ids, fields in _sample_groups(link, partition_id):
            answer = session.ask(p.Read(partition_id, sample_ids, fields), p.ReadAnswer)
            for parts in answer.parts:
                places, rows = (numbers.tolist() for numbers in parts.locate())
                for place, row, sample_id in zip(places, rows, sample_ids, strict=True):
                    block = parts.blocks[place]
                    live.setdefault(block.id, _Live(block, {})).samples[row] = sample_id
        session.send(p.Unpin())
    return list(live.values())


def _block_groups(live: list[_Live]) -> Iterator[tuple[list[str], list[_Live]]]:
    """Yield samples and blocks of their values, so that one request pins many blocks.

    A group joins puts of the same fields, so all of its samples have blocks of the same fields. A
    sample that several puts wrote may be in several groups.
    """
    puts: dict[tuple[str, ...], list[_Live]] = {}
    for each in live:
        puts.setdefault(tuple(each.samples.values()), []).append(each)
    alike: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for sample_ids, blocks in puts.items():
        fields = tuple(sorted(each.block.layout.name for each in blocks))
        alike.setdefault(fields, []).append(sample_ids)
    for groups in alike.values():
        samples: list[str] = []
        together: list[_Live] = []
        for sample_ids in groups:
            samples += sample_ids
            together += puts[sample_ids]
            if len(samples) >= _SAMPLES_AT_ONCE:
                yield samples, together
                samples, together = [], []
        if samples:
            yield samples, together


def _saved(live: _Live) -> tuple[p.SavedBlock, Indices | None]:
    """Return a block as it is saved, and the numbers of its live rows; None for all."""
    numbers = sorted(live.samples)
    sample_ids = [live.samples[row] for row in numbers]
    layout = live.block.layout
    if len(numbers) == layout.rows:
        return p.SavedBlock(live.block.id, layout, b"", sample_ids), None
    rows = np.array(numbers, np.int64)
    return p.SavedBlock(live.block.id, layout, rows.tobytes(), sample_ids), rows


def _restore(link: Link, units: UnitAccess, node: str, file: _File) -> None:
    with link.session(f"load_checkpoint(partition={file.partition_id!r})") as session:
        request = p.BeginRestore(file.partition_id, file.blocks, node)
        answer = session.ask(request, p.RestoreAnswer)
        units.write_rows(
            (block, np.frombuffer(saved.rows, np.int64) if saved.rows else None, data)
            for block, saved, data in zip(answer.blocks, file.blocks, file.data, strict=True)
        )
        session.ask(p.CommitRestore(), type(None))


def _sample_groups(link: Link, partition_id: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yield all samples with their fields, in groups of samples with the same fields."""
    what = f"save_checkpoint(partition={partition_id!r})"
    start = 0
    while True:
        request = p.ListSamples(partition_id, start, _SAMPLES_AT_ONCE)
        page = link.ask(what, request, list[SampleState])
        groups: dict[tuple[str, ...], list[str]] = {}
        for sample in page:
            groups.setdefault(tuple(sorted(sample.fields)), []).append(sample.sample_id)
        for fields, sample_ids in groups.items():
            if fields:
                yield sample_ids, list(fields)
        start += len(page)
        if len(page) < _SAMPLES_AT_ONCE:
            return
