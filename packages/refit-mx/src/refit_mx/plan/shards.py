"""`ShardTable`: the shards of all sources of one version, checked and in columns.

Manifests come from other machines. A `ShardTable` contains only checked data: every shard is inside
its tensor and its source's arena, so a plan made from it reads nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from refit_mx.errors import CompileTargetError, LayoutError, ProtocolError
from refit_mx.layout import TensorSpec
from refit_mx.manifest.format import DIGEST_BYTES, Manifest
from refit_mx.manifest.reads import Int64s
from refit_mx.plan.held_boxes import HeldBoxes
from refit_mx.plan.tensor_columns import TensorColumns, merge_tables

_OFFSET = np.dtype("<i8")


@dataclass(frozen=True, eq=False)
class ShardTable:
    """The shards of one version. Sources are in the order of the manifests.

    Attributes:
        manifests: manifests of the sources.
        tensors: tensors that any source names.
        tensor_rows: row in ``tensors`` by name.
        held: boxes of the sources; replicas share an entry.
        held_of_source: index into ``held`` for each source.
        arena_offsets: for each source, int64 (shards of the source,): first byte of each shard in
            the arena.
        structure: digest of all that a plan depends on: sources, tensors, shards and their places
            in the arenas; not of the version, the digests, or the addresses of arenas.
    """

    manifests: tuple[Manifest, ...]
    tensors: TensorColumns
    tensor_rows: dict[str, int]
    held: tuple[HeldBoxes, ...]
    held_of_source: tuple[int, ...]
    arena_offsets: tuple[Int64s, ...]
    structure: bytes

    @classmethod
    def of(cls, manifests: Sequence[Manifest]) -> ShardTable:
        """Merge the manifests of one version: one per source, at least one.

        Raises:
            ProtocolError: a manifest is malformed: a column has a wrong length, a shard is outside
                its tensor or the arena, the number of digests is wrong, or the table does not match
                its digest; or a worker occurs twice.
            LayoutError: two manifests are of different versions or models, or have one tensor with
                different dtypes or shapes; or there is no manifest.
            CompileTargetError: two manifests differ in how their bytes were prepared.
        """
        _check_belonging(manifests)
        _check_tables(manifests)
        tables: dict[bytes, TensorColumns] = {}
        workers: list[str] = []
        for manifest in manifests:
            if manifest.table_digest not in tables:
                tables[manifest.table_digest] = TensorColumns.decode(
                    manifest.table, manifest.worker_id
                )
                workers.append(manifest.worker_id)
        tensors, tensor_rows, rows_of_tables = merge_tables(list(tables.values()), workers)
        rows_of_table = dict(zip(tables, rows_of_tables, strict=True))

        held: list[HeldBoxes] = []
        seen: dict[bytes, tuple[int, Manifest]] = {}
        held_of_source = []
        arena_offsets = []
        structure = xxhash.xxh3_128()
        for manifest in manifests:
            boxes_digest = _boxes_digest(manifest)
            index, twin = seen.get(boxes_digest, (-1, manifest))
            # This digest can be forged, so compare the boxes too.
            if index < 0 or _boxes_columns(manifest) != _boxes_columns(twin):
                index = len(held)
                rows = rows_of_table[manifest.table_digest]
                held.append(HeldBoxes.decode(manifest.shards, tensors, rows, manifest.worker_id))
                seen[boxes_digest] = (index, manifest)
            held_of_source.append(index)
            arena_offsets.append(_arena_offsets(manifest, held[index]))
            for part in (manifest.source_slot_id, manifest.worker_id, manifest.endpoint):
                structure.update(part.encode() + b"\0")
            structure.update(boxes_digest)
            structure.update(xxhash.xxh3_128_digest(manifest.shards.offset))
        return cls(
            tuple(manifests),
            tensors,
            tensor_rows,
            tuple(held),
            tuple(held_of_source),
            tuple(arena_offsets),
            structure.digest(),
        )

    def for_next_version(self, manifests: Sequence[Manifest]) -> ShardTable | None:
        """Return the same columns with the manifests of another version of the same sources.

        Return None if structures, sources, their order or sizes of arenas have changed, or a
        manifest has no structure digest.

        Raises:
            ProtocolError, LayoutError, CompileTargetError: for the reasons of `of`.
        """
        if len(manifests) != len(self.manifests) or any(
            _fixed_fields(new) != _fixed_fields(old) or not new.structure_digest
            for new, old in zip(manifests, self.manifests, strict=True)
        ):
            return None
        _check_belonging(manifests)
        for manifest, held in zip(manifests, self.held_of_source, strict=True):
            _check_digests(manifest, self.held[held])
        return replace(self, manifests=tuple(manifests))

    def spec(self, tensor: str) -> TensorSpec:
        """Return the spec of a published tensor.

        Raises:
            LayoutError: no source names it.
        """
        row = self.tensor_rows.get(tensor)
        if row is None:
            raise LayoutError(
                f"{tensor!r} is not published: the {len(self.manifests)} sources of version "
                f"{self.manifests[0].version_id!r} name {len(self.tensor_rows)} tensors"
            )
        return self.tensors.spec(row)

    def boxes(self, source: int) -> HeldBoxes:
        """Return the boxes of a source, in the order of its manifest's shards."""
        return self.held[self.held_of_source[source]]

    def block_digests(self, source: int, shard: int) -> bytes:
        """Return the published digests of the blocks of a source's shard, `DIGEST_BYTES` each."""
        before = self.boxes(source).blocks_before
        return self.manifests[source].digests[
            int(before[shard]) * DIGEST_BYTES : int(before[shard + 1]) * DIGEST_BYTES
        ]


def _check_belonging(manifests: Sequence[Manifest]) -> None:
    """Check that manifests are of one version and one registry, each of a different worker."""
    if not manifests:
        raise LayoutError("no manifests: no source of the version answered; expected at least one")
    first = manifests[0]
    seen: set[str] = set()
    for manifest in manifests:
        who = f"worker {manifest.worker_id!r}"
        version = (manifest.model_name, manifest.version_id)
        if version != (first.model_name, first.version_id):
            raise LayoutError(
                f"{who} publishes version {version[1]!r} of model {version[0]!r}, worker "
                f"{first.worker_id!r} version {first.version_id!r} of model "
                f"{first.model_name!r}; expected one version"
            )
        if manifest.registry != first.registry:
            raise CompileTargetError(
                f"{who} publishes {manifest.registry}, worker {first.worker_id!r} "
                f"{first.registry}; a plan needs sources with one registry, so filter them first"
            )
        if manifest.worker_id in seen:
            raise ProtocolError(f"{who} has two manifests; expected one")
        seen.add(manifest.worker_id)


def _check_tables(manifests: Sequence[Manifest]) -> None:
    """Check the digest of each table object once, since many manifests share a table."""
    checked: dict[int, bytes] = {}
    for manifest in manifests:
        digest = checked.get(id(manifest.table))
        if digest is None:
            digest = checked[id(manifest.table)] = xxhash.xxh3_128_digest(manifest.table)
        if digest != manifest.table_digest:
            raise ProtocolError(
                f"manifest of worker {manifest.worker_id!r}: its table does not match its digest"
            )


def _fixed_fields(manifest: Manifest) -> tuple[str, str, str, int, bytes]:
    """Return the fields that a plan depends on, for a manifest with a structure digest."""
    return (
        manifest.source_slot_id,
        manifest.worker_id,
        manifest.endpoint,
        manifest.arena_bytes,
        manifest.structure_digest,
    )


def _boxes_digest(manifest: Manifest) -> bytes:
    digest = xxhash.xxh3_128(manifest.table_digest)
    shards = manifest.shards
    for column in (shards.tensor, shards.start, shards.shape):
        digest.update(f"{shards.axes} {len(column)} ".encode())
        digest.update(column)
    return digest.digest()


def _boxes_columns(manifest: Manifest) -> tuple[bytes, int, bytes, bytes, bytes]:
    shards = manifest.shards
    return manifest.table_digest, shards.axes, shards.tensor, shards.start, shards.shape


def _check_digests(manifest: Manifest, boxes: HeldBoxes) -> None:
    blocks = int(boxes.blocks_before[-1])
    if len(manifest.digests) != blocks * DIGEST_BYTES:
        raise ProtocolError(
            f"manifest of worker {manifest.worker_id!r}: {len(manifest.digests)} bytes of digests; "
            f"expected {blocks * DIGEST_BYTES}, for {blocks} blocks"
        )


def _arena_offsets(manifest: Manifest, boxes: HeldBoxes) -> Int64s:
    """Return a source's offsets, checked together with all that depends on its boxes."""
    label = f"manifest of worker {manifest.worker_id!r}"
    column = manifest.shards.offset
    if len(column) != len(boxes) * _OFFSET.itemsize:
        raise ProtocolError(
            f"{label}: column 'offset' has {len(column)} bytes; "
            f"expected {len(boxes) * _OFFSET.itemsize}, for {len(boxes)} shards"
        )
    _check_digests(manifest, boxes)
    if not 0 <= manifest.arena_bytes < 1 << 62:
        raise ProtocolError(f"{label}: arena_bytes {manifest.arena_bytes}; expected below 2**62")
    offsets = np.frombuffer(column, _OFFSET).astype(np.int64, copy=False)
    outside = (offsets < 0) | (offsets > manifest.arena_bytes - boxes.nbytes)
    if outside.any():
        row = int(np.flatnonzero(outside)[0])
        raise ProtocolError(
            f"{label}: shard {row} has {boxes.nbytes[row]} bytes from offset {offsets[row]}; "
            f"expected a place inside the arena of {manifest.arena_bytes} bytes"
        )
    return offsets
