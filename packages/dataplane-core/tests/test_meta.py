"""KVBatchMeta: transforms keep rows, lengths and tags together."""

import pickle
from dataclasses import fields
from typing import Any  # Any: these tests pass values of all types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane_core import InvalidRequestError, KVBatchMeta


@st.composite
def metas(draw, partition="train"):
    ids = draw(st.lists(st.text(max_size=4), max_size=6))
    per_row = st.lists(st.integers(0, 99), min_size=len(ids), max_size=len(ids))
    return KVBatchMeta(
        partition,
        draw(st.none() | st.just("train")),
        ids,
        fields=draw(st.none() | st.lists(st.sampled_from("abc"), unique=True)),
        sequence_lengths=draw(st.none() | per_row),
        extra_info=draw(st.dictionaries(st.sampled_from("kl"), st.integers(), max_size=2)),
        tags=draw(st.none() | per_row.map(lambda values: [{"v": value} for value in values])),
    )


@st.composite
def metas_with_indices(draw):
    meta = draw(metas())
    if not meta.size:
        return meta, []
    return meta, draw(st.lists(st.integers(-meta.size, meta.size - 1), max_size=8))


def rows(meta):
    lengths = meta.sequence_lengths or [None] * meta.size
    tags = meta.tags or [None] * meta.size
    return list(zip(meta.sample_ids, lengths, tags, strict=True))


def shared(meta):
    return meta.partition_id, meta.task_name, meta.fields, meta.extra_info


def test_meta_has_seven_fields_of_which_three_are_required():
    assert [field.name for field in fields(KVBatchMeta)] == [
        "partition_id",
        "task_name",
        "sample_ids",
        "fields",
        "sequence_lengths",
        "extra_info",
        "tags",
    ]
    first, second = KVBatchMeta("p", None, []), KVBatchMeta("p", None, [])
    first.extra_info["k"] = 1
    assert second.extra_info == {}


def test_tags_of_another_length_are_refused_at_construction():
    with pytest.raises(ValueError, match="1 tags for 2 sample_ids"):
        KVBatchMeta("p", None, ["a", "b"], tags=[{}])


@pytest.mark.parametrize(
    "transform",
    [
        lambda meta: meta.subset([0]),
        lambda meta: meta.slice(0, 1),
        lambda meta: meta.drop([0]),
        lambda meta: meta.concat(KVBatchMeta("p", None, ["c"], sequence_lengths=[3, 4])),
        lambda meta: KVBatchMeta("p", None, ["c"], sequence_lengths=[5]).concat(meta),
    ],
)
def test_transforms_refuse_lengths_that_are_not_one_per_id(transform):
    meta = KVBatchMeta("p", None, ["a", "b"], sequence_lengths=[1])
    with pytest.raises(ValueError, match="sequence_lengths for"):
        transform(meta)
    assert meta.with_fields(["x"]).sequence_lengths == [1]


@given(metas())
def test_a_meta_survives_pickling(meta):
    assert pickle.loads(pickle.dumps(meta)) == meta


@given(metas_with_indices())
def test_subset_returns_rows_in_the_given_order(case):
    meta, indices = case
    taken = meta.subset(indices)
    assert rows(taken) == [rows(meta)[i] for i in indices]
    assert shared(taken) == shared(meta)


@given(metas(), st.integers(-7, 7), st.integers(-7, 7))
def test_slice_is_a_half_open_range(meta, start, stop):
    taken = meta.slice(start, stop)
    assert rows(taken) == rows(meta)[start:stop]
    assert shared(taken) == shared(meta)


@given(st.lists(metas(), min_size=1, max_size=4))
def test_concat_drops_lengths_or_tags_that_one_input_lacks(parts):
    joined = parts[0].concat(*parts[1:])
    assert joined.sample_ids == [i for part in parts for i in part.sample_ids]
    for name in ("sequence_lengths", "tags"):
        values = [getattr(part, name) for part in parts]
        expected = None if None in values else [v for value in values for v in value]
        assert getattr(joined, name) == expected
    assert shared(joined) == shared(parts[0])


def test_concat_of_another_partition_is_refused():
    with pytest.raises(ValueError, match="'val'"):
        KVBatchMeta("train", None, ["a"]).concat(KVBatchMeta("val", None, ["b"]))


@given(metas_with_indices())
def test_drop_is_the_complement_of_subset(case):
    meta, indices = case
    left = meta.drop(indices)
    gone = {i % meta.size for i in indices}
    kept = [row for i, row in enumerate(rows(meta)) if i not in gone]
    if kept:
        assert rows(left) == kept
        assert shared(left) == shared(meta)
    else:
        assert left is None


@given(metas(), st.lists(st.sampled_from("abcd")))
def test_with_fields_appends_each_name_once(meta, names):
    extended = meta.with_fields(names)
    assert extended.fields == list(dict.fromkeys([*(meta.fields or []), *names]))
    assert rows(extended) == rows(meta)


@given(metas())
def test_transforms_never_share_lists_or_extra_info(meta):
    all_rows = list(range(meta.size))
    for other in (meta.subset(all_rows), meta.slice(0, 9), meta.concat(), meta.with_fields([])):
        assert other.sample_ids is not meta.sample_ids
        assert other.extra_info is not meta.extra_info
        if meta.sequence_lengths is not None:
            assert other.sequence_lengths is not meta.sequence_lengths


def test_only_with_fields_copies_tag_dicts():
    meta = KVBatchMeta("p", None, ["a"], tags=[{"v": 1}])
    for other in (meta.subset([0]), meta.slice(0, 1), meta.concat()):
        assert other.tags[0] is meta.tags[0]
    assert meta.with_fields(["x"]).tags[0] is not meta.tags[0]


def test_stamp_tags_creates_tags_or_adds_to_them():
    meta = KVBatchMeta("p", None, ["a", "b"])
    meta.stamp_tags({"std": torch.tensor([0.5, 1.5])})
    meta.stamp_tags({"baseline": [1, 2]})
    assert meta.tags == [{"std": 0.5, "baseline": 1}, {"std": 1.5, "baseline": 2}]


def test_stamp_tags_of_a_wrong_length_writes_nothing():
    meta = KVBatchMeta("p", None, ["a", "b"])
    with pytest.raises(ValueError, match=r"'baseline'.*1 values for 2"):
        meta.stamp_tags({"std": [1, 2], "baseline": [1]})
    assert meta.tags is None


NOT_PLACES = [1.9, True, "1", None, np.bool_(True), torch.tensor(1.0), torch.tensor(True)]


@pytest.mark.parametrize("wrong", NOT_PLACES, ids=repr)
def test_index_that_is_not_an_int_is_refused(wrong: Any) -> None:
    meta = KVBatchMeta("p", None, ["a", "b", "c"])
    for call in (meta.subset, meta.drop):
        with pytest.raises(InvalidRequestError, match=r"indices\[1\].*expected an int"):
            call([0, wrong])
    for bounds in ((wrong, 2), (0, wrong)):
        if wrong is not None:
            with pytest.raises(InvalidRequestError, match=r"slice: (start|stop).*expected an int"):
                meta.slice(*bounds)


def test_indices_may_be_integers_of_any_library() -> None:
    meta = KVBatchMeta("p", None, ["a", "b", "c"])
    for places in ([2, 0], torch.tensor([2, 0]), np.array([2, 0]), (np.int8(2), torch.tensor(-3))):
        assert meta.subset(places).sample_ids == ["c", "a"]  # type: ignore[arg-type]  # also valid
        rest = meta.drop(places)  # type: ignore[arg-type]  # likewise
        assert rest is not None
        assert rest.sample_ids == ["b"]
    with pytest.raises(IndexError, match="subset: index 3 outside a batch of 3 samples"):
        meta.subset([3])


def test_transforms_convert_lengths_to_plain_ints() -> None:
    lengths: Any = torch.tensor([3, 1, 2])
    meta = KVBatchMeta("p", None, ["a", "b", "c"], sequence_lengths=lengths)
    for derived in (meta.subset([0, 2]), meta.slice(0, 2), meta.concat(meta), meta.drop([1])):
        assert derived is not None
        assert derived.sequence_lengths is not None
        assert set(map(type, derived.sequence_lengths)) == {int}


def test_description_is_one_line_without_values_of_tags():
    ids = [f"p{i}" for i in range(512)]
    meta = KVBatchMeta(
        "train", "score", ids, ["a"], [2] * 512, tags=[{"text": "secret"} for _ in ids]
    )
    assert repr(meta) == (
        "KVBatchMeta(partition='train', task='score', 512 samples ('p0', 'p1', …), fields=['a'], "
        "1024 tokens, tags=['text'])"
    )
    assert repr(KVBatchMeta("train", None, [])) == "KVBatchMeta(partition='train', 0 samples)"
    # Attributes may hold anything until they are checked.
    assert "0 tokens" not in repr(KVBatchMeta("train", None, ["a"], None, ["2"]))


def test_notebook_table_is_bounded_and_escaped():
    ids = ["<b>", *(f"p{i}" for i in range(20))]
    html = KVBatchMeta("train", None, ids, None, [1] * 21, tags=[{"<i>": "&"}] * 21)._repr_html_()
    assert "<b>" not in html
    assert "<i>" not in html
    assert "&lt;b&gt;" in html
    assert html.count("<tr>") == 1 + 8 + 1
    assert "13 more" in html
