"""Checkpoints and a run's other files are complete or absent after any failure.

`train` cannot be made to fail at a given byte, to write from another machine, or to meet a file
that cannot be removed. So these tests call the functions that write.
So internals are imported.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from contextlib import contextmanager
from fnmatch import fnmatch

import pytest

from grpo_trainer.checkpoint.folder import (
    RunState,
    load_state,
    save_checkpoint,
    written_files,
)
from grpo_trainer.errors import CheckpointError, OutputError
from grpo_trainer.run.folder import (
    append_record,
    create_run_folder,
    write_history,
)


def state(step=1):
    return RunState(step=step, prompts_position=4 * step, history=[{"step": step}], config={"a": 1})


def write_something(folder):
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"width": 1}')
    (folder / "model" / "model.safetensors").write_bytes(b"0" * 1000)
    (folder / "optimizer.safetensors").write_bytes(b"0" * 2000)
    return written_files(folder)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def saved(tmp_path):
    """Function that saves the checkpoint of a step; step 1 has one."""

    def save(step, write=write_something, **options):
        return save_checkpoint(tmp_path, state(step), write, keep_last=1, **options)

    save.first = save(1)
    return save


@contextmanager
def file_size_limit(limit):
    """Limit files of this process to ``limit`` bytes, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_checkpoint_replaces_older_and_partial_ones(saved, tmp_path):
    (tmp_path / ".step-000001.partial").mkdir()  # of a process that was killed
    checkpoint = saved(12)
    assert names(tmp_path) == ["step-000012"]
    assert load_state(checkpoint) == state(12)


def test_an_unremovable_checkpoint_is_reported_and_not_fatal(saved, tmp_path, monkeypatch):
    """Imitate NFS, which keeps an open file under another name when it is removed."""
    rmtree = shutil.rmtree

    def busy(path, ignore_errors=False):
        kept = [name for name in ("step-000001", "step-000002") if name in str(path)]
        if kept and not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        if not kept:
            rmtree(path, ignore_errors=ignore_errors)

    (tmp_path / ".step-000002.partial").mkdir()
    monkeypatch.setattr(shutil, "rmtree", busy)
    notices = []
    checkpoint = saved(2, notice=notices.append)
    assert load_state(checkpoint) == state(2)
    assert list(tmp_path.glob("step-*")) == [checkpoint]
    assert len(notices) == 2
    assert all("cannot be removed: [Errno 39] Directory not empty" in line for line in notices)
    monkeypatch.undo()
    saved(3, notice=notices.append)
    assert names(tmp_path) == ["step-000003"]
    assert len(notices) == 2


def test_a_checkpoint_is_never_replaced(saved):
    with pytest.raises(CheckpointError, match="step-000001: exists already"):
        saved(1)
    assert load_state(saved.first) == state(1)


def elsewhere(pattern):
    """Writer on another machine; the driver sees the files of a pattern."""

    def write(folder):
        written = write_something(folder)
        for name in written:
            if not fnmatch(name, pattern):
                (folder / name).unlink()
        return written

    return write


def failing(failure):
    def write(folder):
        write_something(folder)
        raise failure

    return write


def without(name):
    def write(folder):
        write_something(folder)
        (folder / name).unlink()
        return written_files(folder)

    return write


NO_FILE = r"step-000002.*rank 0 wrote \d+ bytes, the driver sees no file; run.output must"


@pytest.mark.parametrize(
    ("write", "error", "message"),
    [
        (failing(OSError(errno.ENOSPC, "No space left")), CheckpointError, "No space left"),
        (failing(CheckpointError("rank 0 died")), CheckpointError, "rank 0 died"),
        (failing(KeyboardInterrupt()), KeyboardInterrupt, None),
        (elsewhere(""), CheckpointError, NO_FILE),
        (elsewhere("model/*"), CheckpointError, NO_FILE),
        (elsewhere("*.safetensors"), CheckpointError, NO_FILE),
        (
            lambda folder: write_something(folder) | {"optimizer.safetensors": 2001},
            CheckpointError,
            "wrote 2001 bytes, the driver sees 2000 bytes; ",
        ),
        (without("model/config.json"), CheckpointError, "model/config.json: not among its 2"),
        (without("model/model.safetensors"), CheckpointError, r"model/\*.safetensors: not among"),
        (without("optimizer.safetensors"), CheckpointError, "optimizer.safetensors: not among"),
    ],
)
def test_a_failed_write_leaves_only_the_older_checkpoint(saved, tmp_path, write, error, message):
    with pytest.raises(error, match=message):
        saved(2, write)
    assert names(tmp_path) == ["step-000001"]
    assert load_state(saved.first) == state(1)


@pytest.mark.parametrize("limit", [5, 500, 1500], ids=["json", "model", "optimizer"])
def test_a_disk_that_fills_up_leaves_the_older_checkpoint(saved, tmp_path, limit):
    with file_size_limit(limit), pytest.raises(CheckpointError, match=r"step-000002.*cannot be"):
        saved(2)
    assert names(tmp_path) == ["step-000001"]
    assert load_state(saved.first) == state(1)


def test_the_folder_itself_is_on_disk_before_it_is_renamed(saved, monkeypatch):
    synced = []
    fsync = os.fsync

    def remember(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def write(folder):
        written = write_something(folder)
        synced.clear()
        return written

    monkeypatch.setattr(os, "fsync", remember)
    saved(2, write)
    of_it = {path.partition(".partial")[2] for path in synced if ".partial" in path}
    assert of_it >= {"", "/state.json", "/model", "/model/config.json"}


def test_a_checkpoint_with_an_unflushed_name_is_complete(saved, tmp_path, monkeypatch):
    fsync = os.fsync

    def fail_for_the_folder(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(tmp_path):
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail_for_the_folder)
    with pytest.raises(CheckpointError, match=r"step-000002: complete, but .* Input/output error"):
        saved(2)
    assert names(tmp_path) == ["step-000001", "step-000002"]
    assert load_state(tmp_path / "step-000002") == state(2)


def test_metrics_on_a_full_disk_keep_complete_lines(tmp_path):
    file = tmp_path / "metrics.jsonl"
    write_history(tmp_path, [{"step": 1}])
    size = file.stat().st_size
    with file_size_limit(size + 5), pytest.raises(OutputError, match=r"metrics.jsonl: cannot be"):
        append_record(tmp_path, {"step": 2})
    append_record(tmp_path, {"step": 3})
    with file_size_limit(5), pytest.raises(OutputError, match=r"metrics.jsonl: cannot be"):
        write_history(tmp_path, [{"step": 1}, {"step": 2}])
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"step": 1},
        {"step": 3},
    ]
    assert names(tmp_path) == ["metrics.jsonl"]


def test_a_run_s_folder_is_absolute_wherever_its_output_is(configure, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = create_run_folder(configure({"run.output": "runs"}))
    assert folder.is_absolute()
    assert folder.parent == tmp_path / "runs" / "demo"
