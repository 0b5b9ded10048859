"""Run the quick tests of the members that differ from main: the tests of ``make check``.

A workspace member has changed if one of its files differs from main, committed or not. Its tests
that are marked neither ``slow`` nor ``long`` run for at most `MAX_S`, changed test files first.
The others are reported as skipped; ``make test-<package>`` runs them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_S = 25.0
"""Time for the tests, without their collection."""

_DEADLINE = pytest.StashKey[float]()


def changed_files(root: Path = ROOT, base: str = "main") -> list[str]:
    """Return the files that differ from ``base``, relative to the repository's root."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    fork = git("merge-base", base, "HEAD")[0]
    new = git("ls-files", "--others", "--exclude-standard")
    return sorted({*git("diff", "--name-only", fork), *new})


def members_of(files: list[str]) -> list[str]:
    """Return the folders of the packages and services that ``files`` are in."""
    matches = (re.match(r"(packages|services)/[^/]+(?=/)", path) for path in files)
    return sorted({match[0] for match in matches if match})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of changed files first."""
    changed = {ROOT / path for path in changed_files()}
    items.sort(key=lambda item: item.path not in changed)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip ``item`` after the deadline."""
    deadline = item.session.stash.setdefault(_DEADLINE, time.monotonic() + MAX_S)
    if time.monotonic() > deadline:
        pytest.skip(f"`make check` runs tests for {MAX_S:g} s; `make test` runs this one as well")


def main() -> int:
    """Run the tests and return pytest's exit status."""
    members = members_of(changed_files())
    print(
        f"quick tests of {', '.join(members) or 'no member'}, for at most {MAX_S:g} s", flush=True
    )
    if not members:
        return 0
    words = ["-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "integration.changed"]
    command = [sys.executable, *words, "-m", "not slow and not long", *members]
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
