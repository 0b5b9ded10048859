"""A partition on disk and back: its declaration, its samples, and what each task has settled.

Written against `DataPlaneClient` alone, so a partition saved from one store can be restored into
another of any kind or size. Needs the extra ``dataplane-core[checkpoint]``.
"""

from __future__ import annotations

import contextlib
import secrets
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any  # Any: tags hold the caller's own primitives

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError
from tensordict import TensorDict

from dataplane_core.checkpoint_columns import StoredColumn, pack, unpack
from dataplane_core.checkpoint_folder import WholeFolder, open_whole, write_whole
from dataplane_core.client import LEASE, DataPlaneClient
from dataplane_core.errors import (
    CheckpointError,
    DataPlaneError,
    InvalidRequestError,
    UnsupportedError,
    listed,
)
from dataplane_core.ledger.inspect import PartitionSummary, SampleState
from dataplane_core.ledger.selection import TagFilter
from dataplane_core.object_codec import decode_struct, encode_object
from dataplane_core.rows import Column, leaves_of_rows, split_rows
from dataplane_core.schema import Form

_CLAIM = 10_000
"""Samples that one claim of a restore settles."""


class _Declaration(msgspec.Struct, frozen=True):
    """What the manifest says of a partition; ``unput`` are the declared samples still to come."""

    partition_id: str
    fields: list[str]
    unput: int
    tasks: list[str]
    group_size: int | None
    enums: dict[str, list[str]]
    samples: int
    batches: int
    forms: dict[str, Form] = {}


# When msgspec meets a type for the first time in two threads at once, the process ends.
msgspec.msgpack.Decoder(_Declaration)


class _Block(msgspec.Struct, frozen=True):
    """The samples of a batch that have the same fields: their places and the fields."""

    places: list[int]
    columns: list[StoredColumn]


class _Batch(msgspec.Struct, frozen=True):
    """Samples in the order of first puts; ``settled`` holds, for each task, places of them."""

    sample_ids: list[str]
    tags: list[dict[str, Any]]
    settled: dict[str, list[int]]
    blocks: list[_Block]


def save_partition(
    client: DataPlaneClient, partition_id: str, folder: Path | str, *, batch: int = 1024
) -> Path:
    """Write a partition into ``folder``, in place of an older checkpoint once it is complete.

    Pause the producers meanwhile; a put, clear or claim settled during the save is noticed and
    refused, an overwritten value is not. What is leased or assigned is saved as not claimed.

    Args:
        client: a client with an inspector (``list_partitions``, ``list_samples``).
        partition_id: the partition.
        folder: the checkpoint's own folder.
        batch: samples in memory at once, and in one file; at least 1.

    Returns:
        The folder.

    Raises:
        CheckpointError: it cannot be written, or the partition changed. Nothing of it is left, and
            an older checkpoint is untouched.
        InvalidRequestError: (a ValueError) there is no such partition, or a value of an object
            column or a tag cannot be stored; names it.
        UnsupportedError: the client cannot be inspected.
    """
    folder = Path(folder)
    if batch < 1:
        raise InvalidRequestError(f"save_partition: batch {batch}; expected at least 1")
    before = _summary(client, partition_id)
    with write_whole(folder) as files:
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
        if _standing(before) != _standing(after) or samples != after.present:
            raise CheckpointError(
                f"partition {partition_id!r}: it changed while it was saved; pause those who put, "
                "clear and claim, and save again"
            )
        files.finish(
            msgspec.to_builtins(
                _Declaration(
                    partition_id=partition_id,
                    fields=[field.name for field in before.fields if field.declared],
                    unput=max(0, before.declared - before.put),
                    tasks=[task.name for task in before.tasks],
                    group_size=before.group_size,
                    enums={
                        name: list(values) for name, values in getattr(before, "enums", {}).items()
                    },
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
    """Put a saved partition into a store, with what each task has settled.

    Every file is verified before the first put. ``num_samples`` becomes the samples restored plus
    those that were still to be put; samples cleared before the save are no longer counted.
    Consumers come afterwards: one that claims while the restore runs makes it fail.

    Args:
        client: a client whose claims know ``where``; the store may be of another kind or size.
        folder: what `save_partition` wrote.
        partition_id: name to restore under; None is the name saved.

    Returns:
        The number of samples.

    Raises:
        CheckpointError: naming the file that is missing, changed, extra or not understood.
        InvalidRequestError: (a ValueError) the partition is registered already.
        UnsupportedError: the client cannot settle what was settled.
        DataPlaneError: a put failed, for example for want of room. Whatever is raised, nothing of
            the partition is left in the store.
    """
    whole = open_whole(Path(folder))
    saved = _declaration(whole)
    name = saved.partition_id if partition_id is None else partition_id
    for number in range(saved.batches):
        _restored(whole, number, saved.forms)
    if any(summary.partition_id == name for summary in client.list_partitions()):
        raise InvalidRequestError(
            f"restore_partition: partition {name!r} is registered already; clear it with "
            "clear_samples(None, ...) or restore under another name"
        )
    try:
        _restore(client, whole, saved, name)
    except BaseException:
        with contextlib.suppress(DataPlaneError), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            client.clear_samples(None, name, force=True)
        raise
    return saved.samples


def _restore(client: DataPlaneClient, whole: WholeFolder, saved: _Declaration, name: str) -> None:
    def declare(tasks: list[str], group_size: int | None) -> None:
        client.register_partition(
            name, saved.fields, saved.samples + saved.unput, tasks, group_size, saved.enums
        )

    # Nobody can claim before all is there; and groups come last, because what was settled of a
    # group need not be the whole group.
    declare([], None)
    marks = {task: f"{secrets.token_hex(8)}:{task}" for task in saved.tasks}
    settled: dict[str, set[str]] = {task: set() for task in saved.tasks}
    marked: list[int] = []
    for number in range(saved.batches):
        index, blocks = _restored(whole, number, saved.forms)
        tags = [dict(tag) for tag in index.tags]
        for task, places in index.settled.items():
            settled[task].update(index.sample_ids[place] for place in places)
            for place in places:
                tags[place][marks[task]] = True
        if any(index.settled.values()):
            marked.append(number)
        client.put_samples(index.sample_ids, name, None, tags)
        for places, fields in blocks:
            client.put_samples([index.sample_ids[place] for place in places], name, fields)
    declare(saved.tasks, None)
    for task, sample_ids in settled.items():
        _settle(client, name, task, marks[task], sample_ids)
    for number in marked:
        index, _ = _restored(whole, number, saved.forms)
        client.put_samples(index.sample_ids, name, None, index.tags)
    if saved.group_size is not None:
        declare(saved.tasks, saved.group_size)


def _settle(
    client: DataPlaneClient, partition_id: str, task: str, mark: str, sample_ids: set[str]
) -> None:
    """Claim exactly ``sample_ids``, which carry the tag ``mark``, for good."""
    left = set(sample_ids)
    while left:
        claimed = client.claim_meta(
            partition_id,
            task,
            [],
            min(_CLAIM, len(left)),
            blocking=False,
            where=[TagFilter(mark, "==", True)],
        )
        strange = set(claimed.sample_ids) - left
        if strange or not claimed.size:
            raise UnsupportedError(
                f"restore_partition({partition_id!r}): task {task!r} claimed "
                f"{listed(sorted(strange)) or 'nothing'} where {listed(sorted(left))} were to be "
                "settled; either the client's claims do not filter by tags or a consumer claimed "
                "meanwhile"
            )
        if LEASE in claimed.extra_info:
            client.acknowledge(claimed)
        left.difference_update(claimed.sample_ids)


def _packed(
    client: DataPlaneClient, partition_id: str, states: list[SampleState]
) -> tuple[_Batch, dict[str, torch.Tensor]]:
    together: dict[tuple[str, ...], list[int]] = {}
    for place, state in enumerate(states):
        together.setdefault(tuple(sorted(state.fields)), []).append(place)
    blocks: list[_Block] = []
    tensors: dict[str, torch.Tensor] = {}
    for fields, places in together.items():
        columns: list[StoredColumn] = []
        if fields:
            ids = [states[place].sample_id for place in places]
            answer = client.get_samples(ids, partition_id, list(fields))
            for name, column in split_rows(answer, len(ids)).items():
                stored, parts = pack(name, column)
                for part, tensor in parts.items():
                    tensors[_key(len(blocks), len(columns), part)] = tensor
                columns.append(stored)
        blocks.append(_Block(places, columns))
    settled = {
        task: [place for place, state in enumerate(states) if state.tasks[task] == "settled"]
        for task in states[0].tasks
    }
    ids = [state.sample_id for state in states]
    return _Batch(ids, [state.tags for state in states], settled, blocks), tensors


def _restored(
    whole: WholeFolder, number: int, forms: Mapping[str, Form]
) -> tuple[_Batch, list[tuple[list[int], TensorDict]]]:
    """Read and understand one batch: its index, and the places and fields of its puts."""
    name = _name(number)
    try:
        index = decode_struct(whole.read(f"{name}.msgpack"), _Batch)
    except ValueError as error:
        raise _not_understood(whole, f"{name}.msgpack", error) from None
    try:
        tensors = safetensors.torch.load(whole.read(f"{name}.safetensors"))
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
                for places, leaf in leaves_of_rows(formed):
                    leaves.setdefault(tuple(places), {})[stored.name] = leaf
            for within, named in leaves.items():
                fields = TensorDict(named, batch_size=[len(within)])
                puts.append(([block.places[place] for place in within], fields))
    except (ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise _not_understood(whole, f"{name}.safetensors", error) from None
    return index, puts


def _declaration(whole: WholeFolder) -> _Declaration:
    try:
        return msgspec.convert(whole.about, _Declaration)
    except ValueError as error:
        raise _not_understood(whole, "manifest.json", error) from None


def _not_understood(whole: WholeFolder, name: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"checkpoint file {whole.folder / name}: not understood: {error}")


def _summary(client: DataPlaneClient, partition_id: str) -> PartitionSummary:
    summaries = {summary.partition_id: summary for summary in client.list_partitions()}
    if partition_id not in summaries:
        raise InvalidRequestError(
            f"save_partition: partition {partition_id!r} is not registered; registered: "
            f"{listed(sorted(summaries)) or 'none'}"
        )
    return summaries[partition_id]


def _standing(summary: PartitionSummary) -> object:
    """What a put, a clear or a settled claim changes."""
    settled = {task.name: task.settled for task in summary.tasks}
    return summary.put, summary.present, summary.reserved, summary.fields, settled


def _pages(client: DataPlaneClient, partition_id: str, batch: int) -> Iterator[list[SampleState]]:
    start = 0
    while states := client.list_samples(partition_id, start=start, limit=batch):
        yield states
        start += len(states)


def _name(number: int) -> str:
    return f"batch-{number:06d}"


def _key(block: int, column: int, part: str) -> str:
    return f"{block}.{column}.{part}"
