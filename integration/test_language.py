"""The language check reads docstrings, all strings, and the messages of new commits."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration.git_commands import git
from integration.language import base_commit, message_breaches, python_breaches


@pytest.mark.parametrize(
    ("source", "breach"),
    [
        ('def f():\n    """Of what arrived."""\n', (2, "docstring begins with 'Of'")),
        ('x = 1\nprint(f"""{x}\nis told {x}""")\n', (3, "'told': write")),
        ("most_rows = 1  # as a bound\n", (1, "name 'most_rows' has 'most'")),
    ],
)
def test_breach_is_reported_with_its_line(source: str, breach: tuple[int, str]) -> None:
    ((line, text),) = python_breaches(source)
    assert line == breach[0]
    assert text.startswith(breach[1])


def test_messages_of_new_commits_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commit(message: str) -> str:
        git(tmp_path, "commit", "--allow-empty", "-m", message)
        return git(tmp_path, "rev-parse", "HEAD")

    monkeypatch.delenv("BASE_COMMIT", raising=False)
    git(tmp_path, "init", "-b", "work")
    old = commit("Told before the check existed")
    assert base_commit(tmp_path) is None
    git(tmp_path, "branch", "main")
    commit("core: return rows")
    commit("Return rows\n\nA reader was told.")
    assert base_commit(tmp_path) == old
    breaches = [each.partition(": ")[2] for each in message_breaches(old, tmp_path)]
    assert breaches[0] == "subject 'Return rows' is not 'scope: what changes'"
    assert breaches[1].startswith("'told': write")
    assert len(breaches) == 2
    monkeypatch.setenv("BASE_COMMIT", "0" * 40)
    assert base_commit(tmp_path) is None
