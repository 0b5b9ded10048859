"""A restore returns the partition as it was saved, or raises and leaves nothing."""

import os
import random
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataplane_core import (
    CapacityExceeded,
    CheckpointError,
    DeadlineExceededError,
    InMemoryDataPlaneClient,
    InvalidRequestError,
    PartitionNotFoundError,
    UnsupportedError,
    restore_partition,
    save_partition,
)
from dataplane_core.testing.storage import DTYPES, batch, jagged, objects, same_bits


def store(**config) -> InMemoryDataPlaneClient:
    return InMemoryDataPlaneClient({"enabled": True, "impl": "in_memory", **config})


def state_of(client: InMemoryDataPlaneClient, name: str = "train") -> Any:
    """Return the observable state of a partition; leased and assigned samples are unclaimed."""
    [summary] = [each for each in client.inspector.list_partitions() if each.partition_id == name]
    samples = []
    for sample in client.inspector.list_samples(name, limit=10_000):
        values = {}
        for field in sample.fields:
            [row] = client.get_samples([sample.sample_id], name, [field]).get(field).unbind(0)
            if isinstance(row, torch.Tensor):
                complete = row.contiguous()
                raw = complete.flatten().view(torch.uint8).tolist() if complete.numel() else []
                values[field] = (str(row.dtype), tuple(row.shape), raw)
            else:
                values[field] = repr(row.data)
        acknowledged = {task: how == "acknowledged" for task, how in sample.tasks.items()}
        samples.append((sample.sample_id, values, repr(sample.tags), acknowledged))
    declared = [field.name for field in summary.fields if field.declared]
    kinds = {field.name: field.kind for field in summary.fields if field.written}
    return declared, kinds, summary.group_size, samples


def filled(**config) -> InMemoryDataPlaneClient:
    client = store(**config)
    client.register_partition("train", ["x", "y", "never"], 12, ["logprob", "train"])
    ids = [f"s{i}" for i in range(7)]
    ragged = jagged(*(torch.randn(i, 3) for i in range(7)))
    fields = batch(7, x=torch.randn(7, 2), y=ragged, o=objects(*({"i": [i, None]} for i in ids)))
    client.put_samples(ids, "train", fields, [{"v": i, "w": "ö"} for i in range(7)])
    client.put_samples(["s3", "z"], "train", batch(2, extra=torch.tensor([1.5, float("nan")])))
    client.put_samples(["bare"], "train")
    return client


def acknowledge(client: InMemoryDataPlaneClient, task: str, count: int) -> None:
    meta = client.claim_meta("train", task, ["x"], count, blocking=False)
    if "lease" in meta.extra_info:
        client.acknowledge(meta)


def test_partition_can_be_restored_under_another_name(tmp_path: Path):
    client = filled()
    acknowledge(client, "train", 3)
    acknowledge(client, "logprob", 5)
    save_partition(client, "train", tmp_path / "p", batch=3)
    assert restore_partition(client, tmp_path / "p", "again") == 9
    assert state_of(client, "again") == state_of(client)


@pytest.mark.parametrize("lease", [{}, {"claim_lease_s": 1000.0}])
def test_restore_keeps_acknowledgments_but_not_leases(tmp_path: Path, lease):
    client = filled(claim_lease_s=1000.0)
    acknowledge(client, "train", 2)
    client.claim_meta("train", "train", ["x"], 2)
    save_partition(client, "train", tmp_path / "p")
    target = store(**lease)
    restore_partition(target, tmp_path / "p")
    counts = target.inspector.count_samples("train", "train", ["x"])
    assert (counts.acknowledged, counts.leased, counts.ready, counts.not_ready) == (2, 0, 5, 2)
    claimed = target.claim_meta("train", "train", ["x"], 8, blocking=False)
    assert claimed.sample_ids == ["s2", "s3", "s4", "s5", "s6"]
    assert claimed.tags[0] == {"v": 2, "w": "ö"}


def test_blocking_claim_knows_the_count_of_missing_samples(tmp_path: Path):
    client = filled()  # 9 of 12
    client.clear_samples(["bare", "z"], "train")
    save_partition(client, "train", tmp_path / "p")
    target = store()
    restore_partition(target, tmp_path / "p")
    with pytest.raises(TimeoutError, match="3 of 10 declared samples were not put"):
        target.claim_meta("train", "train", ["x"], 8, timeout_s=0.01)
    target.put_samples(["n1", "n2", "n3"], "train", batch(3, x=torch.randn(3, 2)))
    assert target.claim_meta("train", "train", ["x"], 100).size == 10


def test_restore_keeps_partly_acknowledged_groups(tmp_path: Path):
    client = store()
    client.register_partition("train", ["x"], 5, ["train"], grpo_group_size=2)
    ids = ["a_g0", "a_g1", "b_g0", "b_g1", "c_g0"]
    client.put_samples(ids, "train", batch(5, x=torch.ones(5)))
    assert client.claim_meta("train", "train", ["x"], 2).sample_ids == ids[:2]
    client.clear_samples(["a_g1"], "train")
    save_partition(client, "train", tmp_path / "p")
    target = store()
    restore_partition(target, tmp_path / "p")
    assert state_of(target) == state_of(client)
    with pytest.raises(InvalidRequestError, match="grpo_group_size 2"):
        target.claim_meta("train", "train", ["x"], 3)
    assert target.claim_meta("train", "train", ["x"], 2).sample_ids == ids[2:4]
    assert target.claim_meta("train", "train", ["x"], 2).sample_ids == ["c_g0"]


@pytest.mark.parametrize(
    "dtype", [*DTYPES, torch.complex128, torch.float8_e4m3fn, torch.uint16], ids=str
)
def test_every_dtype_keeps_its_bits(tmp_path: Path, dtype: torch.dtype):
    raw = torch.randint(0, 2, (3, 4), dtype=torch.uint8).repeat(1, dtype.itemsize)
    value = raw.contiguous().view(dtype)
    client = store()
    client.register_partition("train", ["x", "j", "e"], 3, [])
    short = jagged(value[0], value[1][:0], value[2][:1])
    client.put_samples(list("abc"), "train", batch(3, x=value, j=short, e=value[:, :0]))
    save_partition(client, "train", tmp_path / "p")
    target = store()
    restore_partition(target, tmp_path / "p")
    assert same_bits(target.get_samples(list("abc"), "train", ["x"])["x"], value)
    assert state_of(target) == state_of(client)


def test_padding_is_the_same_after_a_restore(tmp_path: Path):
    rows = [torch.ones(1, 2), torch.ones(3, 2), torch.ones(0, 2)]
    with InMemoryDataPlaneClient() as first, InMemoryDataPlaneClient() as second:
        first.register_partition("train", [], 3, ["t"])
        shaped = torch.nested.nested_tensor(rows, layout=torch.strided)
        same = jagged(*torch.ones(3, 2))
        first.put_samples(list("abc"), "train", batch(3, tokens=same, images=shaped))
        for sample_id, turns in zip("abc", (1, 2, 2), strict=True):
            first.put_samples([sample_id], "train", batch(1, turns=torch.ones(1, turns)))
        save_partition(first, "train", tmp_path / "p")
        restore_partition(second, tmp_path / "p")
        for ids in ("abc", "bc"):
            reads = [
                client.get_columns(list(ids), "train", ["tokens", "images", "turns"], width=4)
                for client in (first, second)
            ]
            assert all(columns["tokens"].shape == (len(ids), 4) for columns in reads)
            assert all(columns["turns"].shape == (len(ids), 2) for columns in reads)
            images = [columns["images"].unbind() for columns in reads]
            assert [row.shape for row in images[0]] == [row.shape for row in images[1]]


sample = st.fixed_dictionaries(
    {},
    optional={
        "x": st.tuples(st.integers(0, 3), st.integers(0, 2)),
        "y": st.integers(0, 3),
        "o": st.recursive(
            st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.floats(),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner),
            max_leaves=4,
        ),
    },
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(sample, st.dictionaries(st.text(), st.integers() | st.text())), max_size=6),
    st.integers(1, 4),
    st.integers(0, 6),
    st.integers(0, 6),
)
def test_any_partition_survives_save_and_restore(samples, size, acknowledged, leased):
    client, target = store(claim_lease_s=1000.0), store()
    client.register_partition("train", ["x"], 9, ["train", "other"])
    for i, (fields, tags) in enumerate(samples):
        values: dict[str, Any] = {}
        if "x" in fields:
            values["x"] = torch.randn(1, *fields["x"])
        if "y" in fields:
            values["y"] = torch.arange(fields["y"])[None]
        if "o" in fields:
            values["o"] = objects(fields["o"])
        tags = {key: value for key, value in tags.items() if value != 2**64}
        client.put_samples([f"s{i}"], "train", batch(1, **values), [_small(tags)])
    if acknowledged:
        client.acknowledge(client.claim_meta("train", "train", [], acknowledged, blocking=False))
    if leased:
        client.claim_meta("train", "other", [], leased, blocking=False)
    with tempfile.TemporaryDirectory() as folder:
        save_partition(client, "train", Path(folder) / "p", batch=size)
        restore_partition(target, Path(folder) / "p")
    assert state_of(target) == state_of(client)


def _small(tags: dict[str, Any]) -> dict[str, Any]:
    return {k: v % 2**63 if isinstance(v, int) else v for k, v in tags.items()}


def damage(folder: Path, how: str) -> str:
    """Damage a checkpoint; return the name of the damaged file."""
    name = "batch-000001.safetensors" if "manifest" not in how else "manifest.json"
    path = folder / name
    if how.startswith("missing"):
        path.unlink()
    elif how.startswith("changed"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif how.startswith("cut"):
        path.write_bytes(path.read_bytes()[:-7])
    elif how == "extra":
        name = "notes.txt"
        (folder / name).write_text("hello")
    elif how == "link":
        path.rename(folder.parent / "elsewhere")
        path.symlink_to(folder.parent / "elsewhere")
    return name


@pytest.mark.parametrize(
    "how",
    [
        *("missing", "changed", "cut", "extra", "link"),
        *("missing manifest", "changed manifest", "cut manifest"),
    ],
)
def test_a_damaged_checkpoint_is_one_error_that_names_the_file(tmp_path: Path, how: str):
    save_partition(filled(), "train", tmp_path / "p", batch=3)
    name = damage(tmp_path / "p", how)
    target = store()
    with pytest.raises(CheckpointError, match=name):
        restore_partition(target, tmp_path / "p")
    assert target.inspector.list_partitions() == []


def test_file_changed_during_restore_leaves_nothing(tmp_path: Path):
    save_partition(filled(), "train", tmp_path / "p", batch=3)

    class Meddling(InMemoryDataPlaneClient):
        def register_partition(self, *args):
            damage(tmp_path / "p", "changed")
            super().register_partition(*args)

    target = Meddling()
    with pytest.raises(CheckpointError, match="batch-000001"):
        restore_partition(target, tmp_path / "p")
    assert target.inspector.list_partitions() == []


def test_restore_into_a_too_small_store_leaves_nothing(tmp_path: Path):
    save_partition(filled(), "train", tmp_path / "p", batch=3)
    target = store(storage_capacity=5, ack_timeout_ms=20)
    with pytest.raises(CapacityExceeded):
        restore_partition(target, tmp_path / "p")
    assert target.inspector.list_partitions() == []
    target.register_partition("other", ["x"], 5, [])
    target.put_samples(list("abcde"), "other", batch(5, x=torch.ones(5)))


def test_restore_of_acknowledged_samples_needs_named_claims(tmp_path: Path):
    class Plain(InMemoryDataPlaneClient):
        capabilities = replace(InMemoryDataPlaneClient.capabilities, named_claims=False)

    client = filled()
    client.claim_meta("train", "train", ["extra"], 1, blocking=False)
    save_partition(client, "train", tmp_path / "p")
    target = Plain()
    with pytest.raises(UnsupportedError, match=r"lacks capabilities\.named_claims"):
        restore_partition(target, tmp_path / "p")
    assert target.inspector.list_partitions() == []


def test_a_partition_that_is_there_already_is_not_touched(tmp_path: Path):
    client = filled()
    save_partition(client, "train", tmp_path / "p")
    before = state_of(client)
    with pytest.raises(InvalidRequestError, match="registered already"):
        restore_partition(client, tmp_path / "p")
    assert state_of(client) == before


def test_missing_checkpoint_is_an_error(tmp_path: Path):
    with pytest.raises(CheckpointError, match="no such folder"):
        restore_partition(store(), tmp_path / "p")
    with pytest.raises(InvalidRequestError, match="'nowhere' is not registered; registered: 'tr"):
        save_partition(filled(), "nowhere", tmp_path / "p")
    with pytest.raises(PartitionNotFoundError):
        store().inspector.list_samples("train")


@pytest.mark.parametrize("size", [0, 10_001])
def test_batch_outside_its_bounds_is_named(tmp_path: Path, size: int):
    expected = f"save_partition: batch is {size}; expected an int of 1 to 10000"
    with pytest.raises(InvalidRequestError, match=expected):
        save_partition(filled(), "train", tmp_path / "p", batch=size)


def test_change_during_save_raises_and_keeps_the_old_checkpoint(tmp_path: Path):
    class Busy(InMemoryDataPlaneClient):
        def get_samples(self, sample_ids, partition_id, select_fields):
            self.put_samples([f"late-{random.random()}"], partition_id)
            return super().get_samples(sample_ids, partition_id, select_fields)

    save_partition(filled(), "train", tmp_path / "p")
    busy = Busy()
    busy.register_partition("train", ["x"], 9, [])
    busy.put_samples(["a"], "train", batch(1, x=torch.ones(1)))
    with pytest.raises(CheckpointError, match="changed during the save"):
        save_partition(busy, "train", tmp_path / "p")
    assert restore_partition(store(), tmp_path / "p") == 9
    assert os.listdir(tmp_path) == ["p"]


def test_deadline_of_the_store_during_a_save_is_raised_as_such(tmp_path: Path, monkeypatch):
    def never(*arguments):
        raise DeadlineExceededError("no answer")

    with filled() as client:
        monkeypatch.setattr(client, "get_samples", never)
        with pytest.raises(DeadlineExceededError, match=r"^no answer$"):
            save_partition(client, "train", tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_else_is_not_replaced(tmp_path: Path):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        save_partition(filled(), "train", tmp_path / "p")
    assert (tmp_path / "p" / "thesis.txt").read_text() == "years of work"
    assert os.listdir(tmp_path) == ["p"]


def test_full_disk_raises_and_keeps_the_old_checkpoint(tmp_path: Path):
    save_partition(filled(), "train", tmp_path / "p")
    done = run_script(FULL_DISK, tmp_path / "p", tmp_path)
    assert "cannot be written" in done.stdout
    assert "File too large" in done.stdout
    (tmp_path / "script.py").unlink()
    assert os.listdir(tmp_path) == ["p"]
    assert restore_partition(store(), tmp_path / "p") == 9


@pytest.mark.parametrize("saved", [[], ["p"]], ids=["first", "second"])
def test_failed_last_sync_keeps_the_old_checkpoint(tmp_path: Path, monkeypatch, saved):
    for name in saved:
        save_partition(filled(), "train", tmp_path / name)

    def fail_for_parent(descriptor):
        if os.path.samestat(os.fstat(descriptor), tmp_path.stat()):
            raise OSError("no sync")

    monkeypatch.setattr(os, "fsync", fail_for_parent)
    newer = filled()
    newer.put_samples(["newer"], "train")
    with pytest.raises(CheckpointError, match="cannot be written: no sync"):
        save_partition(newer, "train", tmp_path / "p")
    assert os.listdir(tmp_path) == saved
    assert [restore_partition(store(), tmp_path / name) for name in saved] == [9 for _ in saved]


PREAMBLE = textwrap.dedent("""
    import os, resource, signal, sys
    import torch
    from tensordict import TensorDict
    from dataplane_core import InMemoryDataPlaneClient
    from dataplane_core import CheckpointError
    from dataplane_core import save_partition

    client = InMemoryDataPlaneClient()
    client.register_partition("train", ["x"], 40, ["train"])
    ids = [f"n{i}" for i in range(10)]
    client.put_samples(ids, "train", TensorDict({"x": torch.ones(10, 10_000)}, [10]))
""")

FULL_DISK = textwrap.dedent("""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, -1))
    try:
        save_partition(client, "train", sys.argv[1])
    except CheckpointError as error:
        print(error)
""")


def run_script(text: str, folder: Path, place: Path, *args: str) -> subprocess.CompletedProcess:
    """Run a separate process, because forking one that has used torch can hang."""
    script = place / "script.py"
    script.write_text(PREAMBLE + text)
    command = [sys.executable, str(script), str(folder), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_two_writers_of_one_folder_do_not_mix(tmp_path: Path):
    client = filled()

    class Nested(InMemoryDataPlaneClient):
        @property
        def inspector(self):
            inspector = super().inspector
            inspector.list_samples = self._list_samples
            return inspector

        def _list_samples(self, *args, **kwargs):
            with pytest.raises(CheckpointError, match="another process is writing it"):
                save_partition(client, "train", tmp_path / "p")
            return super().inspector.list_samples(*args, **kwargs)

    nested = Nested()
    nested.register_partition("train", [], 0, [])
    save_partition(nested, "train", tmp_path / "p")
    assert restore_partition(store(), tmp_path / "p") == 0
