"""`Manifest`: what one source published of one version, as sent to receivers.

ModelExpress leaves the manifest at the source and stores only its digest; to ModelExpress it is
opaque bytes. Here it is msgpack, decoded by msgspec into these types; nothing in it is executed.
Columns are little-endian arrays in bytes, since a large model has a hundred thousand shards.
"""

from __future__ import annotations

import hashlib
from typing import Literal, TypeVar

import msgspec
import xxhash

from refit_mx.errors import ProtocolError

FORMAT: Literal["refit-mx/1"] = "refit-mx/1"
BLOCK_BYTES = 1 << 20
"""Block size of a shard's digests; the last block may be shorter."""
DIGEST_BYTES = 16
"""Size of an XXH3-128 digest from `xxhash.xxh3_128_digest`."""

MAX_MANIFEST_BYTES = 256 << 20
"""Size limit of a manifest, and of its structure: about four million shards."""
MANIFEST_FRAME_BYTES = 1 << 16
"""Upper bound of the bytes that a gRPC response adds to a manifest."""

Scalar = str | int | float | bool
_Message = TypeVar("_Message")


class Registry(msgspec.Struct, frozen=True):
    """Description of how the published bytes were prepared.

    Attributes:
        compile_target: ``hf_raw``, ``deep_gemm_fp8``, ``cutlass_fp8``, or another name.
        compile_metadata: properties such as block size, scale dtype, row or column major.
    """

    compile_target: str
    compile_metadata: dict[str, Scalar] = {}


class NixlAgent(msgspec.Struct, frozen=True):
    """NIXL agent of the arena."""

    name: str  # name of the agent; never used again by another process
    metadata: bytes  # result of ``get_agent_metadata`` after the arena was registered
    memory: Literal["DRAM", "VRAM"]
    device_id: int  # device of the memory; 0 on a CPU


class SharedMemory(msgspec.Struct, frozen=True):
    """Shared memory of the arena, for processes on the same machine."""

    pid: int  # process id of the source, in its own PID namespace
    fd: int  # file descriptor of the memory in the source
    name: str  # name of the memory in /proc; random, so that no other memory matches


class TensorTable(msgspec.Struct, frozen=True):
    """The global tensors, usually the same for all sources of a version."""

    names: list[str]  # unique
    dtypes: list[str]  # dtype of each, a key of `refit_mx.layout.ITEM_SIZES`
    shapes: list[list[int]]  # shape of each complete tensor


class ShardColumns(msgspec.Struct, frozen=True):
    """The shards of this source, one per row; a tensor may have several, or none.

    A shard is stored in the arena as one contiguous C-ordered tensor of the shard's shape.
    """

    # Width D of ``start`` and ``shape``. A tensor with fewer axes is padded at the end with starts
    # of 0 and sizes of 1.
    axes: int
    tensor: bytes  # int32 (n,), index into the `TensorTable`
    start: bytes  # int64 (n, D), first element of the shard in the global tensor
    shape: bytes  # int64 (n, D), shape of the shard
    offset: bytes  # int64 (n,), position of its first byte in the arena


class Structure(msgspec.Struct, frozen=True):
    """The part of a manifest that is equal for all versions of one model and layout."""

    table_digest: bytes  # XXH3-128 of ``table``
    table: bytes  # encoded `TensorTable`
    shards: ShardColumns

    def encode(self) -> bytes:
        """Return the bytes to send."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Structure:
        """Decode the result of `encode`.

        Raises:
            ProtocolError: the data is not a structure.
        """
        return decoded(_structures, data, "structure of a manifest")


_NO_SHARDS = ShardColumns(1, b"", b"", b"", b"")


class Manifest(msgspec.Struct, frozen=True):
    """One source's part of one version.

    It may be sent in brief, without its `Structure`. A receiver that does not have the structure
    requests it from the source.

    Attributes:
        model_name: model in the control plane.
        version_id: version in the control plane.
        source_slot_id: the version's expected slot that this source fills.
        worker_id: the source's worker in the control plane; new for every process.
        incarnation: random id of the process; its source server refuses calls with another id.
        endpoint: host:port of the source server, which serves digests, and bytes over TCP.
        registry: how the bytes were prepared; None if unstated, so no filter matches.
        arena_address: address of the arena in the source's memory, for one-sided reads.
        arena_bytes: size of the arena.
        nixl: NIXL agent; None if the source has none.
        shm: shared memory; None if the arena cannot be shared, or sharing is off.
        table_digest: XXH3-128 of ``table``, so that equal tables are decoded once.
        table: encoded `TensorTable`.
        shards: shards of this source.
        digests: XXH3-128 of each block of each shard, `DIGEST_BYTES` each, in the order of shards.
        structure_digest: SHA-256 of the encoded `Structure`; empty if it cannot be requested.
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
    def is_brief(self) -> bool:
        """True if the table and the shards are missing."""
        return bool(self.structure_digest) and not self.table

    def brief(self) -> Manifest:
        """Return the manifest without table and shards; ``structure_digest`` identifies them."""
        return msgspec.structs.replace(self, table_digest=b"", table=b"", shards=_NO_SHARDS)

    def completed(self, structure: Structure) -> Manifest:
        """Return the manifest with a structure that the caller has checked by its digest."""
        return msgspec.structs.replace(
            self,
            table_digest=structure.table_digest,
            table=structure.table,
            shards=structure.shards,
        )

    def encode(self) -> bytes:
        """Return the bytes to send."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Decode the result of `encode`.

        Raises:
            ProtocolError: the data is not a manifest.
        """
        return decoded(_manifests, data, "manifest")


# Created at import, in one thread: if msgspec meets a type for the first time in two threads at
# once, the process crashes, and manifests are fetched in several threads.
_manifests = msgspec.msgpack.Decoder(Manifest)
_structures = msgspec.msgpack.Decoder(Structure)
_tables = msgspec.msgpack.Decoder(TensorTable)


def decoded(
    decoder: msgspec.msgpack.Decoder[_Message],
    data: bytes | bytearray,
    what: str,
    expected: str = FORMAT,
) -> _Message:
    """Return a decoded message; raise `ProtocolError` if the data is of another form."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"{what}: {error}; expected {expected}") from None


def manifest_digest(data: bytes) -> str:
    """Return the SHA-256 of a manifest in hexadecimal, as stored in the control plane."""
    return hashlib.sha256(data).hexdigest()


def encode_table(table: TensorTable) -> tuple[bytes, bytes]:
    """Return ``table_digest`` and ``table`` of a `Manifest`."""
    data = msgspec.msgpack.encode(table)
    return xxhash.xxh3_128_digest(data), data


def decode_table(data: bytes) -> TensorTable:
    """Decode the table from `encode_table`.

    Raises:
        ProtocolError: the data is not a table.
    """
    table = decoded(_tables, data, "manifest: its table")
    if not len(table.names) == len(table.dtypes) == len(table.shapes):
        raise ProtocolError(
            f"manifest: its table has {len(table.names)} names, {len(table.dtypes)} dtypes and "
            f"{len(table.shapes)} shapes; expected equal numbers"
        )
    return table
