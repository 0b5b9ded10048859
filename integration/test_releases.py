"""Conditions of a release: on a small repository, and on a copy of this one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from integration.git_commands import git
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
INNER = '''"""Definitions."""


def helper(a: int, b: int = 0) -> int:
    """Add."""
    return a + b


class Client:
    """A client."""

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


class Repository:
    """A repository with the package ``first-thing`` and its tag 0.1.0."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "packages" / "first-thing"
        self.inner = self.folder / "src" / "first_thing" / "_inner.py"
        self.inner.parent.mkdir(parents=True)
        (self.folder / "changelog.d").mkdir()
        self.inner.with_name("__init__.py").write_text(FACE)
        self.inner.write_text(INNER)
        self.become("0.1.0")
        git(self.root, "init", "--quiet")
        git(self.root, "add", ".")
        git(self.root, "commit", "--quiet", "-m", "first")
        git(self.root, "tag", "first-thing==0.1.0")

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


def test_tag_of_the_current_version_may_be_released(repository: Repository) -> None:
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
        (
            "second-thing==0.1.0",
            None,
            "unknown package 'second-thing'; expected one of first-thing",
        ),
        ("../first-thing==0.1.0", None, "unknown package"),
        ("first-thing==0.1.0", fragment, r"1 changes are not in CHANGELOG.md yet, first \+more"),
        ("first-thing==0.1.0", no_notes, "CHANGELOG.md has nothing about 0.1.0"),
    ],
)
def test_other_tags_are_refused(
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
def test_breaking_change_needs_a_breaking_version(
    repository: Repository, before: str, after: str
) -> None:
    repository.become("0.1.1")
    repository.change(before, after)
    report, allowed = check_api(repository.package)
    assert "breaking changes since first-thing==0.1.0" in report
    assert len(report.splitlines()) > 1
    assert not allowed
    repository.become("0.2.0")
    assert check_api(repository.package)[1]


def move_and_change(repository: Repository) -> None:
    other = "def helper(a: int) -> int:\n    return a\n"
    repository.inner.with_name("_other.py").write_text(other)
    face = FACE.replace("_inner import Client, helper", "_inner import Client")
    face = face.replace("\n__all__", "from first_thing._other import helper\n\n__all__")
    repository.inner.with_name("__init__.py").write_text(face)


def export_another_function(repository: Repository) -> None:
    face = FACE.replace(
        "Client, helper\n", "Client\nfrom first_thing._inner import private as helper\n"
    )
    repository.inner.with_name("__init__.py").write_text(face)


def remove_export(repository: Repository) -> None:
    face = FACE.replace('["Client", "helper"]', '["Client"]')
    repository.inner.with_name("__init__.py").write_text(face)


@pytest.mark.parametrize("change", [move_and_change, export_another_function, remove_export])
def test_replaced_or_removed_export_is_a_break(
    repository: Repository, change: Callable[[Repository], None]
) -> None:
    repository.become("0.1.1")
    change(repository)
    report, allowed = check_api(repository.package)
    assert not allowed, report


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("def private(a: int)", "def private()"),
        ("b: int = 0", "b: int = 0, c: int = 0"),
    ],
)
def test_compatible_change_needs_no_breaking_version(
    repository: Repository, before: str, after: str
) -> None:
    repository.become("0.1.1")
    repository.change(before, after)
    report, allowed = check_api(repository.package)
    assert allowed, report
    assert report == "first-thing 0.1.1: 0 breaking changes since first-thing==0.1.0"


def test_break_after_a_release_is_reported_before_the_next(
    repository: Repository,
) -> None:
    assert check_api(repository.package)[1]
    repository.change("def get(", "def fetch(")
    report, allowed = check_api(repository.package)
    assert not allowed
    assert "1 breaking changes since first-thing==0.1.0" in report
    assert report.endswith("such changes need version 0.2.0 or later")
    repository.become("0.2.0")
    assert check_api(repository.package)[1]


def test_tag_is_compared_with_the_release_before_it(repository: Repository) -> None:
    repository.become("0.1.1")
    repository.change("def get(", "def fetch(")
    git(repository.root, "commit", "--quiet", "-a", "-m", "second")
    git(repository.root, "tag", "first-thing==0.1.1")
    assert check_api(repository.package)[1]
    report, allowed = check_api(repository.package, tagged=True)
    assert not allowed
    assert "since first-thing==0.1.0" in report


def test_last_release_is_the_highest_up_to_this_version(repository: Repository) -> None:
    for version in ("0.9.0", "0.10.0", "0.11.0", "0.10.1rc1"):
        git(repository.root, "tag", f"first-thing=={version}")
    repository.become("0.11.0")
    assert repository.package.last_release() == "first-thing==0.10.0"
    assert repository.package.last_release(inclusive=True) == "first-thing==0.11.0"
    repository.become("0.10.1")
    assert repository.package.last_release(inclusive=True) == "first-thing==0.10.0"
    repository.become("0.1.0")
    assert repository.package.last_release() is None


def test_version_must_be_three_numbers(repository: Repository) -> None:
    repository.become("0.2.0rc1")
    with pytest.raises(ReleaseError, match=r"invalid version '0\.2\.0rc1'"):
        repository.package.last_release()


def test_packages_and_members_are_complete() -> None:
    listed = packages()
    assert len(listed) == 6
    for package in listed:
        assert package.root == ROOT
        assert package.version
        assert (package.folder / "src" / package.module / "__init__.py").exists()
    assert {each.name for each in members()} - {each.name for each in listed} == {
        "dataplane-admin",
        "grpo-trainer",
        "refit-server",
    }


def test_prepared_release_passes_the_checks_of_a_release(tmp_path: Path) -> None:
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
    git(tmp_path, "clone", "--quiet", str(before), str(after))  # a clone has no empty folders
    assert lacking(after) == []
    for each in members(after):
        assert "This release has this." in check_tag(f"{each.name}==7.8.9", after).notes()
    images = re.compile(r"\brl-dataplane/[\w-]+(?::|, newTag: )(\d[\d.]*\d)")
    for folder, min_images in (("deploy", 10), ("docker", 4)):
        texts = [path.read_text() for path in (after / folder).rglob("*.*") if path.is_file()]
        named = [version for text in texts for version in images.findall(text)]
        assert len(named) >= min_images
        assert set(named) == {"7.8.9"}
