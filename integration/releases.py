"""Release one package or service at a time, by a tag ``<name>==<version>``.

``prepare`` writes the version and the changelog; a person reviews, commits and tags them. ``check``
checks a package's tag, and builds its distributions and release notes. ``api`` compares the
exported names of each package with its last release.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any  # Any: what TOML holds

import griffe
import typer
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")
app = typer.Typer(add_completion=False, help=__doc__.partition("\n")[0])


class ReleaseError(Exception):
    """Release that is not possible."""


@dataclass(frozen=True)
class Package:
    """A package, which is uploaded, or a service, which is an image.

    Attributes:
        root: folder of the repository.
        name: name of the distribution.
        folder: its folder in the repository.
    """

    root: Path
    name: str
    folder: Path

    @property
    def module(self) -> str:
        """Name of the module."""
        return self.name.replace("-", "_")

    @property
    def version(self) -> str:
        """Version in its pyproject.toml."""
        version: str = self.project()["version"]
        return version

    def project(self, tag: str | None = None) -> dict[str, Any]:
        """Return ``[project]`` of its pyproject.toml, of this checkout or of a tag."""
        path = self.folder / "pyproject.toml"
        if tag is None:
            text = path.read_text()
        else:
            text = _git(self.root, "show", f"{tag}:{path.relative_to(self.root)}")
        project: dict[str, Any] = tomllib.loads(text)["project"]
        return project

    def requirements(self, tag: str | None = None) -> dict[str, Requirement]:
        """Return its dependencies by name, of this checkout or of a tag."""
        requirements = map(Requirement, self.project(tag)["dependencies"])
        return {each.name: each for each in requirements}

    @property
    def fragments(self) -> list[str]:
        """File names of the unreleased changes."""
        return sorted(path.name for path in (self.folder / "changelog.d").glob("*.md"))

    def notes(self) -> str:
        """Return the changelog's section of its version; empty if there is none."""
        text = (self.folder / "CHANGELOG.md").read_text()
        section = re.search(
            rf"^## {re.escape(self.version)} \([^)]*\)\n(.*?)(?=^## |\Z)", text, re.M | re.S
        )
        return section.group(1).strip() if section else ""

    def last_release(self, *, inclusive: bool = False) -> str | None:
        """Return the tag of the highest version before this one, or up to it if ``inclusive``."""
        this = _numbers(self.version)
        return max(
            (
                tag
                for tag in self.releases()
                if _version_of(tag) < this or (inclusive and _version_of(tag) == this)
            ),
            key=_version_of,
            default=None,
        )

    def releases(self) -> list[str]:
        """Return its tags without those of release candidates."""
        tags = _git(self.root, "tag", "--list", f"{self.name}==*").split()
        return [tag for tag in tags if VERSION.fullmatch(tag.partition("==")[2])]

    def breaks(self, tag: str) -> Iterator[str]:
        """Yield each breaking change of the exported names since a tag."""
        sources = self.folder.relative_to(self.root) / "src"
        old = griffe.load_git(
            self.module, ref=tag, repo=self.root, search_paths=[str(sources)], resolve_aliases=True
        )
        new = griffe.load(
            self.module, search_paths=[str(self.root / sources)], resolve_aliases=True
        )
        exported = {
            face[name].canonical_path
            for name in map(str, old.exports or ())
            for face in (old, new)
            if name in face.members
        }
        for name in sorted({*map(str, old.exports or ())} - {*map(str, new.exports or ())}):
            yield f"{self.module}: {name} is no longer exported"
        for name in sorted({*map(str, old.exports or ())} & {*map(str, new.exports or ())}):
            if name in old.members and name in new.members:
                before, after = old[name].canonical_path, new[name].canonical_path
                if before.rpartition(".")[2] != after.rpartition(".")[2]:
                    yield f"{self.module}: {name} was {before} and is now {after}"
        for breakage in griffe.find_breaking_changes(old, new):
            path = breakage.obj.canonical_path
            if any(path == each or path.startswith(f"{each}.") for each in exported):
                yield breakage.explain(griffe.ExplanationStyle.ONE_LINE)

    def may_break(self, tag: str) -> bool:
        """Return whether this version may break users of a tag's version.

        A major release may; before 1.0, a minor release may too.
        """
        new, old = _numbers(self.version), _version_of(tag)
        return new[0] > old[0] or (new[0] == 0 and new[1] > old[1])


def packages(root: Path = ROOT) -> list[Package]:
    """Return the packages, which are uploaded."""
    return _in(root, "packages")


def members(root: Path = ROOT) -> list[Package]:
    """Return the packages and services; each has a version and a changelog."""
    return packages(root) + _in(root, "services")


def find(name: str, among: list[Package]) -> Package:
    """Return the package called ``name``.

    Raises:
        ReleaseError: there is none.
    """
    for each in among:
        if each.name == name:
            return each
    names = ", ".join(each.name for each in among)
    raise ReleaseError(f"unknown package {name!r}; expected one of {names}")


def check_tag(tag: str, root: Path = ROOT) -> Package:
    """Return the package or service that a tag releases.

    Raises:
        ReleaseError: the tag's version is not the checkout's, or its changelog is incomplete.
    """
    name, _, version = tag.partition("==")
    package = find(name, members(root))
    if version != package.version:
        raise ReleaseError(f"tag {tag}: {name} here is version {package.version}")
    if package.fragments:
        raise ReleaseError(
            f"tag {tag}: {len(package.fragments)} changes are not in CHANGELOG.md yet, "
            f"first {package.fragments[0]}; run prepare"
        )
    if not package.notes():
        raise ReleaseError(f"tag {tag}: CHANGELOG.md has nothing about {version}")
    return package


def check_api(package: Package, *, tagged: bool = False) -> tuple[str, bool]:
    """Return a report of the breaking changes since the last release, and whether they are allowed.

    Args:
        package: a package that is uploaded.
        tagged: this version is being released; compare it with the release before it. Otherwise
            its own release, if there is one, counts as the last release.
    """
    tag = package.last_release(inclusive=not tagged)
    if tag is None:
        return f"{package.name} {package.version}: no earlier release", True
    broken = list(package.breaks(tag))
    allowed = not broken or package.may_break(tag)
    lines = [f"{package.name} {package.version}: {len(broken)} breaking changes since {tag}"]
    lines += broken if allowed else [*broken, f"such changes need {_next(tag)} or later"]
    return "\n  ".join(lines), allowed


def prepare_release(package: Package, version: str) -> None:
    """Set a version and collect the changes into the changelog.

    Compose files, manifests and READMEs get the new version in the tag of a service's image.

    Raises:
        ReleaseError: the version is less than the current one, or there are no changes.
    """
    if _numbers(version) < _numbers(package.version):
        raise ReleaseError(f"{version} is less than {package.name}'s version {package.version}")
    if not package.fragments:
        raise ReleaseError(f"{package.name}: changelog.d has no changes")
    path = package.folder / "pyproject.toml"
    text = path.read_text()
    before = package.version
    changed = text.replace(f'\nversion = "{before}"\n', f'\nversion = "{version}"\n', 1)
    arguments = ("--yes", "--config", str(path), "--version", version)
    _run("towncrier", "build", *arguments, root=package.root)
    path.write_text(changed)
    for file in _image_files(package.root):
        image = rf"(\brl-dataplane/{package.name}(?::|, newTag: )){re.escape(before)}\b"
        text = file.read_text()
        if re.search(image, text):
            file.write_text(re.sub(image, rf"\g<1>{version}", text))


def _image_files(root: Path) -> list[Path]:
    """Return the compose files, manifests and READMEs, which may name images of services."""
    return [
        path
        for folder in ("deploy", "docker")
        for path in sorted((root / folder).rglob("*"))
        if path.suffix in (".md", ".yaml")
    ]


@dataclass(frozen=True)
class Pair:
    """A release, and the packages of this checkout that are tested with it.

    Attributes:
        tag: tag of the release.
        tested: names of the packages whose tests run.
        conflict: why they do not fit together; empty if they do.
    """

    tag: str
    tested: tuple[str, ...]
    conflict: str = ""


def pairs(package: Package) -> Iterator[Pair]:
    """Yield the pairs to test when ``package`` changes.

    They are its last release with its dependents of this checkout, and the last release of each
    dependent with this checkout. A pair with a declared break, by a requirement or a version, is
    not tested: otherwise a breaking change could be neither merged nor released.
    """
    if not package.releases():
        return
    by_name = {each.name: each for each in packages(package.root)}
    dependents = [each for each in by_name.values() if package.name in each.requirements()]
    last = max(package.releases(), key=_version_of)
    exclusions = {each.name: _exclusion(each, last, by_name) for each in dependents}
    for name, conflict in exclusions.items():
        if conflict:
            yield Pair(last, (name,), conflict)
    compatible = tuple(name for name, conflict in exclusions.items() if not conflict)
    if compatible:
        yield Pair(last, compatible)
    for each in dependents:
        if each.releases():
            newest = max(each.releases(), key=_version_of)
            yield Pair(newest, (each.name,), _declared_break(each, newest, by_name))


def _exclusion(package: Package, tag: str, by_name: dict[str, Package]) -> str:
    """Return the requirement of ``package``, direct or not, that excludes a release.

    Empty if none does.
    """
    released, _, version = tag.partition("==")
    for name, requirement in package.requirements().items():
        if name == released and not requirement.specifier.contains(version):
            return f"{package.name} {package.version} requires {requirement}"
        indirect = _exclusion(by_name[name], tag, by_name) if name in by_name else ""
        if indirect:
            return indirect
    return ""


def _declared_break(package: Package, tag: str, by_name: dict[str, Package]) -> str:
    """Return why a release of ``package`` does not fit this checkout; empty if it does."""
    for name, requirement in package.requirements(tag).items():
        if name not in by_name:
            continue
        new = by_name[name]
        if not requirement.specifier.contains(new.version):
            return f"it requires {requirement}, and {name} here is {new.version}"
        tested_with = f"{name}=={new.project(tag)['version']}"
        for old in (tested_with, new.last_release(inclusive=True)):
            if old and new.may_break(old):
                return f"{name} {new.version} may break with {old}"
    return ""


@app.command()
def prepare(name: str, version: str) -> None:
    """Set the version of a package or service, and collect its changes into its changelog."""
    prepare_release(find(name, members()), version)
    print(f"review the changes, commit them, and tag the commit {name}=={version}")


@app.command()
def check(
    tag: str,
    folder: Annotated[Path, typer.Option(help="Output folder; emptied first.")] = ROOT
    / "build/release",
) -> None:
    """Check a package's tag; build its distributions and its release notes."""
    package = check_tag(tag)
    if package not in packages():
        raise ReleaseError(f"tag {tag}: {package.name} is an image, not a package to upload")
    report, allowed = check_api(package, tagged=True)
    print(report)
    if not allowed:
        raise ReleaseError(
            f"tag {tag}: breaking changes need a higher version; raise {package.name}'s version"
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    uv = shutil.which("uv") or str(ROOT / ".tools" / "bin" / "uv")
    _run(uv, "build", "--no-sources", "--package", package.name, "--out-dir", str(folder))
    distributions = sorted(str(path) for path in folder.iterdir() if path.suffix in (".whl", ".gz"))
    _run("twine", "check", "--strict", *distributions)
    (folder / "notes.md").write_text(package.notes() + "\n")


@app.command()
def api() -> None:
    """Compare the exported names of each package with its last release."""
    reports = [check_api(package) for package in packages()]
    for report, _ in reports:
        print(report)
    if not all(allowed for _, allowed in reports):
        raise ReleaseError("breaking changes; restore the exported names, or raise the versions")


@app.command()
def released(name: Annotated[str, typer.Argument()] = "dataplane-core") -> None:
    """Test a package's last release with the dependents of this checkout, and the reverse.

    In reverse, each dependent's last release is tested with the package of this checkout.
    """
    package = find(name, packages())
    if not package.releases():
        print(f"{name}: not released yet")
    isolation = str(ROOT / "integration" / "isolation.py")
    for pair in pairs(package):
        if pair.conflict:
            print(f"not tested: {pair.tag} with {', '.join(pair.tested)} here; {pair.conflict}")
        else:
            _run(sys.executable, isolation, "--released", pair.tag, *pair.tested)


def _in(root: Path, kind: str) -> list[Package]:
    packages_of_kind = []
    for path in sorted(root.glob(f"{kind}/*/pyproject.toml")):
        name = tomllib.loads(path.read_text())["project"]["name"]
        packages_of_kind.append(Package(root, name, path.parent))
    return packages_of_kind


def _numbers(version: str) -> tuple[int, int, int]:
    match = VERSION.fullmatch(version)
    if match is None:
        raise ReleaseError(f"invalid version {version!r}; expected three numbers, such as 0.2.0")
    major, minor, patch = map(int, match.groups())
    return major, minor, patch


def _version_of(tag: str) -> tuple[int, int, int]:
    return _numbers(tag.partition("==")[2])


def _next(tag: str) -> str:
    """Return the first version that may break users of a tag's version."""
    major, minor, _ = _version_of(tag)
    return f"version {major + 1}.0.0" if major else f"version 0.{minor + 1}.0"


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=root, check=True, capture_output=True, text=True, timeout=60
    ).stdout


def _run(program: str, *arguments: str, root: Path = ROOT) -> None:
    """Run a program of this environment, or one with an absolute path."""
    path = program if Path(program).is_absolute() else str(Path(sys.executable).with_name(program))
    if subprocess.run([path, *arguments], cwd=root, check=False).returncode:
        raise ReleaseError(f"failed: {' '.join([program, *arguments])}")


def main() -> None:
    """Run the command line."""
    try:
        app()
    except ReleaseError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
