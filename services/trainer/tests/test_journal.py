"""A journal keeps complete groups through a crash at any moment, and no longer than needed."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_trainer.rollout.journal import FinishedGroup, Journal, prune  # noqa: TID251

few = settings(max_examples=40)


@st.composite
def groups(draw):
    """Draw a finished group; a filtered one has no columns."""
    rows, width = draw(st.integers(1, 3)), draw(st.integers(0, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    columns = {
        "input_ids": torch.randint(0, 9, (rows, width), generator=generator),
        "advantages": torch.rand(rows, generator=generator),
    }
    return FinishedGroup(
        draw(st.integers(0, 6)),
        draw(st.integers(0, 1_000)),
        draw(st.lists(st.floats(0, 1), min_size=rows, max_size=rows)),
        {} if draw(st.booleans()) else columns,
    )


def same(stored, group):
    return (
        stored is not None
        and (stored.position, stored.weight_version, stored.rewards)
        == (group.position, group.weight_version, group.rewards)
        and stored.columns.keys() == group.columns.keys()
        and all(torch.equal(stored.columns[name], group.columns[name]) for name in group.columns)
    )


@few
@given(st.lists(groups(), max_size=6), st.integers(0, 3))
def test_a_restart_finds_the_newest_group_of_each_position(written, restarts):
    with tempfile.TemporaryDirectory() as name:
        newest = {}
        for number in range(restarts + 1):
            journal = Journal(Path(name))
            for group in written[number :: restarts + 1]:
                journal.append(group)
                newest[group.position] = group
            journal.close()
        after = Journal(Path(name))
        assert all(same(after.find(position), group) for position, group in newest.items())
        assert after.find(7) is None


@few
@given(st.lists(groups(), min_size=1, max_size=4, unique_by=lambda each: each.position), st.data())
def test_a_cut_file_keeps_its_complete_groups(written, data):
    with tempfile.TemporaryDirectory() as name:
        journal = Journal(Path(name))
        sizes = [journal.append(group) for group in written]
        journal.close()
        content = journal.path.read_bytes()
        assert len(content) == sum(sizes)
        cut = data.draw(st.integers(0, len(content)))
        journal.path.write_bytes(content[:cut])
        after = Journal(Path(name))
        for number, group in enumerate(written):
            if sum(sizes[: number + 1]) <= cut:
                assert same(after.find(group.position), group)
            else:
                assert after.find(group.position) is None


@few
@given(st.lists(groups(), min_size=1, max_size=3, unique_by=lambda each: each.position), st.data())
def test_a_damaged_group_is_never_returned(written, data):
    with tempfile.TemporaryDirectory() as name:
        journal = Journal(Path(name))
        for group in written:
            journal.append(group)
        journal.close()
        content = bytearray(journal.path.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
        journal.path.write_bytes(content)
        after = Journal(Path(name))
        by_position = {group.position: group for group in written}
        for position in range(7):
            stored = after.find(position)
            assert stored is None or same(stored, by_position[position])


def test_a_checkpoint_removes_files_without_pending_groups(tmp_path):
    first, second = Journal(tmp_path), Journal(tmp_path)
    for journal, position in ((first, 1), (second, 2)):
        journal.append(FinishedGroup(position, 0, [0.0], {}))
    kept = second.path.name
    open_files = {first.rotate(), second.rotate()}
    prune(tmp_path, open_files=open_files, untrained=[2, 3])
    assert {path.name for path in tmp_path.iterdir()} == open_files | {kept}
    prune(tmp_path, open_files=open_files, untrained=[3])
    assert {path.name for path in tmp_path.iterdir()} == open_files


@pytest.mark.parametrize("content", [b"", b"GRJ1", b"not a journal" * 9])
def test_a_foreign_file_is_ignored(tmp_path, content):
    (tmp_path / "other.journal").write_bytes(content)
    assert Journal(tmp_path).find(0) is None
