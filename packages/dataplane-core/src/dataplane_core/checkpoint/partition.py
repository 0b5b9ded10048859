"""Save and restore a partition: its declaration, its samples, and their acknowledgments.

It uses `DataPlaneClient` alone, so a partition can be restored into a store of another kind or
size. Needs the extra ``dataplane-core[checkpoint]``.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any  # Any: tags hold the caller's own primitives

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError
from tensordict import TensorDict

from dataplane_core.arguments import checked_int
from dataplane_core.checkpoint.folder import VerifiedFolder, open_folder, write_folder
from dataplane_core.checkpoint.packing import StoredColumn, pack, unpack
from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import (
    CheckpointError,
    DataPlaneError,
    InvalidRequestError,
    UnsupportedError,
    listed,
)
from dataplane_core.ledger.inspect import MAX_PAGE_ROWS, PartitionSummary, SampleState
from dataplane_core.meta import LEASE
from dataplane_core.schema import Form
from dataplane_core.tensors.object_codec import decode_struct, encode_object
from dataplane_core.tensors.rows import Column, leaves_of_rows, split_rows

_CLAIM = 10_000
"""Maximum samples that one claim of a restore acknowledges."""


class _Declaration(msgspec.Struct, frozen=True):
    """A partition in the manifest; ``not_put`` counts declared samples that were never put."""

    partition_id: str
    fields: list[str]
    not_put: int
    tasks: list[str]
    group_size: int | None
    enums: dict[str, list[str]]
    samples: int
    batches: int
    forms: dict[str, Form] = {}


# msgspec crashes if two threads use a type for the first time at once, so use it here first.
msgspec.msgpack.Decoder(_Declaration)


class _Block(msgspec.Struct, frozen=True):
    """The samples of a batch that have the same fields: their positions and the columns."""

    rows: list[int]
    columns: list[StoredColumn]


class _Batch(msgspec.Struct, frozen=True):
    """Samples in the order of first puts; ``acknowledged`` maps task to positions among them."""

    sample_ids: list[str]
    tags: list[dict[str, Any]]
    acknowledged: dict[str, list[int]]
    blocks: list[_Block]


def save_partition(
    client: DataPlaneClient, partition_id: str, folder: Path | str, *, batch: int = 1024
) -> Path:
    """Write a partition to ``folder``, replacing an older checkpoint once the new one is complete.

    Pause producers and consumers during the save. The save raises if samples are put, cleared or
    acknowledged meanwhile, but it does not detect an overwritten value. Leased and assigned samples
    are saved as unclaimed.

    Args:
        client: a client with an ``inspector``.
        partition_id: the partition.
        folder: a folder for this checkpoint alone.
        batch: samples held in memory at once, and stored in one pair of files; 1 to 10,000.

    Returns:
        The folder.

    Raises:
        CheckpointError: the checkpoint cannot be written, or the partition changed. No part of the
            checkpoint remains, and an older one is untouched.
        InvalidRequestError: (a ValueError) there is no such partition, ``batch`` is out of bounds,
            or a tag or object value cannot be stored; the error names it.
        UnsupportedError: the client cannot be inspected.
        DataPlaneError: the store did not answer a query or a read.
    """
    folder = Path(folder)
    batch = checked_int("save_partition", "batch", batch, minimum=1, maximum=MAX_PAGE_ROWS)
    before = _summary(client, partition_id)
    with write_folder(folder) as files:
        samples = batches = 0
        for states in _pages(client, partition_id, batch):
            index, tensors = _packed(client, partition_id, states)
            name = _name(batches)
            files.add(f"{name}.safetensors", safetensors.torch.save(tensors))
            files.add(
                f"{name}.msgpack", encode_object(f"tags of partition {partition_id!r}", index)
            )
            samples += len(states)
            batches += 1
        after = _summary(client, partition_id)
        if _change_marks(before) != _change_marks(after) or samples != after.present:
            raise CheckpointError(
                f"partition {partition_id!r}: it changed during the save; pause producers and "
                "consumers, then save again"
            )
        files.finish(
            msgspec.to_builtins(
                _Declaration(
                    partition_id=partition_id,
                    fields=[field.name for field in before.fields if field.declared],
                    not_put=max(0, before.declared - before.put),
                    tasks=[task.name for task in before.tasks],
                    group_size=before.group_size,
                    enums={name: list(values) for name, values in before.enums.items()},
                    samples=samples,
                    batches=batches,
                    forms={
                        field.name: field.form for field in before.fields if field.form is not None
                    },
                )
            )
        )
    return folder


def restore_partition(
    client: DataPlaneClient, folder: Path | str, partition_id: str | None = None
) -> int:
    """Restore a saved partition into a store, with the samples that each task acknowledged.

    Every file is verified before the first put. ``num_samples`` becomes the number of samples
    restored plus those still to be put; samples cleared before the save no longer count. Start
    consumers afterwards: a claim during the restore makes it fail.

    Args:
        client: a client with an ``inspector``, and with ``capabilities.named_claims`` if a task had
            acknowledged samples; its store may be of another kind or size.
        folder: the folder that `save_partition` wrote.
        partition_id: name to restore under; None means the saved name.

    Returns:
        The number of samples.

    Raises:
        CheckpointError: a file is missing, changed, unexpected or malformed; the error names it.
        InvalidRequestError: (a ValueError) the partition is registered already, or a consumer
            claimed during the restore.
        UnsupportedError: the client cannot be inspected, or cannot restore which samples were
            acknowledged.
        DataPlaneError: a put failed, for example because the store is full. After an error,
            nothing that was restored remains in the store.
    """
    checkpoint = open_folder(Path(folder))
    saved = _declaration(checkpoint)
    name = saved.partition_id if partition_id is None else partition_id
    for number in range(saved.batches):
        _restored(checkpoint, number, saved.forms)
    if any(summary.partition_id == name for summary in client.inspector.list_partitions()):
        raise InvalidRequestError(
            f"restore_partition: partition {name!r} is registered already; clear it with "
            "clear_samples(None, ...) or restore under another name"
        )
    try:
        _restore(client, checkpoint, saved, name)
    except BaseException:  # an interrupt too must leave no half-restored partition
        with contextlib.suppress(DataPlaneError), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            client.clear_samples(None, name, force=True)
        raise
    return saved.samples


def _restore(
    client: DataPlaneClient, checkpoint: VerifiedFolder, saved: _Declaration, name: str
) -> None:
    def declare(tasks: list[str]) -> None:
        declared = saved.samples + saved.not_put
        client.register_partition(
            name, saved.fields, declared, tasks, saved.group_size, saved.enums
        )

    declare([])  # the tasks follow after the puts, so that no consumer can claim earlier
    acknowledged: dict[str, list[str]] = {task: [] for task in saved.tasks}
    for number in range(saved.batches):
        index, blocks = _restored(checkpoint, number, saved.forms)
        for task, rows in index.acknowledged.items():
            acknowledged[task] += [index.sample_ids[row] for row in rows]
        client.put_samples(index.sample_ids, name, None, index.tags)
        for rows, fields in blocks:
            client.put_samples([index.sample_ids[row] for row in rows], name, fields)
    declare(saved.tasks)
    for task, sample_ids in acknowledged.items():
        for start in range(0, len(sample_ids), _CLAIM):
            _acknowledge(client, name, task, sample_ids[start : start + _CLAIM])


def _acknowledge(
    client: DataPlaneClient, partition_id: str, task: str, sample_ids: list[str]
) -> None:
    """Claim and acknowledge ``sample_ids``, by id because they may be parts of groups."""
    if not client.capabilities.named_claims:
        raise UnsupportedError(
            f"restore_partition({partition_id!r}): task {task!r} has acknowledged samples, and the "
            "client lacks capabilities.named_claims to claim them"
        )
    count = len(sample_ids)
    claimed = client.claim_meta(
        partition_id, task, [], count, blocking=False, sample_ids=sample_ids
    )
    if claimed.size < count:
        raise InvalidRequestError(
            f"restore_partition({partition_id!r}): task {task!r} could claim {claimed.size} of "
            f"{count} acknowledged samples; start its consumers after the restore"
        )
    if LEASE in claimed.extra_info:
        client.acknowledge(claimed)


def _packed(
    client: DataPlaneClient, partition_id: str, states: list[SampleState]
) -> tuple[_Batch, dict[str, torch.Tensor]]:
    rows_by_fields: dict[tuple[str, ...], list[int]] = {}
    for row, state in enumerate(states):
        rows_by_fields.setdefault(tuple(sorted(state.fields)), []).append(row)
    blocks: list[_Block] = []
    tensors: dict[str, torch.Tensor] = {}
    for fields, rows in rows_by_fields.items():
        columns: list[StoredColumn] = []
        if fields:
            ids = [states[row].sample_id for row in rows]
            answer = client.get_samples(ids, partition_id, list(fields))
            for name, column in split_rows(answer, len(ids)).items():
                stored, parts = pack(name, column)
                for part, tensor in parts.items():
                    tensors[_key(len(blocks), len(columns), part)] = tensor
                columns.append(stored)
        blocks.append(_Block(rows, columns))
    acknowledged = {
        task: [row for row, state in enumerate(states) if state.tasks[task] == "acknowledged"]
        for task in states[0].tasks
    }
    ids = [state.sample_id for state in states]
    return _Batch(ids, [state.tags for state in states], acknowledged, blocks), tensors


def _restored(
    checkpoint: VerifiedFolder, number: int, forms: Mapping[str, Form]
) -> tuple[_Batch, list[tuple[list[int], TensorDict]]]:
    """Read and decode one batch: its index, and the positions and fields of its puts."""
    name = _name(number)
    try:
        index = decode_struct(checkpoint.read(f"{name}.msgpack"), _Batch)
    except ValueError as error:
        raise _malformed(checkpoint, f"{name}.msgpack", error) from None
    try:
        tensors = safetensors.torch.load(checkpoint.read(f"{name}.safetensors"))
        puts: list[tuple[list[int], TensorDict]] = []
        for b, block in enumerate(index.blocks):
            leaves: dict[tuple[int, ...], dict[str, Any]] = {}
            for c, stored in enumerate(block.columns):
                prefix = _key(b, c, "")
                parts = {
                    key.removeprefix(prefix): tensor
                    for key, tensor in tensors.items()
                    if key.startswith(prefix)
                }
                column = unpack(stored, parts)
                formed = Column(column.kind, column.rows, forms.get(stored.name))
                for rows, leaf in leaves_of_rows(formed):
                    leaves.setdefault(tuple(rows), {})[stored.name] = leaf
            for within, named in leaves.items():
                fields = TensorDict(named, batch_size=[len(within)])
                puts.append(([block.rows[row] for row in within], fields))
    except (ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise _malformed(checkpoint, f"{name}.safetensors", error) from None
    return index, puts


def _declaration(checkpoint: VerifiedFolder) -> _Declaration:
    try:
        return msgspec.convert(checkpoint.metadata, _Declaration)
    except ValueError as error:
        raise _malformed(checkpoint, "manifest.json", error) from None


def _malformed(checkpoint: VerifiedFolder, name: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"checkpoint file {checkpoint.folder / name}: malformed: {error}")


def _summary(client: DataPlaneClient, partition_id: str) -> PartitionSummary:
    summaries = {summary.partition_id: summary for summary in client.inspector.list_partitions()}
    if partition_id not in summaries:
        raise InvalidRequestError(
            f"save_partition: partition {partition_id!r} is not registered; registered: "
            f"{listed(sorted(summaries)) or 'none'}"
        )
    return summaries[partition_id]


def _change_marks(summary: PartitionSummary) -> object:
    """Return the numbers that a put, a clear or an acknowledged claim changes."""
    acknowledged = {task.name: task.acknowledged for task in summary.tasks}
    return summary.put, summary.present, summary.reserved, summary.fields, acknowledged


def _pages(client: DataPlaneClient, partition_id: str, batch: int) -> Iterator[list[SampleState]]:
    start = 0
    while states := client.inspector.list_samples(partition_id, start=start, limit=batch):
        yield states
        start += len(states)


def _name(number: int) -> str:
    return f"batch-{number:06d}"


def _key(block: int, column: int, part: str) -> str:
    return f"{block}.{column}.{part}"
