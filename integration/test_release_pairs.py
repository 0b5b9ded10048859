"""Which releases are tested with which packages of a checkout, and which breaks stop nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from integration.releases import Pair, find, packages, pairs

CORE, CODEC, ACTOR = "the-core", "a-codec", "an-actor"
"""The actor needs both others, the codec the core."""


class Repository:
    """With all three at 0.1.0, and a tag of each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write(CORE, "0.1.0")
        self.write(CODEC, "0.1.0", f"{CORE}>=0.1.0")
        self.write(ACTOR, "0.1.0", f"{CODEC}>=0.1.0", f"{CORE}[extra]>=0.1.0", "numpy>=1.26")
        self.git("init", "--quiet")
        self.git("add", ".")
        for name in (CORE, CODEC, ACTOR):
            self.release(name, "0.1.0")

    def git(self, *arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        subprocess.run(["git", *identity, *arguments], cwd=self.root, check=True, timeout=60)

    def write(self, name: str, version: str, *needs: str) -> None:
        folder = self.root / "packages" / name
        folder.mkdir(parents=True, exist_ok=True)
        quoted = ", ".join(f'"{each}"' for each in needs)
        project = f'name = "{name}"\nversion = "{version}"\ndependencies = [{quoted}]\n'
        (folder / "pyproject.toml").write_text(f"[project]\n{project}")

    def release(self, name: str, version: str) -> None:
        self.git("commit", "--quiet", "--allow-empty", "-a", "-m", "one")
        self.git("tag", f"{name}=={version}")

    def pairs(self) -> set[Pair]:
        return set(pairs(find(CORE, packages(self.root))))


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_without_a_break_the_last_releases_are_tested_on_both_sides(repository: Repository) -> None:
    repository.write(CORE, "0.1.1")
    assert repository.pairs() == {
        Pair(f"{CORE}==0.1.0", (CODEC, ACTOR)),
        Pair(f"{CODEC}==0.1.0", (CODEC,)),
        Pair(f"{ACTOR}==0.1.0", (ACTOR,)),
    }


def test_what_was_not_released_is_in_no_pair(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    repository.git("tag", "--delete", f"{CODEC}==0.1.0")
    assert {pair.tag for pair in repository.pairs()} == {f"{CORE}==0.1.0", f"{ACTOR}==0.1.0"}
    repository.git("tag", "--delete", f"{CORE}==0.1.0")
    assert not repository.pairs()


def test_a_raised_floor_excludes_the_release_below_it(repository: Repository) -> None:
    repository.write(CORE, "0.1.1")
    repository.write(CODEC, "0.1.1", f"{CORE}>=0.1.1")
    why_not = f"{CODEC} 0.1.1 asks for {CORE}>=0.1.1"
    told = repository.pairs()
    assert Pair(f"{CORE}==0.1.0", (CODEC,), why_not) in told
    # The actor could not be installed with it either.
    assert Pair(f"{CORE}==0.1.0", (ACTOR,), why_not) in told
    assert {pair.tag for pair in told if not pair.why_not} == {f"{CODEC}==0.1.0", f"{ACTOR}==0.1.0"}


def test_an_upper_bound_of_a_release_excludes_the_checkout(repository: Repository) -> None:
    repository.write(CODEC, "0.1.1", f"{CORE}<0.1.1,>=0.1.0")
    repository.release(CODEC, "0.1.1")
    repository.write(CORE, "0.1.1")
    [found] = [pair for pair in repository.pairs() if pair.tag == f"{CODEC}==0.1.1"]
    assert found.why_not == f"it asks for {CORE}<0.1.1,>=0.1.0, and {CORE} here is 0.1.1"


def test_a_version_that_may_break_is_not_tested_with_what_was_released_before_it(
    repository: Repository,
) -> None:
    before = f"{CORE} 0.2.0 may break with {CORE}==0.1.0"
    repository.write(CORE, "0.2.0")
    assert repository.pairs() == {
        Pair(f"{CORE}==0.1.0", (CODEC, ACTOR)),  # they do not say that they need more
        Pair(f"{CODEC}==0.1.0", (CODEC,), before),
        Pair(f"{ACTOR}==0.1.0", (ACTOR,), before),
    }
    # Between its release and theirs as well.
    repository.release(CORE, "0.2.0")
    assert repository.pairs() == {
        Pair(f"{CORE}==0.2.0", (CODEC, ACTOR)),
        Pair(f"{CODEC}==0.1.0", (CODEC,), before),
        Pair(f"{ACTOR}==0.1.0", (ACTOR,), before),
    }


def test_what_was_released_after_a_break_is_tested_again(repository: Repository) -> None:
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
