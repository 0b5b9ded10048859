"""Contract tests of invalid arguments: every client handles them in the same way.

The in-memory client is the reference. Each call is made on both clients. Either both accept it and
return the same, or both refuse it with the same error type and store nothing.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any  # Any: these tests pass values of all types

import numpy as np
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from dataplane_core import (
    DataPlaneClient,
    DataPlaneError,
    InMemoryDataPlaneClient,
    KVBatchMeta,
    MissingDataError,
    PartitionNotFoundError,
    UnsupportedError,
)
from dataplane_core.testing.storage import StoreFixtures, batch, same_bits

LONE_SURROGATE = "\ud800"
"""Lone surrogate: a str that UTF-8 cannot encode."""


class Role(enum.StrEnum):
    USER = "user"


class Raising:
    """A value whose repr, length and truth raise."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __len__(self) -> int:
        raise RuntimeError("no len")

    def __bool__(self) -> bool:
        raise RuntimeError("no bool")


@dataclass
class Point:
    x: int
    y: list[int]


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


_NO_DICT: Any = None
COMPLEX = torch.tensor([1 + 2j, 3 - 1j])
# Factories of values. Each use makes a new value: a call may consume an iterator or change a list.
VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "lone surrogate": lambda: LONE_SURROGATE,
    "empty": lambda: "",
    "str": lambda: "a",
    "np.str_": lambda: np.str_("a"),
    "str enum": lambda: Role.USER,
    "bytes": lambda: b"a",
    "int": lambda: 3,
    "zero": lambda: 0,
    "negative": lambda: -4,
    "65 bits": lambda: 2**64,
    "a thousand bits": lambda: 2**1000,
    "bool": lambda: True,
    "np.bool_": lambda: np.bool_(True),
    "float": lambda: 2.0,
    "NaN": lambda: float("nan"),
    "infinity": lambda: float("inf"),
    "number in a str": lambda: "16",
    "np.int64": lambda: np.int64(2),
    "np.float32": lambda: np.float32(1.5),
    "np.longdouble": lambda: np.longdouble(1.5),
    "np.datetime64": lambda: np.datetime64("2026-01-01T00:00:00.000000001"),
    "complex": lambda: 1 + 2j,
    "slice": lambda: slice(1, 2),
    "function": lambda: len,
    "lambda": lambda: lambda: 1,
    "class": lambda: KVBatchMeta,
    "object": object,
    "raising": Raising,
    "generator": lambda: (name for name in ("a", "b")),
    "set": lambda: {"a"},
    "list": lambda: ["a"],
    "tuple": lambda: ("a", "b"),
    "repeats": lambda: ["a", "a"],
    "list of a lone surrogate": lambda: ["a", LONE_SURROGATE],
    "list of np.str_": lambda: [np.str_("a"), np.str_("b")],
    "array of str": lambda: np.array(["a", "b"]),
    "list of ints": lambda: [1, 2],
    "list of None": lambda: [None],
    "list of bytes": lambda: [b"a"],
    "empty list": list,
    "dict": lambda: {"x": 1},
    "dict of tensors": lambda: {"x": torch.ones(2)},
    "dict with int keys": lambda: {1: "a"},
    "dict with tuple keys": lambda: {(1, 2): 3},
    "dict with a list inside a tuple key": lambda: {"x": {((1,), "b"): None}},
    "list of dicts": lambda: [{"k": 1}, {"k": LONE_SURROGATE}],
    "keys": lambda: {"a": 1, "b": 2}.keys(),
    "deep": lambda: _deep(400),
    "too deep": lambda: _deep(100_000),
    "dataclass": lambda: Point(1, [2]),
    "array": lambda: np.arange(4, dtype=np.int16).reshape(2, 2),
    "big-endian array": lambda: np.arange(3, dtype=">i4"),
    "array of floats": lambda: np.array([1.5, np.nan]),
    "array of datetimes": lambda: np.array(["2026-01-01"], dtype="M8[ns]"),
    "array of objects": lambda: np.array([{"a": 1}, None], dtype=object),
    "array of records": lambda: np.zeros(2, dtype=[("a", "i4")]),
    "masked array": lambda: np.ma.masked_array([1, 2], mask=[False, True]),
    "scalar array": lambda: np.array(2),
    "tensor": lambda: torch.arange(2),
    "scalar tensor": lambda: torch.tensor(2),
    "float tensor": lambda: torch.tensor([1.0, 2.0]),
    "bool tensor": lambda: torch.tensor(True),
    "bfloat16": lambda: torch.ones(2, dtype=torch.bfloat16),
    "tracked": lambda: torch.ones(2, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "compressed sparse": lambda: torch.eye(2).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "without data": lambda: torch.ones(2, device="meta"),
    "complex tensor": lambda: COMPLEX,
    "conjugated": lambda: COMPLEX.conj(),
    "negated": lambda: COMPLEX.conj().imag,
    "every second": lambda: torch.arange(4)[::2],
    "every second of two": lambda: torch.ones(2, dtype=torch.bfloat16)[::2],
    "expanded": lambda: torch.ones(1).expand(2),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(1), torch.ones(2)], layout=torch.jagged
    ),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(2, 1)]),
    "TensorDict": lambda: TensorDict({"x": torch.ones(2)}, [2]),
    "TensorDict without batch size": lambda: TensorDict({"x": torch.ones(2)}, []),
    "TensorDict of another batch size": lambda: TensorDict({"x": torch.ones(3)}, [3]),
    "TensorDict of TensorDicts": lambda: TensorDict({"x": {"y": torch.ones(2)}}, [2]),
    "TensorDict with a lone surrogate": lambda: TensorDict({LONE_SURROGATE: torch.ones(2)}, [2]),
    "TensorDict with a scalar": lambda: TensorDict({"x": torch.tensor(1)}, []),
    "NonTensorStack": lambda: NonTensorStack("a", "b"),
    "NonTensorData": lambda: NonTensorData("a", batch_size=[2]),
    "meta": lambda: KVBatchMeta("p", "train", ["a"], ["x"]),
    "meta of a lone surrogate": lambda: KVBatchMeta("p", "train", [LONE_SURROGATE], ["x"]),
    "meta with other extra_info": lambda: KVBatchMeta("p", "t", ["a"], extra_info=_NO_DICT),
    "meta with a token that is a lone surrogate": lambda: KVBatchMeta(
        "p", "t", ["a"], extra_info={"lease": LONE_SURROGATE}
    ),
}
GOOD: dict[str, dict[str, Callable[[], Any]]] = {
    "register_partition": {
        "fields": lambda: ["x", "y"],
        "num_samples": lambda: 8,
        "consumer_tasks": lambda: ["logprob", "train"],
        "grpo_group_size": lambda: None,
        "enums": lambda: None,
    },
    "put_samples": {
        "sample_ids": lambda: ["a", "b"],
        "fields": lambda: batch(2, x=torch.ones(2)),
        "tags": lambda: [{"k": 1}, {}],
        "claim": lambda: None,
        "origin": lambda: None,
    },
    "put_columns": {
        "sample_ids": lambda: ["a", "b"],
        "columns": lambda: {"x": torch.ones(2, 3)},
        "tags": lambda: None,
        "lengths": lambda: [1, 3],
        "ragged": lambda: ["x"],
    },
    "get_samples": {"sample_ids": lambda: ["a"], "select_fields": lambda: ["x"]},
    "get_columns": {
        "sample_ids": lambda: ["a"],
        "select_fields": lambda: ["x"],
        "pad_values": lambda: {"x": 1},
        "width": lambda: 4,
    },
    "get_data": {
        "meta": lambda: KVBatchMeta("unknown", None, ["a"], ["x"]),
        "select_fields": lambda: ["x"],
    },
    "claim_meta": {
        "task_name": lambda: "train",
        "required_fields": lambda: ["x"],
        "batch_size": lambda: 1,
        "dp_rank": lambda: None,
        "blocking": lambda: False,
        "timeout_s": lambda: 5.0,
        "where": lambda: (),
    },
    "check_consumption_status": {"task_names": lambda: ["train"]},
    "clear_samples": {"sample_ids": lambda: ["a"], "force": lambda: False},
    "withdraw_samples": {"sample_ids": lambda: ["a"]},
    "acknowledge": {"meta": lambda: None},
    "renew": {"meta": lambda: None},
    "release": {"meta": lambda: None},
    "count_samples": {"task_name": lambda: "train", "required_fields": lambda: ["x"]},
    "list_samples": {"start": lambda: 0, "limit": lambda: 3},
    "read_sample": {"sample_id": lambda: "a"},
    "find_samples": {"tag": lambda: "k", "value": lambda: 1, "limit": lambda: 3},
}
"""Factories of valid arguments by method, without ``partition_id``."""

CALLS = [
    (method, name)
    for method, good in GOOD.items()
    for name in (("partition_id", *good) if "meta" not in good else good)
]

objects_within: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from(sorted(VALUES)).map(VALUES.__getitem__),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda makers: lambda: [make() for make in makers]),
        inner.map(lambda make: lambda: {"x": make()}),
    ),
    max_leaves=4,
)
"""Factories of Python values, which are or contain hostile ones."""


def _call(client: DataPlaneClient, method: str, **arguments: Any) -> Any:
    """Call a method of a client or of its inspector."""
    owner = client if hasattr(client, method) else client.inspector
    return getattr(owner, method)(**arguments)


def outcome(call: Callable[..., Any], arguments: dict[str, Any]) -> tuple[type | None, Any]:
    """Return the type of a call's error, or None, and its result.

    Raises:
        Exception: the error is not a `DataPlaneError`.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # nothing to clear
            return None, call(**arguments)
    except DataPlaneError as error:
        return type(error), None


def alike(a: Any, b: Any) -> bool:
    """Return whether two results have the same values, types and bits."""
    if isinstance(a, TensorDict) and isinstance(b, TensorDict):
        return alike({n: a.get(n) for n in a.keys()}, {n: b.get(n) for n in b.keys()})  # noqa: SIM118
    if isinstance(a, NonTensorStack) and isinstance(b, NonTensorStack):
        return alike(a.tolist(), b.tolist())
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if a.is_nested != b.is_nested:
            return False
        return alike(list(a.unbind()), list(b.unbind())) if a.is_nested else same_bits(a, b)
    if isinstance(a, np.ndarray):
        if a.dtype == object:
            return alike(a.tolist(), b.tolist())
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, dict):
        return list(a) == list(b) and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b or (a != a and b != b))  # NaN is like NaN


def comparable(answer: Any) -> Any:
    """Return the part of a result that is the same for every store."""
    if isinstance(answer, KVBatchMeta):
        return [answer.task_name, sorted(answer.sample_ids), answer.fields, answer.tags]
    if isinstance(answer, list):
        return [getattr(each, "sample_id", each) for each in answer]
    return getattr(answer, "sample_id", answer)


def stored(client: DataPlaneClient, partition: str) -> dict[str, Any]:
    """Return the content of a partition: sample to its tags and its fields x and y."""
    try:
        client.register_partition(partition, ["x"], 0, ["look"])
        meta = client.claim_meta(partition, "look", [], 100, blocking=False)
    except PartitionNotFoundError:
        return {}
    content: dict[str, Any] = {}
    for row, sample_id in enumerate(meta.sample_ids):
        content[sample_id] = [meta.tags[row] if meta.tags else {}]
        for name in ("x", "y"):
            with contextlib.suppress(MissingDataError):
                content[sample_id].append(client.get_samples([sample_id], partition, [name]))
    return {sample_id: content[sample_id] for sample_id in sorted(content)}


class HostileContract(StoreFixtures):
    """Contract: all clients accept and refuse the same calls; a refused call stores nothing."""

    hostile_examples = 100

    def _check_drawn(self, strategy: st.SearchStrategy[Any], check: Callable[[Any], None]) -> None:
        settings(
            max_examples=self.hostile_examples,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )(given(strategy)(check))()

    def _compare(
        self,
        client: DataPlaneClient,
        reference: DataPlaneClient,
        method: str,
        arguments: Callable[[str], dict[str, Any]],
    ) -> None:
        partition = f"hostile-{uuid.uuid4().hex[:8]}"
        answers, states = [], []
        for each in (reference, client):
            each.register_partition(partition, ["x", "y"], 8, ["logprob", "train"])
            each.put_samples(["a"], partition, batch(1, x=torch.tensor([7.0])), [{"k": 1}])
            call = functools.partial(_call, each, method)
            answers.append(outcome(call, arguments(partition)))
            states.append(stored(each, partition))
            each.clear_samples(None, partition, force=True)
            with contextlib.suppress(DataPlaneError), warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                other_partition = arguments(partition).get("partition_id")
                each.clear_samples(None, other_partition)  # type: ignore[arg-type]  # it may be hostile
        (expected_error, expected), (error, answer) = answers
        if error is UnsupportedError:
            return  # a capability that the client lacks
        assert error is expected_error
        assert alike(comparable(answer), comparable(expected))
        assert alike(states[1], states[0])
        if error is not None:
            assert list(states[1]) == ["a"]
            assert states[1]["a"][0] == {"k": 1}
            assert states[1]["a"][1]["x"].tolist() == [7.0]

    def test_hostile_arguments_are_handled_as_by_the_reference(
        self, client: DataPlaneClient
    ) -> None:
        with InMemoryDataPlaneClient() as reference:

            def check(drawn: tuple[tuple[str, str], str]) -> None:
                (method, argument), value = drawn
                note(f"{method}({argument}={value})")

                def arguments(partition: str) -> dict[str, Any]:
                    valid = {name: make() for name, make in GOOD[method].items()}
                    if "meta" not in valid:
                        valid["partition_id"] = partition
                    return valid | {argument: VALUES[value]()}

                self._compare(client, reference, method, arguments)

            self._check_drawn(
                st.tuples(st.sampled_from(CALLS), st.sampled_from(sorted(VALUES))), check
            )

    def test_hostile_column_values_are_handled_as_by_reference(
        self, client: DataPlaneClient
    ) -> None:
        with InMemoryDataPlaneClient() as reference:

            def check(make: Callable[[], Any]) -> None:
                def arguments(partition: str) -> dict[str, Any]:
                    column = np.empty(1, dtype=object)
                    column[0] = make()
                    columns = {"y": column}
                    return {"sample_ids": ["b"], "partition_id": partition, "columns": columns}

                self._compare(client, reference, "put_columns", arguments)

            self._check_drawn(objects_within, check)

    def test_hostile_tensors_are_handled_as_by_the_reference(self, client: DataPlaneClient) -> None:
        tensors = [name for name, make in VALUES.items() if isinstance(make(), torch.Tensor)]
        with InMemoryDataPlaneClient() as reference:
            for name in tensors:

                def fields(partition: str, name: str = name) -> dict[str, Any]:
                    leaf = TensorDict({}, [2])
                    leaf._set_str("y", VALUES[name](), inplace=False, validated=True)
                    return {"sample_ids": ["b", "c"], "partition_id": partition, "fields": leaf}

                def columns(partition: str, name: str = name) -> dict[str, Any]:
                    column = {"y": VALUES[name]()}
                    return {"sample_ids": ["b", "c"], "partition_id": partition, "columns": column}

                self._compare(client, reference, "put_samples", fields)
                self._compare(client, reference, "put_columns", columns)
