"""`ShardTable`: what manifests from other machines may say, and what is refused."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_reference import Model, check_plan, publish, sharded

from refit_mx.errors import CompileTargetError, LayoutError, ProtocolError
from refit_mx.manifest import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    Manifest,
    Registry,
    ShardColumns,
    Structure,
    TensorTable,
    encode_table,
)
from refit_mx.plan import shards as shards_module
from refit_mx.plan.planner import plan_reads
from refit_mx.plan.shards import ShardTable
from refit_mx.plan.targets import replicated_target
from refit_mx.tensor_types import Box, TensorSpec

W = TensorSpec("w", "float32", (8, 3))
B = TensorSpec("b", "int16", (5,))


def good() -> list[Manifest]:
    """Two sources: each half of ``w``, and all of ``b``."""
    held = [[("w", box), ("b", Box.whole((5,)))] for box in sharded(W, 0, 2)]
    return publish(Model.of([W, B]), held).manifests


def with_columns(manifest: Manifest, **columns: object) -> Manifest:
    return msgspec.structs.replace(
        manifest, shards=msgspec.structs.replace(manifest.shards, **columns)
    )


def with_table(manifest: Manifest, table: TensorTable) -> Manifest:
    digest, data = encode_table(table)
    return msgspec.structs.replace(manifest, table_digest=digest, table=data)


def numbers(*values: int) -> bytes:
    return np.array(values, "<i8").tobytes()


def test_the_table_knows_every_tensor_and_every_shard() -> None:
    shards = ShardTable.of(good())
    assert shards.spec("w") == W
    assert shards.spec("b") == B
    assert shards.boxes(1).start.tolist() == [[4, 0, 0, 0], [0, 0, 0, 0]]
    assert shards.boxes(1).stop.tolist() == [[8, 3, 1, 1], [5, 1, 1, 1]]
    assert shards.boxes(1).nbytes.tolist() == [48, 10]
    with pytest.raises(LayoutError, match="'x' is not published: the 2 sources of version 'v1'"):
        shards.spec("x")


def test_a_manifest_that_travelled_makes_the_same_table() -> None:
    sent = [Manifest.decode(manifest.encode()) for manifest in good()]
    assert ShardTable.of(sent).structure == ShardTable.of(good()).structure


def test_the_digests_of_a_shard_are_those_of_its_blocks() -> None:
    rows = BLOCK_BYTES // 4096
    big = TensorSpec("big", "float32", (3 * rows + 1, 1024))
    small, none = TensorSpec("small", "uint8", (7,)), TensorSpec("none", "uint8", (0,))
    held = [[("small", Box.whole((7,))), ("none", Box.whole((0,))), ("big", Box.whole(big.shape))]]
    model = Model.of([big, small, none])
    shards = ShardTable.of(publish(model, held).manifests)
    assert shards.block_digests(0, 0) == xxhash.xxh3_128_digest(model.content["small"].tobytes())
    assert shards.block_digests(0, 1) == b""
    content = model.content["big"].tobytes()
    assert shards.block_digests(0, 2) == b"".join(
        xxhash.xxh3_128_digest(content[at : at + BLOCK_BYTES])
        for at in range(0, len(content), BLOCK_BYTES)
    )
    assert len(shards.block_digests(0, 2)) == 4 * DIGEST_BYTES


def test_the_next_version_of_the_same_layout_has_the_same_structure_and_its_plan_is_right() -> None:
    held = [[("w", box)] for box in sharded(W, 0, 2)]
    later = publish(Model.of([W], 1), held)
    later.manifests = [
        msgspec.structs.replace(m, version_id="v2", arena_address=1 << 20) for m in later.manifests
    ]
    one = ShardTable.of(publish(Model.of([W]), held).manifests)
    two = ShardTable.of(later.manifests)
    assert one.structure == two.structure
    target = replicated_target(W)
    check_plan(plan_reads(one, [target]), two, [target], later, Model.of([W], 1))


def named(manifests: list[Manifest], version: str = "v1") -> list[Manifest]:
    """With the names of their structures."""
    return [
        msgspec.structs.replace(
            m,
            version_id=version,
            structure_digest=hashlib.sha256(
                Structure(m.table_digest, m.table, m.shards).encode()
            ).digest(),
        )
        for m in manifests
    ]


def test_the_table_of_the_next_version_is_the_one_that_would_be_made_anew() -> None:
    one = ShardTable.of(named(good()))
    later = [
        msgspec.structs.replace(m, digests=bytes(len(m.digests)), arena_address=1 << 20)
        for m in named(good(), "v2")
    ]
    two, anew = one.of_next(later), ShardTable.of(later)
    assert two is not None
    assert (two.structure, two.manifests) == (anew.structure, anew.manifests)
    assert two.block_digests(0, 0) == anew.block_digests(0, 0) == bytes(DIGEST_BYTES)
    assert one.manifests[0].version_id == "v1"


@pytest.mark.parametrize(
    "change",
    [
        "worker_id",
        "source_slot_id",
        "endpoint",
        "arena_bytes",
        "offset",
        "order",
        "fewer",
        "unnamed",
    ],
)
def test_what_may_be_planned_otherwise_is_made_anew(change: str) -> None:
    manifests = named(good())
    one = ShardTable.of(manifests)
    first, second = named(good(), "v2")
    if change == "order":
        later = [second, first]
    elif change == "fewer":
        later = [first]
    elif change == "unnamed":
        later = [msgspec.structs.replace(first, structure_digest=b""), second]
    elif change == "offset":
        later = named([with_columns(first, offset=numbers(0, 0)), second], "v2")
    elif change == "arena_bytes":
        later = [msgspec.structs.replace(first, arena_bytes=first.arena_bytes + 4096), second]
    else:
        later = [msgspec.structs.replace(first, **{change: "other:1"}), second]
    assert one.of_next(later) is None


def test_the_next_version_is_checked_as_the_first_one_was() -> None:
    one = ShardTable.of(named(good()))
    first, second = named(good(), "v2")
    with pytest.raises(ProtocolError, match="bytes of digests"):
        one.of_next([msgspec.structs.replace(first, digests=first.digests[:-1]), second])
    with pytest.raises(LayoutError, match="expected one version"):
        one.of_next([first, msgspec.structs.replace(second, version_id="v3")])


@pytest.mark.parametrize("field", ["worker_id", "source_slot_id", "endpoint", "offset", "order"])
def test_another_source_or_layout_has_another_structure(field: str) -> None:
    manifests = good()
    if field == "order":
        others = manifests[::-1]
    elif field == "offset":
        others = [with_columns(manifests[0], offset=numbers(0, 0)), manifests[1]]
        assert others[0].shards.offset != manifests[0].shards.offset
    else:
        others = [msgspec.structs.replace(manifests[0], **{field: "other:1"}), manifests[1]]
    assert ShardTable.of(others).structure != ShardTable.of(manifests).structure


def test_replicas_are_decoded_once() -> None:
    held = [[("w", box)] for box in sharded(W, 0, 2) * 3]
    manifests = publish(Model.of([W]), held).manifests
    manifests = [
        msgspec.structs.replace(m, table=manifests[0].table, table_digest=manifests[0].table_digest)
        for m in manifests
    ]
    shards = ShardTable.of(manifests)
    assert len(shards.held) == 2
    assert shards.held_of_source == (0, 1, 0, 1, 0, 1)


def test_sources_are_no_replicas_because_a_digest_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of this kind can be forged; here all are equal."""
    monkeypatch.setattr(shards_module, "_boxes_digest", lambda manifest: b"forged")
    held = [[("w", box)] for box in sharded(W, 0, 4)]
    model = Model.of([W])
    sources = publish(model, held)
    shards = ShardTable.of(sources.manifests)
    check_plan(
        plan_reads(shards, [replicated_target(W)]), shards, [replicated_target(W)], sources, model
    )


def test_no_manifest_is_refused() -> None:
    with pytest.raises(LayoutError, match="no manifests"):
        ShardTable.of([])


@pytest.mark.parametrize("field", ["version_id", "model_name"])
def test_another_version_or_model_is_refused(field: str) -> None:
    one, two = good()
    with pytest.raises(LayoutError, match=r"worker 'worker-1' publishes .* expected one version"):
        ShardTable.of([one, msgspec.structs.replace(two, **{field: "other"})])


def test_sources_of_another_preparation_are_not_mixed() -> None:
    one, two = good()
    with pytest.raises(CompileTargetError, match="cutlass_fp8"):
        ShardTable.of([one, msgspec.structs.replace(two, registry=Registry("cutlass_fp8"))])


def test_a_worker_that_comes_twice_is_refused() -> None:
    one, _ = good()
    with pytest.raises(ProtocolError, match="'worker-0' comes twice"):
        ShardTable.of([one, one])


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        (TensorSpec("w", "int32", (8, 3)), "int32"),
        (TensorSpec("w", "float32", (8, 4)), r"\(8, 4\)"),
        (TensorSpec("w", "float32", (8, 3, 1)), r"\(8, 3, 1\)"),
    ],
)
def test_sources_that_disagree_on_a_tensor_are_refused(spec: TensorSpec, found: str) -> None:
    one = publish(Model.of([B, W]), [[("w", Box.whole(W.shape))]]).manifests[0]
    two = publish(Model.of([spec]), [[("w", Box.whole(spec.shape))]]).manifests[0]
    two = msgspec.structs.replace(two, worker_id="other")
    with pytest.raises(LayoutError, match=f"'w': worker 'worker-0' .* worker 'other' .*{found}"):
        ShardTable.of([one, two])


def test_tables_in_another_order_and_of_other_tensors_are_united() -> None:
    one = publish(Model.of([B, W]), [[("w", sharded(W, 0, 2)[0])]]).manifests[0]
    c = TensorSpec("c", "bool", (2,))
    two = publish(Model.of([W, c]), [[("c", Box.whole((2,))), ("w", sharded(W, 0, 2)[1])]])
    other = msgspec.structs.replace(two.manifests[0], worker_id="other")
    shards = ShardTable.of([one, other])
    assert [shards.spec(name) for name in ("w", "b", "c")] == [W, B, c]
    assert plan_reads(shards, [replicated_target(W), replicated_target(c)]).nbytes == 98


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (TensorTable(["w", "w"], ["bool", "bool"], [[8, 3], [5]]), "names a tensor twice"),
        (TensorTable(["w", "b"], ["float32", "complex"], [[8, 3], [5]]), "dtype 'complex'"),
        (TensorTable(["w", "b"], ["float32", "int16"], [[8, 3], [1] * 5]), "has 5 axes"),
        (TensorTable(["w", "b"], ["float32", "int16"], [[8, 3], [-5]]), "negative: -5"),
        (TensorTable(["w", "b"], ["float32", "int16"], [[8, 3], [2**64 - 1]]), "past 63 bits"),
        (TensorTable(["w", "b"], ["float32", "int16"], [[8, 3], [2**61]]), "at most"),
        (TensorTable(["w", "b"], ["float32", "int16"], [[2**32, 2**32], [5]]), "at most"),
        (TensorTable(["w", "b"], ["float32", "int16"], [[8, 3], [0, 2**62]]), "at most"),
        (TensorTable(["w"], ["float32"], [[8, 3]]), "of tensors 0 to 1; expected 0 to 0"),
        (TensorTable([], [], []), "the table has 0"),
        (TensorTable(["w", "b"], ["float32"], [[8, 3]]), "expected as many of each"),
    ],
)
def test_a_table_of_tensors_that_cannot_be_is_refused(table: TensorTable, message: str) -> None:
    one, _ = good()
    with pytest.raises(ProtocolError, match=message):
        ShardTable.of([with_table(one, table)])


def test_a_table_that_is_not_the_one_its_digest_says_is_refused() -> None:
    one, two = good()
    other = with_table(two, TensorTable(["w"], ["float32"], [[8, 3]]))
    forged = msgspec.structs.replace(other, table_digest=one.table_digest)
    with pytest.raises(ProtocolError, match="'worker-1': its table is not the one"):
        ShardTable.of([one, forged])
    with pytest.raises(ProtocolError, match="table"):
        ShardTable.of(
            [
                msgspec.structs.replace(
                    one, table=b"junk", table_digest=xxhash.xxh3_128_digest(b"junk")
                )
            ]
        )


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"axes": 5}, "have 5 axes"),
        ({"axes": -1}, "have -1 axes"),
        ({"tensor": bytes(7)}, "column 'tensor' has 7 bytes"),
        ({"start": bytes(31)}, "column 'start' has 31 bytes"),
        ({"shape": bytes(40)}, "column 'shape' has 40 bytes"),
        ({"offset": bytes(8)}, "column 'offset' has 8 bytes"),
        ({"axes": 1}, "column 'start'"),
        ({"tensor": np.array([0, 2], "<i4").tobytes()}, "of tensors 0 to 2"),
        ({"tensor": np.array([-1, 0], "<i4").tobytes()}, "of tensors -1 to 0"),
        ({"start": numbers(-1, 0, 0, 0)}, r"starts at \[-1"),
        ({"start": numbers(5, 0, 0, 0)}, "expected one inside"),
        ({"start": numbers(2**63 - 1, 0, 0, 0)}, "expected one inside"),
        ({"start": numbers(0, 0, 0, 1)}, "shard 1, of 'b'"),
        ({"shape": numbers(4, -3, 5, 1)}, "expected one inside"),
        ({"shape": numbers(4, 2**63 - 1, 5, 1)}, "expected one inside"),
        ({"shape": numbers(4, 3, 5, 0)}, "shard 1, of 'b'"),
        ({"shape": numbers(4, 3, 6, 1)}, "shard 1, of 'b'"),
        ({"offset": numbers(-1, 0)}, "inside the arena"),
        ({"offset": numbers(0, 2**63 - 1)}, "inside the arena"),
        ({"offset": numbers(10**6, 0)}, "inside the arena"),
    ],
)
def test_shards_that_cannot_be_are_refused(columns: dict[str, object], message: str) -> None:
    one, two = good()
    assert ShardTable.of([one, two])
    with pytest.raises(ProtocolError, match=message):
        ShardTable.of([with_columns(one, **columns), two])


def test_columns_of_too_few_axes_for_a_tensor_are_refused() -> None:
    one, _ = good()
    narrow = ShardColumns(1, bytes(4), numbers(0), numbers(8), numbers(0))
    with pytest.raises(ProtocolError, match="the columns have 1 axes"):
        ShardTable.of([msgspec.structs.replace(one, shards=narrow)])


def test_digests_that_are_too_few_or_too_many_are_refused() -> None:
    one, _ = good()
    for digests in (b"", one.digests[:-1], one.digests + bytes(DIGEST_BYTES)):
        with pytest.raises(ProtocolError, match="bytes of digests; expected 32, for 2 blocks"):
            ShardTable.of([msgspec.structs.replace(one, digests=digests)])


def test_an_arena_that_is_too_small_or_of_no_size_is_refused() -> None:
    one, _ = good()
    for size in (-1, 1 << 62):
        with pytest.raises(ProtocolError, match="expected below"):
            ShardTable.of([msgspec.structs.replace(one, arena_bytes=size)])
    with pytest.raises(ProtocolError, match="inside the arena of 10 bytes"):
        ShardTable.of([msgspec.structs.replace(one, arena_bytes=10)])


WILD = st.sampled_from([0, 1, -1, 2, 3, 5, 8, 100, 2**31, 2**62, 2**63 - 1, -(2**63)])


@settings(max_examples=300)
@given(st.data())
def test_whatever_the_columns_say_no_read_leaves_the_arena(data: st.DataObject) -> None:
    one, two = good()
    column = data.draw(st.sampled_from(["tensor", "start", "shape", "offset"]))
    values = np.frombuffer(getattr(one.shards, column), "<i4" if column == "tensor" else "<i8")
    values = values.copy()
    for _ in range(data.draw(st.integers(1, 2))):
        at, wild = data.draw(st.integers(0, len(values) - 1)), data.draw(WILD)
        values[at] = wild if column != "tensor" else np.int64(wild).astype(np.int32)
    changed = with_columns(one, **{column: values.tobytes()})
    changed = msgspec.structs.replace(
        changed, arena_bytes=data.draw(st.sampled_from([one.arena_bytes, 0, 2**61, 2**63 - 1]))
    )
    try:
        shards = ShardTable.of([changed, two])
    except ProtocolError:
        return
    try:
        plan = plan_reads(shards, [replicated_target(W), replicated_target(B)])
    except LayoutError:
        return
    for source, reads in plan.fetches:
        for src, _, run, n1, src1, _, n2, src2, _ in reads.rows.tolist():
            assert min(src, src1, src2) >= 0
            last = src + run + (n1 - 1) * src1 + (n2 - 1) * src2
            assert last <= shards.manifests[source].arena_bytes
    assert plan.nbytes == W.nbytes + B.nbytes
