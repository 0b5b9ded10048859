"""Releases: one package at a time, by a tag ``<package>==<version>``.

``prepare`` writes the version and the changelog, a person looks at it, commits and tags;
``check`` says whether a tag may be released, and puts what is to be uploaded and its notes into a
folder; ``api`` compares what each package exports with its last release.
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
from typing import Annotated

import griffe
import typer

ROOT = Path(__file__).parents[1]
VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")
app = typer.Typer(add_completion=False, help=__doc__.partition("\n")[0])


class ReleaseError(Exception):
    """Says what stands in a release's way."""


@dataclass(frozen=True)
class Package:
    """One of the packages that are uploaded.

    Attributes:
        root: of the repository.
        name: of the distribution, and of its folder.
    """

    root: Path
    name: str

    @property
    def folder(self) -> Path:
        """What is in the repository of it."""
        return self.root / "packages" / self.name

    @property
    def module(self) -> str:
        """What is imported."""
        return self.name.replace("-", "_")

    @property
    def version(self) -> str:
        """As its pyproject.toml has it."""
        found: str = tomllib.loads((self.folder / "pyproject.toml").read_text())["project"][
            "version"
        ]
        return found

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

    def last_release(self) -> str | None:
        """The tag of the highest version that was released before this one."""
        this = _numbers(self.version)
        return max(
            (tag for tag in self.releases() if _of(tag) < this),
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
    return [
        Package(root, path.parent.name) for path in sorted(root.glob("packages/*/pyproject.toml"))
    ]


def find(name: str, root: Path = ROOT) -> Package:
    """The package of a name.

    Raises:
        ReleaseError: there is none.
    """
    names = [each.name for each in packages(root)]
    if name not in names:
        raise ReleaseError(f"{name!r} is no package; expected one of {', '.join(names)}")
    return Package(root, name)


def check_tag(tag: str, root: Path = ROOT) -> Package:
    """The package that a tag releases.

    Raises:
        ReleaseError: the tag is not of the package as it is here, or its changes are not told.
    """
    name, _, version = tag.partition("==")
    package = find(name, root)
    if version != package.version:
        raise ReleaseError(f"tag {tag}: {package.folder.name} here is version {package.version}")
    if package.fragments:
        raise ReleaseError(
            f"tag {tag}: {len(package.fragments)} changes are not in CHANGELOG.md yet, "
            f"{package.fragments[0]} for one; run prepare"
        )
    if not package.notes():
        raise ReleaseError(f"tag {tag}: CHANGELOG.md has nothing about {version}")
    return package


def check_api(package: Package) -> tuple[str, bool]:
    """What broke since the last release, and whether that may be."""
    tag = package.last_release()
    if tag is None:
        return f"{package.name} {package.version}: no release before it", True
    broken = list(package.breaks(tag))
    allowed = not broken or package.may_break(tag)
    told = f"{package.name} {package.version}: {len(broken)} breaking changes since {tag}"
    return "\n  ".join([told, *broken]), allowed


@app.command()
def prepare(name: str, version: str) -> None:
    """Set a package's version, and collect its changes into its changelog."""
    package = find(name)
    if _numbers(version) < _numbers(package.version):
        raise ReleaseError(f"{version} is less than {package.version}, which {name} has")
    if not package.fragments:
        raise ReleaseError(f"{name}: nothing in changelog.d says what changed")
    path = package.folder / "pyproject.toml"
    text = path.read_text()
    changed = text.replace(f'\nversion = "{package.version}"\n', f'\nversion = "{version}"\n', 1)
    _run("towncrier", "build", "--yes", "--config", str(path), "--version", version)
    path.write_text(changed)
    print(f"look at it, commit it, and tag the commit {name}=={version}")


@app.command()
def check(
    tag: str, folder: Annotated[Path, typer.Option(help="Emptied first.")] = ROOT / "build/release"
) -> None:
    """Say whether a tag may be released; build what would be uploaded, and its notes."""
    package = check_tag(tag)
    told, allowed = check_api(package)
    print(told)
    if not allowed:
        raise ReleaseError(f"tag {tag}: such changes need {_next(package)}")
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
    for told, allowed in answers:
        print(told if allowed else f"{told}\n  the next version has to say so")
    if not all(allowed for _, allowed in answers):
        raise ReleaseError("what was exported is gone or changed; give it back, or raise versions")


@app.command()
def released(name: Annotated[str, typer.Argument()] = "dataplane-core") -> None:
    """Test a package's last release with the others of this checkout, and the other way round."""
    package = find(name)
    if not package.releases():
        print(f"{name}: not released yet")
        return
    last = max(package.releases(), key=_of)
    others = [each for each in packages() if each != package and _depends(each, package)]
    isolation = str(ROOT / "integration" / "isolation.py")
    _run(sys.executable, isolation, "--released", last, *(each.name for each in others), tool=False)
    for each in others:
        if each.releases():
            newest = max(each.releases(), key=_of)
            _run(sys.executable, isolation, "--released", newest, each.name, tool=False)


def _depends(package: Package, on: Package) -> bool:
    project = tomllib.loads((package.folder / "pyproject.toml").read_text())["project"]
    return any(re.match(rf"{on.name}\b(?!-)", each) for each in project["dependencies"])


def _numbers(version: str) -> tuple[int, int, int]:
    found = VERSION.fullmatch(version)
    if found is None:
        raise ReleaseError(f"{version!r} is no version; expected three numbers, as 0.2.0")
    major, minor, patch = map(int, found.groups())
    return major, minor, patch


def _of(tag: str) -> tuple[int, int, int]:
    return _numbers(tag.partition("==")[2])


def _next(package: Package) -> str:
    major, minor, _ = _numbers(package.version)
    return f"version {major + 1}.0.0" if major else f"version 0.{minor + 1}.0"


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=root, check=True, capture_output=True, text=True, timeout=60
    ).stdout


def _run(*command: str, tool: bool = True) -> None:
    program, *arguments = command
    if tool and not Path(program).is_absolute():
        program = str(Path(sys.executable).with_name(program))
    if subprocess.run([program, *arguments], cwd=ROOT, check=False).returncode:
        raise ReleaseError(f"failed: {' '.join(command)}")


def main() -> None:
    """Run the command line."""
    try:
        app()
    except ReleaseError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
