"""Errors of blocked claims and puts match the patterns of the page about stuck runs. No Ray.

Imports internals: without Ray, only the directory reports free bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from directory_calls import TIMEOUT_S, Calls
from tensordict import TensorDict

from dataplane_core import CapacityExceeded, ClaimTimeoutError, InMemoryDataPlaneClient
from dataplane_tq.directory.server import Directory
from dataplane_tq.directory.wire import Link
from dataplane_tq.packed.layout import FieldLayout
from dataplane_tq.packed.unit_wire import UnitSpec

# Only in the workspace: another release of the core may have other messages.
pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[3] / "docs" / "recipes" / "stuck-run.md"
SOON_S = 0.05
UNIT_BYTES = 1 << 16


def documented() -> list[str]:
    """Return the documented messages of claims and puts; ``…`` stands for a variable text."""
    messages: list[str] = []
    operation = ""
    rows = re.findall(r"^\| (the same with )?`([^`]+)`", PAGE.read_text(), re.MULTILINE)
    for same, message in rows:
        if "no answer from" in message:
            continue  # from a lost part; test_two_machines.py compares them
        if not same:
            operation = message.partition(": ")[0]
        messages.append(f"{operation}: {message}" if same else message)
    return messages


def claim_after(put: list[str], declared: int, claims: int, fields: list[str]) -> None:
    """Declare and put samples, and claim all of them several times."""
    config = {"enabled": True, "impl": "in_memory", "claim_lease_s": 1000.0}
    with InMemoryDataPlaneClient(config) as client:
        client.register_partition("train", ["x", "y"], declared, ["train"])
        client.put_samples(put, "train", TensorDict({"x": torch.ones(len(put))}, [len(put)]))
        for _ in range(claims):
            client.claim_meta("train", "train", fields, declared, timeout_s=SOON_S)


def claim_with_a_missing_column() -> None:
    claim_after(["a", "b"], 2, 1, ["x", "y"])


def claim_with_a_missing_put() -> None:
    claim_after(["a"], 2, 1, ["x"])


def claim_of_leased_samples() -> None:
    claim_after(["a", "b"], 2, 2, ["x"])


def put_of_too_many_samples() -> None:
    config = {"enabled": True, "impl": "in_memory", "storage_capacity": 2, "ack_timeout_ms": 50}
    with InMemoryDataPlaneClient(config) as client:
        client.register_partition("train", ["x"], 3, ["train"])
        for ids in (["a", "b"], ["c"]):
            fields = TensorDict({"x": torch.ones(len(ids))}, [len(ids)])
            client.put_samples(ids, "train", fields)


def put_to_directory(sizes: list[int], cleared: slice) -> None:
    """Put samples of these sizes to one unit, and clear some of them before the last."""
    directory = Directory(100, [UnitSpec("unit", "node", UNIT_BYTES)], "127.0.0.1")
    calls = Calls(Link(directory.start(), timeout_s=TIMEOUT_S))
    calls.register()
    ids = [f"s{i}" for i in range(len(sizes))]
    try:
        for sample_id, size in zip(ids, sizes, strict=True):
            if sample_id == ids[-1]:
                calls.clear(ids[cleared])
            layout = FieldLayout("x", "torch.uint8", False, (size,), b"", size, 1)
            calls.put([sample_id], kind="torch.uint8", layouts=[layout], timeout_s=SOON_S)
    finally:
        calls.link.close()


def put_of_too_many_bytes() -> None:
    put_to_directory([UNIT_BYTES, UNIT_BYTES], slice(0))


def put_into_fragmented_memory() -> None:
    put_to_directory([*[UNIT_BYTES // 8] * 8, UNIT_BYTES // 4], slice(0, 8, 2))


FAILURES = [
    claim_with_a_missing_column,
    claim_with_a_missing_put,
    claim_of_leased_samples,
    claim_of_leased_samples,
    put_of_too_many_samples,
    put_of_too_many_bytes,
    put_into_fragmented_memory,
]
"""Functions that raise the documented errors, in the page's order."""


@pytest.mark.parametrize(("message", "fail"), list(zip(documented(), FAILURES, strict=True)))
def test_error_matches_the_page(message: str, fail: Callable[[], None]) -> None:
    with pytest.raises((ClaimTimeoutError, CapacityExceeded)) as caught:
        fail()
    pattern = "(.+)".join(map(re.escape, message.split("…")))
    assert re.match(pattern, str(caught.value)), f"{caught.value} does not match {message}"
