"""Pairs of releases and packages of a checkout that are tested, and pairs with a declared break."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration.git_commands import git
from integration.releases import Pair, find, packages, pairs

CORE, CODEC, ACTOR = "the-core", "a-codec", "an-actor"
"""The actor requires the codec and the core; the codec requires the core."""


class Repository:
    """A repository of three packages, each at 0.1.0 with a tag."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write(CORE, "0.1.0")
        self.write(CODEC, "0.1.0", f"{CORE}>=0.1.0")
        self.write(ACTOR, "0.1.0", f"{CODEC}>=0.1.0", f"{CORE}[extra]>=0.1.0", "numpy>=1.26")
        git(self.root, "init", "--quiet")
        git(self.root, "add", ".")
        for name in (CORE, CODEC, ACTOR):
            self.release(name, "0.1.0")

    def write(self, name: str, version: str, *needs: str) -> None:
        folder = self.root / "packages" / name
        folder.mkdir(parents=True, exist_ok=True)
        quoted = ", ".join(f'"{each}"' for each in needs)
        project = f'name = "{name}"\nversion = "{version}"\ndependencies = [{quoted}]\n'
        (folder / "pyproject.toml").write_text(f"[project]\n{project}")

    def release(self, name: str, version: str) -> None:
        git(self.root, "commit", "--quiet", "--allow-empty", "-a", "-m", "one")
        git(self.root, "tag", f"{name}=={version}")

    def pairs(self) -> set[Pair]:
        return set(pairs(find(CORE, packages(self.root))))


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_last_releases_are_tested_in_both_directions(repository: Repository) -> None:
    repository.write(CORE, "0.1.1")
    assert repository.pairs() == {
        Pair(f"{CORE}==0.1.0", (CODEC, ACTOR)),
        Pair(f"{CODEC}==0.1.0", (CODEC,)),
        Pair(f"{ACTOR}==0.1.0", (ACTOR,)),
    }


def test_unreleased_package_is_in_no_pair(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    git(repository.root, "tag", "--delete", f"{CODEC}==0.1.0")
    assert {pair.tag for pair in repository.pairs()} == {f"{CORE}==0.1.0", f"{ACTOR}==0.1.0"}
    git(repository.root, "tag", "--delete", f"{CORE}==0.1.0")
    assert not repository.pairs()


def test_raised_lower_bound_excludes_an_older_release(repository: Repository) -> None:
    repository.write(CORE, "0.1.1")
    repository.write(CODEC, "0.1.1", f"{CORE}>=0.1.1")
    conflict = f"{CODEC} 0.1.1 requires {CORE}>=0.1.1"
    all_pairs = repository.pairs()
    assert Pair(f"{CORE}==0.1.0", (CODEC,), conflict) in all_pairs
    # The actor could not be installed with it either.
    assert Pair(f"{CORE}==0.1.0", (ACTOR,), conflict) in all_pairs
    assert {pair.tag for pair in all_pairs if not pair.conflict} == {
        f"{CODEC}==0.1.0",
        f"{ACTOR}==0.1.0",
    }


def test_upper_bound_of_a_release_excludes_the_checkout(repository: Repository) -> None:
    repository.write(CODEC, "0.1.1", f"{CORE}<0.1.1,>=0.1.0")
    repository.release(CODEC, "0.1.1")
    repository.write(CORE, "0.1.1")
    [pair] = [pair for pair in repository.pairs() if pair.tag == f"{CODEC}==0.1.1"]
    assert pair.conflict == f"it requires {CORE}<0.1.1,>=0.1.0, and {CORE} here is 0.1.1"


def test_breaking_version_is_not_tested_with_older_releases(
    repository: Repository,
) -> None:
    before = f"{CORE} 0.2.0 may break with {CORE}==0.1.0"
    repository.write(CORE, "0.2.0")
    assert repository.pairs() == {
        Pair(f"{CORE}==0.1.0", (CODEC, ACTOR)),  # their requirements allow it
        Pair(f"{CODEC}==0.1.0", (CODEC,), before),
        Pair(f"{ACTOR}==0.1.0", (ACTOR,), before),
    }
    # The same holds between its release and theirs.
    repository.release(CORE, "0.2.0")
    assert repository.pairs() == {
        Pair(f"{CORE}==0.2.0", (CODEC, ACTOR)),
        Pair(f"{CODEC}==0.1.0", (CODEC,), before),
        Pair(f"{ACTOR}==0.1.0", (ACTOR,), before),
    }


def test_releases_after_a_break_are_tested_again(repository: Repository) -> None:
    repository.write(CORE, "0.2.0")
    repository.release(CORE, "0.2.0")
    repository.write(CODEC, "0.2.0", f"{CORE}>=0.2.0")
    repository.release(CODEC, "0.2.0")
    repository.write(CORE, "0.2.1")
    assert repository.pairs() == {
        Pair(f"{CORE}==0.2.0", (CODEC, ACTOR)),
        Pair(f"{CODEC}==0.2.0", (CODEC,)),
        Pair(f"{ACTOR}==0.1.0", (ACTOR,), f"{CODEC} 0.2.0 may break with {CODEC}==0.1.0"),
    }
