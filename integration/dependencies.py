"""What depends on what: ours on ours, and on others. Run as ``make deps``.

Read from each pyproject.toml, so it says what an installation asks for; `test_imports` holds the
imports to it.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Distribution:
    """One of ours.

    Attributes:
        name: of the distribution.
        version: of the checkout.
        requires: by extra, what it asks for; the empty name is no extra.
    """

    name: str
    version: str
    requires: dict[str, tuple[Requirement, ...]]

    def names(self, *, of: set[str], ours: bool) -> list[str]:
        """What it depends on, with the extra that asks for it in parentheses.

        Args:
            of: the names of all of ours.
            ours: only these, or only others.
        """
        found = []
        for extra, requirements in self.requires.items():
            for requirement in requirements:
                if (canonicalize_name(requirement.name) in of) is not ours:
                    continue
                extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
                asked = f" ({extra})" if extra else ""
                found.append(f"{requirement.name}{extras}{requirement.specifier}{asked}")
        return found


def distributions(root: Path = ROOT) -> list[Distribution]:
    """All of the workspace: a package before those that depend on it, else by name."""
    found = {}
    for path in sorted(root.glob("packages/*/pyproject.toml")) + sorted(
        root.glob("services/*/pyproject.toml")
    ):
        project = tomllib.loads(path.read_text())["project"]
        asked = {"": project["dependencies"], **project.get("optional-dependencies", {})}
        requires = {
            extra: tuple(map(Requirement, requirements)) for extra, requirements in asked.items()
        }
        name = canonicalize_name(project["name"])
        found[name] = Distribution(name, project["version"], requires)
    return _in_order(found)


def _in_order(found: dict[str, Distribution]) -> list[Distribution]:
    ordered: list[Distribution] = []
    left = dict(found)
    while left:
        ready = [each for each in left.values() if not _needs(each) & left.keys() - {each.name}]
        if not ready:
            raise SystemExit(f"these depend on each other: {', '.join(sorted(left))}")
        ordered += ready
        left = {name: each for name, each in left.items() if each not in ready}
    return ordered


def _needs(distribution: Distribution) -> set[str]:
    return {canonicalize_name(each.name) for each in distribution.requires[""]}


def main() -> None:
    """Print the table."""
    found = distributions()
    names = {each.name for each in found}
    table = Table(title="What depends on what (in parentheses: the extra that asks for it)")
    for heading in ("", "version", "ours", "others"):
        table.add_column(heading, overflow="fold")
    for each in found:
        table.add_row(
            each.name,
            each.version,
            "\n".join(each.names(of=names, ours=True)) or "none",
            ", ".join(each.names(of=names, ours=False)),
            end_section=True,
        )
    Console(highlight=False, markup=False).print(table)


if __name__ == "__main__":
    main()
