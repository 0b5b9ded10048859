"""Journals keep groups and responses through a crash at any moment, and no longer than needed.

Imports internals: a crash is placed at each byte.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

# A crash at any byte of a file is tested on the journal itself; test_crashes.py kills processes.
from grpo_trainer.rollout.journal import FinishedGroup, Journal
from grpo_trainer.rollout.journal_file import prune
from grpo_trainer.rollout.response_journal import (
    CallRecorder,
    ResponseJournal,
    response_keys,
    version_to_report,
)
from grpo_trainer.rollout.sampling import Drawn

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
        after = Journal(Path(name))
        assert all(same(after.find(position), group) for position, group in newest.items())
        assert after.find(7) is None


@few
@given(st.lists(groups(), min_size=1, max_size=3, unique_by=lambda each: each.position), st.data())
def test_a_damaged_group_is_never_returned(written, data):
    with tempfile.TemporaryDirectory() as name:
        journal = Journal(Path(name))
        for group in written:
            journal.append(group)
        [path] = Path(name).iterdir()
        content = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        after = Journal(Path(name))
        by_position = {group.position: group for group in written}
        for position in range(7):
            stored = after.find(position)
            assert stored is None or same(stored, by_position[position])


def test_groups_beyond_the_checkpoint_are_retained(tmp_path):
    Journal(tmp_path).append(FinishedGroup(7, 0, [0.0], {}))
    [crashed] = tmp_path.iterdir()
    for position, kept in ((6, True), (7, True), (8, False)):
        prune(tmp_path, open_files=(), untrained=[5], position=position)
        assert crashed.exists() == kept


def test_a_group_too_large_for_the_disk_hides_no_later_one(tmp_path, monkeypatch):
    journal = Journal(tmp_path)
    file = journal._file._file
    writes = 0

    class FullOnce:
        def __getattr__(self, name):
            return getattr(file, name)

        def write(self, content):
            nonlocal writes
            writes += 1
            if writes == 2:
                raise OSError(28, "No space left on device")
            return file.write(content[:30])

    monkeypatch.setattr(journal._file, "_file", FullOnce())
    with pytest.raises(OSError, match="No space left"):
        journal.append(FinishedGroup(1, 0, [0.0], {}))
    journal.append(FinishedGroup(2, 0, [0.0], {}))
    after = Journal(tmp_path)
    assert after.find(1) is None
    assert after.find(2) is not None


@pytest.mark.parametrize("content", [b"", b"GRJ1", b"not a journal" * 9])
def test_a_foreign_file_is_ignored(tmp_path, content):
    (tmp_path / "other.group.journal").write_bytes(content)
    (tmp_path / "other.response.journal").write_bytes(content)
    assert Journal(tmp_path).find(0) is None
    assert partial_responses(ResponseJournal(tmp_path), keys(1)) == [None]


INSTALLED = "weights-9-x"


def keys(count, position=5, stop_strings=None):
    """Keys of rows with equal input."""
    data = {"positions": [position] * count, "stop_strings": stop_strings}
    return response_keys(data, [torch.tensor([1, 2])] * count)


def partial_responses(journal, row_keys, installed=INSTALLED):
    return [journal.find(key, installed=installed) for key in row_keys]


def drawn(seed, length):
    """Tokens of a response; a longer one with the same seed continues it."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 99_999, (64,), generator=generator)
    return Drawn(tokens[:length], -torch.rand(64, generator=generator)[:length])


def versions(length):
    return [f"weights-{index // 3}-x" for index in range(length)]


def is_prefix(stored, response, drawn_by=versions):
    if stored is None:
        return True
    n = len(stored.token_ids)
    return (
        0 < n == len(stored.versions) <= len(response.token_ids)
        and torch.equal(stored.token_ids, response.token_ids[:n])
        and torch.equal(stored.logprobs, response.logprobs[:n])
        and stored.versions == drawn_by(n)
    )


def record(journal, row_keys, steps, *, rotate=()):
    """Record the growth of a call's responses; ``steps`` has their lengths at each record."""
    recorder = CallRecorder(journal, row_keys, installed=INSTALLED)
    for number, lengths in enumerate(steps):
        if number in rotate:
            journal.rotate()
        recorder.record([drawn(*each) for each in enumerate(lengths)], versions(max(lengths)))


growth = st.lists(st.tuples(*[st.integers(0, 6)] * 2), min_size=1, max_size=5).map(
    lambda increments: [
        tuple(sum(each[row] for each in increments[: n + 1]) for row in range(2))
        for n in range(len(increments))
    ]
)


@few
@given(growth, st.sets(st.integers(0, 4)), st.booleans())
def test_a_restart_finds_all_recorded_tokens(steps, rotate, is_continued):
    with tempfile.TemporaryDirectory() as name:
        first = ResponseJournal(Path(name))
        record(first, keys(2), steps[:-1] if is_continued else steps, rotate=rotate)
        before = partial_responses(ResponseJournal(Path(name)), keys(2))
        if is_continued:
            second = CallRecorder(ResponseJournal(Path(name)), keys(2), installed=INSTALLED)
            responses = [drawn(*each) for each in enumerate(steps[-1])]
            second.record(responses, ["weights-7-x"] * 9)
        after = partial_responses(ResponseJournal(Path(name)), keys(2))
        for row, (earlier, stored) in enumerate(zip(before, after, strict=True)):
            length = steps[-1][row]
            known = [] if earlier is None else earlier.versions
            assert known == versions(len(known))
            expected = known + ["weights-7-x"] * (length - len(known))
            assert is_prefix(stored, drawn(row, length), lambda n, each=expected: each[:n])
            assert (0 if stored is None else len(stored.token_ids)) == length


@few
@given(growth, st.data())
def test_a_cut_file_keeps_the_responses_until_the_cut(steps, data):
    with tempfile.TemporaryDirectory() as name:
        journal = ResponseJournal(Path(name))
        recorder = CallRecorder(journal, keys(2), installed=INSTALLED)
        [path] = Path(name).iterdir()
        sizes = []
        for lengths in steps:
            recorder.record([drawn(*each) for each in enumerate(lengths)], versions(max(lengths)))
            sizes.append(path.stat().st_size)
        cut = data.draw(st.integers(0, sizes[-1]))
        path.write_bytes(path.read_bytes()[:cut])
        complete = [lengths for size, lengths in zip(sizes, steps, strict=True) if size <= cut]
        for row, stored in enumerate(partial_responses(ResponseJournal(Path(name)), keys(2))):
            length = complete[-1][row] if complete else 0
            assert is_prefix(stored, drawn(row, length))
            assert (0 if stored is None else len(stored.token_ids)) == length


@few
@given(growth, st.data())
def test_a_damaged_record_ends_the_response(steps, data):
    with tempfile.TemporaryDirectory() as name:
        journal = ResponseJournal(Path(name))
        record(journal, keys(2), steps)
        [path] = Path(name).iterdir()
        content = bytearray(path.read_bytes())
        if content:
            content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        for row, stored in enumerate(partial_responses(ResponseJournal(Path(name)), keys(2))):
            assert is_prefix(stored, drawn(row, 64))


def test_the_tokens_of_two_calls_are_not_mixed(tmp_path):
    journal = ResponseJournal(tmp_path)
    late, other = (CallRecorder(journal, keys(1), installed=INSTALLED) for _ in range(2))
    late.record([drawn(0, 4)], versions(4))
    other.record([drawn(1, 4)], versions(4))
    late.record([drawn(0, 6)], versions(6))
    other.record([drawn(1, 5)], versions(5))
    [stored] = partial_responses(ResponseJournal(tmp_path), keys(1))
    assert is_prefix(stored, drawn(1, 5))
    assert len(stored.token_ids) == 5


def test_a_response_belongs_to_its_prompt_input_and_stop_strings(tmp_path):
    record(ResponseJournal(tmp_path), keys(1, stop_strings=[["."]]), [[3]])
    after = ResponseJournal(tmp_path)
    others = [keys(1), keys(1, position=6, stop_strings=[["."]]), keys(2, stop_strings=[["."]] * 2)]
    assert [partial_responses(after, each)[-1] for each in others] == [None] * 3
    assert partial_responses(after, keys(1, stop_strings=[["."]])) != [None]
    [other_input] = response_keys({"positions": [5]}, [torch.tensor([1, 2, 3])])
    assert after.find(other_input, installed=INSTALLED) is None


@pytest.mark.parametrize(
    ("recorded", "installed", "name"),
    [
        ("run-a-3-0", "run-b-5-1", "run-a-3-0"),
        ("run-a-6-0", "run-b-5-1", "run-b-5-1"),
        ("", "", ""),
    ],
)
def test_no_token_has_a_newer_version_than_the_installed_one(recorded, installed, name):
    assert version_to_report(recorded, installed) == name


def test_a_checkpoint_removes_responses_to_trained_prompts(tmp_path):
    journal = ResponseJournal(tmp_path)
    groups = Journal(tmp_path)
    record(journal, keys(1, position=1), [[3]])
    groups.append(FinishedGroup(1, 0, [0.0], {}))
    open_files = {journal.rotate(), groups.rotate()}
    record(journal, keys(1, position=2), [[3]])
    prune(tmp_path, open_files=open_files, untrained=[1, 2], position=3)
    assert len([*tmp_path.iterdir()]) == 4
    prune(tmp_path, open_files=open_files, untrained=[2], position=3)
    assert {path.name for path in tmp_path.iterdir()} == open_files
    assert partial_responses(ResponseJournal(tmp_path), keys(1, position=2)) != [None]
