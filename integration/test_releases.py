"""What stands in a release's way: on a small repository, and on a copy of this one."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from integration.releases import (
    ROOT,
    Package,
    ReleaseError,
    check_api,
    check_tag,
    find,
    members,
    packages,
    prepare_release,
)
from integration.test_imports import lacking

FACE = '''"""A package."""

from first_thing._inner import Client, helper

__all__ = ["Client", "helper"]
'''
INNER = '''"""Where it is made."""


def helper(a: int, b: int = 0) -> int:
    """Add."""
    return a + b


class Client:
    """Of something."""

    def get(self, name: str, *, timeout_s: float = 1.0) -> str:
        """Get."""
        return name


def private(a: int) -> int:
    """Not exported."""
    return a
'''
CHANGES = """# Changelog

<!-- towncrier release notes start -->

## {version} (2026-01-01)

### Added

- What {version} has.

## 0.0.1 (2025-01-01)

- What came before.
"""


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, timeout=60)


class Repository:
    """With the package ``first-thing``, as released in 0.1.0."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "packages" / "first-thing"
        self.inner = self.folder / "src" / "first_thing" / "_inner.py"
        self.inner.parent.mkdir(parents=True)
        (self.folder / "changelog.d").mkdir()
        self.inner.with_name("__init__.py").write_text(FACE)
        self.inner.write_text(INNER)
        self.become("0.1.0")
        self.git("init", "--quiet")
        self.git("add", ".")
        self.git("commit", "--quiet", "-m", "first")
        self.git("tag", "first-thing==0.1.0")

    def git(self, *arguments: str) -> None:
        git(self.root, *arguments)

    def become(self, version: str) -> None:
        project = f'[project]\nname = "first-thing"\nversion = "{version}"\ndependencies = []\n'
        (self.folder / "pyproject.toml").write_text(project)
        (self.folder / "CHANGELOG.md").write_text(CHANGES.format(version=version))

    def change(self, before: str, after: str) -> None:
        text = self.inner.read_text()
        assert before in text
        self.inner.write_text(text.replace(before, after))

    @property
    def package(self) -> Package:
        return find("first-thing", packages(self.root))


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_a_tag_of_the_package_as_it_is_may_be_released(repository: Repository) -> None:
    package = check_tag("first-thing==0.1.0", repository.root)
    assert package.notes() == "### Added\n\n- What 0.1.0 has."


def fragment(repository: Repository) -> None:
    (repository.folder / "changelog.d" / "+more.added.md").write_text("More.\n")


def no_notes(repository: Repository) -> None:
    (repository.folder / "CHANGELOG.md").write_text("# Changelog\n")


@pytest.mark.parametrize(
    ("tag", "change", "expected"),
    [
        ("first-thing==0.2.0", None, "first-thing here is version 0.1.0"),
        ("first-thing", None, "first-thing here is version 0.1.0"),
        ("second-thing==0.1.0", None, "'second-thing' is not known; expected one of first-thing"),
        ("../first-thing==0.1.0", None, "is not known"),
        ("first-thing==0.1.0", fragment, r"1 changes are not in CHANGELOG.md yet, \+more.added.md"),
        ("first-thing==0.1.0", no_notes, "CHANGELOG.md has nothing about 0.1.0"),
    ],
)
def test_a_tag_of_anything_else_is_refused(
    repository: Repository, tag: str, change: Callable[[Repository], None] | None, expected: str
) -> None:
    if change is not None:
        change(repository)
    with pytest.raises(ReleaseError, match=expected):
        check_tag(tag, repository.root)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("def helper(a: int, b: int = 0)", "def helper(a: int)"),
        ("*, timeout_s: float = 1.0", "*, deadline_s: float = 1.0"),
        ("def get(", "def fetch("),
    ],
)
def test_a_change_of_what_is_exported_needs_a_version_that_says_so(
    repository: Repository, before: str, after: str
) -> None:
    repository.become("0.1.1")
    repository.change(before, after)
    told, allowed = check_api(repository.package)
    assert "breaking changes since first-thing==0.1.0" in told
    assert len(told.splitlines()) > 1
    assert not allowed
    repository.become("0.2.0")
    assert check_api(repository.package)[1]


def moved_and_changed(repository: Repository) -> None:
    other = "def helper(a: int) -> int:\n    return a\n"
    repository.inner.with_name("_other.py").write_text(other)
    face = FACE.replace("_inner import Client, helper", "_inner import Client")
    face = face.replace("\n__all__", "from first_thing._other import helper\n\n__all__")
    repository.inner.with_name("__init__.py").write_text(face)


def another_under_its_name(repository: Repository) -> None:
    face = FACE.replace(
        "Client, helper\n", "Client\nfrom first_thing._inner import private as helper\n"
    )
    repository.inner.with_name("__init__.py").write_text(face)


def not_exported(repository: Repository) -> None:
    face = FACE.replace('["Client", "helper"]', '["Client"]')
    repository.inner.with_name("__init__.py").write_text(face)


@pytest.mark.parametrize("change", [moved_and_changed, another_under_its_name, not_exported])
def test_a_name_that_stands_for_something_else_or_nothing_is_a_break(
    repository: Repository, change: Callable[[Repository], None]
) -> None:
    repository.become("0.1.1")
    change(repository)
    told, allowed = check_api(repository.package)
    assert not allowed, told


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("def private(a: int)", "def private()"),
        ("b: int = 0", "b: int = 0, c: int = 0"),
    ],
)
def test_what_breaks_nobody_needs_none(repository: Repository, before: str, after: str) -> None:
    repository.become("0.1.1")
    repository.change(before, after)
    told, allowed = check_api(repository.package)
    assert allowed, told
    assert told == "first-thing 0.1.1: 0 breaking changes since first-thing==0.1.0"


def test_what_breaks_after_a_release_is_found_before_the_next_is_prepared(
    repository: Repository,
) -> None:
    assert check_api(repository.package)[1]
    repository.change("def get(", "def fetch(")
    told, allowed = check_api(repository.package)
    assert not allowed
    assert "1 breaking changes since first-thing==0.1.0" in told
    assert told.endswith("such changes need version 0.2.0 or later")
    repository.become("0.2.0")
    assert check_api(repository.package)[1]


def test_a_tag_is_compared_with_the_release_before_it(repository: Repository) -> None:
    repository.become("0.1.1")
    repository.change("def get(", "def fetch(")
    repository.git("commit", "--quiet", "-a", "-m", "second")
    repository.git("tag", "first-thing==0.1.1")
    assert check_api(repository.package)[1]
    told, allowed = check_api(repository.package, tagged=True)
    assert not allowed
    assert "since first-thing==0.1.0" in told


def test_the_last_release_is_the_highest_up_to_this_version(repository: Repository) -> None:
    for version in ("0.9.0", "0.10.0", "0.11.0", "0.10.1rc1"):
        repository.git("tag", f"first-thing=={version}")
    repository.become("0.11.0")
    assert repository.package.last_release() == "first-thing==0.10.0"
    assert repository.package.last_release(this_too=True) == "first-thing==0.11.0"
    repository.become("0.10.1")
    assert repository.package.last_release(this_too=True) == "first-thing==0.10.0"
    repository.become("0.1.0")
    assert repository.package.last_release() is None


def test_a_version_is_three_numbers(repository: Repository) -> None:
    repository.become("0.2.0rc1")
    with pytest.raises(ReleaseError, match=r"'0\.2\.0rc1' is no version"):
        repository.package.last_release()


def test_every_package_here_can_be_looked_at() -> None:
    found = packages()
    assert len(found) == 6
    for package in found:
        assert package.root == ROOT
        assert package.version
        assert (package.folder / "src" / package.module / "__init__.py").exists()
    assert {each.name for each in members()} - {each.name for each in found} == {
        "dataplane-admin",
        "grpo-trainer",
        "refit-server",
    }


def test_what_was_prepared_passes_the_tests_that_a_release_waits_for(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*_cache")
    for folder in ("packages", "services", "deploy", "docker"):
        shutil.copytree(ROOT / folder, before / folder, ignore=unwanted)
    for each in members(before):
        (each.folder / "changelog.d" / "+this.fixed.md").write_text("This release has this.\n")
    git(before, "init", "--quiet")
    git(before, "add", ".")
    git(before, "commit", "--quiet", "-m", "before")
    for each in members(before):
        prepare_release(each, "7.8.9")
    git(before, "add", ".")
    git(before, "commit", "--quiet", "-m", "prepared")
    git(tmp_path, "clone", "--quiet", str(before), str(after))  # has no folder without a file
    assert lacking(after) == []
    for each in members(after):
        assert "This release has this." in check_tag(f"{each.name}==7.8.9", after).notes()
    images = re.compile(r"\brl-dataplane/[\w-]+(?::|, newTag: )(\d[\d.]*\d)")
    for folder, at_least in (("deploy", 10), ("docker", 4)):
        texts = [path.read_text() for path in (after / folder).rglob("*.*") if path.is_file()]
        named = [version for text in texts for version in images.findall(text)]
        assert len(named) >= at_least
        assert set(named) == {"7.8.9"}
