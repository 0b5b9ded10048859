"""`Manifest`: what one source published as one version, as it travels to receivers.

ModelExpress keeps it at the source and names its digest in the control plane; to ModelExpress it is
opaque bytes. Ours is msgpack by msgspec: typed on decoding, and nothing in it is ever executed. The
columns are arrays in little-endian bytes, since a large model has a hundred thousand shards.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec
import xxhash

from refit_mx.errors import ProtocolError

FORMAT: Literal["refit-mx/1"] = "refit-mx/1"
BLOCK_BYTES = 1 << 20
"""A shard's digests are of blocks of this many of its bytes, the last one shorter."""
DIGEST_BYTES = 16
"""Of XXH3-128, as `xxhash.xxh3_128_digest` gives it."""

Scalar = str | int | float | bool
_Message = TypeVar("_Message")


class Registry(msgspec.Struct, frozen=True):
    """How the publisher prepared the bytes of this publish.

    Attributes:
        compile_target: ``hf_raw``, ``vllm_fused``, ``deep_gemm_fp8``, ``cutlass_fp8`` or a name
            that was registered.
        compile_metadata: such as block size, scale dtype, row or column major.
    """

    compile_target: str
    compile_metadata: dict[str, Scalar] = {}


class NixlAgent(msgspec.Struct, frozen=True):
    """How to reach the arena with NIXL.

    Attributes:
        name: of the agent; unique to the process, never used again by another.
        metadata: what the agent's ``get_agent_metadata`` gave after the arena was registered.
        memory: ``DRAM`` or ``VRAM``.
        device_id: of the memory; 0 on a CPU.
    """

    name: str
    metadata: bytes
    memory: Literal["DRAM", "VRAM"]
    device_id: int


class SharedMemory(msgspec.Struct, frozen=True):
    """How a process of the same machine maps the arena.

    Attributes:
        pid: of the source, in its own PID namespace.
        fd: of the memory, in the source.
        name: of the memory, as /proc shows it; random, so that no other memory is taken for it.
    """

    pid: int
    fd: int
    name: str


class TensorTable(msgspec.Struct, frozen=True):
    """The global tensors, the same for all sources of a version as a rule.

    Attributes:
        names: unique.
        dtypes: of each, one of `refit_mx.tensor_types.ITEM_SIZES`.
        shapes: of each whole tensor.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class ShardColumns(msgspec.Struct, frozen=True):
    """The shards of this source, one a row; a tensor may have several, or none.

    A shard lies in the arena as one contiguous C-ordered tensor of its own shape.

    Attributes:
        axes: width D of ``start`` and ``shape``; a tensor with fewer axes is filled up behind with
            starts of 0 and sizes of 1.
        tensor: int32 (n,), index into the `TensorTable`.
        start: int64 (n, D), where the shard begins in the global tensor.
        shape: int64 (n, D), of the shard.
        offset: int64 (n,), of its first byte from the beginning of the arena.
    """

    axes: int
    tensor: bytes
    start: bytes
    shape: bytes
    offset: bytes


class Structure(msgspec.Struct, frozen=True):
    """What stays the same from version to version as long as the model and its layout do.

    Attributes:
        table_digest: XXH3-128 of ``table``.
        table: a `TensorTable`, encoded.
        shards: of the source.
    """

    table_digest: bytes
    table: bytes
    shards: ShardColumns

    def encode(self) -> bytes:
        """As it travels."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Structure:
        """What `encode` made.

        Raises:
            ProtocolError: anything else.
        """
        return _decoded(_structures, data, "structure of a manifest")


_NO_SHARDS = ShardColumns(1, b"", b"", b"", b"")


class Manifest(msgspec.Struct, frozen=True):
    """One source's part of one version.

    It may travel in brief: without its `Structure`, which its source is asked for where it is not
    known yet.

    Attributes:
        model_name: of the control plane.
        version_id: of the control plane.
        source_slot_id: which of the version's expected slots this fills.
        worker_id: of the source in the control plane; new with every process.
        incarnation: of the process, random; a source server refuses calls for another.
        endpoint: host:port of its source server, which serves bytes over TCP and digests.
        registry: None if the publisher names none; then no filter matches.
        arena_address: address of the arena in the source's memory, for one-sided reads.
        arena_bytes: its size.
        nixl: None if the source has no NIXL.
        shm: None if the arena is in memory that cannot be shared, or is not to be.
        table_digest: XXH3-128 of ``table``, so that equal tables are decoded once.
        table: a `TensorTable`, encoded.
        shards: of this source.
        digests: XXH3-128 of each block of each shard, `DIGEST_BYTES` each, in the order of shards.
        structure_digest: SHA-256 of its `Structure`, encoded; empty if nobody is to ask for that.
    """

    model_name: str
    version_id: str
    source_slot_id: str
    worker_id: str
    incarnation: str
    endpoint: str
    registry: Registry | None
    arena_address: int
    arena_bytes: int
    nixl: NixlAgent | None
    table_digest: bytes
    table: bytes
    shards: ShardColumns
    digests: bytes
    shm: SharedMemory | None = None
    structure_digest: bytes = b""
    format: Literal["refit-mx/1"] = FORMAT

    @property
    def in_brief(self) -> bool:
        """Whether its table and shards are missing."""
        return bool(self.structure_digest) and not self.table

    def brief(self) -> Manifest:
        """Without table and shards; ``structure_digest`` says which they are."""
        return msgspec.structs.replace(self, table_digest=b"", table=b"", shards=_NO_SHARDS)

    def completed(self, structure: Structure) -> Manifest:
        """With table and shards, which the caller has seen to be those of ``structure_digest``."""
        return msgspec.structs.replace(
            self,
            table_digest=structure.table_digest,
            table=structure.table,
            shards=structure.shards,
        )

    def encode(self) -> bytes:
        """As it travels."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """What `encode` made.

        Raises:
            ProtocolError: anything else.
        """
        return _decoded(_manifests, data, "manifest")


# Made here, where nothing else runs: sources are asked for manifests in several threads, and when
# msgspec meets a type for the first time in two of them at once, the process ends.
_manifests = msgspec.msgpack.Decoder(Manifest)
_structures = msgspec.msgpack.Decoder(Structure)
_tables = msgspec.msgpack.Decoder(TensorTable)


def _decoded(decoder: msgspec.msgpack.Decoder[_Message], data: bytes, what: str) -> _Message:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"{what}: {error}; expected {FORMAT}") from None


def encode_table(table: TensorTable) -> tuple[bytes, bytes]:
    """``table_digest`` and ``table`` of a `Manifest`."""
    data = msgspec.msgpack.encode(table)
    return xxhash.xxh3_128_digest(data), data


def decode_table(data: bytes) -> TensorTable:
    """What `encode_table` made.

    Raises:
        ProtocolError: anything else.
    """
    try:
        table = _tables.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"manifest: its table: {error}") from None
    if not len(table.names) == len(table.dtypes) == len(table.shapes):
        raise ProtocolError(
            f"manifest: its table has {len(table.names)} names, {len(table.dtypes)} dtypes and "
            f"{len(table.shapes)} shapes; expected as many of each"
        )
    return table
