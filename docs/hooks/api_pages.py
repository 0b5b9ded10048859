"""The API reference: the public names of a module, by kind, for mkdocstrings to describe.

The code is read and not imported, since a name may need a package that is not installed, such as
vLLM.
"""

from __future__ import annotations

import functools
from pathlib import Path

import griffe

PACKAGES = Path(__file__).parents[2] / "packages"
KINDS = ("Classes", "Functions", "Errors", "Types and constants")


def api_page(module_name: str) -> str:
    """Return a mkdocstrings directive for each name that ``module_name`` exports."""
    by_kind: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name in sorted(exports(module_name), key=str.lower):
        by_kind[kind_of(module_name, name)].append(name)
    lines = []
    for kind, names in by_kind.items():
        if names:
            lines += ["", f"### {kind}", ""]
            lines += [f"::: {module_name}.{name}\n" for name in names]
    return "\n".join(lines)


def exports(module_name: str) -> list[str]:
    """Return the names in the module's ``__all__``."""
    return [str(name) for name in loader().modules_collection[module_name].exports or ()]


def kind_of(module_name: str, name: str) -> str:
    """Return the heading of a name."""
    member = loader().modules_collection[module_name][name]
    target = member.final_target if member.is_alias else member
    if target.is_class:
        bases = [str(base) for base in target.bases]
        return "Errors" if any(is_error(base) for base in bases) else "Classes"
    return "Functions" if target.is_function else "Types and constants"


def is_error(base: str) -> bool:
    return base.endswith(("Error", "Exception"))


@functools.cache
def loader() -> griffe.GriffeLoader:
    """Load the packages of this repository, once."""
    packages = griffe.GriffeLoader(search_paths=sorted(PACKAGES.glob("*/src")))
    for folder in sorted(PACKAGES.glob("*/src/*/__init__.py")):
        packages.load(folder.parent.name)
    packages.resolve_aliases(implicit=False, external=False)
    return packages
