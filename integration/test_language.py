"""The language check finds each kind of breach, and nothing in plain text."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from integration.language import path_breaches, python_breaches, subject_breaches, text_breaches


@pytest.mark.parametrize(
    "source",
    [
        'def f():\n    """Of what arrived."""\n',
        "def f():\n    told = 1\n    return told\n",
        'LIMIT = 1\n"""Its limit."""\n',
        'def f():\n    """3 rows."""\n',
        'def f():\n    """Empty if nothing arrived."""\n',
        "OURS = 1\n",
        "PATIENCE_S = 1\n",
        "def f(most_rows): ...\n",
        "def test_a_wait_is_told(): ...\n",
        "# Nobody reads\n",
        "x = 'the lease lapsed'\n",
        "# The owner is not known\n",
    ],
)
def test_each_kind_of_breach_is_found_once(source: str) -> None:
    assert len(list(python_breaches(source))) == 1


def test_a_phrase_across_two_lines_is_found_on_its_first_line() -> None:
    assert [line for line, _ in text_breaches("one\nit goes\non then\n")] == [2]


def test_plain_words_and_names_of_others_pass() -> None:
    assert list(text_breaches("The lease expired; `settle` is a span name.")) == []
    assert list(python_breaches('span = "settle train"\nmost_common = 1\n')) == []


def test_names_of_files_are_checked() -> None:
    assert len(list(path_breaches("packages/found/told-host.html.j2"))) == 2
    assert list(path_breaches("packages/refit_mx/hosts.py")) == []


def test_subjects_to_push_are_checked(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "--initial-branch=main")
    git("commit", "--allow-empty", "-m", "before the upstream")
    assert not list(subject_breaches(tmp_path))
    git("checkout", "-b", "topic", "--track", "main")
    for subject in ("core: add a column", "no scope", "core: " + "x" * 67):
        git("commit", "--allow-empty", "-m", subject)
    assert ["no scope" in breach for breach in subject_breaches(tmp_path)] == [False, True]
