"""Check that a package was not replaced by a folder of the same name."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def require_package(name: str, module: str) -> None:
    """Check that ``import name`` finds a package with ``module``, without importing it.

    A package that is not installed passes, because its import then fails with a clear error.

    Args:
        name: name of the package, such as "observability".
        module: module or subpackage of the package, such as "views".

    Raises:
        ImportError: something else of that name comes first on ``sys.path``; the error names it.
    """
    spec = find_spec(name)
    if spec is None:
        return
    folders = list(spec.submodule_search_locations or ())
    names = (module, f"{module}.py")
    if not any((Path(folder) / each).exists() for folder in folders for each in names):
        origin = ", ".join(folders or [str(spec.origin)])
        raise ImportError(
            f"package {name!r}: found {origin}, which is not the installed package; rename it, or "
            "remove the folder that contains it from sys.path",
            name=name,
        )
