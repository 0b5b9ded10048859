"""Releases: one package or service at a time, by a tag ``<name>==<version>``.

``prepare`` writes the version and the changelog, a person looks at it, commits and tags;
``check`` says whether a package's tag may be released, and puts what is to be uploaded and its
notes into a folder; ``api`` compares what each package exports with its last release.
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
    """Says what stands in a release's way."""


@dataclass(frozen=True)
class Package:
    """A package, which is uploaded, or a service, which is an image.

    Attributes:
        root: of the repository.
        name: of the distribution.
        folder: what is in the repository of it.
    """

    root: Path
    name: str
    folder: Path

    @property
    def module(self) -> str:
        """What is imported."""
        return self.name.replace("-", "_")

    @property
    def version(self) -> str:
        """As its pyproject.toml has it."""
        found: str = self.project()["version"]
        return found

    def project(self, tag: str | None = None) -> dict[str, Any]:
        """What its pyproject.toml declares, here or at a tag."""
        path = self.folder / "pyproject.toml"
        if tag is None:
            text = path.read_text()
        else:
            text = _git(self.root, "show", f"{tag}:{path.relative_to(self.root)}")
        found: dict[str, Any] = tomllib.loads(text)["project"]
        return found

    def needs(self, tag: str | None = None) -> dict[str, Requirement]:
        """What it depends on, by name, here or at a tag."""
        found = map(Requirement, self.project(tag)["dependencies"])
        return {each.name: each for each in found}

    @property
    def fragments(self) -> list[str]:
        """Changes that no release has yet."""
        return sorted(path.name for path in (self.folder / "changelog.d").glob("*.md"))

    def notes(self) -> str:
        """What the changelog says of its version; empty if nothing."""
        text = (self.folder / "CHANGELOG.md").read_text()
        found = re.search(
            rf"^## {re.escape(self.version)} \([^)]*\)\n(.*?)(?=^## |\Z)", text, re.M | re.S
        )
        return found.group(1).strip() if found else ""

    def last_release(self, *, this_too: bool = False) -> str | None:
        """The tag of the highest version before this one, or up to it."""
        this = _numbers(self.version)
        return max(
            (tag for tag in self.releases() if _of(tag) < this or (this_too and _of(tag) == this)),
            key=_of,
            default=None,
        )

    def releases(self) -> list[str]:
        """Its tags; those of candidates are none."""
        told = _git(self.root, "tag", "--list", f"{self.name}==*").split()
        return [tag for tag in told if VERSION.fullmatch(tag.partition("==")[2])]

    def breaks(self, tag: str) -> Iterator[str]:
        """What someone who used the exported names as they were at a tag would stumble over."""
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
            yield f"{self.module}: {name} is not exported any more"
        for name in sorted({*map(str, old.exports or ())} & {*map(str, new.exports or ())}):
            if name in old.members and name in new.members:
                before, after = old[name].canonical_path, new[name].canonical_path
                if before.rpartition(".")[2] != after.rpartition(".")[2]:
                    yield f"{self.module}: {name} was {before} and is {after}"
        for breakage in griffe.find_breaking_changes(old, new):
            path = breakage.obj.canonical_path
            if any(path == each or path.startswith(f"{each}.") for each in exported):
                yield breakage.explain(griffe.ExplanationStyle.ONE_LINE)

    def may_break(self, tag: str) -> bool:
        """Whether the version says that it breaks with the one of a tag: a major, before 1.0 a
        minor release."""
        new, old = _numbers(self.version), _of(tag)
        return new[0] > old[0] or (new[0] == 0 and new[1] > old[1])


def packages(root: Path = ROOT) -> list[Package]:
    """All that are uploaded."""
    return _in(root, "packages")


def members(root: Path = ROOT) -> list[Package]:
    """All that have a version and a changelog: packages and services."""
    return packages(root) + _in(root, "services")


def find(name: str, among: list[Package]) -> Package:
    """The one of a name.

    Raises:
        ReleaseError: there is none.
    """
    for each in among:
        if each.name == name:
            return each
    names = ", ".join(each.name for each in among)
    raise ReleaseError(f"{name!r} is not known; expected one of {names}")


def check_tag(tag: str, root: Path = ROOT) -> Package:
    """The package or service that a tag releases.

    Raises:
        ReleaseError: the tag is not of the package as it is here, or its changes are not told.
    """
    name, _, version = tag.partition("==")
    package = find(name, members(root))
    if version != package.version:
        raise ReleaseError(f"tag {tag}: {name} here is version {package.version}")
    if package.fragments:
        raise ReleaseError(
            f"tag {tag}: {len(package.fragments)} changes are not in CHANGELOG.md yet, "
            f"{package.fragments[0]} for one; run prepare"
        )
    if not package.notes():
        raise ReleaseError(f"tag {tag}: CHANGELOG.md has nothing about {version}")
    return package


def check_api(package: Package, *, tagged: bool = False) -> tuple[str, bool]:
    """What broke since the last release, and whether that may be.

    Args:
        package: one that is uploaded.
        tagged: this version is the one that is being released, and compared with the one before
            it. Else it may have been released, and what changed since is not in it.
    """
    tag = package.last_release(this_too=not tagged)
    if tag is None:
        return f"{package.name} {package.version}: no release before it", True
    broken = list(package.breaks(tag))
    allowed = not broken or package.may_break(tag)
    told = [f"{package.name} {package.version}: {len(broken)} breaking changes since {tag}"]
    told += broken if allowed else [*broken, f"such changes need {_next(tag)} or later"]
    return "\n  ".join(told), allowed


def prepare_release(package: Package, version: str) -> None:
    """Set a version, also where a service's image is named by it, and collect the changes into the
    changelog.

    Raises:
        ReleaseError: the version is less than the present one, or there are no changes.
    """
    if _numbers(version) < _numbers(package.version):
        raise ReleaseError(f"{version} is less than {package.version}, which {package.name} has")
    if not package.fragments:
        raise ReleaseError(f"{package.name}: nothing in changelog.d says what changed")
    path = package.folder / "pyproject.toml"
    text = path.read_text()
    before = package.version
    changed = text.replace(f'\nversion = "{before}"\n', f'\nversion = "{version}"\n', 1)
    arguments = ("--yes", "--config", str(path), "--version", version)
    _run("towncrier", "build", *arguments, root=package.root)
    path.write_text(changed)
    for named in _naming_images(package.root):
        image = rf"(\brl-dataplane/{package.name}(?::|, newTag: )){re.escape(before)}\b"
        text = named.read_text()
        if re.search(image, text):
            named.write_text(re.sub(image, rf"\g<1>{version}", text))


def _naming_images(root: Path) -> list[Path]:
    """Compose files and manifests, and what is said of them, which name images of services."""
    return [
        path
        for folder in ("deploy", "docker")
        for path in sorted((root / folder).rglob("*"))
        if path.suffix in (".md", ".yaml")
    ]


@dataclass(frozen=True)
class Pair:
    """A released package, and packages of this checkout that are tested with it.

    Attributes:
        tag: of the release.
        tested: names of those whose tests run.
        why_not: says that they are not made for each other; empty where they are.
    """

    tag: str
    tested: tuple[str, ...]
    why_not: str = ""


def pairs(package: Package) -> Iterator[Pair]:
    """A package's last release with those of this checkout that depend on it, and their last
    releases with this checkout. Where a requirement or a version tells of a break there is nothing
    to test: else what breaks could neither be merged nor be released."""
    if not package.releases():
        return
    ours = {each.name: each for each in packages(package.root)}
    others = [each for each in ours.values() if package.name in each.needs()]
    last = max(package.releases(), key=_of)
    refusing = {each.name: _refusal(each, last, ours) for each in others}
    for name, why_not in refusing.items():
        if why_not:
            yield Pair(last, (name,), why_not)
    together = tuple(name for name, why_not in refusing.items() if not why_not)
    if together:
        yield Pair(last, together)
    for each in others:
        if each.releases():
            newest = max(each.releases(), key=_of)
            yield Pair(newest, (each.name,), _outgrown(each, newest, ours))


def _refusal(package: Package, tag: str, ours: dict[str, Package]) -> str:
    """Which requirement excludes a release: of a package of this checkout, or of one of ours that
    it needs. Empty if none does."""
    released, _, version = tag.partition("==")
    for name, requirement in package.needs().items():
        if name == released and not requirement.specifier.contains(version):
            return f"{package.name} {package.version} asks for {requirement}"
        further = _refusal(ours[name], tag, ours) if name in ours else ""
        if further:
            return further
    return ""


def _outgrown(package: Package, tag: str, ours: dict[str, Package]) -> str:
    """Why a release of a package is not for what it needs of this checkout; empty if it is."""
    for name, requirement in package.needs(tag).items():
        if name not in ours:
            continue
        new = ours[name]
        if not requirement.specifier.contains(new.version):
            return f"it asks for {requirement}, and {name} here is {new.version}"
        beside = f"{name}=={new.project(tag)['version']}"  # what it was tested with
        for old in (beside, new.last_release(this_too=True)):
            if old and new.may_break(old):
                return f"{name} {new.version} may break with {old}"
    return ""


@app.command()
def prepare(name: str, version: str) -> None:
    """Set the version of a package or service, and collect its changes into its changelog."""
    prepare_release(find(name, members()), version)
    print(f"look at it, commit it, and tag the commit {name}=={version}")


@app.command()
def check(
    tag: str, folder: Annotated[Path, typer.Option(help="Emptied first.")] = ROOT / "build/release"
) -> None:
    """Say whether a package's tag may be released; build what would be uploaded, and its notes."""
    package = check_tag(tag)
    if package not in packages():
        raise ReleaseError(f"tag {tag}: {package.name} is an image, which nothing uploads")
    told, allowed = check_api(package, tagged=True)
    print(told)
    if not allowed:
        raise ReleaseError(f"tag {tag}: its version does not say that it breaks")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    uv = shutil.which("uv") or str(ROOT / ".tools" / "bin" / "uv")
    _run(uv, "build", "--no-sources", "--package", package.name, "--out-dir", str(folder))
    made = sorted(str(path) for path in folder.iterdir() if path.suffix in (".whl", ".gz"))
    _run("twine", "check", "--strict", *made)
    (folder / "notes.md").write_text(package.notes() + "\n")


@app.command()
def api() -> None:
    """Compare what each package exports with its last release."""
    answers = [check_api(package) for package in packages()]
    for told, _ in answers:
        print(told)
    if not all(allowed for _, allowed in answers):
        raise ReleaseError("what was exported is gone or changed; give it back, or raise versions")


@app.command()
def released(name: Annotated[str, typer.Argument()] = "dataplane-core") -> None:
    """Test a package's last release with the others of this checkout, and the other way round."""
    package = find(name, packages())
    if not package.releases():
        print(f"{name}: not released yet")
    isolation = str(ROOT / "integration" / "isolation.py")
    for pair in pairs(package):
        if pair.why_not:
            print(f"not tested: {pair.tag} with {', '.join(pair.tested)} here; {pair.why_not}")
        else:
            _run(sys.executable, isolation, "--released", pair.tag, *pair.tested)


def _in(root: Path, kind: str) -> list[Package]:
    found = []
    for path in sorted(root.glob(f"{kind}/*/pyproject.toml")):
        name = tomllib.loads(path.read_text())["project"]["name"]
        found.append(Package(root, name, path.parent))
    return found


def _numbers(version: str) -> tuple[int, int, int]:
    found = VERSION.fullmatch(version)
    if found is None:
        raise ReleaseError(f"{version!r} is no version; expected three numbers, as 0.2.0")
    major, minor, patch = map(int, found.groups())
    return major, minor, patch


def _of(tag: str) -> tuple[int, int, int]:
    return _numbers(tag.partition("==")[2])


def _next(tag: str) -> str:
    """The first version that may break with the one of a tag."""
    major, minor, _ = _of(tag)
    return f"version {major + 1}.0.0" if major else f"version 0.{minor + 1}.0"


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=root, check=True, capture_output=True, text=True, timeout=60
    ).stdout


def _run(program: str, *arguments: str, root: Path = ROOT) -> None:
    """Run a command, one of this environment if it is named alone."""
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
