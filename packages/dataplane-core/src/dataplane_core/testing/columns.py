"""Contract tests of columns: padding depends on recorded forms, not on shapes."""

from __future__ import annotations

import uuid
from typing import Any  # Any: columns of a read

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataplane_core import DataPlaneClient, InvalidRequestError, KVBatchMeta, MissingDataError
from dataplane_core.schema import Form
from dataplane_core.tensors.rows import form_of
from dataplane_core.testing.storage import StoreFixtures, batch, jagged, same_bits

WIDTH = 6
IMAGES = ((1, 2, 3), (2, 2, 3), (0, 2, 3), (1, 4, 2))
"""Shapes of a sample's images: one, two, none, one of another resolution."""


def shaped(*rows: torch.Tensor) -> torch.Tensor:
    """Return a strided nested tensor, whose rows may differ in shape."""
    return torch.nested.nested_tensor(list(rows), layout=torch.strided)


@st.composite
def batches(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw puts of three samples each, with lengths and images."""
    return [
        {
            "lengths": draw(st.lists(st.integers(0, 4), min_size=3, max_size=3)),
            "images": draw(st.lists(st.sampled_from(IMAGES), min_size=3, max_size=3)),
        }
        for _ in range(draw(st.integers(1, 3)))
    ]


class ColumnContract(StoreFixtures):
    """Contract: `put_columns` and `get_columns` know which fields are per token."""

    form_examples = 25

    def test_padding_is_not_stored_but_added_by_the_reader(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        columns: dict[str, Any] = {
            "tokens": torch.arange(1, 10).reshape(3, 3),
            "hidden": torch.rand(3, 3, 2, dtype=torch.float32).to(torch.bfloat16),
            "dense": torch.rand(3, 2),
            "reward": torch.tensor([0.5, 1.0, 2.0]),
            "text": np.array(["one", {"two": [2]}, None], dtype=object),
        }
        ids, lengths, names = list("abc"), [1, 3, 0], list(columns)
        put = client.put_columns(
            ids, partition, columns, lengths=lengths, ragged=["tokens", "hidden"]
        )
        assert (put.sample_ids, put.fields) == (ids, names)
        stored = peer.get_samples(ids, partition, names)
        assert [row.tolist() for row in stored["tokens"].unbind()] == [[1], [4, 5, 6], []]
        assert stored["text"].tolist() == ["one", {"two": [2]}, None]
        answer: dict[str, Any] = peer.get_columns(
            ["b", "a", "b"], partition, names, pad_values={"tokens": -1}
        )
        assert list(answer) == names
        assert answer["tokens"].tolist() == [[4, 5, 6], [1, -1, -1], [4, 5, 6]]
        assert same_bits(answer["hidden"][0], columns["hidden"][1])
        assert same_bits(answer["hidden"][1, :1], columns["hidden"][0, :1])
        assert not answer["hidden"][1, 1:].any()
        assert same_bits(answer["dense"], columns["dense"][[1, 0, 1]])
        assert answer["reward"].tolist() == [1.0, 0.5, 1.0]
        assert answer["text"].tolist() == [{"two": [2]}, "one", {"two": [2]}]
        assert peer.get_columns([], partition, names) == {}

    @pytest.mark.parametrize("lengths", [[1, 3], [3, 3]], ids=["ragged", "of one length"])
    @pytest.mark.parametrize("pad_value", [1.5, float("nan"), 2**70])
    def test_pad_value_that_a_dtype_cannot_hold_is_refused(
        self, client: DataPlaneClient, partition: str, pad_value: float, lengths: list[int]
    ) -> None:
        tokens = {"tokens": torch.ones(2, 3, dtype=torch.int64)}
        client.put_columns(["a", "b"], partition, tokens, lengths=lengths, ragged=["tokens"])
        with pytest.raises(InvalidRequestError, match=r"that torch\.int64 can hold"):
            client.get_columns(
                ["a", "b"], partition, ["tokens"], pad_values={"tokens": pad_value}, width=4
            )

    @pytest.mark.parametrize(
        ("columns", "lengths", "named"),
        [
            ({"x": torch.ones(3, 2)}, None, "'x' has 3 rows; expected 2"),
            ({"x": torch.ones(2, 2)}, [1], "1 lengths for 2 rows of columns"),
            ({"x": torch.ones(2, 2)}, [1, 3], "row 1 has a length of 3; expected 0 to 2"),
            (
                {"x": torch.ones(2, 2)},
                [-1, 1],
                r"lengths\[0\] is -1; expected an int",
            ),
            ({"x": torch.ones(2)}, [1, 1], "'x' cannot be cut"),
        ],
        ids=["rows", "lengths", "too long", "negative", "flat"],
    )
    def test_columns_that_do_not_fit_write_nothing(
        self,
        client: DataPlaneClient,
        partition: str,
        columns: dict[str, Any],
        lengths: list[int] | None,
        named: str,
    ) -> None:
        with pytest.raises(InvalidRequestError, match=named):
            client.put_columns(
                ["a", "b"], partition, columns, lengths=lengths, ragged=[] if not lengths else ["x"]
            )
        with pytest.raises(MissingDataError):
            client.get_samples(["a"], partition, ["x"])

    def test_ragged_name_without_a_column_changes_no_field(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        client.put_columns(["a"], partition, {"y": torch.ones(1, 2)}, ragged=["x"])
        client.put_columns(["a"], partition, {"x": torch.ones(1, 3)})
        [column] = client.get_columns(["a"], partition, ["x"], width=6).values()
        assert column.shape == (1, 3)

    @pytest.mark.parametrize("shape", [(), (1,), (2,), (3, 2)], ids=str)
    def test_a_field_that_is_not_per_token_keeps_its_shape(
        self,
        client: DataPlaneClient,
        peer: DataPlaneClient,
        partition: str,
        shape: tuple[int, ...],
    ) -> None:
        values = torch.rand(2, *shape)
        client.put_columns(["a", "b"], partition, {"image_size": values})
        padded = peer.get_columns(["a", "b"], partition, ["image_size"], width=WIDTH)["image_size"]
        assert isinstance(padded, torch.Tensor)
        assert same_bits(padded, values)

    def test_a_field_per_token_by_name_is_padded_to_the_width(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        columns = {"advantages": torch.ones(2, 3), "sample_mask": torch.ones(2)}
        client.put_columns(["a", "b"], partition, columns)
        padded: dict[str, Any] = peer.get_columns(["a"], partition, list(columns), width=WIDTH)
        assert padded["advantages"].tolist() == [[1, 1, 1, 0, 0, 0]]
        assert padded["sample_mask"].tolist() == [1]

    def test_one_value_per_sample_is_not_padded(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        client.put_columns(["a", "b"], partition, {"advantages": torch.ones(2, 1)})
        with pytest.raises(InvalidRequestError, match="'advantages' was put dense in rows"):
            peer.get_columns(["a", "b"], partition, ["advantages"], width=WIDTH)
        padded: dict[str, Any] = peer.get_columns(["a", "b"], partition, ["advantages"])
        assert padded["advantages"].shape == (2, 1)

    @pytest.mark.parametrize("how", ["put_samples", "put_columns"])
    def test_ragged_rows_of_one_length_are_padded(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str, how: str
    ) -> None:
        rows = torch.tensor([[1, 2], [3, 4]])
        if how == "put_samples":
            client.put_samples(["a", "b"], partition, batch(2, x=jagged(*rows)))
        else:
            client.put_columns(["a", "b"], partition, {"x": rows}, lengths=[2, 2], ragged=["x"])
        padded: dict[str, Any] = peer.get_columns(["b"], partition, ["x"], width=4)
        assert padded["x"].tolist() == [[3, 4, 0, 0]]
        assert same_bits(peer.get_samples(["a", "b"], partition, ["x"])["x"], rows)

    def test_field_stays_per_token_for_later_batches(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        client.put_samples(["a"], partition, batch(1, x=jagged(torch.ones(2))))
        client.put_samples(["b"], partition, batch(1, x=torch.ones(1, 3), y=torch.ones(1, 3)))
        client.register_partition(partition, ["x", "y"], 8, ["logprob", "train"])
        padded: dict[str, Any] = peer.get_columns(["b"], partition, ["x", "y"], width=4)
        assert padded["x"].tolist() == [[1, 1, 1, 0]]
        assert padded["y"].tolist() == [[1, 1, 1]]

    def test_a_read_reports_the_forms_that_fields_have(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        fields = batch(
            2,
            x=jagged(torch.ones(2), torch.ones(2)),
            y=torch.ones(2, 2),
            images=shaped(torch.ones(1, 2), torch.ones(1, 2)),
            token_mask=torch.ones(2, 2),
        )
        client.put_samples(["a", "b"], partition, fields)
        forms: dict[str, Form] = {}
        client.get_columns(["b"], partition, list(fields.keys()), forms=forms)
        assert forms == {"x": "ragged", "images": "shaped"}
        if client.capabilities.inspection:
            summaries = {
                summary.partition_id: summary for summary in client.inspector.list_partitions()
            }
            kept = {field.name: field.form for field in summaries[partition].fields}
            assert {name: form for name, form in kept.items() if form} == forms

    def test_every_read_carries_the_forms_of_fields(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        images = [torch.ones(1, 4), torch.ones(0, 4), torch.ones(1, 4)]
        tokens = jagged(*torch.ones(3, 5))
        dense = torch.ones(3, 2)
        fields = batch(3, images=shaped(*images), tokens=tokens, dense=dense)
        client.put_samples(["a", "b", "c"], partition, fields)
        meta = KVBatchMeta(partition, None, [], ["images", "tokens", "dense"])
        for ids in (["a", "b"], ["a", "c"], ["b"]):  # of several lengths, and of one
            meta.sample_ids = ids
            reads = [
                peer.get_samples(ids, partition, list(fields.keys())),
                peer.get_data(meta),
                peer.get_columns(ids, partition, list(fields.keys()), width=WIDTH),
            ]
            for read in reads:
                forms = {name: form_of(read[name]) for name in fields.keys()}  # noqa: SIM118
                assert forms == {"images": "shaped", "tokens": "ragged", "dense": None}
                rows = [tuple(row.shape) for row in read["images"].unbind()]
                assert rows == [(0 if each == "b" else 1, 4) for each in ids]
                assert not read["images"].is_nested or read["images"].layout == torch.strided
            # What was read can be put again as it is.
            client.put_samples(ids, partition, reads[0])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float32], ids=str)
    def test_rows_of_different_shapes_keep_their_shapes(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str, dtype: torch.dtype
    ) -> None:
        rows = [torch.randint(0, 200, shape).to(dtype) for shape in IMAGES]
        ids = list("abcd")
        client.put_columns(ids, partition, {"images": shaped(*rows)})
        for picked in ([0, 1, 2, 3], [3, 0], [1, 2], [2], [0, 0]):
            named = [ids[i] for i in picked]
            read = peer.get_samples(named, partition, ["images"])["images"]
            column = peer.get_columns(named, partition, ["images"], width=WIDTH)["images"]
            assert isinstance(column, torch.Tensor)
            for answer in (read, column):
                unbound = answer.unbind()
                assert all(same_bits(a, rows[i]) for a, i in zip(unbound, picked, strict=True))

    def test_any_sequence_of_batches_reads_back_in_its_shapes(
        self, client: DataPlaneClient, peer: DataPlaneClient
    ) -> None:
        @settings(
            max_examples=self.form_examples,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(puts=batches(), data=st.data())
        def check(puts: list[dict[str, Any]], data: st.DataObject) -> None:
            partition = f"forms-{uuid.uuid4().hex[:8]}"
            client.register_partition(partition, [], 16, ["train"])
            tokens, images, scores = [], [], []
            for number, put in enumerate(puts):
                rows = [torch.randint(0, 99, (length,)) for length in put["lengths"]]
                fields = batch(
                    3,
                    tokens=jagged(*rows),
                    images=shaped(*(torch.rand(shape) for shape in put["images"])),
                    score=torch.rand(3, 1),
                )
                client.put_samples([f"{number}{letter}" for letter in "abc"], partition, fields)
                tokens += rows
                images += fields["images"].unbind()
                scores += fields["score"].unbind()
            ids = [f"{number}{letter}" for number in range(len(puts)) for letter in "abc"]
            picked = data.draw(st.lists(st.integers(0, len(ids) - 1), min_size=1, max_size=5))
            padded: dict[str, Any] = peer.get_columns(
                [ids[i] for i in picked], partition, ["tokens", "images", "score"], width=WIDTH
            )
            assert padded["tokens"].shape == (len(picked), WIDTH)
            assert padded["score"].shape == (len(picked), 1)
            for row_number, i in enumerate(picked):
                row = torch.nn.functional.pad(tokens[i], (0, WIDTH - len(tokens[i])))
                assert same_bits(padded["tokens"][row_number], row)
                assert same_bits(padded["score"][row_number], scores[i])
            for image, i in zip(padded["images"].unbind(), picked, strict=True):
                assert same_bits(image, images[i])
            client.clear_samples(None, partition)

        check()
