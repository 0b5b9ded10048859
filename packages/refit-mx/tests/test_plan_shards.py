"""`ShardTable`: manifests from other machines that are accepted or refused.

The tests make columns of manifests by hand, since other machines may send any bytes.
So internals are imported.
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_reference import Model, check_plan, publish, sharded

from refit_mx import (
    Box,
    CompileTargetError,
    LayoutError,
    Manifest,
    ProtocolError,
    Registry,
    ShardTable,
    TensorSpec,
    plan_reads,
    replicated_target,
)
from refit_mx.manifest.format import (
    DIGEST_BYTES,
    ShardColumns,
    Structure,
    TensorTable,
    encode_table,
)
from refit_mx.plan import shards as shards_module

W = TensorSpec("w", "float32", (8, 3))
B = TensorSpec("b", "int16", (5,))


def good() -> list[Manifest]:
    """Return two sources; each has one half of ``w`` and all of ``b``."""
    held = [[("w", box), ("b", Box.full((5,)))] for box in sharded(W, 0, 2)]
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


def test_table_has_every_tensor_and_shard() -> None:
    shards = ShardTable.of(good())
    assert shards.spec("w") == W
    assert shards.spec("b") == B
    assert shards.boxes(1).start.tolist() == [[4, 0, 0, 0], [0, 0, 0, 0]]
    assert shards.boxes(1).stop.tolist() == [[8, 3, 1, 1], [5, 1, 1, 1]]
    assert shards.boxes(1).nbytes.tolist() == [48, 10]
    with pytest.raises(LayoutError, match="'x' is not published: the 2 sources of version 'v1'"):
        shards.spec("x")


def named(manifests: list[Manifest], version: str = "v1") -> list[Manifest]:
    """Return manifests with the digests of their structures."""
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
def test_table_is_rebuilt_after_a_change_that_affects_plans(change: str) -> None:
    manifests = named(good())
    table = ShardTable.of(manifests)
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
    assert table.for_next_version(later) is None


def test_next_version_is_checked_like_the_first() -> None:
    table = ShardTable.of(named(good()))
    first, second = named(good(), "v2")
    with pytest.raises(ProtocolError, match="bytes of digests"):
        table.for_next_version([msgspec.structs.replace(first, digests=first.digests[:-1]), second])
    with pytest.raises(LayoutError, match="expected one version"):
        table.for_next_version([first, msgspec.structs.replace(second, version_id="v3")])


def test_equal_box_digests_do_not_make_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    # Such digests can be forged; here all are equal.
    monkeypatch.setattr(shards_module, "_boxes_digest", lambda manifest: b"forged")
    held = [[("w", box)] for box in sharded(W, 0, 4)]
    model = Model.of([W])
    sources = publish(model, held)
    shards = ShardTable.of(sources.manifests)
    check_plan(
        plan_reads(shards, [replicated_target(W)]), shards, [replicated_target(W)], sources, model
    )


def test_empty_list_of_manifests_is_refused() -> None:
    with pytest.raises(LayoutError, match="no manifests"):
        ShardTable.of([])


@pytest.mark.parametrize("field", ["version_id", "model_name"])
def test_another_version_or_model_is_refused(field: str) -> None:
    first, second = good()
    with pytest.raises(LayoutError, match=r"worker 'worker-1' publishes .* expected one version"):
        ShardTable.of([first, msgspec.structs.replace(second, **{field: "other"})])


def test_sources_of_different_registries_are_not_mixed() -> None:
    first, second = good()
    with pytest.raises(CompileTargetError, match="cutlass_fp8"):
        ShardTable.of([first, msgspec.structs.replace(second, registry=Registry("cutlass_fp8"))])


def test_repeated_worker_is_refused() -> None:
    first, _ = good()
    with pytest.raises(ProtocolError, match="'worker-0' has two manifests"):
        ShardTable.of([first, first])


@pytest.mark.parametrize(
    ("spec", "difference"),
    [
        (TensorSpec("w", "int32", (8, 3)), "int32"),
        (TensorSpec("w", "float32", (8, 4)), r"\(8, 4\)"),
        (TensorSpec("w", "float32", (8, 3, 1)), r"\(8, 3, 1\)"),
    ],
)
def test_sources_that_disagree_on_a_tensor_are_refused(spec: TensorSpec, difference: str) -> None:
    first = publish(Model.of([B, W]), [[("w", Box.full(W.shape))]]).manifests[0]
    second = publish(Model.of([spec]), [[("w", Box.full(spec.shape))]]).manifests[0]
    second = msgspec.structs.replace(second, worker_id="other")
    with pytest.raises(
        LayoutError, match=f"'w': worker 'worker-0' .* worker 'other' .*{difference}"
    ):
        ShardTable.of([first, second])


def test_tables_with_different_tensors_and_orders_are_merged() -> None:
    first = publish(Model.of([B, W]), [[("w", sharded(W, 0, 2)[0])]]).manifests[0]
    c = TensorSpec("c", "bool", (2,))
    second = publish(Model.of([W, c]), [[("c", Box.full((2,))), ("w", sharded(W, 0, 2)[1])]])
    other = msgspec.structs.replace(second.manifests[0], worker_id="other")
    shards = ShardTable.of([first, other])
    assert [shards.spec(name) for name in ("w", "b", "c")] == [W, B, c]
    assert plan_reads(shards, [replicated_target(W), replicated_target(c)]).nbytes == 98


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (TensorTable(["w", "w"], ["bool", "bool"], [[8, 3], [5]]), "has a tensor twice"),
        (TensorTable(["w", "b"], ["float32", "complex"], [[8, 3], [5]]), "dtype 'complex'"),
        (TensorTable(["w", "b"], ["float32", "int16"], [[8, 3], [1] * 5]), "has 5 axes"),
        (TensorTable(["w", "b"], ["float32", "int16"], [[8, 3], [-5]]), "negative: -5"),
        (TensorTable(["w", "b"], ["float32", "int16"], [[8, 3], [2**64 - 1]]), "past 63 bits"),
        (TensorTable(["w", "b"], ["float32", "int16"], [[8, 3], [2**61]]), "at most"),
        (TensorTable(["w", "b"], ["float32", "int16"], [[2**32, 2**32], [5]]), "at most"),
        (TensorTable(["w", "b"], ["float32", "int16"], [[8, 3], [0, 2**62]]), "at most"),
        (TensorTable(["w"], ["float32"], [[8, 3]]), "of tensors 0 to 1; expected 0 to 0"),
        (TensorTable([], [], []), "the table has 0"),
        (TensorTable(["w", "b"], ["float32"], [[8, 3]]), "expected equal numbers"),
    ],
)
def test_table_of_invalid_tensors_is_refused(table: TensorTable, message: str) -> None:
    first, _ = good()
    with pytest.raises(ProtocolError, match=message):
        ShardTable.of([with_table(first, table)])


def test_table_with_another_digest_is_refused() -> None:
    first, second = good()
    other = with_table(second, TensorTable(["w"], ["float32"], [[8, 3]]))
    forged = msgspec.structs.replace(other, table_digest=first.table_digest)
    with pytest.raises(ProtocolError, match="'worker-1': its table does not match"):
        ShardTable.of([first, forged])
    with pytest.raises(ProtocolError, match="table"):
        ShardTable.of(
            [
                msgspec.structs.replace(
                    first, table=b"junk", table_digest=xxhash.xxh3_128_digest(b"junk")
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
        ({"start": numbers(0, 0, 0, 1)}, "shard 1, of 'b'"),
        ({"shape": numbers(4, 3, 6, 1)}, "shard 1, of 'b'"),
        ({"offset": numbers(-1, 0)}, "inside the arena"),
    ],
)
def test_invalid_shards_are_refused(columns: dict[str, object], message: str) -> None:
    first, second = good()
    assert ShardTable.of([first, second])
    with pytest.raises(ProtocolError, match=message):
        ShardTable.of([with_columns(first, **columns), second])


def test_columns_with_too_few_axes_are_refused() -> None:
    first, _ = good()
    narrow = ShardColumns(1, bytes(4), numbers(0), numbers(8), numbers(0))
    with pytest.raises(ProtocolError, match="the columns have 1 axes"):
        ShardTable.of([msgspec.structs.replace(first, shards=narrow)])


def test_too_few_or_too_many_digests_are_refused() -> None:
    first, _ = good()
    for digests in (b"", first.digests[:-1], first.digests + bytes(DIGEST_BYTES)):
        with pytest.raises(ProtocolError, match="bytes of digests; expected 32, for 2 blocks"):
            ShardTable.of([msgspec.structs.replace(first, digests=digests)])


def test_arena_of_invalid_size_is_refused() -> None:
    first, _ = good()
    for size in (-1, 1 << 62):
        with pytest.raises(ProtocolError, match="expected below"):
            ShardTable.of([msgspec.structs.replace(first, arena_bytes=size)])
    with pytest.raises(ProtocolError, match="inside the arena of 10 bytes"):
        ShardTable.of([msgspec.structs.replace(first, arena_bytes=10)])


WILD = st.sampled_from([0, 1, -1, 2, 3, 5, 8, 100, 2**31, 2**62, 2**63 - 1, -(2**63)])


@settings(max_examples=300)
@given(st.data())
def test_invalid_columns_never_cause_reads_outside_the_arena(data: st.DataObject) -> None:
    first, second = good()
    column = data.draw(st.sampled_from(["tensor", "start", "shape", "offset"]))
    values = np.frombuffer(getattr(first.shards, column), "<i4" if column == "tensor" else "<i8")
    values = values.copy()
    for _ in range(data.draw(st.integers(1, 2))):
        at, wild = data.draw(st.integers(0, len(values) - 1)), data.draw(WILD)
        values[at] = wild if column != "tensor" else np.int64(wild).astype(np.int32)
    changed = with_columns(first, **{column: values.tobytes()})
    changed = msgspec.structs.replace(
        changed, arena_bytes=data.draw(st.sampled_from([first.arena_bytes, 0, 2**61, 2**63 - 1]))
    )
    try:
        shards = ShardTable.of([changed, second])
    except ProtocolError:
        return
    try:
        plan = plan_reads(shards, [replicated_target(W), replicated_target(B)])
    except LayoutError:
        return
    for source, reads in plan.source_reads:
        for src, _, run, n1, src1, _, n2, src2, _ in reads.rows.tolist():
            assert min(src, src1, src2) >= 0
            last = src + run + (n1 - 1) * src1 + (n2 - 1) * src2
            assert last <= shards.manifests[source].arena_bytes
    assert plan.nbytes == W.nbytes + B.nbytes
